"""Train with PyTorch on one device."""

import torch

from benchmarks.compare.task import LEARNING_RATE, MOMENTUM


def program(task):
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step(batch):
        optimizer.zero_grad()
        parts = zip(*(x.chunk(task.num_micro_batches) for x in batch.values()), strict=True)
        for part in parts:
            loss = model(dict(zip(batch, part, strict=True)))
            (loss / task.num_micro_batches).backward()
        optimizer.step()

    return step, model
