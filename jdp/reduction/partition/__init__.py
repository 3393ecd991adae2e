"""Run a function of whole arrays on slices."""

from jdp.reduction.partition.partitioner import Piece, partitioned
from jdp.reduction.partition.values import Gather, Owned

__all__ = ["Gather", "Owned", "Piece", "partitioned"]
