"""A step function with its options: made once, and read wherever a step is placed or traced."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True, eq=False)
class StepSpec:
    """A decorated function and its options.

    Attributes:
      fn: `fn(state, batch, *rest) -> (state, metrics)`; without `returns_state` `-> metrics`.
      axis_name: axes of the mesh that split the batch; further axes are left to the compiler.
      weight_fn: weighs a rank's rows, or None.
      donate: whether the state's buffers are reused.
      returns_state: whether it is a train step.
      told: warnings that the author has had for the step; new ones are added.
    """

    fn: Callable[..., Any]
    axis_name: tuple[str, ...]
    weight_fn: Callable[[Any], Any] | None
    donate: bool
    returns_state: bool
    told: set[str] = field(default_factory=set)

    @functools.cached_property
    def name(self) -> str:
        """The name of the author's function."""
        return getattr(self.fn, "__name__", "step")  # functools.partial has none

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The signature of the author's function."""
        return inspect.signature(self.fn)

    def argument(self, i: int) -> str:
        """Return the name of an argument by its position."""
        names = list(self.signature.parameters)
        return names[i] if i < len(names) else f"argument {i}"

    def paths(self, i: int, arg: Any) -> list[str]:
        """Return the names of the leaves of an argument, such as `state.params['w']`."""
        leaves, name = jax.tree_util.tree_leaves_with_path(arg), self.argument(i)
        return [name + jax.tree_util.keystr(path) for path, _ in leaves]
