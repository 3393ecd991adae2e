"""The task as the JAX programs get it: arrays in trees, the loss and the devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from benchmarks.compare import task
from benchmarks.compare.task import Arrays
from benchmarks.harness import models
from benchmarks.harness.models import Problem

TX = optax.sgd(task.LEARNING_RATE, momentum=task.MOMENTUM)

# A step of each takes some 20 to 60 ms on 2 cores.
_SIZES: dict[str, Callable[[int], Problem]] = {
    "mlp": lambda rows: models.mlp(width=512, num_layers=4, num_rows=rows),
    "conv": lambda rows: models.conv_net(channels=32, num_layers=4, num_rows=rows, size=16),
    "transformer": lambda rows: models.transformer(dim=128, num_layers=2, num_rows=rows, length=32),
}
# The smallest of each kind, for tests.
_TINY: dict[str, Callable[[int], Problem]] = {
    "mlp": lambda rows: models.mlp(width=24, num_layers=2, num_rows=rows),
    "conv": lambda rows: models.conv_net(channels=12, num_layers=2, num_rows=rows, size=6),
    "transformer": lambda rows: models.transformer(dim=96, num_layers=1, num_rows=rows, length=5),
}
NUM_ROWS = {"mlp": 256, "conv": 64, "transformer": 32}
# Divides by 2, 3 and 4 ranks, each with 4 micro-batches.
TINY_ROWS = 48


class State(NamedTuple):
    """The state of the programs without jdp."""

    params: Any
    opt_state: Any


class Task(NamedTuple):
    """A task for a program.

    Attributes:
      params: returns new initial parameters, a tree of NumPy arrays.
      batch: the global batch, of NumPy arrays.
      loss_fn: `(params, batch) -> []`, the mean over rows.
      devices: one for each rank.
      num_micro_batches: parts that a step divides its rows into.
      stage: of `jdp.sharded`; 0 elsewhere.
    """

    params: Callable[[], Any]
    batch: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    devices: Sequence[jax.Device]
    num_micro_batches: int = 1
    stage: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.devices)


@functools.cache
def problem_of(model: str, is_tiny: bool) -> Problem:
    """Return a model with its batch, made from a seed and so the same in every process."""
    return _TINY[model](TINY_ROWS) if is_tiny else _SIZES[model](NUM_ROWS[model])


def task_of(problem: Problem, devices: Sequence[jax.Device], k: int = 1, stage: int = 0) -> Task:
    """Return the task of a problem on some devices."""

    def params() -> Any:
        return jax.tree.map(np.array, problem.params)

    return Task(params, problem.batch, problem.loss_fn, devices, k, stage)


def named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name, such as "layers.0.w"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def arrays(tree: Any) -> Arrays:
    """Return the leaves of a tree by name, as NumPy arrays."""
    return {name: np.asarray(leaf) for name, leaf in named(tree).items()}
