"""One of several processes that reduce and train with PyTorch, for a `Team` (of team.py)."""

import contextlib
import datetime
import itertools
import sys
import time

import team
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def functions() -> dict:
    index, port, num_processes = (int(argument) for argument in sys.argv[1:])
    # As torchrun does where nobody says otherwise.
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
        made["vector"] = vector = torch.full((num_bytes // 4,), index + 1.0)
        dist.all_reduce(vector)
        assert (vector == num_processes * (num_processes + 1) / 2).all()
        vector.zero_()  # sums of zeros never overflow

    def run(num_calls: int) -> float:
        vector = made["vector"]
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            dist.all_reduce(vector)
        return (time.perf_counter() - start) / num_calls

    def prepare_step(width: int, num_layers: int, num_rows: int) -> None:
        made["step"] = _step(width, num_layers, num_rows)

    def run_step(name: str, num_steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            made["step"](name)
        return (time.perf_counter() - start) / num_steps

    return {
        "about": lambda: f"torch {torch.__version__}",
        "prepare": prepare,
        "run": run,
        "prepare_step": prepare_step,
        "run_step": run_step,
    }


# The step of models.mlp on one process's rows; "none" reduces nothing.
def _step(width, num_layers, num_rows):
    layers = [[nn.Linear(width, width), nn.GELU()] for _ in range(num_layers)]
    model = DistributedDataParallel(nn.Sequential(*list(itertools.chain(*layers))[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(num_rows, width), torch.randn(num_rows, width)

    def step(name):
        optimizer.zero_grad()
        with model.no_sync() if name == "none" else contextlib.nullcontext():
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    team.serve(int(sys.argv[1]), functions)
