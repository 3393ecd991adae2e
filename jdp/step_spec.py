"""A step function and its options."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True, eq=False)
class StepSpec:
    """A decorated function and its options.

    Attributes:
      fn: `fn(state, batch, *rest) -> (state, metrics)`; without `returns_state` `-> metrics`.
      axis_name: mesh axes that shard the batch; other axes are left to the compiler.
      weight_fn: returns the weight of a rank's rows; None: equal weights.
      warned: warnings already shown; grows.
      virtual_ranks: for how many ranks the function is traced; None: those of the mesh.
      keywords: (position, name) of the last arguments, which `fn` gets by keyword.
    """

    fn: Callable[..., Any]
    axis_name: tuple[str, ...]
    weight_fn: Callable[[Any], Any] | None
    donate: bool
    returns_state: bool
    warned: set[str] = field(default_factory=set)
    keywords: tuple[tuple[int, str], ...] = ()
    virtual_ranks: int | None = None

    @functools.cached_property
    def name(self) -> str:
        """The name of the author's function."""
        return getattr(self.fn, "__name__", "step")  # functools.partial has no name

    @property
    def decorator(self) -> str:
        """The name of its decorator."""
        return "jdp.train_step" if self.returns_state else "jdp.eval_step"

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The signature of the author's function."""
        return inspect.signature(self.fn)

    @functools.cached_property
    def num_positional(self) -> range:
        """Possible numbers of arguments of a call without keywords."""
        parameters = [*self.signature.parameters.values()]
        positional = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
        required = [each for each in parameters if each.default is each.empty]
        if any(each.kind == each.KEYWORD_ONLY for each in required):
            return range(0)
        return range(len([each for each in required if each in positional]), len(positional) + 1)

    def argument(self, i: int) -> str:
        """Return an argument's name by its position."""
        names = dict(enumerate(self.signature.parameters)) | dict(self.keywords)
        return names.get(i, f"argument {i}")

    def by_keyword(self, last: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Split a call's last arguments into `(by position, by keyword)`."""
        num = len(last) - len(self.keywords)
        names = [name for _, name in self.keywords]
        return tuple(last[:num]), dict(zip(names, last[num:], strict=True))

    def paths(self, i: int, arg: Any) -> list[str]:
        """Return the paths of leaves, such as `state.params['w']`."""
        leaves, name = jax.tree_util.tree_leaves_with_path(arg), self.argument(i)
        return [name + jax.tree_util.keystr(path) for path, _ in leaves]
