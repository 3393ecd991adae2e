"""Times of collectives by size, with checked results."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jdp.distributed import agree
from jdp.tools import collective_case, paired_timing
from jdp.tools.collective_case import AUTO, Case, Trial
from jdp.tools.known_values import WrongResultError

PEER = "xla"
_MiB = 2**20
# Enough calls to make a program's start a small part. A `ppermute` of many operations compiles
# slowly.
_MAX_CALLS, _MAX_PPERMUTES = 16, 4


class Setting(NamedTuple):
    """How collectives are timed: each round times all algorithms twice, in both orders."""

    dtype: str = "float32"
    num_rounds: int = 10
    warm_up: int = 1
    in_place: bool = False


class CannotRun(Exception):
    """An algorithm that cannot run here, and why."""


def default_algorithms(operation: str, platform: str) -> tuple[str, ...]:
    """jdp's code for GPUs was never measured between GPUs, and runs only by name."""
    known = [name for name in collective_case.algorithms(operation) if name != AUTO]
    on_gpu = ("direct", "ring", "native")
    return tuple(name for name in known if platform == "cpu" or name not in on_gpu)


def sizes(first: int, last: int, factor: int, *, itemsize: int, num_ranks: int) -> list[int]:
    """Return numbers of elements from `first` to `last` bytes, multiples of `num_ranks`.

    >>> sizes(16, 100, 2, itemsize=4, num_ranks=3)  # 12, 24, 60 bytes
    [3, 6, 15]
    """
    found = []
    while first <= last:
        elements = max(first // itemsize // num_ranks, 1) * num_ranks
        if not found or elements > found[-1]:
            found.append(elements)
        first *= factor
    return found


def bus_factor(operation: str, num_ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests does.

    Each rank must send at least so many bytes for each byte of the array, so bus bandwidths compare
    with the link's.

    >>> bus_factor("all-reduce", 4), bus_factor("all-gather", 4)
    (1.5, 0.75)
    """
    return (2 if operation == "all-reduce" else 1) * (num_ranks - 1) / num_ranks


def measure(
    mesh: Mesh,
    operation: str,
    algorithms: Sequence[str],
    elements: Sequence[int],
    setting: Setting,
    skipped: Callable[[str, str], None],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each size and algorithm, on all processes."""
    able = list(algorithms)
    for size in elements:
        clocks: dict[str, _Clock] = {}
        for name in list(able):
            try:
                clocks[name] = _Clock(mesh, Case(operation, name, setting.dtype, size), setting)
            except CannotRun as error:
                able.remove(name)
                skipped(name, str(error))
        if clocks:
            found = paired_timing.alternate(
                clocks,
                budget_s=0.0,
                min_rounds=setting.num_rounds,
                max_rounds=setting.num_rounds,
                warm_up=setting.warm_up,
            )
            for name, clock in clocks.items():
                case = Case(operation, name, setting.dtype, size)
                yield _row(mesh, case, found, float(np.median(clock.cpu_seconds)))


class _Clock:
    """Times calls of a collective, and checks the results; CPU seconds are of all processes."""

    def __init__(self, mesh: Mesh, case: Case, setting: Setting):
        most = _MAX_PPERMUTES if case.algorithm == "ppermute" else _MAX_CALLS
        self._num_calls = max(1, min(most, 2 * _MiB // case.num_bytes))
        self._made = Trial([case] * self._num_calls, mesh, in_place=setting.in_place)
        self._group = group = agree.peers(mesh)
        self.cpu_seconds: list[float] = []
        # Processes leave XLA's sum of one element at nearly the same time.
        one = Case("all-reduce", PEER, "float32", 1)
        self._start = Trial([one], mesh) if len(group) > 1 else None
        try:
            self._made.prepare()
            self._made()
        except ValueError as error:  # collectives.native raises it on all processes
            raise CannotRun(str(error)) from error
        _require_right(group, self._made)

    def __call__(self) -> float:
        """Return the seconds of the slowest process."""
        self._made.prepare()
        if self._start is not None:
            self._start.prepare()
            self._start()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self._made()
        own = time.perf_counter() - begin, time.process_time() - cpu_begin
        found = _require_right(self._group, self._made, own)
        self.cpu_seconds.append(sum(cpu for _, cpu in found) / self._num_calls)
        return max(seconds for seconds, _ in found) / self._num_calls


def _require_right(
    group: tuple[int, ...], made: Trial, seconds: tuple[float, float] = (0.0, 0.0)
) -> list[tuple[float, float]]:
    wrong = None
    try:
        made.check()
    except WrongResultError as error:
        wrong = str(error)
    mine = [*seconds, wrong]
    found = agree.all_gather(group, mine, what="the results of jdp bench")
    for process, (*_, text) in found.items():
        if text is not None:
            where = f"process {process}: " if len(group) > 1 else ""
            raise WrongResultError(f"{where}{text}")
    return [(wall, cpu) for wall, cpu, _ in found.values()]


def _row(mesh: Mesh, case: Case, found: dict[str, np.ndarray], cpu_s: float) -> dict[str, Any]:
    seconds = found[case.algorithm]
    median = float(np.median(seconds))
    bandwidth = case.num_bytes / median
    peer = float(np.median(found[PEER] / seconds)) if PEER in found else None
    return {
        "operation": case.operation,
        "algorithm": case.algorithm,
        "dtype": jnp.dtype(case.dtype).name,
        "ranks": mesh.size,
        "processes": len({device.process_index for device in mesh.devices.flat}),
        "bytes": case.num_bytes,
        "median_s": median,
        "min_s": float(seconds.min()),
        "max_s": float(seconds.max()),
        "cpu_s": cpu_s,
        "algbw_bytes_per_s": bandwidth,
        "busbw_bytes_per_s": bandwidth * bus_factor(case.operation, mesh.size),
        "xla_over_this": peer,
        "rounds": len(seconds),
    }
