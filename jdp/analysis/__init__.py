"""Find values that differ from rank to rank, and deadlocks."""

from jdp.analysis.backward_slice import Node
from jdp.analysis.diagnostics import bulleted, line_of, shown, source_of
from jdp.analysis.interpreter import bfloat16_reductions
from jdp.analysis.lattice import AbstractValue
from jdp.analysis.provenance import Origin, Provenance, Report
from jdp.analysis.records import Deadlock, Marked
from jdp.analysis.uniformity import (
    analyse,
    declare_pure,
    find_shard_maps,
    uniformity,
    unknown_primitives,
)

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
