"""Which values may differ from rank to rank, and where ranks could wait for each other."""

from jdp.uniformity.analysis import analyse, find_shard_maps
from jdp.uniformity.classes import Class
from jdp.uniformity.declared import declare_pure
from jdp.uniformity.function import uniformity
from jdp.uniformity.partitioned import bfloat16_reductions
from jdp.uniformity.provenance import Origin, Provenance
from jdp.uniformity.refusals import compilers_deadlock, unknown_primitives
from jdp.uniformity.report import Deadlock, Marked, Report
from jdp.uniformity.source import line_of
from jdp.uniformity.source import source as source_of
from jdp.uniformity.way_back import Node
from jdp.uniformity.wording import bulleted, shown

__all__ = [
    "Class",
    "Deadlock",
    "Marked",
    "Node",
    "Origin",
    "Provenance",
    "Report",
    "analyse",
    "bfloat16_reductions",
    "bulleted",
    "compilers_deadlock",
    "declare_pure",
    "find_shard_maps",
    "line_of",
    "shown",
    "source_of",
    "uniformity",
    "unknown_primitives",
]
