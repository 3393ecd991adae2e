"""Data-parallel training for JAX."""

import os

TYPE_CHECKING = False  # True to type checkers; importing `typing` would take 4 ms

__version__: str

if TYPE_CHECKING:
    from jdp import collectives as collectives
    from jdp.analysis import declare_pure as declare_pure
    from jdp.analysis import uniformity as uniformity
    from jdp.checkpoint.checkpointer import Checkpointer as Checkpointer
    from jdp.checkpoint.load import load as load
    from jdp.data.batches import batches as batches
    from jdp.data.batches import shard_batches as shard_batches
    from jdp.data.sampler import Sampler as Sampler
    from jdp.distributed.checks.replicas import check_replicas as check_replicas
    from jdp.distributed.mesh import init as init
    from jdp.distributed.metrics_log import log as log
    from jdp.distributed.objects import all_gather_object as all_gather_object
    from jdp.distributed.objects import broadcast_object as broadcast_object
    from jdp.distributed.trackers import tracker as tracker
    from jdp.rank_state import per_rank as per_rank
    from jdp.reduction.global_mean import global_mean as global_mean
    from jdp.reduction.gradients import sync_gradients as sync_gradients
    from jdp.reduction.local_steps import diloco as diloco
    from jdp.reduction.local_steps import local_sgd as local_sgd
    from jdp.reduction.metrics import batch_norm_statistics as batch_norm_statistics
    from jdp.reduction.metrics import max_over_ranks as max_over_ranks
    from jdp.reduction.metrics import mean_over_ranks as mean_over_ranks
    from jdp.reduction.metrics import min_over_ranks as min_over_ranks
    from jdp.reduction.metrics import rows as rows
    from jdp.reduction.metrics import sum_over_ranks as sum_over_ranks
    from jdp.reduction.micro_batches import value_and_grad as value_and_grad
    from jdp.reduction.optimizer import dynamic_loss_scale as dynamic_loss_scale
    from jdp.reduction.optimizer import replicated as replicated
    from jdp.reduction.optimizer import skip_nonfinite as skip_nonfinite
    from jdp.reduction.ragged import ragged_all_to_all as ragged_all_to_all
    from jdp.reduction.scanned_layers import scan_layers as scan_layers
    from jdp.reduction.sharded import sharded as sharded
    from jdp.reduction.sharded_embedding import sharded_embedding as sharded_embedding
    from jdp.tools import debug as debug
    from jdp.tools.batch_size import find_batch_size as find_batch_size
    from jdp.tools.explain import explain as explain
    from jdp.tools.profiling.profile import profile as profile
    from jdp.training.check_step import check_step as check_step
    from jdp.training.evaluation import evaluate as evaluate
    from jdp.training.state import TrainState as TrainState
    from jdp.training.step import eval_step as eval_step
    from jdp.training.step import train_step as train_step
    from jdp.worker.progress import phase as phase

_MODULES = {
    "Checkpointer": "checkpoint.checkpointer",
    "Sampler": "data.sampler",
    "TrainState": "training.state",
    "all_gather_object": "distributed.objects",
    "batch_norm_statistics": "reduction.metrics",
    "batches": "data.batches",
    "broadcast_object": "distributed.objects",
    "check_replicas": "distributed.checks.replicas",
    "check_step": "training.check_step",
    "collectives": "",
    "debug": "tools.debug",
    "declare_pure": "analysis",
    "diloco": "reduction.local_steps",
    "dynamic_loss_scale": "reduction.optimizer",
    "eval_step": "training.step",
    "evaluate": "training.evaluation",
    "explain": "tools.explain",
    "find_batch_size": "tools.batch_size",
    "global_mean": "reduction.global_mean",
    "init": "distributed.mesh",
    "load": "checkpoint.load",
    "local_sgd": "reduction.local_steps",
    "log": "distributed.metrics_log",
    "max_over_ranks": "reduction.metrics",
    "mean_over_ranks": "reduction.metrics",
    "min_over_ranks": "reduction.metrics",
    "per_rank": "rank_state",
    "phase": "worker.progress",
    "profile": "tools.profiling.profile",
    "ragged_all_to_all": "reduction.ragged",
    "replicated": "reduction.optimizer",
    "rows": "reduction.metrics",
    "scan_layers": "reduction.scanned_layers",
    "sharded": "reduction.sharded",
    "sharded_embedding": "reduction.sharded_embedding",
    "shard_batches": "data.batches",
    "skip_nonfinite": "reduction.optimizer",
    "sum_over_ranks": "reduction.metrics",
    "sync_gradients": "reduction.gradients",
    "tracker": "distributed.trackers",
    "train_step": "training.step",
    "uniformity": "analysis",
    "value_and_grad": "reduction.micro_batches",
}

__all__ = sorted(_MODULES)


if "requests" in os.environ.get("JDP_LAUNCHER", ""):  # this process may be forked
    from jdp.worker import fork_server

    fork_server.record_reads()

if not TYPE_CHECKING:
    # `jdp run` needs no JAX, so names import on first read. The first imports all but `jdp.tools`,
    # for a standby that waits in `init`.
    def __getattr__(name):
        import importlib

        if name == "__version__":
            return importlib.import_module("jdp.worker.build_info").version()
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if not _MODULES[name]:  # a package, perhaps still being imported
            return importlib.import_module(f"jdp.{name}")
        wanted = _MODULES[name]
        for public, module in _MODULES.items():
            if module == wanted or module and not module.startswith("tools."):
                imported = importlib.import_module(f"jdp.{module}")
                globals()[public] = getattr(imported, public, imported)  # itself: `jdp.debug`
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *_MODULES})
