"""Train with PyTorch's DistributedDataParallel."""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.compare.task import LEARNING_RATE, MOMENTUM


def program(task):
    model = DistributedDataParallel(task.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step(batch):
        optimizer.zero_grad()
        parts = zip(*(x.chunk(task.num_micro_batches) for x in batch.values()), strict=True)
        for number, part in enumerate(parts, 1):
            is_last = number == task.num_micro_batches
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(dict(zip(batch, part, strict=True)))
                (loss / task.num_micro_batches).backward()
        optimizer.step()

    return step, model.module
