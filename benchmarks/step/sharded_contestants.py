"""The contestants of `sharded`: jdp.sharded at each stage, jdp.replicated, and plain jit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import models
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.step.contestants import State

STAGES = {f"stage {stage}": stage for stage in (1, 2, 3)}
REPLICATED, PEER = "replicated", "jit + NamedSharding"
# The rival once more: how far its times are from its own.
AGAIN = "replicated again"
LABELS = (REPLICATED, AGAIN, *STAGES, PEER)
# The second one divides by the root of a mean of squares; a larger eps than optax's lets no
# rounding of small gradients through.
OPTIMIZERS = {"momentum": models.TX, "adam": optax.adam(1e-3, eps=1e-3)}
# Steps of one run, and runs before training restarts. The first step of a run touches memory that
# the other contestants had in the meantime: at stage 3 about 2,500 pages on 2 ranks.
NUM_STEPS, NUM_RUNS = 16, 2
MIN_SIZE = 4096
# Rows in a batch of all ranks.
ROWS = {"mlp": 64, "transformer": 8}


@functools.cache
def problem_of(model: str) -> Problem:
    """Return the model of this name, a key of `ROWS`."""
    if model == "mlp":
        return models.mlp(width=512, num_layers=4, num_rows=ROWS[model])
    return models.transformer(dim=128, num_layers=4, num_rows=ROWS[model], length=32)


@functools.cache
def oracle_of(model: str, optimizer: str) -> Oracle:
    """Return the expected results of a model and an optimizer, keys of `ROWS` and `OPTIMIZERS`."""
    tx = OPTIMIZERS[optimizer]
    return Oracle(problem_of(model), tx=tx, num_steps=NUM_STEPS, num_runs=NUM_RUNS)


def training(label: str, model: str, optimizer: str, mesh: Mesh) -> Training:
    """Return a contestant.

    Args:
      label: one of `LABELS`.
      model: a key of `ROWS`.
      optimizer: a key of `OPTIMIZERS`.
      mesh: of the ranks, with the axis "data", as `jdp.init` returned it.
    """
    problem, tx = problem_of(model), OPTIMIZERS[optimizer]
    where = NamedSharding(mesh, P("data"))
    batch = {
        name: jax.make_array_from_callback(rows.shape, where, rows.__getitem__)
        for name, rows in problem.batch.items()
    }
    step, start = _peer(problem, tx, mesh) if label == PEER else _jdp(problem, tx, label)
    return Training(label, step, start, batch, oracle_of(model, optimizer))


def _jdp(problem: Problem, tx: Any, label: str) -> tuple[Any, Any]:
    if label in (REPLICATED, AGAIN):
        tx = jdp.replicated(tx)
    else:
        tx = jdp.sharded(tx, stage=STAGES[label], min_size=MIN_SIZE)

    @jdp.train_step
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(problem.loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    def start() -> Any:
        return jdp.TrainState.create(jax.tree.map(np.array, problem.params), tx)

    return step, start


def _peer(problem: Problem, tx: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Return the step that XLA partitions: every large leaf split, as Flax's guide has it."""

    def sharding(leaf: Any) -> NamedSharding:
        shape = jnp.shape(leaf)
        dims = [i for i, size in enumerate(shape) if size % mesh.size == 0]
        if not dims or np.prod(shape) < MIN_SIZE:
            return NamedSharding(mesh, P())
        dim = max(dims, key=lambda i: (shape[i], -i))
        return NamedSharding(mesh, P(*[None] * dim, "data"))

    def start() -> State:
        params = jax.tree.map(np.array, problem.params)
        state = State(params, tx.init(params))
        return jax.device_put(state, jax.tree.map(sharding, state))

    def step(state: State, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(problem.loss_fn)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), {"loss": loss}

    places = jax.tree.map(sharding, start())
    return jax.jit(step, donate_argnums=0, out_shardings=(places, None)), start
