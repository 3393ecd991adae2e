"""Names of the leaves of a traced step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jdp.step_spec import StepSpec

# A step's own output, the weight of the global batch.
WEIGHT = "weight"


@dataclass(frozen=True)
class Output:
    """One output leaf of a step; its texts are built only for errors."""

    tree: str  # the tree that it is in, as the author would call it
    keys: tuple[Any, ...]  # its path in that tree
    kind: str  # "state", "metric", "rows", or "own": a metric before it is averaged
    aval: Any  # its shape and dtype, over all ranks

    @property
    def path(self) -> str:
        """The leaf's path as the author would write it."""
        return self.tree + jax.tree_util.keystr(self.keys)

    @property
    def type(self) -> str:
        """Its type, such as float32[3]."""
        return f"{self.aval.dtype}{list(self.aval.shape)}"


@jax.tree_util.register_static
@dataclass(frozen=True)
class TraceFindings:
    """Findings of the trace of a step, returned from the trace as a node without leaves.

    Attributes:
      marked: paths of the gradients whose reduction was traced.
      split: paths of the gradients that are sent as soon as they are ready.
      weighed: name of the function that weighs ranks, such as jdp.train_step; empty if none does.
      gradient_bytes: bytes of all gradients that are sent.
    """

    marked: frozenset[str]
    split: frozenset[str]
    weighed: frozenset[str]
    gradient_bytes: int


@dataclass(frozen=True)
class Traced:
    """A step as it was traced.

    Attributes:
      spec: the step.
      platform: which it is compiled for.
      inputs: paths of the leaves of its arguments, in order.
      mask: position among `inputs` of the padding mask of the batch, or None.
      outputs: the leaves that leave it, in order.
      found: what the trace met.
    """

    spec: StepSpec
    platform: str
    inputs: Sequence[str]
    mask: int | None
    outputs: Sequence[Output]
    found: TraceFindings
