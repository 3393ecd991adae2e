"""`jdp bench --calibrate`: the rates of this machine, saved for predictions."""

import os
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.distributed import agree, hosts
from jdp.inspect import calibration, known_values
from jdp.inspect.alpha_beta_fit import fitted
from jdp.inspect.bench import collectives, compute, output
from jdp.inspect.calibration import Calibration, CollectiveLaw
from jdp.inspect.compute_rates import ComputeRates

_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
_BYTES = (2**12, 2**16, 2**20, 2**22, 2**24)
# As in a compiled step, whose gradients are not read again.
_SETTING = collectives.Setting(num_rounds=5, in_place=True)


def calibrate(mesh: Mesh, say: Callable[[str], None]) -> Calibration | None:
    """Measure computation and collectives, and return the rates.

    Rates of other numbers of ranks and processes in an earlier file of this host are kept.
    Processes but the first one of the mesh return None.
    """
    require_own_gpus(mesh.devices.flat[0].platform, len(agree.peers(mesh)))
    rates: dict[tuple, CollectiveLaw] = {}
    for part in _meshes(mesh):
        for operation in known_values.OPERATIONS:
            for rate in _rates(part, operation, say):
                rates[_key(rate)] = rate
    facts = output.machine()
    del facts["load"]
    earlier = calibration.load(facts["platform"]) if _is_readable(facts["platform"]) else None
    same = ("versions", "device_kind")  # a host may have got other GPUs
    if earlier is not None and all(getattr(earlier, name) == facts[name] for name in same):
        rates = {**{_key(rate): rate for rate in earlier.rates}, **rates}
    else:
        earlier = None
    computation = _computation(mesh, earlier, facts["num_cores"])
    if jax.process_index() != agree.peers(mesh)[0]:
        return None
    if len(agree.peers(mesh)) > 1 and earlier is not None:
        facts["num_devices"] = earlier.num_devices
    kept = () if earlier is None else earlier.computation
    by_ranks = {it.num_ranks: it for it in (*kept, *computation)}
    return Calibration(
        **facts,
        computation=tuple(by_ranks[number] for number in sorted(by_ranks)),
        rates=tuple(rates.values()),
    )


def require_own_gpus(
    platform: str, num_processes: int, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise an error if processes may share GPUs, on which they take turns."""
    if platform == "gpu" and num_processes > 1 and environment.get(_SHARE) == "1":
        raise ValueError(
            f"{_SHARE}=1 lets these {num_processes} processes share a GPU, on which they take "
            "turns: jdp explain would predict each GPU too slow. Unset it, and start at most as "
            "many processes as there are GPUs."
        )


def _computation(
    mesh: Mesh, earlier: Calibration | None, num_cores: int
) -> tuple[ComputeRates, ...]:
    """Return measured rates of computation, on the first process of a mesh.

    One process measures one device, as many as there are cores, and all. Several measure nothing
    if there is an earlier file: one process measured that, and could keep all other devices idle.
    """
    group, me = agree.peers(mesh), jax.process_index()
    own = [device for device in mesh.devices.flat if device.process_index == me]

    def rates(num_devices: int, num_ranks: int) -> ComputeRates:
        devices = np.array(own[:num_devices])
        return compute.rates(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), num_ranks)

    if len(group) == 1:
        # On CPUs more ranks than cores wait for each other.
        shared = {min(num_cores, mesh.size)} if own[0].platform == "cpu" else set()
        numbers = {1, mesh.size} | shared
        return tuple(rates(number, number) for number in sorted(numbers))
    known = agree.all_gather(group, earlier is not None, what="whether computation is measured")
    if known[group[0]]:
        return ()
    alone = (rates(1, 1),) if me == group[0] else ()
    agree.all_gather(group, None, what="that one device has computed alone")
    num_here = sum(hosts.is_here(device.process_index) for device in mesh.devices.flat)
    return (*alone, rates(len(own), num_here)) if num_here > 1 else alone


def _is_readable(platform: str) -> bool:
    try:
        calibration.load(platform)
    except ValueError:  # of another format: replaced
        return False
    return True


def _meshes(mesh: Mesh) -> list[Mesh]:
    if len(agree.peers(mesh)) > 1:
        return [mesh]
    devices, numbers = list(mesh.devices.flat), [mesh.size]
    while numbers[-1] > 2:
        numbers.append(1 << (numbers[-1] - 1).bit_length() - 1)
    return [
        Mesh(np.array(devices[:number]), mesh.axis_names, axis_types=mesh.axis_types)
        for number in reversed(numbers)
        if number > 1
    ]


def _rates(mesh: Mesh, operation: str, say: Callable[[str], None]) -> list[CollectiveLaw]:
    platform = mesh.devices.flat[0].platform
    names = collectives.default_algorithms(operation, platform)
    elements = [num_bytes // 4 // mesh.size * mesh.size for num_bytes in _BYTES]
    rows = list(
        collectives.measure(mesh, operation, names, elements, _SETTING, lambda name, why: None)
    )
    found = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name]
        points, cpu_points = (
            tuple((row["bytes"], row[name]) for row in own) for name in ("median_s", "cpu_s")
        )
        alpha, beta, error = fitted(points)
        rate = CollectiveLaw(
            operation, name, mesh.size, own[0]["processes"], own[0]["dtype"], alpha, beta, error,
            points, cpu_points,
        )  # fmt: skip
        found.append(rate)
        say(
            f"{operation} of {mesh.size} ranks, {name}: {alpha * 1e6:.1f} us + bytes / "
            f"{beta / 1e9:.2f} GB/s, within {error:.0%} of {len(points)} sizes"
        )
    return found


def _key(rate: CollectiveLaw) -> tuple:
    return rate.operation, rate.algorithm, rate.num_ranks, rate.num_processes, rate.dtype
