"""How fast devices and links are: each rate with its interval, and where it is known from."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from jdp.inspect.gpus import NCCL_START_S, NVLINK, OTHER_NVLINK, VLLM
from jdp.inspect.rate import ASSUMED, PUBLISHED, Rate
from jdp.inspect.rate import given as as_given
from jdp.inspect.targets import TargetDevices

DESCRIBED = "XLA's device description"

# What a real program reaches of a peak: lowest, likely, highest.
_OF_MATMUL_PEAK, _OF_MEMORY_PEAK = (0.45, 0.65, 0.8), (0.7, 0.85, 0.95)


class _Tpu(NamedTuple):
    flops: float  # of bfloat16, per second
    memory: float  # bytes per second
    links: float  # bits per second of all links of a chip


# Google's system architecture pages, https://cloud.google.com/tpu/docs.
_TPUS = {
    "v4": _Tpu(275e12, 1228e9, 2400e9),
    "v5 lite": _Tpu(197e12, 819e9, 1600e9),
    "v5p": _Tpu(459e12, 2765e9, 4800e9),
    "v6 lite": _Tpu(918e12, 1640e9, 3584e9),
}


UNITS = {
    "matmul_flops": "FLOP/s",
    "matmul_flops_f32": "FLOP/s",
    "memory_bytes_per_s": "B/s",
    "cached_bytes_per_s": "B/s",
    "transcendentals_per_s": "1/s",
    "link_bytes_per_s": "B/s",
    "host_link_bytes_per_s": "B/s",
    "reduction_start_s": "s",
    "operation_start_s": "s",
    # How many times as long operations take in a step as those rates say.
    "matmul_times": "times",
    "elementwise_times": "times",
    "strided_times": "times",
}


def rates_of(
    target: TargetDevices,
    given: Mapping[str, float] | None = None,
    measured: Mapping[str, Rate] | None = None,
) -> dict[str, Rate]:
    """Return the rates of a target: given ones, then measured ones, then known ones.

    Args:
      target: the devices.
      given: rates by name, > 0.
      measured: rates by name.

    Raises:
      ValueError: if there is no such rate, or it is not positive.
    """
    known = {"gpu": _gpu, "tpu": _tpu}.get(target.platform, _cpu)(target)
    if target.num_hosts == 1:
        known.pop("host_link_bytes_per_s", None)
    known |= measured or {}
    for name, value in (given or {}).items():
        if name not in UNITS:
            raise ValueError(f"there is no rate {name!r}. Rates are {', '.join(UNITS)}.")
        if not value > 0 and not (value == 0 and name.endswith("_start_s")):
            raise ValueError(f"the rate {name}={value} must be positive, in {UNITS[name]}.")
        known[name] = as_given(value, UNITS[name])
    return known


def _rate(name: str, peak: float, parts: tuple[float, float, float], source: str) -> Rate:
    low, likely, high = (peak * part for part in parts)
    return Rate(likely, low, high, UNITS[name], source)


def _gpu(target: TargetDevices) -> dict[str, Rate]:
    text = target.description
    kind = next((name for name in NVLINK if f" {name} " in f" {target.device_kind} "), "")
    clock = _number(text, "core_count") * 2
    peaks = {bits: clock * _matrix_rate(text, key) for bits, key in ((16, 16), (32, 11))}
    of_peak = "{}, {:.0%} of {:.3g}"

    def described(name: str, peak: float, parts: tuple[float, float, float]) -> Rate:
        return _rate(name, peak, parts, of_peak.format(DESCRIBED, parts[1], peak))

    if kind.startswith("H"):
        source = f"{PUBLISHED} ({VLLM})"
        link = _rate("link_bytes_per_s", NVLINK[kind], (0.85, 1, 1.1), source)
    else:
        link = _rate("link_bytes_per_s", NVLINK.get(kind, OTHER_NVLINK), (0.6, 1, 1.3), ASSUMED)
    nics = f"{ASSUMED}: eight links of 400 Gb/s for each host, 90 % of them"
    return {
        "matmul_flops": described("matmul_flops", peaks[16], _OF_MATMUL_PEAK),
        "matmul_flops_f32": described("matmul_flops_f32", peaks[32], _OF_MATMUL_PEAK),
        "memory_bytes_per_s": described(
            "memory_bytes_per_s", _number(text, "memory_bandwidth"), _OF_MEMORY_PEAK
        ),
        "link_bytes_per_s": link,
        "host_link_bytes_per_s": _rate("host_link_bytes_per_s", 360e9, (0.5, 1, 1.1), nics),
        "reduction_start_s": Rate(NCCL_START_S, 10e-6, 40e-6, "s", link.source),
        "operation_start_s": Rate(1.5e-6, 0.5e-6, 4e-6, "s", ASSUMED),
    }


def _number(text: str, name: str) -> float:
    found = re.search(rf"\b{name}: ([\d.e+]+)", text)
    if found is None:
        raise ValueError(f"the description of this GPU has no {name}; give the rates: rates=.")
    return float(found[1])


def _matrix_rate(text: str, dtype: int) -> float:
    """Return multiplications for each core and second, by the number that XLA has for a dtype."""
    units = text.partition("matrix_unit_description")[2]
    found = re.search(
        rf"key: {dtype}\s+value \{{\s+clock_rate_ghz: ([\d.]+)\s+units_per_core: (\d+)\s+"
        r"ops_per_clock: (\d+)",
        units,
    )
    if found is None:
        raise ValueError("the description of this GPU has no rate of matmuls; give it: rates=.")
    return float(found[1]) * 1e9 * int(found[2]) * int(found[3])


def _tpu(target: TargetDevices) -> dict[str, Rate]:
    found = next((tpu for name, tpu in _TPUS.items() if name in target.device_kind), None)
    source = f"{PUBLISHED} (cloud.google.com/tpu/docs)"
    if found is None:
        found, source = _TPUS["v5p"], f"{ASSUMED}, as of a v5p"
    return {
        "matmul_flops": _rate("matmul_flops", found.flops, _OF_MATMUL_PEAK, source),
        # A float32 product is three or more of bfloat16, unless JAX's default precision is left.
        "matmul_flops_f32": _rate("matmul_flops_f32", found.flops, (0.1, 0.6, 0.8), source),
        "memory_bytes_per_s": _rate("memory_bytes_per_s", found.memory, _OF_MEMORY_PEAK, source),
        "link_bytes_per_s": _rate("link_bytes_per_s", found.links / 8, (0.3, 0.5, 0.8), source),
        "reduction_start_s": Rate(10e-6, 3e-6, 30e-6, "s", ASSUMED),
        "operation_start_s": Rate(0.5e-6, 0.1e-6, 2e-6, "s", ASSUMED),
    }


def _cpu(target: TargetDevices) -> dict[str, Rate]:
    # All ranks share the cores of a host.
    share = (os.cpu_count() or 1) / target.mesh.size
    source = f"{ASSUMED}: {os.cpu_count() or 1} cores for {target.mesh.size} ranks"
    thirds = (0.3, 1, 3)
    return {
        "matmul_flops": _rate("matmul_flops", 20e9 * share, thirds, source),
        "matmul_flops_f32": _rate("matmul_flops_f32", 40e9 * share, thirds, source),
        "memory_bytes_per_s": _rate("memory_bytes_per_s", 5e9 * share, thirds, source),
        "link_bytes_per_s": _rate("link_bytes_per_s", 4e9 * share, thirds, source),
        "host_link_bytes_per_s": _rate("host_link_bytes_per_s", 1e9, thirds, source),
        "reduction_start_s": Rate(40e-6, 5e-6, 400e-6, "s", ASSUMED),
        "operation_start_s": Rate(5e-6, 1e-6, 20e-6, "s", ASSUMED),
    }
