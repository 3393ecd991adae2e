"""Trains every model on one device in float64, and writes the files of the tasks.

    JAX_ENABLE_X64=1 python -m benchmarks.compare.write_tasks FOLDER [--tiny] --ranks 2 4

A program of its own, since a process computes in float64 throughout or not at all. The models
cast some values to float32, so the results have that accuracy at worst.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.compare import jax_task
from benchmarks.compare.programs import one_device
from benchmarks.compare.task import NUM_STEPS, Arrays, TaskFile, write
from benchmarks.harness.models import Problem


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", nargs="*", default=list(jax_task.NUM_ROWS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[])
    options = parser.parse_args()
    assert jax.config.jax_enable_x64, "set JAX_ENABLE_X64=1"
    for model in options.models:
        problem = jax_task.problem_of(model, options.tiny)
        write(options.folder / f"{model}.npz", solved(problem, options.ranks))


def solved(problem: Problem, ranks: Sequence[int]) -> TaskFile:
    """Train a model on one device, and each of n ranks alone, for all n of `ranks`."""
    params, batch = jax_task.arrays(problem.params), jax_task.arrays(problem.batch)
    alone = {}
    for num_ranks in ranks:
        parts = [_part(problem, num_ranks, rank) for rank in range(num_ranks)]
        ends = [_trained(part) for part in parts]
        alone[num_ranks] = {name: np.stack([end[name] for end in ends]) for name in params}
    return TaskFile(params, batch, _trained(problem), alone)


def _part(problem: Problem, num_ranks: int, rank: int) -> Problem:
    def rows(x: np.ndarray) -> np.ndarray:
        return x.reshape(num_ranks, -1, *x.shape[1:])[rank]

    return problem._replace(batch=jax.tree.map(rows, problem.batch))


def _trained(problem: Problem) -> Arrays:
    wide = jax.tree.map(_float64, (problem.params, problem.batch))
    task = jax_task.task_of(problem._replace(params=wide[0], batch=wide[1]), jax.devices()[:1])
    step, start, batch = one_device.program(task)
    state = start()
    for _ in range(NUM_STEPS):
        state, _ = step(state, batch)
    return jax_task.arrays(state.params)


def _float64(x: Any) -> np.ndarray:
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


if __name__ == "__main__":
    main()
