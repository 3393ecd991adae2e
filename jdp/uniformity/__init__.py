"""Which values may differ from rank to rank, and where ranks could wait for each other."""

from jdp.uniformity.analysis import analyse, find_shard_maps
from jdp.uniformity.classes import Class
from jdp.uniformity.declared import declare_pure
from jdp.uniformity.function import uniformity
from jdp.uniformity.refusals import compilers_deadlock, unknown_primitives
from jdp.uniformity.report import Deadlock, Marked, Report

__all__ = [
    "Class",
    "Deadlock",
    "Marked",
    "Report",
    "analyse",
    "compilers_deadlock",
    "declare_pure",
    "find_shard_maps",
    "uniformity",
    "unknown_primitives",
]
