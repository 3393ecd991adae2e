"""Rates of computation: large matmuls, and scaling an array in memory, by some devices at once."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.inspect.bench import training_steps
from jdp.inspect.calibration import CACHED_BYTES
from jdp.inspect.compute_rates import ComputeRates
from jdp.inspect.exact import require
from jdp.inspect.rate import Rate
from jdp.inspect.rates import UNITS

_WIDTH = {"cpu": 1024}  # rows and columns of the matmul; on others:
_WIDTH_ELSEWHERE = 8192
# Matmuls in a row: others than CPUs begin one while the host starts the next.
_NUM_MATMULS_ELSEWHERE = 8
# Operations of a program, so many that its own start is a small part of their time.
_NUM_TIMES, _NUM_TINY = 64, 512
# Elements of the scaled array: more than caches hold, which are 50 MiB and more on GPUs.
_ELEMENTS, _ELEMENTS_ELSEWHERE = 2**24, 2**27
# On CPUs XLA of JAX 0.10 drops barriers first, and makes one operation of all between them. On GPUs
# it drops them last, and cannot run what then is left of them.
_WITH_BARRIERS = {"cpu": {"xla_disable_hlo_passes": "cse_barrier_expander"}}
_NUM_ROUNDS, _WARM_UP_S = 7, 0.1
_PERIOD = 3


def matmul_flops_per_s(mesh: Mesh, dtype: str) -> float:
    """Return the floating-point operations per second of each device, while all compute."""
    platform = mesh.devices.flat[0].platform
    width = _WIDTH.get(platform, _WIDTH_ELSEWHERE)
    num_calls = 1 if platform == "cpu" else _NUM_MATMULS_ELSEWHERE
    # Element (i, j) of the product is width * (i mod 3) * (j mod 3): exact in every dtype.
    small = np.arange(width) % _PERIOD
    a = np.broadcast_to(small[:, None], (mesh.size, width, width)).astype(jnp.dtype(dtype))
    b = np.broadcast_to(small[None, :], (mesh.size, width, width)).astype(jnp.dtype(dtype))
    run = _on_all(mesh, lambda a, b: a @ b)
    right = (width * small[:, None] * small[None, :]).astype(jnp.dtype(dtype))
    a, b = _placed(mesh, a), _placed(mesh, b)
    return 2 * width**3 / _seconds(run, a, b, right, f"a matmul in {dtype}", num_calls)


def memory_bytes_per_s(mesh: Mesh) -> float:
    """Return the bytes that each device reads and writes per second, while all change an array."""
    if mesh.devices.flat[0].platform != "cpu":
        # Once is so short that the start of the program would count.
        size = _ELEMENTS_ELSEWHERE
        return 2 * 4 * size / loop_s(mesh, lambda x: x + 1, size, _NUM_TIMES)
    whole = np.resize(np.arange(251, dtype=np.float32), _ELEMENTS)
    x = np.broadcast_to(whole, (mesh.size, _ELEMENTS))
    old = np.zeros_like(x)
    run = _on_all(mesh, lambda x, old: 2 * x, donate=1)
    seconds = _seconds(run, _placed(mesh, x), _placed(mesh, old), 2 * whole, "a scaled array")
    return 2 * 4 * _ELEMENTS / seconds


def loop_s(mesh: Mesh, operation: Callable[[Any], Any], num_elements: int, right: float) -> float:
    """Return the seconds of an operation on an array, one of many in a loop."""
    x = np.zeros((mesh.size, num_elements), np.float32)

    def repeated(x: Any, old: Any) -> Any:
        if mesh.devices.flat[0].platform == "cpu":
            return jax.lax.fori_loop(0, _NUM_TIMES, lambda i, x: operation(x), x)
        # An iteration of a loop on a GPU starts further kernels, and copies the array.
        return _one_by_one(operation, x, _NUM_TIMES)

    expected = np.full(num_elements, right, np.float32)
    run = _on_all(mesh, repeated)
    return _seconds(run, _placed(mesh, x), _placed(mesh, x), expected, "a loop") / _NUM_TIMES


def operation_start_s(mesh: Mesh) -> float:
    """Return the seconds of an operation on 8 numbers, one of many that follow each other.

    XLA compiles a loop of such operations to one, so they are written one by one.
    """

    def chain(x: Any, old: Any) -> Any:
        return _one_by_one(lambda x: x + 1, x, _NUM_TINY)

    x = _placed(mesh, np.zeros((mesh.size, 8), np.float32))
    right = np.full(8, _NUM_TINY, np.float32)
    options = _WITH_BARRIERS.get(mesh.devices.flat[0].platform)
    run = _on_all(mesh, chain, compiler_options=options)
    return _seconds(run, x, x, right, "a chain") / _NUM_TINY


def rates(mesh: Mesh, num_ranks: int) -> ComputeRates:
    """Return what each device of a mesh computes per second, while all of them do."""
    size = CACHED_BYTES // 8
    found: dict[str, Any] = {
        "matmul_flops_per_s": {
            dtype: matmul_flops_per_s(mesh, dtype) for dtype in ("float32", "bfloat16")
        },
        "memory_bytes_per_s": memory_bytes_per_s(mesh),
        "cached_bytes_per_s": CACHED_BYTES / loop_s(mesh, lambda x: x + 1, size, _NUM_TIMES),
        "transcendentals_per_s": size / loop_s(mesh, jnp.tanh, size, 0.0),
        "operation_start_s": operation_start_s(mesh),
    }
    slowness = training_steps.slowness(mesh, _by_name(found))
    return ComputeRates(num_ranks, **found, slowness=slowness)


def _by_name(found: Mapping[str, Any]) -> dict[str, Rate]:
    """Return measured rates under the names that a prediction has for them."""
    flops = found["matmul_flops_per_s"]
    values = {"matmul_flops": flops["bfloat16"], "matmul_flops_f32": flops["float32"]}
    values |= {name: x for name, x in found.items() if name != "matmul_flops_per_s"}
    # A step without collectives uses no link.
    values |= {"link_bytes_per_s": 1.0, "reduction_start_s": 0.0}
    return {name: Rate(x, x, x, UNITS[name], "measured here") for name, x in values.items()}


def _one_by_one(operation: Callable[[Any], Any], x: Any, num_times: int) -> Any:
    for _ in range(num_times):
        x = jax.lax.optimization_barrier(operation(x))
    return x


def _on_all(mesh: Mesh, function: Callable, donate: Any = (), **options: Any) -> Any:
    spec = P(mesh.axis_names[0])
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=donate, keep_unused=True, **options)


def _placed(mesh: Mesh, x: np.ndarray) -> jax.Array:
    where = NamedSharding(mesh, P(mesh.axis_names[0]))
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def _seconds(
    run: Any, x: jax.Array, other: jax.Array, right: np.ndarray, what: str, num_calls: int = 1
) -> float:
    """Return the median seconds of `run`, whose last results are checked on every device."""
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
            require(shard.data, right, contestant="XLA", rank=rank, round_number=number, what=what)
    return float(np.median(seconds))


def _warm_up(run: Any, x: jax.Array, other: jax.Array) -> None:
    """Run without a clock on GPUs, which lower their clock rate while results are checked."""
    if next(iter(x.devices())).platform == "cpu":
        return
    end = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < end:
        jax.block_until_ready(run(x, other))
