"""Run a function of whole arrays on slices: exactly, with every rank computing its own part."""

from jdp.reduction.partition.partitioner import Piece, partitioned
from jdp.reduction.partition.values import Gather, Owned

__all__ = ["Gather", "Owned", "Piece", "partitioned"]
