"""Train with PyTorch's FSDP2, which splits parameters, gradients and the optimizer's state."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.compare.task import LEARNING_RATE, MOMENTUM


def program(task):
    model = task.model()
    mesh = init_device_mesh("cpu", (task.num_ranks,))
    for layer in task.layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step(batch):
        optimizer.zero_grad()
        parts = zip(*(x.chunk(task.num_micro_batches) for x in batch.values()), strict=True)
        for number, part in enumerate(parts, 1):
            model.set_requires_gradient_sync(number == task.num_micro_batches)
            loss = model(dict(zip(batch, part, strict=True)))
            (loss / task.num_micro_batches).backward()
        optimizer.step()

    return step, model
