"""Device and link rates, each with interval and source."""

import math
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from jdp.tools import calibration
from jdp.tools.calibration import Calibration, CollectiveLaw
from jdp.tools.rate import (
    ASSUMED,
    GPUS,
    NCCL_START_S,
    PUBLISHED,
    Rate,
    given_rate,
    kind_of,
    nvlink,
    part_of,
)
from jdp.tools.targets import TargetDevices

DESCRIBED = "XLA's device description"
_DATA_SHEET = f"{PUBLISHED} (NVIDIA's data sheet)"
_OF_DEVICES = ("matmul_flops", "matmul_flops_f32", "memory_bytes_per_s")

# A peak's reached part: lowest, likely, highest.
_OF_MATMUL_PEAK, _OF_MEMORY_PEAK = (0.45, 0.65, 0.8), (0.7, 0.85, 0.95)
# The reached part of measured rates: a step's matmuls and arrays are smaller.
_OF_LARGE_MATMULS, _OF_LARGE_ARRAYS = (0.5, 0.75, 1.0), (0.5, 1.0, 2.0)


class _Tpu(NamedTuple):
    flops: float  # of bfloat16, per second
    memory: float
    links: float  # bits per second of a chip's links


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
    "link_bytes_per_s": "B/s",
    "host_link_bytes_per_s": "B/s",
    "reduction_start_s": "s",
    "host_reduction_start_s": "s",
    "kernel_reduction_start_s": "s",
    "operation_start_s": "s",
}


def given_rates(values: Mapping[str, float] | None) -> dict[str, Rate]:
    """Return the user's rates, > 0; a start may be 0."""
    if not isinstance(values or {}, Mapping):
        raise TypeError(f'rates={values!r} must be a dict such as {{"matmul_flops": 600e12}}.')
    found = {}
    for name, value in (values or {}).items():
        if name not in UNITS:
            raise ValueError(f"the rate {name!r} does not exist. Rates are {', '.join(UNITS)}.")
        if isinstance(value, str | bool) or not hasattr(value, "__float__"):
            raise TypeError(f"the rate {name}={value!r} must be a number, in {UNITS[name]}.")
        number = float(value)
        may_be_0 = name.endswith("_start_s")
        if not math.isfinite(number) or number < 0 or number == 0 and not may_be_0:
            least = "at least 0" if may_be_0 else "more than 0"
            raise ValueError(
                f"the rate {name}={value} must be finite and {least}, in {UNITS[name]}."
            )
        found[name] = given_rate(number, UNITS[name])
    return found


def rates_of(
    target: TargetDevices,
    given: Mapping[str, Rate] | None = None,
    measured: Mapping[str, Rate] | None = None,
) -> dict[str, Rate]:
    """Return a target's rates: given, else measured, else known."""
    known = {"gpu": _gpu, "tpu": _tpu}.get(target.platform, _cpu)(target)
    start_s = known["reduction_start_s"]
    known["host_reduction_start_s"] = start_s.times(2, ", twice that within a host")
    known |= {**(measured or {}), **(given or {})}
    if target.num_hosts == 1:
        known = {name: rate for name, rate in known.items() if not name.startswith("host_")}
    missing = [name for name in _OF_DEVICES if name not in known]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} of {target.device_kind} are unknown. Measure them there with "
            f"jdp bench --calibrate, or pass them: rates=dict({missing[0]}=..., ...)."
        )
    return known


def _of_peak(
    name: str, peak: float, source: str, parts: tuple[float, float, float] | None = None
) -> Rate:
    parts = parts or (_OF_MEMORY_PEAK if name == "memory_bytes_per_s" else _OF_MATMUL_PEAK)
    return _rate(name, peak, parts, f"{source}, {parts[1]:.0%} of {peak:.3g}")


def _rate(name: str, peak: float, parts: tuple[float, float, float], source: str) -> Rate:
    return part_of(peak, parts, UNITS[name], source)


def _gpu(target: TargetDevices) -> dict[str, Rate]:
    kind = kind_of(target.device_kind)
    peaks, source = _gpu_peaks(target.description, kind)
    link = nvlink(kind)
    num_nics = GPUS[kind].per_host if kind else 8
    nics = f"{ASSUMED}: {num_nics} links of 400 Gb/s for each host, 90 % of them"
    return {
        **{name: _of_peak(name, peak, source) for name, peak in peaks.items()},
        "link_bytes_per_s": link,
        "host_link_bytes_per_s": _rate(
            "host_link_bytes_per_s", 45e9 * num_nics, (0.5, 1, 1.1), nics
        ),
        "reduction_start_s": Rate(NCCL_START_S, 10e-6, 40e-6, "s", link.source),
        "kernel_reduction_start_s": Rate(6e-6, 3e-6, 12e-6, "s", ASSUMED),
        "operation_start_s": Rate(1.5e-6, 0.5e-6, 4e-6, "s", ASSUMED),
    }


def _gpu_peaks(description: str, kind: str) -> tuple[dict[str, float], str]:
    if description:
        clock = _number(description, "core_count") * 2
        peaks = (
            clock * _matrix_rate(description, 16),
            clock * _matrix_rate(description, 11),
            _number(description, "memory_bandwidth"),
        )
        return dict(zip(_OF_DEVICES, peaks, strict=True)), DESCRIBED
    if kind not in GPUS:
        return {}, ""
    gpu = GPUS[kind]
    # TensorFloat-32 has half of bfloat16's rate.
    peaks = gpu.flops, gpu.flops / 2, gpu.memory_bytes_per_s
    return dict(zip(_OF_DEVICES, peaks, strict=True)), _DATA_SHEET


def _number(text: str, name: str) -> float:
    found = re.search(rf"\b{name}: ([\d.e+]+)", text)
    if found is None:
        raise ValueError(f"the description of this GPU has no {name}. Pass the rates: rates=.")
    return float(found[1])


def _matrix_rate(text: str, dtype: int) -> float:
    """Return multiplications per core and second, by XLA's number of a dtype."""
    units = text.partition("matrix_unit_description")[2]
    found = re.search(
        rf"key: {dtype}\s+value \{{\s+clock_rate_ghz: ([\d.]+)\s+units_per_core: (\d+)\s+"
        r"ops_per_clock: (\d+)",
        units,
    )
    if found is None:
        raise ValueError("the description of this GPU has no rate of matmuls. Pass it: rates=.")
    return float(found[1]) * 1e9 * int(found[2]) * int(found[3])


def _tpu(target: TargetDevices) -> dict[str, Rate]:
    found = next((tpu for name, tpu in _TPUS.items() if name in target.device_kind), None)
    source = f"{PUBLISHED} (cloud.google.com/tpu/docs)"
    if found is None:
        found, source = _TPUS["v5p"], f"{ASSUMED}, as of a v5p"
    links, of_links = found.links / 8, (0.3, 0.5, 0.8)
    return {
        "matmul_flops": _of_peak("matmul_flops", found.flops, source),
        # A float32 product is three or more of bfloat16, except at JAX's default precision.
        "matmul_flops_f32": _of_peak("matmul_flops_f32", found.flops, source, (0.1, 0.6, 0.8)),
        "memory_bytes_per_s": _of_peak("memory_bytes_per_s", found.memory, source),
        "link_bytes_per_s": _of_peak("link_bytes_per_s", links, source, of_links),
        "reduction_start_s": Rate(10e-6, 3e-6, 30e-6, "s", ASSUMED),
        "operation_start_s": Rate(0.5e-6, 0.1e-6, 2e-6, "s", ASSUMED),
    }


def _cpu(target: TargetDevices) -> dict[str, Rate]:
    # All ranks share a host's cores.
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


# algorithm in a calibration -> in a compiled program
_ALGORITHMS = {"direct": "native", "native": "native", "xla": "xla"}


class MeasuredRates(NamedTuple):
    """This host's measured rates, with laws of collectives on as many ranks and processes."""

    rates: Mapping[str, Rate]
    laws: Mapping[tuple[str, str], CollectiveLaw]


def measured(target: TargetDevices) -> MeasuredRates:
    """Return this host's calibrated rates for a target."""
    found = calibration.load(target.platform)
    if found is None or found.device_kind != target.device_kind or target.num_hosts > 1:
        return MeasuredRates({}, {})
    devices = target.mesh.devices.flat
    ranks = target.mesh.size, len({device.process_index for device in devices})
    laws = {
        (law.operation, _ALGORITHMS[law.algorithm]): law
        for law in found.rates
        if (law.num_ranks, law.num_processes) == ranks and law.algorithm in _ALGORITHMS
    }
    if found.platform == "cpu" and target.mesh.size > found.num_cores:
        laws = {name: law.on_shared_cores(found.num_cores) for name, law in laws.items()}
    return MeasuredRates(_of_devices(found, target.mesh.size), laws)


def _of_devices(found: Calibration, num_ranks: int) -> dict[str, Rate]:
    own = calibration.of_ranks(found.computation, num_ranks, share_cores=found.platform == "cpu")
    flops = own.matmul_flops_per_s
    whole = {
        "matmul_flops": flops.get("bfloat16"),
        "matmul_flops_f32": flops.get("float32"),
        "memory_bytes_per_s": own.memory_bytes_per_s,
    }
    by = f"(jdp bench --calibrate, {found.date[:10]})"
    rates = {}
    for name, value in whole.items():
        parts = _OF_LARGE_ARRAYS if name == "memory_bytes_per_s" else _OF_LARGE_MATMULS
        if value:
            source = f"{parts[1]:.0%} of {value:.3g}, measured here {by}"
            rates[name] = _rate(name, value, parts, source)
    return rates
