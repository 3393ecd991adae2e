"""Measures waited calls of compiled steps beside calls of `jax.jit`: what small steps pay."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import exact, timing
from benchmarks.harness.report import Section

# The largest ratio to `jit` that is meant to be.
GOALS = {"train": 1.10, "eval": 1.05, "hooks": 1.15}
_LOG_EVERY = 10


def measure(*, budget_s: float, setups: Sequence[tuple[str, int, int]]) -> Section:
    """Time calls.

    Args:
      budget_s: seconds for each pair.
      setups: (a key of `GOALS`, leaves of the parameters, ranks).
    """
    rows = [_row(kind, num_leaves, ranks, budget_s) for kind, num_leaves, ranks in setups]
    return Section(
        "Cost of a call",
        "Microseconds of a call whose loss and parameters are waited for. train: SGD on leaves of "
        "4 floats, a `TrainState` beside a tuple of parameters and optimizer state. eval: the loss "
        f"alone. hooks: train, with `Checkpointer.step` in each step and `jdp.log` in each "
        f"{_LOG_EVERY}th. Each gradient is 1, so results are exact, and are checked on every rank "
        "after the last round.",
        rows,
        {
            "step": "{kind}",
            "leaves": "{leaves}",
            "ranks": "{ranks}",
            "jdp, us": "{jdp_us:.0f}",
            "jit, us": "{jit_us:.0f}",
            "jdp / jit": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "goal": "{goal:.2f}",
            "rounds": "{rounds}",
        },
    )


def _row(kind: str, num_leaves: int, ranks: int, budget_s: float) -> dict[str, Any]:
    mesh = jdp.init(devices=jax.devices()[:ranks])
    with contextlib.ExitStack() as stack:
        ours, bare = contestants_of(num_leaves, mesh, kind)
        if kind == "hooks":
            stack.enter_context(_hooks(ours))
        measured = timing.compare(
            functools.partial(timing.until_ready, ours),
            functools.partial(timing.until_ready, bare),
            budget_s=budget_s,
            warm_up=5,
        )
        ours.check()
        bare.check()
    return {
        "section": "call",
        "kind": kind,
        "leaves": num_leaves,
        "ranks": ranks,
        "jdp_us": measured.first_s * 1e6,
        "jit_us": measured.second_s * 1e6,
        "ratio": measured.ratio,
        "low": measured.low,
        "high": measured.high,
        "goal": GOALS[kind],
        "rounds": measured.num_rounds,
    }


@contextlib.contextmanager
def _hooks(contestant: "Contestant") -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory() as folder,
        jdp.Checkpointer(f"{folder}/run") as checkpointer,
    ):

        def after(number: int, state: Any, metrics: Any) -> None:
            if number % _LOG_EVERY == 0:
                jdp.log(metrics, number, file=f"{folder}/metrics.jsonl")
            checkpointer.step(state)

        contestant.state = checkpointer.restore(contestant.state)
        contestant.hooks = after
        yield


class Contestant:
    """A step on parameters of which leaf i starts at i; training adds 1 to each in each call."""

    def __init__(self, label: str, step: Any, state: Any, batch: Any, *, trains: bool):
        self._label, self._step, self._batch, self._trains = label, step, batch, trains
        self.state, self._num_calls = state, 0
        self._metrics: Any = None
        self.hooks: Any = None

    def __call__(self) -> Any:
        self._num_calls += 1
        if self._trains:
            self.state, self._metrics = self._step(self.state, self._batch)
        else:
            self._metrics = self._step(self.state, self._batch)
        if self.hooks is not None:
            self.hooks(self._num_calls, self.state, self._metrics)
        return self._params() if self._trains else None, self._metrics

    def _params(self) -> Any:
        return self.state.params if isinstance(self.state, jdp.TrainState) else self.state[0]

    def check(self) -> None:
        """Compare every leaf on every rank, and the loss, with the exact values."""
        added = self._num_calls if self._trains else 0
        first = {name: np.float32(int(name[1:]) + added) for name in self._params()}
        for name, leaf in self._params().items():
            self._require(name, leaf, np.full(4, first[name]))
        before = sum(first.values()) - len(first) * (1 if self._trains else 0)
        self._require("loss", self._metrics["loss"], np.float32(-4 * before))

    def _require(self, name: str, array: Any, expected: Any) -> None:
        for rank, shard in enumerate(array.addressable_shards):
            if not np.array_equal(np.asarray(shard.data), expected):
                exact.require(
                    shard.data,
                    expected,
                    contestant=self._label,
                    rank=rank,
                    round_number=self._num_calls,
                    what=name,
                )


def _loss(params: Any, batch: Any) -> jax.Array:
    total: Any = sum(jax.tree.leaves(params))
    return -jnp.mean(batch["x"]) * total.sum()


def contestants_of(
    num_leaves: int, mesh: Mesh, kind: str = "train"
) -> tuple[Contestant, Contestant]:
    """Return the step of jdp, and the same one of `jax.jit`."""
    whole = {f"w{i}": np.full(4, i, np.float32) for i in range(num_leaves)}
    rows = {"x": np.ones((8, 4), np.float32)}
    batch = jax.device_put(rows, NamedSharding(mesh, P("data")))
    tx = optax.sgd(1.0)
    state = jdp.TrainState.create(whole, jdp.replicated(tx))
    bare_state = jax.device_put((whole, tx.init(whole)), NamedSharding(mesh, P()))

    @jdp.train_step
    def step(state: jdp.TrainState, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(_loss)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    @functools.partial(jax.jit, donate_argnums=0)
    def bare(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    @jdp.eval_step
    def evaluated(state: jdp.TrainState, batch: Any) -> Any:
        return {"loss": _loss(state.params, batch)}

    @jax.jit
    def bare_evaluated(state: Any, batch: Any) -> Any:
        return {"loss": _loss(state[0], batch)}

    trains = kind != "eval"
    return (
        Contestant("jdp", step if trains else evaluated, state, batch, trains=trains),
        Contestant("jit", bare if trains else bare_evaluated, bare_state, batch, trains=trains),
    )
