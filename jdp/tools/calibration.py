"""This machine's measured rates in the file of `docs/bench.md`. Needs no JAX."""

import dataclasses
import itertools
import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdp.tools import results
from jdp.tools.results import AMOUNT, COUNT, POSITIVE, TEXT, Field, checked


def fit_alpha_beta(points: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fit t = alpha + bytes / beta to (bytes, seconds); return the largest relative error, too."""
    alpha, slope = _least_squares(points)
    if alpha < 0:  # through 0: each point counts by its relative error
        alpha = 0.0
        slope = sum(b / t for b, t in points) / sum((b / t) ** 2 for b, t in points)
    if slope <= 0:
        alpha, slope = len(points) / sum(1 / t for _, t in points), 0.0
    alpha, beta = _rounded(alpha), _rounded(1 / slope) if slope else float("inf")
    worst = max(abs((alpha + b / beta) / t - 1) for b, t in points)
    return alpha, beta, round(worst, 6)


def _least_squares(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    # The normal equations of (alpha + slope * b) / t - 1.
    aa = sum(1 / t**2 for _, t in points)
    ab = sum(b / t**2 for b, t in points)
    bb = sum((b / t) ** 2 for b, t in points)
    ya, yb = sum(1 / t for _, t in points), sum(b / t for b, t in points)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise ValueError(
            f"{len(points)} points of one size do not determine a law. Measure several sizes."
        )
    return (ya * bb - yb * ab) / determinant, (aa * yb - ab * ya) / determinant


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


@dataclasses.dataclass(frozen=True)
class ComputeRates:
    """Rates of large matmuls, and of scaling a large array, on each of some devices of a host.

    All of these devices compute, and others idle.
    """

    num_ranks: int
    matmul_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float

    def shared(self, share: float, alone: "ComputeRates") -> "ComputeRates":
        """Return the rates with another share of cores and memory, > 0."""
        both = self.matmul_flops_per_s.keys() & alone.matmul_flops_per_s.keys()
        flops = {
            dtype: min(share * self.matmul_flops_per_s[dtype], alone.matmul_flops_per_s[dtype])
            for dtype in both
        }
        memory = min(share * self.memory_bytes_per_s, alone.memory_bytes_per_s)
        return ComputeRates(self.num_ranks, flops, memory)


def of_ranks(
    measured: Sequence[ComputeRates], num_ranks: int, *, share_cores: bool
) -> ComputeRates:
    """Return each rank's rates, from the next larger measured number, or the largest."""
    found = next((it for it in measured if it.num_ranks >= num_ranks), measured[-1])
    share = found.num_ranks / num_ranks if share_cores else 1.0
    return dataclasses.replace(found.shared(share, measured[0]), num_ranks=num_ranks)


FORMAT = 7
_READ = (6, FORMAT)  # 6 has further fields


def _is_point(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return COUNT.holds(value[0]) and POSITIVE.holds(value[1])


def _are_points(value: Any) -> bool:
    if not isinstance(value, list) or not all(map(_is_point, value)):
        return False
    sizes = [num_bytes for num_bytes, _ in value]
    return len(sizes) > 1 and sizes == sorted(set(sizes))


_NUMBER = Field("a whole number from 1", lambda it: COUNT.holds(it) and it > 0)
BYTES_PER_S = Field(
    f"{POSITIVE.what}, or null", lambda it: it in (None, math.inf) or POSITIVE.holds(it)
)
CALIBRATION = {
    "format": Field(" or ".join(map(str, _READ)), lambda it: it in _READ),
    "host": TEXT, "platform": TEXT, "device_kind": TEXT, "num_devices": _NUMBER,
    "num_cores": _NUMBER, "date": TEXT, "versions": results.dict_of(TEXT),
    "computation": results.LIST, "rates": results.LIST,
}  # fmt: skip
_POINTS = Field("a list of at least two [bytes, seconds] with ascending bytes", _are_points)
LAW = {
    "operation": TEXT, "algorithm": TEXT, "num_ranks": _NUMBER, "num_processes": _NUMBER,
    "dtype": TEXT, "alpha_s": AMOUNT, "bytes_per_s": BYTES_PER_S, "largest_error": AMOUNT,
    "points": _POINTS, "cpu_points": _POINTS,
}  # fmt: skip
_BY_DTYPE = Field(
    f"an object of dtypes, each {POSITIVE.what}",
    lambda it: it != {} and results.dict_of(POSITIVE).holds(it),
)
COMPUTATION = {
    "num_ranks": _NUMBER, "matmul_flops_per_s": _BY_DTYPE, "memory_bytes_per_s": POSITIVE,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CollectiveLaw:
    """The law t = alpha_s + bytes / bytes_per_s, fitted to times of one collective.

    Attributes:
      algorithm: "direct" or "ring" of jdp's library, "native" (its other operations), "ppermute"
        (`jdp.collectives.ring`) or "xla".
      bytes_per_s: inf for a constant time. `bytes` is a rank's whole array, as in nccl-tests: an
        all-gather's result, otherwise the input.
      largest_error: the largest |predicted / measured - 1| over `points`.
      points: the measured (bytes, median seconds), ascending.
      cpu_points: the same for a call's CPU seconds on all ranks together.
    """

    operation: str
    algorithm: str
    num_ranks: int
    num_processes: int
    dtype: str
    alpha_s: float
    bytes_per_s: float
    largest_error: float
    points: tuple[tuple[int, float], ...]
    cpu_points: tuple[tuple[int, float], ...]

    def on_shared_cores(self, num_cores: int) -> "CollectiveLaw":
        """Return the law of CPU time, for more ranks than cores: a waiting rank leaves its core."""
        points = tuple((num_bytes, cpu_s / num_cores) for num_bytes, cpu_s in self.cpu_points)
        alpha, beta, error = fit_alpha_beta(points)
        return dataclasses.replace(
            self, alpha_s=alpha, bytes_per_s=beta, largest_error=error, points=points
        )

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds, interpolated between measured sizes, else by the law."""
        for (low, fast), (high, slow) in itertools.pairwise(self.points):
            if low <= num_bytes <= high:
                return fast + (num_bytes - low) / (high - low) * (slow - fast)
        return self.alpha_s + num_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Calibration:
    """One machine's measured rates, by number of devices, ascending."""

    host: str
    platform: str
    device_kind: str
    num_devices: int
    num_cores: int
    date: str
    versions: Mapping[str, str]
    computation: tuple[ComputeRates, ...]
    rates: tuple[CollectiveLaw, ...]

    def rate(
        self, operation: str, algorithm: str, num_ranks: int, num_processes: int = 1
    ) -> CollectiveLaw | None:
        """Return a collective's law."""
        wanted = (operation, algorithm, num_ranks, num_processes)
        for rate in self.rates:
            if (rate.operation, rate.algorithm, rate.num_ranks, rate.num_processes) == wanted:
                return rate
        return None

    def save(self, path: Path | None = None) -> Path:
        """Write the file, and return its path."""
        path = path or default_path(self.platform)
        text = results.to_json({"format": FORMAT, **dataclasses.asdict(self)})
        part = path.with_suffix(f".{os.getpid()}.part")
        with results.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text + "\n")
            part.replace(path)
        return path


def default_path(platform: str) -> Path:
    """Return the path of this host's file."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a container's user may have no home
        cache = tempfile.gettempdir()
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return Path(cache, "jdp", "calibration", f"{host}_{platform}.json")


def require_writable(platform: str) -> None:
    """Raise an error if this host's file cannot be written."""
    path = default_path(platform)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"the calibration {path} cannot be written: {error.strerror}. Set XDG_CACHE_HOME to "
            "a writable folder."
        ) from None


def load(platform: str, path: Path | None = None) -> Calibration | None:
    """Return this host's calibration."""
    default = default_path(platform)
    path = path or default
    again = "Measure again: jdp bench --calibrate, which " + (
        "replaces it." if path == default else f"writes {default}, and pass that file."
    )
    try:
        return _read(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the calibration {path} does not have this jdp's format {FORMAT}: "
            f"{results.why_unreadable(error)}. {again}"
        ) from error


def _read(content: Any) -> Calibration:
    found = checked(content, CALIBRATION)
    del found["format"]
    found["computation"] = tuple(
        ComputeRates(**checked(it, COMPUTATION)) for it in found["computation"]
    )
    found["rates"] = tuple(map(_read_law, found["rates"]))
    numbers = [it.num_ranks for it in found["computation"]]
    if numbers[:1] != [1] or numbers != sorted(set(numbers)):
        raise ValueError(f"its computation is of {numbers} ranks, which do not ascend from 1")
    return Calibration(**found)


def _read_law(content: Any) -> CollectiveLaw:
    found = checked(content, LAW)
    for name in ("points", "cpu_points"):
        found[name] = tuple(map(tuple, found[name]))
    return CollectiveLaw(**found | {"bytes_per_s": read_bytes_per_s(found["bytes_per_s"])})


def read_bytes_per_s(written: float | None) -> float:
    """Return a law's `bytes_per_s` in JSON: null is inf."""
    return math.inf if written is None else float(written)
