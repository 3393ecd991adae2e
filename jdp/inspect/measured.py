"""Rates of this host that `jdp bench --calibrate` has measured, for devices of the same kind."""

from collections.abc import Mapping
from typing import NamedTuple

from jdp.inspect import calibration, compute_rates
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
    """Return the rates in the calibration of this host that hold for a target."""
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
    own = compute_rates.of_ranks(found.computation, num_ranks, share_cores=found.platform == "cpu")
    flops, slowness = own.matmul_flops_per_s, own.slowness
    by = f"(jdp bench --calibrate, {found.date[:10]})"
    speeds = {
        "matmul_flops": flops.get("bfloat16"),
        "matmul_flops_f32": flops.get("float32"),
        "memory_bytes_per_s": own.memory_bytes_per_s,
        "cached_bytes_per_s": own.cached_bytes_per_s,
        "transcendentals_per_s": own.transcendentals_per_s,
    }
    source = f"measured here {by}"
    rates = {name: Rate(x, x, x, UNITS[name], source) for name, x in speeds.items() if x}
    # Each of these multiplies the time of operations, so the error of a step is theirs.
    factors = {
        "operation_start_s": slowness.start * own.operation_start_s,
        "matmul_times": slowness.matmul,
        "elementwise_times": slowness.elementwise,
        "strided_times": slowness.strided,
    }
    shortest, longest = time_interval(slowness.largest_error)
    source = f"measured here, on training steps {by}"
    for name, value in factors.items():
        rates[name] = Rate(value, shortest * value, longest * value, UNITS[name], source)
    return rates
