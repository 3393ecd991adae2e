"""One of several processes that reduce with MPI, for a `Team` (of team.py); needs mpi4py."""

import time

import numpy as np
import team
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def functions() -> dict:
    vectors = {}

    def about() -> str:
        return MPI.Get_library_version().split(",")[0] + f", mpi4py {MPI.Get_version()}"

    def prepare(num_bytes: int) -> None:
        vectors["own"] = vector = np.full(num_bytes // 4, WORLD.rank + 1, np.float32)
        WORLD.Allreduce(MPI.IN_PLACE, vector)
        assert (vector == WORLD.size * (WORLD.size + 1) / 2).all()
        vector[:] = 0  # sums of zeros never overflow

    def run(num_calls: int) -> float:
        vector = vectors["own"]
        WORLD.Barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            WORLD.Allreduce(MPI.IN_PLACE, vector)
        return (time.perf_counter() - start) / num_calls

    return {"about": about, "prepare": prepare, "run": run}


if __name__ == "__main__":
    team.serve(WORLD.rank, functions)
