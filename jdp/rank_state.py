"""`per_rank`: state of a rank or its rows, sharded over the ranks."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdp import pytrees

# (saved value, wanted shape and dtype) -> array
Resize = Callable[[Any, jax.ShapeDtypeStruct], Any]


class PerRank:
    """A tree of arrays sharded over the ranks on their first dim.

    Attributes:
      value: the tree; between steps with global arrays, inside a step with this rank's shards.
      resize: the rule for another number of ranks, or None; ignored in comparisons.
    """

    def __init__(self, value: Any, resize: Resize | None = None):
        self.value = value
        self.resize = resize

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"

    # NumPy and JAX read these.
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_no_array("an array function"))

    __jax_array__ = __array__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_no_array(f".{name}"))

    __array_priority__ = 1000  # NumPy yields its operators to those below


def _no_array(taken_for: str) -> str:
    return (
        f"jdp.per_rank(...) is not an array, but {taken_for} needs one. Write .value, for "
        'example state.model_state["hidden"].value + x, and jdp.per_rank(new) for the returned '
        "state."
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise TypeError(_no_array(f"`{name}`"))

    refuse.__name__ = name
    return refuse


# Python looks up operators on the class.
_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
for _name in (
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
    *"neg pos abs invert lt le gt ge getitem len iter bool float int index".split(),
):
    setattr(PerRank, f"__{_name}__", _refusing(f"__{_name}__"))


@dataclass(frozen=True)
class _Rule:
    """The `resize` rule in the treedef, where all rules compare equal; only a restore reads it."""

    resize: Resize | None = field(compare=False)


jax.tree_util.register_pytree_with_keys(
    PerRank,
    lambda own: (((jax.tree_util.GetAttrKey("value"), own.value),), _Rule(own.resize)),
    lambda rule, children: PerRank(next(iter(children)), rule.resize),
)


def per_rank(tree: Any, *, resize: Resize | None = None) -> PerRank:
    """Declare state that belongs to a rank or to rows, and so differs from rank to rank.

    Examples are error feedback, hidden states of truncated backpropagation, replay buffers and
    environments. The arrays are sharded over the ranks on their first dim, like a batch. Inside a
    step `state.model_state["hidden"].value` is this rank's shard; the step returns the new shard in
    a `per_rank(...)` again. jdp does not average it: reduce what other state computes from it, as
    from the batch.

    Args:
      tree: arrays `[rows, ...]`, the same on every process; the number of ranks divides the first
        dim. One value for each rank is `[num_ranks, ...]`, and `[1, ...]` inside a step.
      resize: `resize(saved, like) -> array`, from a saved NumPy array to one of shape and dtype
        `like`. It is called for each array whose shape in a checkpoint differs, as for another
        number of ranks. Without it such a checkpoint is refused. Hidden states of rows keep their
        shape and need no rule. With a rule, a host alone keeps the commits of its rows: if the host
        is lost, the rule gets the rows of the others.

    Returns:
      A node of the state. `.value` is the tree.

    >>> import jax.numpy as jnp, optax, jdp
    >>> mesh = jdp.init(cpu_ranks=2)
    >>> @jdp.train_step
    ... def step(state, batch):
    ...     hidden = state["hidden"].value + batch  # this rank's rows
    ...     return {"hidden": jdp.per_rank(hidden)}, {"mean": hidden.mean()}
    >>> state, metrics = step({"hidden": jdp.per_rank(jnp.zeros(4))}, jnp.arange(4.0))
    >>> state["hidden"].value.tolist(), float(metrics["mean"])
    ([0.0, 1.0, 2.0, 3.0], 1.5)
    """
    return PerRank(tree, resize)


def _is_per_rank(node: Any) -> bool:
    return isinstance(node, PerRank)


def owners(tree: Any) -> list[PerRank | None]:
    """Return each leaf's `per_rank` node."""
    found: list[PerRank | None] = []
    for node in jax.tree.leaves(tree, is_leaf=_is_per_rank):
        found += [node] * len(jax.tree.leaves(node)) if _is_per_rank(node) else [None]
    return found


def flags(tree: Any) -> list[bool]:
    """Whether each leaf is `per_rank`."""
    if isinstance(tree, pytrees.Held):
        others = {i for i, _ in tree.others}
        whole = tree.treedef.unflatten(range(tree.treedef.num_leaves))
        return [flag for i, flag in enumerate(flags(whole)) if i not in others]
    return [owner is not None for owner in owners(tree)]


def require_dims(tree: Any) -> None:
    """Refuse a tree with an unshardable `per_rank` array."""
    own = flags(tree)
    if not any(own):
        return
    named = jax.tree_util.tree_leaves_with_path(tree)
    for is_own, (path, leaf) in zip(own, named, strict=True):
        if is_own:
            require_dim(jax.tree_util.keystr(path), leaf)


def require_dim(name: str, leaf: Any, num_ranks: int = 1) -> None:
    """Refuse an unshardable `per_rank` leaf."""
    if not pytrees.is_array(leaf):
        raise TypeError(
            f"`{name}` is {leaf!r}, of type {type(leaf).__name__}, in a jdp.per_rank, which splits "
            "arrays over the ranks. Keep it next to the per_rank, or close over it."
        )
    shape = jnp.shape(leaf)
    if not shape or shape[0] % num_ranks:
        raise ValueError(
            f"`{name}` {jnp.result_type(leaf)}{list(shape)} is jdp.per_rank, which is split over "
            f"ranks on its first dim, but {_reason(shape, num_ranks)}"
        )


def _reason(shape: tuple[int, ...], num_ranks: int) -> str:
    if shape:
        return (
            f"{shape[0]} does not divide by {num_ranks} ranks. For state of rows this dim is the "
            f"rows of the batch, for one value per rank it is {num_ranks}."
        )
    return (
        "a scalar has none. For one value per rank add a dim: jnp.zeros((num_ranks, *shape)) "
        "outside a step, value[None] inside."
    )


def resized(owner: PerRank, leaf: Any, saved: np.ndarray, name: str, where: str) -> np.ndarray:
    """Resize a saved leaf (for keys, its data) by its rule."""
    wrap = functools.partial(_wrapped, leaf)
    like = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    shape = jax.eval_shape(wrap, saved).shape
    shapes = f"`{name}` is {like.dtype}{list(shape)} in {where} and {list(like.shape)} here"
    if owner.resize is None:
        raise ValueError(
            f"{shapes}. It is jdp.per_rank, one part per rank, and jdp cannot convert it to "
            "another number of ranks. Write jdp.per_rank(tree, resize=lambda saved, like: ...), "
            "which returns the value for this run, for example jnp.zeros(like.shape, "
            f"like.dtype); or run on {shape[0]} ranks again."
        )
    new = owner.resize(wrap(np.array(saved)), like)  # a copy, which the rule may change and keep
    if jnp.shape(new) != like.shape or jnp.result_type(new) != like.dtype:
        raise ValueError(
            f"{shapes}, but its resize= returned {jnp.result_type(new)}{list(jnp.shape(new))}. "
            "Return an array of the shape and dtype of its second argument."
        )
    return np.asarray(jax.random.key_data(new) if pytrees.is_key(leaf) else new)


def _wrapped(leaf: Any, saved: Any) -> Any:
    """Return a saved value as the author knows it: data as keys."""
    if not pytrees.is_key(leaf):
        return saved
    return jax.random.wrap_key_data(jnp.asarray(saved), impl=pytrees.key_impl(leaf))
