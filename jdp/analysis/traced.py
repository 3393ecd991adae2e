"""Names of the leaves of a traced step."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jdp.step_spec import StepSpec

# The weight of the global batch, an output that jdp adds to a step.
WEIGHT = "weight"


class NamedTree:
    """A tree whose leaves errors name. The names are built only for errors.

    Args:
      name: of the tree, as the author would write it.
      tree: the tree.

    >>> NamedTree("metrics", {"loss": 1.0, "norms": (2.0, 3.0)}).paths
    ["metrics['loss']", "metrics['norms'][0]", "metrics['norms'][1]"]
    """

    def __init__(self, name: str, tree: Any):
        self.name = name
        self._tree = tree

    @functools.cached_property
    def paths(self) -> list[str]:
        """The path of each leaf, as the author would write it."""
        named = jax.tree_util.tree_leaves_with_path(self._tree)
        return [self.name + jax.tree_util.keystr(path) for path, _ in named]


class Output(NamedTuple):
    """One output leaf of a step.

    Attributes:
      tree: the tree that it belongs to.
      position: of the leaf in that tree.
      kind: "state", "metric", "rows", or "own": a metric before it is averaged.
      aval: shape and dtype, over all ranks.
    """

    tree: NamedTree
    position: int
    kind: str
    aval: Any

    @property
    def path(self) -> str:
        """The leaf's path as the author would write it."""
        return self.tree.paths[self.position]

    @property
    def type(self) -> str:
        """The leaf's dtype and shape, such as float32[3]."""
        return f"{self.aval.dtype}{list(self.aval.shape)}"


@jax.tree_util.register_static
@dataclass(frozen=True)
class TraceFindings:
    """Findings of the trace of a step, returned from the trace as a node without leaves.

    Attributes:
      marked: paths of the gradients whose reduction was traced.
      split: paths of the gradients that are sent as soon as they are ready.
      averaged: paths of the gradients that the author gets as means over the ranks.
      weighed: name of the function that weighs ranks, such as jdp.train_step; empty if none does.
      gradient_bytes: bytes of all gradients that are sent.
      gathers: a text for each array that a sharded optimizer's update gathers whole on every rank.
      owned: a text for each kind of matrix that such an update computes on one rank each.
      gather_dtype: in which losses see parameters that an optimizer updates in more bits; empty if
        the step updates none.
      integer_sums: the author's line of each sum of integers whose overflow is reported.
      group_bytes: bytes of the parameters that are gathered together before use; 0 if none are.
    """

    marked: frozenset[str]
    split: frozenset[str]
    weighed: frozenset[str]
    gradient_bytes: int
    gathers: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    gather_dtype: str = ""
    group_bytes: int = 0
    integer_sums: tuple[str, ...] = ()
    averaged: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Traced:
    """A traced step.

    Attributes:
      spec: the step's function and options.
      platform: the platform that it is compiled for, such as "cpu".
      inputs: paths of the leaves of its arguments, in order.
      mask: position among `inputs` of the padding mask of the batch, or None.
      outputs: its output leaves, in order.
      found: the findings of the trace.
    """

    spec: StepSpec
    platform: str
    inputs: Sequence[str]
    mask: int | None
    outputs: Sequence[Output]
    found: TraceFindings
