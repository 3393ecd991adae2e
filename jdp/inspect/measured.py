"""Rates of this host that `jdp bench --calibrate` has measured, for devices of the same kind."""

from collections.abc import Mapping
from typing import NamedTuple

from jdp.inspect import calibration
from jdp.inspect.calibration import Calibration, CollectiveLaw
from jdp.inspect.rate import Rate
from jdp.inspect.rates import UNITS
from jdp.inspect.targets import TargetDevices

# A busy machine, or other sizes than the measured ones: the lowest, likely and highest rate.
INTERVAL = 0.75, 1.0, 1.25

# Name of the algorithm in a calibration -> in a compiled program.
_ALGORITHMS = {"direct": "native", "native": "native", "xla": "xla"}


class MeasuredRates(NamedTuple):
    """The rates that were measured on this host; empty if none were, or for other devices.

    Attributes:
      rates: of devices, by name.
      laws: of collectives on as many ranks and processes, by operation and algorithm.
    """

    rates: Mapping[str, Rate]
    laws: Mapping[tuple[str, str], CollectiveLaw]


def measured(target: TargetDevices) -> MeasuredRates:
    """Return the rates in the calibration of this host that hold for a target.

    Raises:
      ValueError: if the file of the calibration is not that of this jdp.
    """
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
    return MeasuredRates(_of_devices(found, target.mesh.size), laws)


def _of_devices(found: Calibration, num_ranks: int) -> dict[str, Rate]:
    flops, memory = found.matmul_flops_per_s, found.memory_bytes_per_s
    cached, transcendentals = found.cached_bytes_per_s, found.transcendentals_per_s
    start_s, slowness = found.operation_start_s, found.slowness
    if num_ranks > 1:
        # On CPUs ranks share the cores and the memory of the host.
        share = found.num_compute_ranks / num_ranks if found.platform == "cpu" else 1.0
        flops = {name: share * x for name, x in found.shared_matmul_flops_per_s.items()}
        memory = share * found.shared_memory_bytes_per_s
        cached = share * found.shared_cached_bytes_per_s
        transcendentals = share * found.shared_transcendentals_per_s
        start_s, slowness = found.shared_operation_start_s / share, found.shared_slowness
    by = f"(jdp bench --calibrate, {found.date[:10]})"
    alone = {
        "matmul_flops": flops.get("bfloat16"),
        "matmul_flops_f32": flops.get("float32"),
        "memory_bytes_per_s": memory,
        "cached_bytes_per_s": cached,
        "transcendentals_per_s": transcendentals,
        "operation_start_s": slowness.start * start_s,
    }
    source = f"measured here {by}"
    rates = {name: Rate(x, x, x, UNITS[name], source) for name, x in alone.items() if x}
    error = min(max(slowness.largest_error, INTERVAL[2] - 1), 0.75)
    source = f"measured here, on training steps {by}"
    for kind in ("matmul", "elementwise", "strided"):
        times, name = getattr(slowness, kind), f"{kind}_times"
        rates[name] = Rate(times, (1 - error) * times, (1 + error) * times, UNITS[name], source)
    return rates
