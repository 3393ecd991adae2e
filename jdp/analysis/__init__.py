"""Which values may differ from rank to rank, and where ranks could wait for each other."""

from jdp.analysis.abstract_value import AbstractValue
from jdp.analysis.analyse import analyse, find_shard_maps
from jdp.analysis.backward_slice import Node
from jdp.analysis.declared import declare_pure
from jdp.analysis.findings import Deadlock, Marked
from jdp.analysis.loop_refusals import unknown_primitives
from jdp.analysis.partitioned import bfloat16_reductions
from jdp.analysis.provenance import Origin, Provenance
from jdp.analysis.report import Report
from jdp.analysis.source_lines import line_of
from jdp.analysis.source_lines import source as source_of
from jdp.analysis.uniformity import uniformity
from jdp.analysis.wording import bulleted, shown

__all__ = [
    "AbstractValue",
    "Deadlock",
    "Marked",
    "Node",
    "Origin",
    "Provenance",
    "Report",
    "analyse",
    "bfloat16_reductions",
    "bulleted",
    "declare_pure",
    "find_shard_maps",
    "line_of",
    "shown",
    "source_of",
    "uniformity",
    "unknown_primitives",
]
