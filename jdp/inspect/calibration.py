"""Measured rates of this machine, which `jdp bench --calibrate` saves. Needs no JAX.

One JSON file for each host and platform, `~/.cache/jdp/calibration/HOST_PLATFORM.json`, with the
fields of `Calibration`. `docs/bench.md` describes them.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jdp.inspect import calibration_fields, results
from jdp.inspect.alpha_beta_fit import fitted
from jdp.inspect.calibration_fields import FORMAT
from jdp.inspect.compute_rates import ComputeRates, Slowness
from jdp.inspect.json_fields import checked

# Bytes that an operation reads and writes at the rate of a cache.
CACHED_BYTES = 2**23


@dataclasses.dataclass(frozen=True)
class CollectiveLaw:
    """The law t = alpha_s + bytes / bytes_per_s of one collective, fitted to measured times.

    Attributes:
      operation: "all-reduce", "reduce-scatter", "all-gather" or "all-to-all".
      algorithm: "direct" or "ring" of jdp's library, "native" (its other operations), "ppermute"
        (`jdp.collectives.ring`) or "xla".
      num_ranks: number of ranks.
      num_processes: number of processes that these ranks are in.
      dtype: dtype of the arrays.
      alpha_s: seconds of a call with no bytes, >= 0.
      bytes_per_s: further bytes for each second; inf if the time does not grow. `bytes` is a
        rank's whole array, as in nccl-tests: the input of an all-reduce, a reduce-scatter or an
        all-to-all, and the result of an all-gather.
      largest_error: the largest |predicted / measured - 1| over `points`.
      points: the measured (bytes, median seconds), ascending.
      cpu_points: for the same bytes the median CPU seconds of a call, of all ranks together.
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
        """Return the law where more ranks than cores compute: one that waits leaves its core.

        A call then takes its CPU time, divided by the cores.
        """
        points = tuple((num_bytes, cpu_s / num_cores) for num_bytes, cpu_s in self.cpu_points)
        alpha, beta, error = fitted(points)
        return dataclasses.replace(
            self, alpha_s=alpha, bytes_per_s=beta, largest_error=error, points=points
        )

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted seconds of one call: between measured sizes on the line between
        them, and otherwise by the law.

        >>> points = ((1000, 2e-5), (3000, 4e-5))
        >>> cpu = ((1000, 1e-5), (3000, 2e-5))
        >>> rate = CollectiveLaw("all-reduce", "xla", 2, 1, "float32", 1e-5, 1e9, 0.5, points, cpu)
        >>> round(rate.seconds(2000), 9), round(rate.seconds(1_000_000), 9)
        (3e-05, 0.00101)
        """
        for (low, fast), (high, slow) in itertools.pairwise(self.points):
            if low <= num_bytes <= high:
                return fast + (num_bytes - low) / (high - low) * (slow - fast)
        return self.alpha_s + num_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The measured rates of one machine.

    Attributes:
      host: name of the host.
      platform: "cpu", "gpu" or "tpu".
      device_kind: JAX's name for the kind of device.
      num_devices: number of local devices.
      num_cores: number of CPU cores that the process may use.
      date: when it was measured, ISO 8601 in UTC.
      versions: package -> version: jdp, jax, jaxlib, python.
      computation: rates of computation of one device by itself, and of more at once, ascending.
      rates: laws of the collectives.
    """

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
        """Return the law of a collective, or None if it was not measured."""
        wanted = (operation, algorithm, num_ranks, num_processes)
        for rate in self.rates:
            if (rate.operation, rate.algorithm, rate.num_ranks, rate.num_processes) == wanted:
                return rate
        return None

    def save(self, path: Path | None = None) -> Path:
        """Write the file, in place of an earlier one, and return its path."""
        path = path or default_path(self.platform)
        text = results.to_json({"format": FORMAT, **dataclasses.asdict(self)})
        part = path.with_suffix(f".{os.getpid()}.part")
        with results.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text + "\n")
            part.replace(path)
        return path


def default_path(platform: str) -> Path:
    """Return the path of this host's file for a platform."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home, as in a container
        cache = tempfile.gettempdir()
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    return Path(cache, "jdp", "calibration", f"{host}_{platform}.json")


def require_writable(platform: str) -> None:
    """Raise an error if this host's file for a platform cannot be written."""
    path = default_path(platform)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"the calibration {path} cannot be written: {error.strerror}. Set XDG_CACHE_HOME to a "
            "folder that you may write."
        ) from None


def load(platform: str, path: Path | None = None) -> Calibration | None:
    """Return what was measured on this host, or None if nothing was."""
    default = default_path(platform)
    path = path or default
    again = "Measure again: jdp bench --calibrate, which " + (
        "replaces it." if path == default else f"writes {default}, and name that file."
    )
    try:
        return _read(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):  # a user may have no home, as in a container
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the calibration {path} is not one of this jdp, whose format is {FORMAT}: "
            f"{results.why_unreadable(error)}. Predicted times would have no basis. {again}"
        ) from error


def _read(content: Any) -> Calibration:
    found = checked(content, calibration_fields.CALIBRATION)
    del found["format"]
    found["computation"] = tuple(map(_read_computation, found["computation"]))
    found["rates"] = tuple(map(_read_law, found["rates"]))
    numbers = [it.num_ranks for it in found["computation"]]
    if numbers[:1] != [1] or numbers != sorted(set(numbers)):
        raise ValueError(f"its computation is of {numbers} ranks, which do not ascend from 1")
    return Calibration(**found)


def _read_law(content: Any) -> CollectiveLaw:
    found = checked(content, calibration_fields.LAW)
    for name in ("points", "cpu_points"):
        found[name] = tuple(map(tuple, found[name]))
    return CollectiveLaw(**found | {"bytes_per_s": read_bytes_per_s(found["bytes_per_s"])})


def _read_computation(content: Any) -> ComputeRates:
    found = checked(content, calibration_fields.COMPUTATION)
    return ComputeRates(
        **found | {"slowness": Slowness(**checked(found["slowness"], calibration_fields.SLOWNESS))}
    )


def read_bytes_per_s(written: float | None) -> float:
    """Return the `bytes_per_s` of a law that a file of JSON holds, where null stands for inf."""
    return math.inf if written is None else float(written)
