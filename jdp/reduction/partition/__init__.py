"""Run a function of whole arrays on slices: exactly, with every rank computing its own part."""

from jdp.reduction.partition.ranks import Gather, Owned
from jdp.reduction.partition.run import Piece, partitioned

__all__ = ["Gather", "Owned", "Piece", "partitioned"]
