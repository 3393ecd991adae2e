"""Rates of this host that `jdp bench --calibrate` has measured, for devices of the same kind."""

from collections.abc import Mapping
from typing import NamedTuple

from jdp.inspect import calibration
from jdp.inspect.calibration import Calibration, CollectiveLaw
from jdp.inspect.rate import Rate, time_interval
from jdp.inspect.rates import UNITS
from jdp.inspect.targets import TargetDevices

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
    if found.platform == "cpu" and target.mesh.size > found.num_cores:
        laws = {name: law.on_shared_cores(found.num_cores) for name, law in laws.items()}
    return MeasuredRates(_of_devices(found, target.mesh.size), laws)


def _of_devices(found: Calibration, num_ranks: int) -> dict[str, Rate]:
    flops, memory = dict(found.matmul_flops_per_s), found.memory_bytes_per_s
    cached, transcendentals = found.cached_bytes_per_s, found.transcendentals_per_s
    start_s, slowness = found.operation_start_s, found.slowness
    if num_ranks > 1:
        # On CPUs ranks share the cores and the memory of the host. None is faster than by itself.
        share = found.num_compute_ranks / num_ranks if found.platform == "cpu" else 1.0
        flops = {
            name: min(share * x, flops.get(name, share * x))
            for name, x in found.shared_matmul_flops_per_s.items()
        }
        memory = min(memory, share * found.shared_memory_bytes_per_s)
        cached = min(cached, share * found.shared_cached_bytes_per_s)
        transcendentals = min(transcendentals, share * found.shared_transcendentals_per_s)
        start_s = max(start_s, found.shared_operation_start_s / share)
        slowness = found.shared_slowness
    by = f"(jdp bench --calibrate, {found.date[:10]})"
    alone = {
        "matmul_flops": flops.get("bfloat16"),
        "matmul_flops_f32": flops.get("float32"),
        "memory_bytes_per_s": memory,
        "cached_bytes_per_s": cached,
        "transcendentals_per_s": transcendentals,
    }
    source = f"measured here {by}"
    rates = {name: Rate(x, x, x, UNITS[name], source) for name, x in alone.items() if x}
    # Each of these multiplies the time of operations, so the error of a step is theirs.
    factors = {
        "operation_start_s": slowness.start * start_s,
        "matmul_times": slowness.matmul,
        "elementwise_times": slowness.elementwise,
        "strided_times": slowness.strided,
    }
    shortest, longest = time_interval(slowness.largest_error)
    source = f"measured here, on training steps {by}"
    for name, value in factors.items():
        rates[name] = Rate(value, shortest * value, longest * value, UNITS[name], source)
    return rates
