"""How a wrong program is written down, and the small problem that most of them train on.

`@wrong(kind, blames)` stands over a step that must be refused, `@right` over a twin of it that
differs in as little as possible and must pass. A comment `# <- here` marks the line that the
message has to name.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp

# What the message holds: its code and, where several have that code, what it says to write.
KINDS = {
    "varies": ("JDP101", "state.apply_gradients(grads)"),
    "decision": ("JDP101", "grads = jdp.sync_gradients(grads)"),
    "drawn": ("JDP101", "state.shared_key"),
    "statistics": ("JDP101", "jdp.mean_over_ranks(stats)"),
    "key": ("JDP101", "state.key differs"),
    "other axis": ("JDP101", "along the mesh axis"),
    "metric": ("JDP102", "jdp.sum_over_ranks(x)"),
    "reduced twice": ("JDP121", "apply_gradients(grads, synced=True)"),
    "not divided": ("JDP121", "jdp.sync_gradients(grads, mean=False)"),
    "repeated": ("JDP122", "jdp.mean_over_ranks(x)"),
    "unweighted": ("JDP123", ""),
    "deadlock": ("JDP103", ""),
    "mask": ("JDP109", ""),
    "gather": ("JDP110", ""),
    "ref": ("JDP106", ""),
    "forward mode": ("JDP111", "late=False"),
}


class Program(NamedTuple):
    """A step and what it is called with.

    Attributes:
      step: `(state, batch, *rest) -> (state, metrics)`, not decorated yet.
      kind: key of `KINDS`, "" of a right program.
      blames: beginnings of the names that must be blamed, and no others.
      make: gives `(state, batch, *rest)`.
      options: keyword arguments of `jdp.train_step`.
      since: first JAX version in which it is wrong, or exists.
      until: first JAX version in which it is right.
    """

    step: Callable[..., Any]
    kind: str
    blames: tuple[str, ...]
    make: Callable[[], tuple]
    options: dict[str, Any]
    since: tuple[int, ...] = (0,)
    until: tuple[int, ...] = (99,)

    def exists(self) -> bool:
        return self.since <= jax.__version_info__ < self.until

    def line(self) -> str:
        """Where the comment stands, as in "refs.py:41"; empty without one."""
        lines, first = inspect.getsourcelines(getattr(self.step, "written_as", self.step))
        for number, text in enumerate(lines, first):
            if "# <- here" in text:
                return f"{Path(inspect.getsourcefile(self.step)).name}:{number}"
        return ""


WRONG: list[Program] = []
TWICE: list[Program] = []
BENT: list[Program] = []
RIGHT: list[Program] = []


def wrong(
    kind: str, *blames: str, make: Callable[[], tuple] | None = None, **options: Any
) -> Callable[[Callable], Callable]:
    """Record a step that must be refused; `since`, `until` and options of `train_step` go along."""
    return _noted(WRONG, kind, blames, make, options)


def twice(*blames: str, make: Callable[[], tuple] | None = None, **options: Any) -> Callable:
    """Record a step that is right, and sends the gradients `blames` twice."""
    return _noted(TWICE, "", blames, make, options)


def bent(*blames: str, make: Callable[[], tuple] | None = None, **options: Any) -> Callable:
    """Record a step that bends the gradients `blames` before their mean, and must be warned of."""
    return _noted(BENT, "", blames, make, options)


def right(*, make: Callable[[], tuple] | None = None, **options: Any) -> Callable:
    """Record a step that must pass."""
    return _noted(RIGHT, "", (), make, options)


def _noted(
    where: list[Program], kind: str, blames: tuple, make: Any, options: dict[str, Any]
) -> Callable[[Callable], Callable]:
    versions = {name: options.pop(name) for name in ("since", "until") if name in options}

    def note(step: Callable) -> Callable:
        where.append(Program(step, kind, blames, make or training, options, **versions))
        return step

    return note


# A linear model on 8 rows, drawn so that ranks decide differently where a program lets them.


def rows() -> dict[str, np.ndarray]:
    x = np.random.default_rng(31).normal(size=(8, 3)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1))}


def masked_rows() -> dict[str, np.ndarray]:
    return {**rows(), "mask": np.arange(8) < 7}


def params() -> dict[str, np.ndarray]:
    return {"w": np.array([0.5, -1.0, 2.0], np.float32), "b": np.float32(0.25)}


def sgd(*before: optax.GradientTransformation, **kwargs: Any) -> Any:
    return jdp.replicated(optax.chain(*before, optax.sgd(0.1, momentum=0.9)), **kwargs)


def training(tx: Any = None, model_state: Any = 0.0, batch: Any = None, **kwargs: Any) -> tuple:
    """A TrainState and a batch."""
    tx = sgd() if tx is None else tx
    state = jdp.TrainState.create(params(), tx, model_state=model_state, **kwargs)
    return state, rows() if batch is None else batch


def numbers() -> tuple:
    """A state of bare numbers, where the library has no part in what a step does; and a batch."""
    return {"a": np.float32(1), "b": np.float32(2), "v": np.arange(4, dtype=np.float32)}, rows()


def holding(**state: Any) -> Callable[[], tuple]:
    """Make the state that is named here; and a batch."""
    return lambda: (state, rows())


def predict(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def loss_fn(p: Any, batch: Any) -> jax.Array:
    return jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2)


def gradients(state: Any, batch: Any) -> Any:
    return jax.grad(loss_fn)(state.params, batch)


def local(batch: Any) -> jax.Array:
    """A number of this rank's rows alone."""
    return batch["x"].mean()


def descend(p: Any, grads: Any) -> Any:
    return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads)
