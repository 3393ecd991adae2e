"""One of several processes that copy memory at once, for a `Team` (of team.py)."""

import ctypes
import os
import time

import team


def functions() -> dict:
    copied = {}

    def prepare(num_bytes: int) -> None:
        copied["from"], copied["to"] = bytearray(b"1" * num_bytes), bytearray(b"0" * num_bytes)

    def copy(num_calls: int) -> tuple[float, float]:
        num_bytes = len(copied["to"])
        source, target = (
            (ctypes.c_char * num_bytes).from_buffer(copied[name]) for name in ("from", "to")
        )
        memmove, source, target = ctypes.memmove, ctypes.addressof(source), ctypes.addressof(target)
        start = time.monotonic()  # a clock that all processes share
        for _ in range(num_calls):
            memmove(target, source, num_bytes)
        return start, time.monotonic()

    return {"about": lambda: "", "prepare": prepare, "run": copy}


if __name__ == "__main__":
    team.serve(int(os.environ["JDP_INDEX"]), functions)
