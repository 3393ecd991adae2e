"""Measures the cost of calls through XLA on one GPU, and writes the tables of all measurements
there.

`run_all.sh` calls it:

    python -m benchmarks.gpu.measure LIBJDP_CUDA_SO BENCH_RING_JSONL
"""

import ctypes
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import exact, report, timing
from benchmarks.harness.report import Section

TOKEN = jax.ShapeDtypeStruct((1,), jnp.float32)
NUM_BUCKETS = 32
SIZE = 1024
CALLS = 100  # each doubles: 2**100 times a whole number is exact in float32


def main() -> None:
    library, lines = Path(sys.argv[1]), Path(sys.argv[2])
    if jax.default_backend() != "gpu":
        sys.exit(f"measure.py needs a GPU; JAX found {jax.default_backend()}.")
    sections = []
    for part in (
        lambda: ring_sections(lines),
        lambda: [call_section(library)],
    ):
        try:
            for section in part():
                print(f"\n{section.title}\n\n{report.table(section)}", flush=True)
                sections.append(section)
        except Exception as error:  # the other parts still count
            print(f"measure: a part failed: {type(error).__name__}: {error}", file=sys.stderr)
    for section in sections:
        for row in section.rows:
            row["gpu"] = gpu()
    report.publish("ring", sections, hardware=gpu().split(",")[0], shows=False)
    sys.exit(len(sections) < 5)


@functools.cache  # nvidia-smi takes up to seconds, and each row names the GPU
def gpu() -> str:
    """Return name, driver and compiler, as far as they are installed."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.check_output(query, text=True).splitlines()[0]
    if shutil.which("nvcc") is None:
        return card
    nvcc = subprocess.check_output(["nvcc", "--version"], text=True).split("release ")[1][:4]
    return f"{card}, nvcc {nvcc}"


def ring_sections(lines: Path) -> list[Section]:
    """Return the tables of bench_ring's output, even if it is incomplete.

    Raises:
      exact.WrongResultError: if bench_ring found a wrong result.
    """
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    if wrong := [row["error"] for row in rows if row["kind"] == "wrong"]:
        raise exact.WrongResultError(*wrong)
    copy = next(row for row in rows if row["kind"] == "copy")
    columns = {
        "ranks": "{num_ranks}",
        "KiB a rank": "{kib:.0f}",
        "algorithm": "{algorithm}",
        "blocks a rank": "{num_channels}",
        "us": "{us:.1f}",
        "floor, us": "{floor_us:.1f}",
        "floor / time": "{fraction:.2f}",
    }
    for row in rows:
        row["kib"], row["slot_kib"] = row["bytes"] / 1024, row.get("slot_bytes", 0) / 1024
    text = (
        f"{gpu()}. All ranks on one GPU, in place. The floor is the bytes that a rank moves "
        "through device "
        f"memory over the {copy['tb_per_s']:.2f} TB/s of a device-to-device copy in the same run; "
        "small buckets beat it, because they stay in the cache. Medians of graph replays. "
        + exact.CHECKED
    )

    def of(kind: str) -> list[dict]:
        return [row for row in rows if row["kind"] == kind]

    return [
        Section("Latency of small buckets", text, of("latency"), columns),
        Section("From 64 KiB to 256 MiB", text, of("size"), columns),
        Section("Other types, 8 ranks", text, of("type"), {"type": "{type}", **columns}),
        Section(
            "Blocks and message sizes, 8 ranks, 64 MiB, ring",
            text,
            of("variant"),
            {**columns, "message, KiB": "{slot_kib:.0f}"},
        ),
    ]


def call_section(path: Path) -> Section:
    """Time start and done of one rank through XLA, beside a program without them."""
    open_communicator(path)
    compared = timing.compare(
        exact.checked(Calls("rings", rings), timing.until_ready),
        exact.checked(Calls("product", lambda xs: [x * 2 for x in xs]), timing.until_ready),
        budget_s=6,
    )
    per_bucket_us = (compared.first_s - compared.second_s) / CALLS / NUM_BUCKETS * 1e6
    row = {"num_buckets": NUM_BUCKETS, "per_bucket_us": per_bucket_us}
    return Section(
        "A bucket's start and done through XLA",
        f"{gpu()}. One rank, {NUM_BUCKETS} buckets of 4 KiB in one program, {CALLS} calls in a "
        "row, each of the result of the one before, minus the same program with a product in "
        f"their place. {exact.CHECKED}",
        [row],
        {"buckets": "{num_buckets}", "us a bucket": "{per_bucket_us:.2f}"},
    )


# As in jdp.collectives: all starts, a barrier over the tokens, the dones in a chain.
def rings(leaves: list[jax.Array]) -> list[jax.Array]:
    def attributes(i: int) -> dict:
        return {"bucket": np.int32(i), "num_ranks": np.int32(1), "communicator": np.int64(0)}

    scale = jnp.float32(2)
    tokens = [
        jax.ffi.ffi_call("jdp_ring_start", TOKEN)(scale, x, **attributes(i))
        for i, x in enumerate(leaves)
    ]
    tokens = jax.lax.optimization_barrier(tokens)
    after, results = tokens[0], []
    for i, (token, x) in enumerate(zip(tokens, leaves, strict=True)):
        shapes = [TOKEN, jax.ShapeDtypeStruct(x.shape, x.dtype)]
        call = jax.ffi.ffi_call("jdp_ring_done", shapes, input_output_aliases={1: 0, 2: 1})
        after, y = call(token, after, x, **attributes(i))
        results.append(y)
    return results


def open_communicator(path: Path) -> None:
    library = ctypes.CDLL(str(path))
    for name in ("jdp_ring_start", "jdp_ring_done"):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    library.jdp_cuda_last_error.restype = ctypes.c_char_p
    key, ordinal = ctypes.c_int64(0), ctypes.c_int32(0)
    blob = ctypes.create_string_buffer(1024)

    def call(name: str, *args: object) -> None:
        if getattr(library, name)(key, ordinal, *args):
            raise RuntimeError(library.jdp_cuda_last_error().decode())

    # Device 0, rank 0 of 1, on one device; room for all buckets.
    call("jdp_cuda_open", 0, 0, 1, 2, ctypes.c_int64(NUM_BUCKETS * 8192))
    call("jdp_cuda_export", blob)
    call("jdp_cuda_import", blob)
    call("jdp_cuda_probe_write")
    call("jdp_cuda_probe_read")


class Calls:
    """Consecutive calls of a program that doubles buckets, each of the result of the one before."""

    def __init__(self, label: str, double: Callable[[list[jax.Array]], list[jax.Array]]):
        self._label, self._double = label, jax.jit(double)
        self._round = 0
        self._leaves: list[jax.Array] = []

    def prepare(self) -> None:
        self._round += 1
        numbers = exact.values(0, self._round, NUM_BUCKETS * SIZE).reshape(NUM_BUCKETS, SIZE)
        self._leaves = jax.block_until_ready([jnp.array(bucket) for bucket in numbers])

    def __call__(self) -> list[jax.Array]:
        for _ in range(CALLS):
            self._leaves = self._double(self._leaves)
        return self._leaves

    def check(self) -> None:
        """Compare all elements.

        Raises:
          exact.WrongResultError: if one is wrong.
        """
        exact.require(
            np.stack(self._leaves),
            exact.reduced(1, self._round, CALLS, NUM_BUCKETS * SIZE, scale=2.0),
            contestant=self._label,
            rank=0,
            round_number=self._round,
            what=f"{NUM_BUCKETS} buckets after {CALLS} calls",
        )


if __name__ == "__main__":
    main()
