"""One of several processes that reduce and train with JAX, for a `Team` (of team.py)."""

import functools
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.all_reduce import loops
from benchmarks.harness import exact, models, team
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.step import contestants, sharded_contestants


def functions() -> dict:
    index, port, num_processes = (int(argument) for argument in sys.argv[1:])
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, num_processes, index, coordinator_bind_address=address, initialization_timeout=60
    )
    mesh = jdp.init()
    together = loops.Loop("psum", mesh, [1], 1)
    made: dict[str, exact.Contestant] = {}

    def seconds(contestant: exact.Contestant) -> float:
        jax.block_until_ready(together())
        start = time.perf_counter()
        jax.block_until_ready(contestant())
        return time.perf_counter() - start

    def run(name: str, num_calls: int) -> float:
        return exact.checked(made[name], seconds)() / num_calls

    def prepare(num_bytes: int, num_calls: int) -> None:
        made.clear()  # the memory of the last size
        for name in loops.SUMS:
            made[name] = loops.Loop(name, mesh, [num_bytes // 4], num_calls)
        for name in ("direct", "psum"):
            calls = loops.Loop(name, mesh, [num_bytes // 4], 1, repeats=num_calls)
            made[f"{name}, calls"] = calls

    def prepare_step(*problem: int, num_steps: int) -> None:
        made.clear()
        oracles: dict[int, Oracle] = {}
        for name, all_reduce in ALL_REDUCES.items():
            made[name] = training_of(name, all_reduce, mesh, problem, num_steps, oracles)

    def prepare_sharded(model: str, optimizer: str) -> None:
        made.clear()
        for label in sharded_contestants.LABELS:
            made[label] = sharded_contestants.training(label, model, optimizer, mesh)

    return {
        "about": lambda: f"jax {jax.__version__}",
        "prepare": prepare,
        "run": run,
        "prepare_step": lambda *args: prepare_step(*args[:-1], num_steps=args[-1]),
        "prepare_sharded": prepare_sharded,
        "run_step": run,
    }


ALL_REDUCES = {
    "direct": jdp.collectives.native,
    "ring": functools.partial(jdp.collectives.native, algorithm="ring"),
    "psum": jdp.collectives.xla,
    "none": None,
}


def training_of(
    name: str,
    all_reduce: Any,
    mesh: Mesh,
    problem: tuple[int, ...],
    num_steps: int,
    oracles: dict[int, Oracle],
) -> Training:
    """Make a contestant that trains models.mlp.

    Args:
      name: name of the contestant.
      all_reduce: from jdp.collectives; None: each process trains alone on its rows.
      mesh: mesh of all processes.
      problem: width, layers, rows of a rank.
      num_steps: number of steps of one run.
      oracles: oracles by number of ranks; a missing one is added.
    """
    if all_reduce is None:
        mesh = Mesh(np.array(jax.local_devices()[:1]), mesh.axis_names)
    width, num_layers, num_rows = problem
    made = models.mlp(width=width, num_layers=num_layers, num_rows=num_rows * mesh.size)
    if mesh.size not in oracles:
        oracles[mesh.size] = Oracle(made, num_steps=num_steps, num_runs=2)
    where = NamedSharding(mesh, P("data"))
    batch = {
        name: jax.make_array_from_callback(rows.shape, where, rows.__getitem__)
        for name, rows in made.batch.items()
    }
    tx = jdp.replicated(models.TX, all_reduce=all_reduce or jdp.collectives.xla)

    def start() -> jdp.TrainState:
        jdp.init(mesh)
        return jdp.TrainState.create(made.params, tx)

    jdp.init(mesh)
    step = contestants.jdp_step(made.loss_fn, mesh, 1)
    return Training(name, step, start, batch, oracles[mesh.size])


if __name__ == "__main__":
    team.serve(int(sys.argv[1]), functions)
