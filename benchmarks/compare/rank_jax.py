"""One of the processes of the JAX contestants, for a `Team` (of team.py)."""

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jdp
from benchmarks.compare import jax_task, task
from benchmarks.compare.checked import ExpectedRun
from benchmarks.compare.contestants import CONTESTANTS
from benchmarks.compare.jax_task import Task
from benchmarks.compare.worker import Worker
from benchmarks.harness import team


class TrainedByJax:
    """A program in this process."""

    def __init__(self, program: str, given: Task):
        module = importlib.import_module(f"benchmarks.compare.programs.{program}")
        self._step, self._start, self._batch = module.program(given)
        self._devices = list(given.devices)
        self._state: Any = None

    def start(self) -> None:
        jdp.init(devices=self._devices)  # contestants on other ranks may have run since
        self._state = jax.block_until_ready(self._start())

    def run(self, num_steps: int) -> None:
        result: Any = None
        for _ in range(num_steps):
            self._state, result = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, result))

    def drop(self) -> None:
        self._state = None

    def gather(self) -> list[tuple]:
        """Return every shard of the parameters that a device of this process has."""
        return [
            (
                name,
                np.asarray(shard.data),
                self._devices.index(shard.device),
                shard.index,
                leaf.shape,
            )
            for name, leaf in jax_task.named(self._state.params).items()
            for shard in leaf.addressable_shards
        ]


def functions() -> dict:
    folder, is_tiny = Path(sys.argv[1]), sys.argv[2] == "tiny"
    index, port, num_processes = (int(argument) for argument in sys.argv[3:])
    if num_processes > 1:
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, num_processes, index, initialization_timeout=60)
    return worker_of(folder, is_tiny).functions(f"jax {jax.__version__}")


def worker_of(folder: Path, is_tiny: bool) -> Worker:
    """Return the contestants of this process.

    Args:
      folder: of the files that write_tasks.py wrote.
      is_tiny: whether they were written for the tiny models.
    """

    def make(name: str, model: str, k: int, num_ranks: int) -> tuple[TrainedByJax, ExpectedRun]:
        one, problem = CONTESTANTS[name], jax_task.problem_of(model, is_tiny)
        given = jax_task.task_of(problem, jax.devices()[:num_ranks], k, one.stage)
        file = task.read(folder / f"{model}.npz")
        end = file.expected if one.reduces else file.alone[num_ranks]
        return TrainedByJax(one.program, given), ExpectedRun(name, file.params, end)

    def barrier() -> None:
        multihost_utils.sync_global_devices("before a run")

    return Worker(make, barrier)


if __name__ == "__main__":
    team.serve(int(sys.argv[3]), functions)
