"""Run a function of whole arrays on slices, with each rank's own part."""

from jdp.reduction.partition.partitioner import Piece, partitioned
from jdp.reduction.partition.values import Gather, Owned

__all__ = ["Gather", "Owned", "Piece", "partitioned"]
