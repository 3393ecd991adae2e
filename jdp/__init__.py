"""Data-parallel training in JAX: the same step, on every rank, on its own rows of the batch."""

from jdp import collectives
from jdp.check import check_step
from jdp.data import batches, shard_batches
from jdp.evaluate import evaluate
from jdp.grad import global_mean, value_and_grad
from jdp.mesh import init
from jdp.metrics import mean_over_ranks, rows, sum_over_ranks
from jdp.optimizer import replicated
from jdp.sampler import Sampler
from jdp.scan_layers import scan_layers
from jdp.state import TrainState
from jdp.step import eval_step, train_step
from jdp.sync import sync_gradients
from jdp.uniformity import uniformity

__all__ = [
    "Sampler",
    "TrainState",
    "batches",
    "check_step",
    "collectives",
    "eval_step",
    "evaluate",
    "global_mean",
    "init",
    "mean_over_ranks",
    "replicated",
    "rows",
    "scan_layers",
    "shard_batches",
    "sum_over_ranks",
    "sync_gradients",
    "train_step",
    "uniformity",
    "value_and_grad",
]
