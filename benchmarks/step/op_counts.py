"""Counts the collectives and matmuls of compiled steps, on CPU and compiled for GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.gpu import topology
from benchmarks.harness import hlo, models
from benchmarks.harness.report import Section
from benchmarks.step import lineup
from jdp.collectives.buckets import MiB

COMBINE = "xla_gpu_all_reduce_combine_threshold_bytes"


def count() -> Section:
    """Count the operations of all setups, on this machine's CPU."""
    rows = [
        _row(model, ranks, k, label, lineup.counts(one.step, one.state, one.batch))
        for model, ranks, k in lineup.SETUPS
        for label, one in lineup.compiled(model, ranks, k).items()
    ]
    return _section("What the compiled steps do, on CPU", rows)


def count_for_gpus() -> Section:
    """Count the operations of programs compiled for 8 x H200, with larger models, in bfloat16.

    Raises:
      topology.UnavailableError: if they cannot be compiled here.
    """
    mesh = topology.mesh_of_h200s()
    here = jdp.init(devices=jax.devices()[:1])
    large = (
        models.mlp(width=2048, num_layers=4, num_rows=8192, dtype=jnp.bfloat16),
        models.transformer(dim=512, num_layers=4, num_rows=128, length=512, dtype=jnp.bfloat16),
    )
    rows = []
    for problem in large:
        for k in (1, 8):
            for label, make in lineup.makers(k).items():
                where = lineup.mesh_of(label, mesh)
                state = _shapes(lineup.start(label, problem, here), where, P())
                batch = _shapes(problem.batch, where, P("data"))
                program = make(problem.loss_fn, mesh, k), state, batch
                rows.append(_row(problem.name, mesh.size, k, label, lineup.counts(*program)))
                if label in ("jdp", "shard_map"):
                    found = lineup.counts(*program, **{COMBINE: 4 * MiB})
                    rows.append(_row(problem.name, mesh.size, k, f"{label}, 4 MiB", found))
    return _section(
        "Operations of steps compiled for 8 x H200, without such a machine",
        rows,
        "4 MiB: with XLA_FLAGS=--xla_gpu_all_reduce_combine_threshold_bytes=4194304; by itself "
        "XLA combines all-reduces up to 30 MiB.",
    )


def _shapes(tree: Any, mesh: Mesh, spec: P) -> Any:
    where = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _row(model: str, ranks: int, k: int, label: str, found: hlo.Counts) -> dict[str, Any]:
    calls = found.calls
    return {
        "section": "counts",
        "model": model,
        "ranks": ranks,
        "micro_batches": k,
        "contestant": label,
        "all_reduces": calls["all-reduce"],
        "all_gathers": calls["all-gather"],
        "other_collectives": calls.total() - calls["all-reduce"] - calls["all-gather"],
        "sent_mib": found.sent_bytes.total() / MiB,
        "hidden_mib": found.hidden_bytes / MiB,
        "gflops": found.flops / 1e9,
    }


def _section(title: str, rows: list[dict[str, Any]], note: str = "") -> Section:
    return Section(
        title,
        "For each device and step, counted in the optimised program, the body of a loop as "
        "often as it runs. GFlop: of the matmuls. MiB: bytes that the device puts into "
        "collectives; "
        f"hidden: those in flight while a matmul runs, which are none on CPU. {note}",
        rows,
        {
            "model": "{model}",
            "ranks": "{ranks}",
            "micro-batches": "{micro_batches}",
            "contestant": "{contestant}",
            "all-reduces": "{all_reduces}",
            "all-gathers": "{all_gathers}",
            "other collectives": "{other_collectives}",
            "MiB": "{sent_mib:.2f}",
            "hidden": "{hidden_mib:.2f}",
            "GFlop": "{gflops:.3f}",
        },
    )
