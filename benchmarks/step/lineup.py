"""All contestants for one model, compiled, on the same data."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import exact, hlo, models, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.step import contestants
from benchmarks.step.contestants import LossFn, Step

# (model, ranks, micro-batches) One optimizer for all: a different one would retrace the step.
_TX = jdp.replicated(models.TX)

SETUPS = [(name, ranks, k) for k in (1, 8) for name in ("mlp", "transformer") for ranks in (2, 4)]


def counts(step: Step, state: Any, batch: Any, **compiler_options: Any) -> hlo.Counts:
    """Count the operations of a compiled step."""
    lowered = step.lower(state, batch)
    return hlo.count(lowered.compile(compiler_options or None).as_text())


def makers(k: int) -> dict[str, Callable[[LossFn, Mesh, int], Step]]:
    """Return jdp's step and its rivals, by name."""
    return {"jdp": contestants.jdp_step, **contestants.rivals(k)}


@functools.cache
def compiled(name: str, num_ranks: int, k: int) -> dict[str, Training]:
    """Compile all contestants, by name, and check one step of each.

    Raises:
      exact.WrongResultError: if the result of one of them differs from the oracle.
    """
    problem, mesh = models.problem_of(name), jdp.init(devices=jax.devices()[:num_ranks])
    made = {
        label: training(label, make(problem.loss_fn, mesh, k), problem, mesh, _oracle(name))
        for label, make in makers(k).items()
    }
    for one in made.values():
        exact.checked(one, timing.until_ready)()
    return made


def training(label: str, step: Step, problem: Problem, mesh: Mesh, oracle: Oracle) -> Training:
    """Return the contestant called `label` with its state and its batch."""
    batch = jax.device_put(problem.batch, NamedSharding(mesh_of(label, mesh), P("data")))
    return Training(label, step, functools.partial(start, label, problem, mesh), batch, oracle)


@functools.cache
def _oracle(name: str) -> Oracle:
    return Oracle(models.problem_of(name), num_steps=1, num_runs=4)


def mesh_of(label: str, mesh: Mesh) -> Mesh:
    """Return the mesh of the arrays of the contestant called `label`."""
    return contestants.explicit_mesh(mesh) if label == contestants.EXPLICIT else mesh


def start(label: str, problem: Problem, mesh: Mesh) -> Any:
    """Return the state of step 0, in the form of the contestant called `label`."""
    # Copied, since device_put may keep numpy's buffers, and every contestant donates.
    params = jax.tree.map(np.array, problem.params)
    everywhere = NamedSharding(mesh_of(label, mesh), P())
    params = jax.device_put(params, everywhere)
    if label == "jdp":
        return jdp.TrainState.create(params, _TX)
    opt_state = jax.device_put(models.TX.init(jax.device_get(params)), everywhere)
    return contestants.State(params, opt_state)
