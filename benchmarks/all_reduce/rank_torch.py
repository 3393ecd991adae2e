"""One of several processes that reduce and train with PyTorch, for a `Team` (of team.py)."""

import contextlib
import datetime
import itertools
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import exact, team

# Relative to the largest element of a tensor, as in oracle.py.
TOLERANCE = 1e-4
DDP = "torch DDP"


def functions() -> dict:
    index, port, num_processes = (int(argument) for argument in sys.argv[1:])
    # torchrun's default.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=index,
        world_size=num_processes,
        timeout=datetime.timedelta(seconds=60),
    )
    made = {}

    def prepare(num_bytes: int) -> None:
        made["vector"] = vector = torch.zeros(num_bytes // 4)
        made["case"] = exact.InPlace("torch gloo", index, num_processes, vector.numpy())
        run(1)

    def run(num_calls: int) -> float:
        vector = made["vector"]
        made["case"].prepare()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            dist.all_reduce(vector)
        seconds = time.perf_counter() - start
        made["case"].check(num_calls)
        return seconds / num_calls

    def prepare_step(width: int, num_layers: int, num_rows: int, num_steps: int) -> None:
        made.clear()
        for name in ("all", "none"):
            made[name] = Training(
                name, index, num_processes, width, num_layers, num_rows, num_steps
            )

    def run_step(name: str, num_steps: int) -> float:
        made[name].prepare()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            made[name]()
        seconds = time.perf_counter() - start
        made[name].check()
        return seconds / num_steps

    return {
        "about": lambda: f"torch {torch.__version__}",
        "prepare": prepare,
        "run": run,
        "prepare_step": prepare_step,
        "run_step": run_step,
    }


class Training:
    """The step of models.mlp on one process's rows; "none" reduces nothing.

    The oracle is the same model without DDP, on the rows of all processes.
    """

    def __init__(self, name, index, num_processes, width, num_layers, num_rows, num_steps):
        torch.manual_seed(0)
        layers = [[nn.Linear(width, width), nn.GELU()] for _ in range(num_layers)]
        module = nn.Sequential(*list(itertools.chain(*layers))[:-1])
        x, y = (torch.randn(num_processes, num_rows, width) for _ in range(2))
        self._name, self._index, self._round = name, index, 0
        self._begin = [parameter.detach().clone() for parameter in module.parameters()]
        self._expected = self._trained(
            module, (x, y) if name == "all" else (x[index], y[index]), num_steps
        )
        self._restore(module)
        self._model = DistributedDataParallel(module)
        self._optimizer = _optimizer(self._model)
        self._x, self._y = x[index], y[index]

    def prepare(self):
        self._round += 1
        if self._round % len(self._expected) == 1:
            self._restore(self._model)
            self._optimizer = _optimizer(self._model)

    def __call__(self):
        self._optimizer.zero_grad()
        with self._model.no_sync() if self._name == "none" else contextlib.nullcontext():
            nn.functional.mse_loss(self._model(self._x), self._y).backward()
        self._optimizer.step()

    def check(self):
        expected = self._expected[(self._round - 1) % len(self._expected)]
        for number, (found, wanted) in enumerate(
            zip(_numbers(self._model, self._optimizer), expected, strict=True)
        ):
            exact.require(
                found,
                wanted,
                contestant=DDP if self._name == "all" else "no_sync",
                rank=self._index,
                round_number=self._round,
                what=f"tensor {number} of the parameters and the momentum",
                tolerance=TOLERANCE * float(abs(wanted).max()),
            )

    # Two consecutive runs, then training restarts.
    def _trained(self, module, rows, num_steps):
        optimizer, runs = _optimizer(module), []
        for _ in range(2):
            for _ in range(num_steps):
                optimizer.zero_grad()
                nn.functional.mse_loss(module(rows[0]), rows[1]).backward()
                optimizer.step()
            runs.append([numbers.copy() for numbers in _numbers(module, optimizer)])
        return runs

    def _restore(self, module):
        with torch.no_grad():
            for parameter, begin in zip(module.parameters(), self._begin, strict=True):
                parameter.copy_(begin)


def _optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _numbers(model, optimizer):
    parameters = list(model.parameters())
    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    return [tensor.detach().numpy() for tensor in parameters + momenta]


if __name__ == "__main__":
    team.serve(int(sys.argv[1]), functions)
