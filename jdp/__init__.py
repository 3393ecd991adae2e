"""Data-parallel training in JAX: the same step, on every rank, on its own rows of the batch."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jdp import collectives as collectives
    from jdp.check import check_step as check_step
    from jdp.checkpoint import Checkpointer as Checkpointer
    from jdp.data import batches as batches
    from jdp.data import shard_batches as shard_batches
    from jdp.evaluate import evaluate as evaluate
    from jdp.grad import global_mean as global_mean
    from jdp.grad import value_and_grad as value_and_grad
    from jdp.mesh import init as init
    from jdp.metrics import mean_over_ranks as mean_over_ranks
    from jdp.metrics import rows as rows
    from jdp.metrics import sum_over_ranks as sum_over_ranks
    from jdp.optimizer import replicated as replicated
    from jdp.progress import phase as phase
    from jdp.rank_state import per_rank as per_rank
    from jdp.replicas import check_replicas as check_replicas
    from jdp.sampler import Sampler as Sampler
    from jdp.scan_layers import scan_layers as scan_layers
    from jdp.state import TrainState as TrainState
    from jdp.step import eval_step as eval_step
    from jdp.step import train_step as train_step
    from jdp.sync import sync_gradients as sync_gradients
    from jdp.uniformity import uniformity as uniformity

# The room of each public name.
_ROOMS = {
    "Checkpointer": "checkpoint",
    "Sampler": "sampler",
    "TrainState": "state",
    "batches": "data",
    "check_replicas": "replicas",
    "check_step": "check",
    "collectives": "",
    "eval_step": "step",
    "evaluate": "evaluate",
    "global_mean": "grad",
    "init": "mesh",
    "mean_over_ranks": "metrics",
    "per_rank": "rank_state",
    "phase": "progress",
    "replicated": "optimizer",
    "rows": "metrics",
    "scan_layers": "scan_layers",
    "shard_batches": "data",
    "sum_over_ranks": "metrics",
    "sync_gradients": "sync",
    "train_step": "step",
    "uniformity": "uniformity",
    "value_and_grad": "grad",
}

__all__ = sorted(_ROOMS)


# Some rooms are named as what they are for, and importing one puts it into the package under that
# name. What is public there is the function.
class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _ROOMS.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:  # which would take any name for one of ours
    # `jdp run` needs no JAX, so nothing is imported before a name is asked for. Then all is: a
    # standby, which waits in `init`, has paid for what the script needs after it.
    def __getattr__(name):
        if name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not _ROOMS[name]:  # Itself a room, which another may ask for while it is imported.
            return importlib.import_module(f"jdp.{name}")
        for public, room in _ROOMS.items():
            if room:
                globals()[public] = getattr(importlib.import_module(f"jdp.{room}"), public)
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_ROOMS})
