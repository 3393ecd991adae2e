"""One of several processes that reduce with MPI, for a `Team` (of team.py); needs mpi4py."""

import time
from typing import Any

import numpy as np
from mpi4py import MPI

from benchmarks.harness import exact, team

WORLD = MPI.COMM_WORLD


def functions() -> dict:
    made: dict[str, Any] = {}

    def about() -> str:
        return MPI.Get_library_version().split(",")[0] + f", mpi4py {MPI.Get_version()}"

    def prepare(num_bytes: int) -> None:
        made["vector"] = vector = np.zeros(num_bytes // 4, np.float32)
        made["case"] = exact.InPlace("Open MPI", WORLD.rank, WORLD.size, vector)
        run(1)

    def run(num_calls: int) -> float:
        vector = made["vector"]
        made["case"].prepare()
        WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            WORLD.Allreduce(MPI.IN_PLACE, vector)
        seconds = time.perf_counter() - start
        made["case"].check(num_calls)
        return seconds / num_calls

    return {"about": about, "prepare": prepare, "run": run}


if __name__ == "__main__":
    team.serve(WORLD.rank, functions)
