"""All contestants for one model, compiled, on the same data, seen to train alike."""

import functools
from collections.abc import Callable
from typing import Any

import contestants
import hlo
import jax
import models
import numpy as np
from contestants import LossFn, Step
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Problem

import jdp

# (model, ranks, micro-batches)
SETUPS = [(name, ranks, k) for k in (1, 8) for name in ("mlp", "transformer") for ranks in (2, 4)]


class Contestant:
    """A step with the state that it trains, and a batch."""

    def __init__(self, step: Step, state: Any, batch: Any):
        self.step, self.state, self.batch = step, state, batch

    def run(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return self.state, metrics

    def counts(self, **compiler_options: Any) -> hlo.Counts:
        lowered = self.step.lower(self.state, self.batch)
        return hlo.count(lowered.compile(compiler_options or None).as_text())


def makers(k: int) -> dict[str, Callable[[LossFn, Mesh, int], Step]]:
    """Give jdp's step and its rivals, by name."""
    return {"jdp": contestants.jdp_step, **contestants.rivals(k)}


@functools.cache
def compiled(name: str, num_ranks: int, k: int) -> dict[str, Contestant]:
    """Compile all contestants, by name, and see that they train alike before they are timed.

    Raises:
      AssertionError: if one of them has other parameters than jdp after two steps.
    """
    problem, mesh = _problem(name), jdp.init(devices=jax.devices()[:num_ranks])
    batch = jax.device_put(problem.batch, NamedSharding(mesh, P("data")))
    made = {
        label: Contestant(make(problem.loss_fn, mesh, k), start(label, problem, mesh), batch)
        for label, make in makers(k).items()
    }
    for contestant in made.values():
        contestant.run()
        jax.block_until_ready(contestant.run())
    _require_equal(made, problem.params)
    return made


# A step takes at least 20 ms on 2 cores; rows divide by 4 ranks times 8 micro-batches.
@functools.cache
def _problem(name: str) -> Problem:
    if name == "mlp":
        return models.mlp(width=512, num_layers=4, num_rows=512)
    return models.transformer(dim=128, num_layers=4, num_rows=32, length=32)


def start(label: str, problem: Problem, mesh: Mesh) -> Any:
    """Give the state of step 0, in the form of the contestant called `label`."""
    # Copied, since device_put may keep numpy's buffers, and every contestant donates.
    params = jax.tree.map(np.array, problem.params)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    if label == "jdp":
        return jdp.TrainState.create(params, jdp.replicated(contestants.TX))
    opt_state = jax.device_put(contestants.TX.init(params), NamedSharding(mesh, P()))
    return contestants.State(params, opt_state)


def _require_equal(made: dict[str, Contestant], before: Any) -> None:
    params = {label: jax.device_get(one.state.params) for label, one in made.items()}
    if _largest_difference(params["jdp"], before) < 1e-4:
        raise AssertionError("two steps moved no parameter: that all agree would show nothing.")
    for label in params:
        difference = _largest_difference(params[label], params["jdp"])
        if not difference <= 1e-5:
            raise AssertionError(f"{label!r} is {difference:.1e} away from jdp after two steps.")


def _largest_difference(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs)
