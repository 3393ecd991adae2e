"""`jdp bench --calibrate`: this machine's measured rates."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.distributed import agree, this_process
from jdp.tools import calibration, known_values
from jdp.tools.bench import collectives, output
from jdp.tools.calibration import Calibration, CollectiveLaw, ComputeRates, fit_alpha_beta
from jdp.tools.known_values import require_equal

_WIDTH = {"cpu": 1024}
_WIDTH_ELSEWHERE = 8192
# Devices other than CPUs begin one while the host starts the next.
_NUM_MATMULS_ELSEWHERE = 8
_NUM_TIMES = 64
# More than fits into caches (50 MiB and more on GPUs).
_ELEMENTS, _ELEMENTS_ELSEWHERE = 2**24, 2**27
_NUM_ROUNDS, _WARM_UP_S = 7, 0.1
_PERIOD = 3


def matmul_flops_per_s(mesh: Mesh, dtype: str) -> float:
    """Return each device's operations per second, while all compute."""
    platform = mesh.devices.flat[0].platform
    width = _WIDTH.get(platform, _WIDTH_ELSEWHERE)
    num_calls = 1 if platform == "cpu" else _NUM_MATMULS_ELSEWHERE
    # Exact in every dtype: element (i, j) of the product is width * (i mod 3) * (j mod 3).
    small = np.arange(width) % _PERIOD
    a = np.broadcast_to(small[:, None], (mesh.size, width, width)).astype(jnp.dtype(dtype))
    b = np.broadcast_to(small[None, :], (mesh.size, width, width)).astype(jnp.dtype(dtype))
    run = _on_all(mesh, lambda a, b: a @ b)
    right = (width * small[:, None] * small[None, :]).astype(jnp.dtype(dtype))
    a, b = _placed(mesh, a), _placed(mesh, b)
    return 2 * width**3 / _seconds(run, a, b, right, f"a matmul in {dtype}", num_calls)


def memory_bytes_per_s(mesh: Mesh) -> float:
    """Return each device's bytes read and written per second, while all do."""
    if mesh.devices.flat[0].platform == "cpu":
        whole = np.resize(np.arange(251, dtype=np.float32), _ELEMENTS)
        x = np.broadcast_to(whole, (mesh.size, _ELEMENTS))
        old = np.zeros_like(x)
        run = _on_all(mesh, lambda x, old: 2 * x, donate=1)
        seconds = _seconds(run, _placed(mesh, x), _placed(mesh, old), 2 * whole, "a scaled array")
        return 2 * 4 * _ELEMENTS / seconds

    # The program's start would count for a single short operation.
    def chain(x: Any, old: Any) -> Any:
        for _ in range(_NUM_TIMES):
            x = jax.lax.optimization_barrier(x + 1)
        return x

    zeros = _placed(mesh, np.zeros((mesh.size, _ELEMENTS_ELSEWHERE), np.float32))
    right = np.full(_ELEMENTS_ELSEWHERE, _NUM_TIMES, np.float32)
    seconds = _seconds(_on_all(mesh, chain), zeros, zeros, right, "a chain of additions")
    return _NUM_TIMES * 2 * 4 * _ELEMENTS_ELSEWHERE / seconds


def compute_rates(mesh: Mesh, num_ranks: int) -> ComputeRates:
    """Return each device's rates, while all compute."""
    flops = {dtype: matmul_flops_per_s(mesh, dtype) for dtype in ("float32", "bfloat16")}
    return ComputeRates(num_ranks, flops, memory_bytes_per_s(mesh))


def _on_all(mesh: Mesh, function: Callable, donate: Any = ()) -> Any:
    spec = P(mesh.axis_names[0])
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=donate, keep_unused=True)


def _placed(mesh: Mesh, x: np.ndarray) -> jax.Array:
    where = NamedSharding(mesh, P(mesh.axis_names[0]))
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def _seconds(
    run: Any, x: jax.Array, other: jax.Array, right: np.ndarray, what: str, num_calls: int = 1
) -> float:
    seconds, result = [], run(x, other)
    for number in range(_NUM_ROUNDS):
        if other.is_deleted():
            other = result
        jax.block_until_ready(other)
        _warm_up(run, x, other)
        begin = time.perf_counter()
        for _ in range(num_calls):
            result = run(x, other)
        jax.block_until_ready(result)
        seconds.append((time.perf_counter() - begin) / num_calls)
        for shard in result.addressable_shards:
            rank = shard.index[0].start or 0
            require_equal(
                shard.data, right, contestant="XLA", rank=rank, round_number=number, what=what
            )
    return float(np.median(seconds))


def _warm_up(run: Any, x: jax.Array, other: jax.Array) -> None:
    """GPUs lower their clock rate during the checks."""
    if next(iter(x.devices())).platform == "cpu":
        return
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        jax.block_until_ready(run(x, other))


_SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"
_BYTES = (2**12, 2**16, 2**20, 2**22, 2**24)
# A step's gradients are not read again.
_SETTING = collectives.Setting(num_rounds=5, in_place=True)


def calibrate(mesh: Mesh, say: Callable[[str], None]) -> Calibration | None:
    """Measure and return rates, on the first process; those of other numbers of ranks are kept."""
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
    """Refuse processes that may share GPUs."""
    if platform == "gpu" and num_processes > 1 and environment.get(_SHARE) == "1":
        raise ValueError(
            f"{_SHARE}=1 lets these {num_processes} processes take turns on a GPU, so jdp "
            "explain would predict each GPU too slow. Unset it, and start at most one process "
            "per GPU."
        )


def _computation(
    mesh: Mesh, earlier: Calibration | None, num_cores: int
) -> tuple[ComputeRates, ...]:
    """Measure computation on the first process; several only without a file of one."""
    group, me = agree.peers(mesh), jax.process_index()
    own = [device for device in mesh.devices.flat if device.process_index == me]

    def rates(num_devices: int, num_ranks: int) -> ComputeRates:
        devices = np.array(own[:num_devices])
        return compute_rates(Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types), num_ranks)

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
    num_here = sum(
        this_process.is_on_own_host(device.process_index) for device in mesh.devices.flat
    )
    return (*alone, rates(len(own), num_here)) if num_here > 1 else alone


def _is_readable(platform: str) -> bool:
    try:
        calibration.load(platform)
    except ValueError:
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
        alpha, beta, error = fit_alpha_beta(points)
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
