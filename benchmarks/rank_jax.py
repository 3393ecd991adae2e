"""One of several processes that reduce and train with JAX, for a `Team` (of team.py)."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import contestants
import jax
import loops
import models
import numpy as np
import team
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp


def functions() -> dict:
    index, port, num_processes = (int(argument) for argument in sys.argv[1:])
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, num_processes, index, coordinator_bind_address=address, initialization_timeout=60
    )
    mesh = jdp.init()
    together = loops.Loop("psum", mesh, [1], 1)
    made: dict[str, Callable[[], Any]] = {}

    def run(name: str, num_calls: int) -> float:
        jax.block_until_ready(together())
        start = time.perf_counter()
        jax.block_until_ready(made[name]())
        return (time.perf_counter() - start) / num_calls

    def prepare(num_bytes: int, num_calls: int) -> None:
        made.clear()  # the memory of the last size
        for name in loops.MEANS:
            made[name] = loops.Loop(name, mesh, [num_bytes // 4], num_calls)
        for name in ("direct", "psum"):
            one = loops.Loop(name, mesh, [num_bytes // 4], 1)
            made[f"{name}, calls"] = functools.partial(_repeat, one, num_calls, wait=True)

    def prepare_step(*problem: int, num_steps: int) -> None:
        made.clear()
        for name, all_reduce in ALL_REDUCES.items():
            step = _Training(all_reduce, mesh, *problem)
            made[name] = functools.partial(_repeat, step, num_steps)

    return {
        "about": lambda: f"jax {jax.__version__}",
        "prepare": prepare,
        "run": run,
        "prepare_step": lambda *args: prepare_step(*args[:-1], num_steps=args[-1]),
        "run_step": run,
    }


ALL_REDUCES = {
    "direct": jdp.collectives.native,
    "ring": functools.partial(jdp.collectives.native, algorithm="ring"),
    "psum": jdp.collectives.xla,
    "none": None,
}


def _repeat(call: Callable[[], Any], num_calls: int, *, wait: bool = False) -> Any:
    for _ in range(num_calls - 1):
        result = call()
        if wait:
            jax.block_until_ready(result)
    return call()


class _Training:
    """A step of models.mlp; with no `all_reduce` each process trains alone on its rows."""

    def __init__(
        self,
        all_reduce: Any,
        mesh: Mesh,
        width: int,
        num_layers: int,
        num_rows: int,
    ):
        if all_reduce is None:
            mesh = Mesh(np.array(jax.local_devices()[:1]), mesh.axis_names)
        problem = models.mlp(width=width, num_layers=num_layers, num_rows=num_rows * mesh.size)
        where = NamedSharding(mesh, P("data"))
        self._batch = {
            name: jax.make_array_from_callback(rows.shape, where, rows.__getitem__)
            for name, rows in problem.batch.items()
        }
        jdp.init(mesh)
        tx = jdp.replicated(contestants.TX, all_reduce=all_reduce or jdp.collectives.xla)
        self._state = jdp.TrainState.create(problem.params, tx)
        self._step = contestants.jdp_step(problem.loss_fn, mesh, 1)

    def __call__(self) -> Any:
        self._state, metrics = self._step(self._state, self._batch)
        return self._state, metrics


if __name__ == "__main__":
    team.serve(int(sys.argv[1]), functions)
