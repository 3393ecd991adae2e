"""Measures the Python time of one call of a compiled step, beside a call of `jax.jit`."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import exact, models, timing
from benchmarks.harness.report import Section


def measure(*, budget_s: float, setups: Sequence[tuple[int, int]]) -> Section:
    """Time calls.

    Args:
      budget_s: seconds for each pair.
      setups: (leaves of the state, ranks).
    """
    rows = [_row(num_leaves, ranks, budget_s) for num_leaves, ranks in setups]
    return Section(
        "Cost of a call",
        "Microseconds until the call of a step returns that adds 1 to every leaf, each a scalar; "
        "the devices have nothing else to do. jdp's own part does not depend on ranks, JAX's "
        "grows with them. 10,000 leaves run on one rank: for more, XLA takes over a minute to "
        "compile so many arguments of a `shard_map`. Results checked on every rank "
        "after the last round: the state counts the calls.",
        rows,
        {
            "leaves": "{leaves}",
            "ranks": "{ranks}",
            "jdp, us": "{jdp_us:.0f}",
            "jit, us": "{jit_us:.0f}",
            "difference, us": "{difference_us:.0f}",
            "jdp / jit": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
        },
    )


def _row(num_leaves: int, ranks: int, budget_s: float) -> dict[str, Any]:
    mesh = jdp.init(devices=jax.devices()[:ranks])
    ours, bare = contestants_of(num_leaves, mesh)
    found = timing.compare(
        functools.partial(timing.until_returned, ours),
        functools.partial(timing.until_returned, bare),
        budget_s=budget_s,
        warm_up=3,
    )
    ours.check()
    bare.check()
    return {
        "section": "call",
        "leaves": num_leaves,
        "ranks": ranks,
        "jdp_us": found.first_s * 1e6,
        "jit_us": found.second_s * 1e6,
        "difference_us": (found.first_s - found.second_s) * 1e6,
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "rounds": found.num_rounds,
    }


class Counter:
    """A step that adds 1 to every leaf; leaf i starts at i."""

    def __init__(self, label: str, step: Any, state: Any, batch: Any, params_of: Any):
        self._label, self._step, self._batch, self._params_of = label, step, batch, params_of
        self._state, self._num_calls = state, 0

    def __call__(self) -> Any:
        self._num_calls += 1
        self._state, metrics = self._step(self._state, self._batch)
        return self._state, metrics

    def check(self) -> None:
        for name, leaf in self._params_of(self._state).items():
            expected = np.float32(int(name[1:]) + self._num_calls)
            for rank, shard in enumerate(leaf.addressable_shards):
                if np.asarray(shard.data) != expected:
                    exact.require(
                        shard.data,
                        expected,
                        contestant=self._label,
                        rank=rank,
                        round_number=self._num_calls,
                        what=name,
                    )


def contestants_of(num_leaves: int, mesh: Mesh) -> tuple[Counter, Counter]:
    problem = models.many_leaves(num_leaves)
    whole = {f"w{i}": np.float32(i) for i in range(num_leaves)}
    batch = jax.device_put(problem.batch, NamedSharding(mesh, P("data")))

    def advanced(params: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, params)

    @jdp.train_step
    def step(state: jdp.TrainState, batch: Any) -> Any:
        return state.replace(params=advanced(state.params)), {}

    @functools.partial(jax.jit, donate_argnums=0)
    def bare(params: Any, batch: Any) -> Any:
        return advanced(params), {}

    state = jdp.TrainState.create(whole, jdp.replicated(optax.sgd(0.1)))
    params = jax.device_put(jax.tree.map(np.array, whole), NamedSharding(mesh, P()))
    return (
        Counter("jdp", step, state, batch, lambda state: state.params),
        Counter("jit", bare, params, batch, lambda params: params),
    )
