"""How a right program is written down, and the small problem that most of them train on.

`add` notes one; `@right` over a step and `@loss` over a loss do so by the function's name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

NUM_ROWS = 8
SGD = jdp.replicated(optax.sgd(0.1))


class Program(NamedTuple):
    """A step that jdp must accept without a word.

    Attributes:
      name: what it shows.
      step: `(state, batch, *rest) -> (state, metrics)`, not decorated yet.
      make_state: makes the state; where it is only traced, its shapes are all that counts.
      rest: further arguments of the step.
      axes: name and size of each axis of the mesh.
      runs: whether it also runs, and must then train as one rank does.
      options: keyword arguments of `jdp.train_step`.
    """

    name: str
    step: Callable[..., Any]
    make_state: Callable[[], Any]
    rest: tuple
    axes: dict[str, int]
    runs: bool
    options: dict[str, Any]

    def axis_name(self) -> Any:
        return self.options.get("axis_name", "data")


PROGRAMS: list[Program] = []
LOSSES: dict[str, tuple[Callable, Callable]] = {}  # by name, with what makes params; see add_loss


def add(
    name: str,
    step: Callable[..., Any],
    make_state: Callable[[], Any],
    *,
    rest: tuple = (),
    axes: dict[str, int] | None = None,
    runs: bool = False,
    **options: Any,
) -> None:
    """Record a program: on 4 ranks, unless `axes` says otherwise."""
    axes = {"data": 4} if axes is None else axes
    PROGRAMS.append(Program(name, step, make_state, rest, axes, runs, options))


def right(make_state: Callable[[], Any] | None = None, **kwargs: Any) -> Callable:
    """Record a step."""

    def note(step: Callable) -> Callable:
        add(_name(step), step, make_state or state, **kwargs)
        return step

    return note


def add_loss(
    name: str,
    loss_fn: Callable[[Any, Any], jax.Array],
    make_params: Callable[[], Any] | None = None,
    *,
    uniform: bool = True,
    **kwargs: Any,
) -> None:
    """Record the training with a loss of `(params, batch)`.

    Unless `uniform` is False, ranks with the same rows have the same gradient of it.
    """
    if uniform:
        LOSSES[name] = loss_fn, make_params or params
    make_state = state if make_params is None else lambda: state(make_params())
    add(f"loss: {name}", minimises(loss_fn), make_state, **kwargs)


def loss(make_params: Callable[[], Any] | None = None, **kwargs: Any) -> Callable:
    """Record a loss."""

    def note(loss_fn: Callable) -> Callable:
        add_loss(_name(loss_fn), loss_fn, make_params, **kwargs)
        return loss_fn

    return note


def _name(function: Callable) -> str:
    return function.__name__.replace("_", " ")


def minimises(loss_fn: Callable[[Any, Any], jax.Array]) -> Callable[..., Any]:
    """Make the step that everyone writes: the gradient of a loss, applied."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": value}

    return step


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Make a batch, of which each program takes what it needs."""
    draw = np.random.default_rng(seed)
    floats = {
        "rows": (4,),
        "targets": (3,),
        "sequence": (5, 4),
        "image": (6, 6, 2),
        "volume": (4, 4, 4, 2),
    }
    return {
        **{k: draw.normal(size=(NUM_ROWS, *s)).astype(np.float32) for k, s in floats.items()},
        "tokens": draw.integers(1, 7, size=(NUM_ROWS, 5), dtype=np.int32),
        "labels": draw.integers(0, 3, size=NUM_ROWS, dtype=np.int32),
        "counts": np.arange(NUM_ROWS, dtype=np.float32) % 3,
    }


def params() -> dict[str, np.ndarray]:
    """Make the parameters of `predict`."""
    draw = np.random.default_rng(1)
    return {
        "w": draw.normal(0, 0.5, size=(4, 3)).astype(np.float32),
        "b": np.full(3, 0.1, np.float32),
    }


def predict(p: Any, x: jax.Array) -> jax.Array:
    """Return 3 numbers for each row."""
    return jnp.tanh(x @ p["w"] + p["b"])


def loss_fn(p: Any, batch: Any) -> jax.Array:
    """Return the mean squared error of `predict`."""
    return mean_error(predict(p, batch["rows"]), batch)


def mean_error(predictions: jax.Array, batch: Any) -> jax.Array:
    """Return the mean squared error of some predictions."""
    return jnp.mean((predictions - batch["targets"]) ** 2)


plain = minimises(loss_fn)


def state(p: Any = None, tx: Any = SGD, **kwargs: Any) -> jdp.TrainState:
    """Make the state of `predict`, or of other parameters."""
    return jdp.TrainState.create(params() if p is None else p, tx, **kwargs)


def filled(init: Callable[..., Any]) -> Any:
    """Return what `init` would return with positive numbers in it, without a compile."""
    draw = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.zeros(leaf.shape, leaf.dtype)
        return draw.uniform(0.1, 0.6, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, jax.eval_shape(init))


def distance(out: Any) -> jax.Array | int:
    """Return a loss of anything: how far its float leaves are from one."""
    leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.mean((x.astype(jnp.float32) - 1) ** 2) for x in leaves)
