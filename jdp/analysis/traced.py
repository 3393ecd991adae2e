"""What the leaves of a traced step are called."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

# A step's own output, the weight of the global batch.
WEIGHT = "weight"


@dataclass(frozen=True)
class Output:
    """One leaf that leaves a step, described only where it is complained about."""

    tree: str  # the tree that it is in, as the author would call it
    keys: tuple[Any, ...]  # its path in that tree
    kind: str  # "state", "metric", "rows", or "own": a metric before it is averaged
    aval: Any  # its `jax.typeof`

    @property
    def path(self) -> str:
        """The leaf's path as the author would write it."""
        return self.tree + jax.tree_util.keystr(self.keys)

    @property
    def type(self) -> str:
        """What it is, such as float32[3]."""
        return f"{self.aval.dtype}{list(self.aval.shape)}"


@dataclass(frozen=True)
class Traced:
    """A step as it was traced.

    Attributes:
      name: of the author's function.
      axis_name: the axes that split the batch.
      inputs: paths of the leaves of its arguments, in order.
      outputs: the leaves that leave it, in order.
      marked: paths of the gradients whose reduction was traced.
      mask: position among `inputs` of the padding mask of the batch, or None.
      differentiates: whether it is a train step.
      platform: which it is compiled for.
      weighed: what gives ranks different weights, such as jdp.train_step; empty: nothing does.
      told: warnings that the author has had for this step, of other shapes or ranks.
    """

    name: str
    axis_name: tuple[str, ...]
    inputs: Sequence[str]
    outputs: Sequence[Output]
    marked: frozenset[str]
    mask: int | None
    differentiates: bool
    platform: str
    weighed: frozenset[str] = frozenset()
    told: set[str] = field(default_factory=set)
