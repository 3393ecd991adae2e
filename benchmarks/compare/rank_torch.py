"""One of the processes of the PyTorch contestants, for a `Team` (of team.py)."""

import datetime
import functools
import importlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.compare import task, torch_models
from benchmarks.compare.checked import ExpectedRun
from benchmarks.compare.contestants import CONTESTANTS
from benchmarks.compare.worker import Worker
from benchmarks.harness import team


class TorchTask(NamedTuple):
    """The task as the PyTorch programs get it."""

    model: Any  # returns a new model with the initial parameters
    layers_of: Any
    num_ranks: int
    num_micro_batches: int


class TrainedByTorch:
    """A program in this process, which is one rank."""

    def __init__(self, program, given, batch, rank):
        self._module = importlib.import_module(f"benchmarks.compare.programs.{program}")
        self._task, self._batch, self._rank = given, batch, rank
        self._step: Any = None
        self._model: Any = None

    def start(self):
        self._step, self._model = self._module.program(self._task)

    def run(self, num_steps):
        for _ in range(num_steps):
            self._step(self._batch)

    def drop(self):
        self._step, self._model = None, None

    def gather(self):
        """Return all parameters of this rank; FSDP2's are gathered from all of them."""
        return [
            (name, torch_models.from_torch(_whole(parameter)), self._rank)
            for name, parameter in self._model.named_parameters()
        ]


def _whole(parameter):
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def functions():
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    rank, port, num_ranks = (int(argument) for argument in sys.argv[3:])
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=60),
    )

    def own_rows(x):
        return x.reshape(num_ranks, -1, *x.shape[1:])[rank]

    def make(name, model, k, _):
        one, file = CONTESTANTS[name], task.read(folder / f"{model}.npz")
        batch = torch_models.batch_of({key: own_rows(x) for key, x in file.batch.items()})
        new = functools.partial(torch_models.model_of, model, file.params)
        given = TorchTask(new, torch_models.layers_of, num_ranks, k)
        end = file.expected
        if not one.reduces:
            end = {key: x[rank] for key, x in file.alone[num_ranks].items()}
        return TrainedByTorch(one.program, given, batch, rank), ExpectedRun(name, file.params, end)

    return Worker(make, dist.barrier).functions(f"torch {torch.__version__}")


if __name__ == "__main__":
    team.serve(int(sys.argv[3]), functions)
