"""One of several processes that copy memory at once, for a `Team` (of team.py)."""

import ctypes
import os
import time

import numpy as np

from benchmarks.harness import exact, team


def functions() -> dict:
    index, copied = int(os.environ["JDP_INDEX"]), {}

    def prepare(num_bytes: int) -> None:
        copied["from"], copied["to"] = (
            np.ones(num_bytes // 4, np.float32),
            np.zeros(num_bytes // 4, np.float32),
        )
        copied["round"] = 0

    def copy(num_calls: int) -> tuple[float, float]:
        source, target = copied["from"], copied["to"]
        copied["round"] += 1
        source[:] = exact.values(index, copied["round"], source.size)
        memmove, addresses = ctypes.memmove, (target.ctypes.data, source.ctypes.data)
        start = time.monotonic()  # a clock that all processes share
        for _ in range(num_calls):
            memmove(*addresses, source.nbytes)
        end = time.monotonic()
        exact.require(
            target,
            source,
            contestant="memcpy",
            rank=index,
            round_number=copied["round"],
            what="copy",
        )
        return start, end

    return {"about": lambda: "", "prepare": prepare, "run": copy}


if __name__ == "__main__":
    team.serve(int(os.environ["JDP_INDEX"]), functions)
