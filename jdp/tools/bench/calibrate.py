"""`jdp bench --calibrate`: measured rates of this machine."""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.distributed import agree, this_process
from jdp.tools import calibration, known_values, models, paired_timing, timeline
from jdp.tools.bench import collectives, output
from jdp.tools.calibration import (
    CACHED_BYTES,
    Calibration,
    CollectiveLaw,
    ComputeRates,
    Slowness,
    fit_alpha_beta,
)
from jdp.tools.hlo import HloProgram
from jdp.tools.known_values import require_equal
from jdp.tools.models import SmallModel
from jdp.tools.prediction import Likely
from jdp.tools.rate import Rate, given_rate
from jdp.tools.rates import UNITS
from jdp.tools.timeline import Groups, Work

# Steps are slower than large matmuls and loops over cached arrays: their matrices are smaller or
# transposed, arrays strided, and threads wait.


_NUM_STEPS, _BUDGET_S = 4, 9.0
_TOLERANCE = 1e-3  # of a leaf's largest element
_LEARNING_RATE, _MOMENTUM = 1e-3, 0.9


class AloneSeconds(NamedTuple):
    """Seconds of operations by themselves; `strided` ones go across an array's rows."""

    matmul: float = 0.0
    elementwise: float = 0.0
    strided: float = 0.0
    start: float = 0.0


class Training(NamedTuple):
    """A model with micro-batches."""

    model: SmallModel
    num_micro_batches: int = 1

    @property
    def name(self) -> str:
        """The model and its number of micro-batches."""
        return f"{self.model.name} in {self.num_micro_batches}"

    def gradients(self, params: Any, batch: Any) -> Any:
        """Return the mean loss's gradients, summed over micro-batches."""
        num = self.num_micro_batches
        gradient = jax.grad(self.model.loss_fn)
        if num == 1:
            return gradient(params, batch)
        split = jax.tree.map(lambda x: x.reshape(num, -1, *x.shape[1:]), batch)

        def add(total: Any, rows: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, rows)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), split)
        return jax.tree.map(lambda x: x / num, total)


class TimedStep(NamedTuple):
    """A timed step, and its operations by themselves."""

    alone: AloneSeconds
    seconds: float


def measured_slowness(mesh: Mesh, rates: Mapping[str, Rate]) -> Slowness:
    """Return the slowness of timed steps without collectives."""
    trainings = _trainings(mesh.devices.flat[0].platform)
    made = {training.name: _made(mesh, training) for training in trainings}
    clocks = {name: clock for name, (clock, _) in made.items()}
    found = paired_timing.alternate(clocks, budget_s=_BUDGET_S, warm_up=1)
    return fit_slowness(
        [
            TimedStep(alone_seconds(program, rates), float(np.median(found[name])) / _NUM_STEPS)
            for name, (_, program) in made.items()
        ]
    )


def fit_slowness(steps: Sequence[TimedStep]) -> Slowness:
    """Fit the factors; those that the steps do not distinguish are equal."""
    shares = np.array([step.alone for step in steps])
    shares /= np.array([[step.seconds] for step in steps])
    factors = _least_squares(shares)
    error = float(np.abs(shares @ factors - 1).max())
    return Slowness(*(float(f"{x:.4g}") for x in (*factors, round(error, 6))))


def _groupings(num: int) -> Iterator[list[int]]:
    """Yield the ways to equate factors: the group of each."""
    for groups in itertools.product(range(num), repeat=num):
        firsts = list(dict.fromkeys(groups))
        if firsts == list(range(len(firsts))):
            yield list(groups)


def _least_squares(shares: np.ndarray) -> np.ndarray:
    """Return positive factors with each step's sum of shares closest to 1."""
    num_steps, num = shares.shape
    best, least = np.ones(num), float("inf")
    for groups in _groupings(num):
        joined = np.zeros((num_steps, max(groups) + 1))
        np.add.at(joined, (slice(None), groups), shares)
        found, _, rank, _ = np.linalg.lstsq(joined, np.ones(num_steps), rcond=1e-6)
        residual = float(np.sum((joined @ found - 1) ** 2))
        if rank == joined.shape[1] and found.min() > 0 and residual < least - 1e-9:
            best, least = found[groups], residual
    return best


class _Recorder:
    """Adds up the seconds of operations by kind."""

    def __init__(self, rates: Mapping[str, Rate]):
        self._start_s = rates["operation_start_s"].value
        no_start = {"operation_start_s": given_rate(0.0, "s")}
        self._likely = Likely({**rates, **no_start}, num_ranks=1, hosts=[0])
        self.alone = AloneSeconds()

    def compute_s(self, work: Work) -> float:
        kind = "matmul" if work.flops else "strided" if work.is_strided else "elementwise"
        own = {kind: getattr(self.alone, kind) + self._likely.compute_s(work)}
        self.alone = self.alone._replace(**own, start=self.alone.start + self._start_s)
        return 0.0

    def transfer_s(self, kind: str, algorithm: str, num_bytes: float, groups: Groups = ()) -> float:
        return 0.0


def alone_seconds(program: HloProgram, rates: Mapping[str, Rate]) -> AloneSeconds:
    """Return the seconds of operations, by kind."""
    recorder = _Recorder(rates)
    timeline.simulate(program, recorder)
    return recorder.alone


# Several sizes and ratios of matmuls, and micro-batches with smaller arrays.
def _trainings(platform: str) -> list[Training]:
    if platform != "cpu":
        narrow = models.mlp(width=1024, num_layers=4, num_rows=4096)._replace(name="narrow mlp")
        large = models.mlp(width=4096, num_layers=2, num_rows=8192)
        half = models.mlp(width=4096, num_layers=2, num_rows=8192, dtype=jnp.bfloat16)
        short = models.transformer(dim=512, num_layers=2, num_rows=16, length=512)
        long = models.transformer(dim=1024, num_layers=1, num_rows=8, length=1024)
        return [
            *(Training(narrow), Training(large), Training(large, 4)),
            *(Training(half._replace(name="mlp in bfloat16")), Training(short)),
            *(Training(long), Training(long, 4)),
        ]
    deep = models.mlp(width=384, num_layers=6, num_rows=64)._replace(name="deep mlp")
    wide = models.mlp(width=768, num_layers=2, num_rows=192)
    thin = models.transformer(dim=96, num_layers=4, num_rows=24, length=24)
    return [
        Training(models.mlp(width=256, num_layers=3, num_rows=32)._replace(name="narrow mlp")),
        *(Training(deep), Training(deep, 4), Training(wide), Training(wide, 4)),
        Training(models.transformer(dim=64, num_layers=3, num_rows=8, length=64)),
        *(Training(thin), Training(thin, 4)),
        Training(models.transformer(dim=192, num_layers=2, num_rows=8, length=48)),
    ]


def _made(mesh: Mesh, training: Training) -> tuple[Callable[[], float], HloProgram]:
    """Return a clock of `_NUM_STEPS` checked steps, and the compiled step."""
    name, num, model = mesh.axis_names[0], mesh.size, training.model

    def step(state: Any, batch: Any) -> Any:
        params, momentum = state
        grads = training.gradients(params, batch)
        momentum = jax.tree.map(lambda m, g: _MOMENTUM * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - _LEARNING_RATE * m, params, momentum), momentum

    specs: Any = {"in_specs": (P(), P(name)), "out_specs": P(), "check_vma": False}
    run: Any = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=0)
    whole = jax.tree.map(lambda x: np.concatenate([x] * num), model.batch)
    batch = jax.device_put(whole, NamedSharding(mesh, P(name)))
    start = model.params, jax.tree.map(np.zeros_like, model.params)
    right = _right(step, start, model.batch, mesh.devices.flat[0])

    def place() -> Any:
        return jax.block_until_ready(jax.device_put(start, NamedSharding(mesh, P())))

    def clock() -> float:
        state = jax.block_until_ready(run(place(), batch))  # into the caches
        begin = time.perf_counter()
        for _ in range(_NUM_STEPS):
            state = run(state, batch)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        for leaf, expected in zip(jax.tree.leaves(state), right, strict=True):
            _require(leaf, expected, training.name)
        return seconds

    return clock, HloProgram(run.lower(place(), batch).compile().as_text())


def _right(step: Any, state: Any, batch: Any, device: Any) -> list[np.ndarray]:
    alone: Any = jax.jit(step)
    state, batch = jax.device_put((state, batch), device)
    for _ in range(_NUM_STEPS + 1):
        state = alone(state, batch)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def _require(leaf: jax.Array, expected: np.ndarray, name: str) -> None:
    for rank, shard in enumerate(leaf.addressable_shards):
        require_equal(
            shard.data, expected, contestant="XLA", rank=rank, round_number=0,
            what=f"the state of {name}", tolerance=_TOLERANCE * float(np.abs(expected).max()),
        )  # fmt: skip


_WIDTH = {"cpu": 1024}
_WIDTH_ELSEWHERE = 8192
# Devices other than CPUs begin one while the host starts the next.
_NUM_MATMULS_ELSEWHERE = 8
# Enough to make the program's start a small part.
_NUM_TIMES, _NUM_TINY = 64, 512
# More than fits into caches (50 MiB and more on GPUs).
_ELEMENTS, _ELEMENTS_ELSEWHERE = 2**24, 2**27
# XLA:CPU of JAX 0.10 drops barriers early, and then fuses across them. XLA:GPU drops them last, and
# needs that pass.
_WITH_BARRIERS = {"cpu": {"xla_disable_hlo_passes": "cse_barrier_expander"}}
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
    if mesh.devices.flat[0].platform != "cpu":
        # One operation is so short that the program's start would count.
        size = _ELEMENTS_ELSEWHERE
        return 2 * 4 * size / loop_s(mesh, lambda x: x + 1, size, _NUM_TIMES)
    whole = np.resize(np.arange(251, dtype=np.float32), _ELEMENTS)
    x = np.broadcast_to(whole, (mesh.size, _ELEMENTS))
    old = np.zeros_like(x)
    run = _on_all(mesh, lambda x, old: 2 * x, donate=1)
    seconds = _seconds(run, _placed(mesh, x), _placed(mesh, old), 2 * whole, "a scaled array")
    return 2 * 4 * _ELEMENTS / seconds


def loop_s(mesh: Mesh, operation: Callable[[Any], Any], num_elements: int, right: float) -> float:
    """Return the seconds of an operation, in a loop of many."""
    x = np.zeros((mesh.size, num_elements), np.float32)

    def repeated(x: Any, old: Any) -> Any:
        if mesh.devices.flat[0].platform == "cpu":
            return jax.lax.fori_loop(0, _NUM_TIMES, lambda i, x: operation(x), x)
        # A loop on a GPU starts more kernels, and copies the array.
        return _one_by_one(operation, x, _NUM_TIMES)

    expected = np.full(num_elements, right, np.float32)
    run = _on_all(mesh, repeated)
    return _seconds(run, _placed(mesh, x), _placed(mesh, x), expected, "a loop") / _NUM_TIMES


def operation_start_s(mesh: Mesh) -> float:
    """Return the seconds of an operation on 8 numbers; a chain, as XLA compiles a loop to one."""

    def chain(x: Any, old: Any) -> Any:
        return _one_by_one(lambda x: x + 1, x, _NUM_TINY)

    x = _placed(mesh, np.zeros((mesh.size, 8), np.float32))
    right = np.full(8, _NUM_TINY, np.float32)
    options = _WITH_BARRIERS.get(mesh.devices.flat[0].platform)
    run = _on_all(mesh, chain, compiler_options=options)
    return _seconds(run, x, x, right, "a chain") / _NUM_TINY


def compute_rates(mesh: Mesh, num_ranks: int) -> ComputeRates:
    """Return the rates of each device, while all compute."""
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
    slowness = measured_slowness(mesh, _by_name(found))
    return ComputeRates(num_ranks, **found, slowness=slowness)


def _by_name(found: Mapping[str, Any]) -> dict[str, Rate]:
    flops = found["matmul_flops_per_s"]
    values = {"matmul_flops": flops["bfloat16"], "matmul_flops_f32": flops["float32"]}
    values |= {name: x for name, x in found.items() if name != "matmul_flops_per_s"}
    # unused without collectives
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
    """Return the median seconds of checked runs."""
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
    """Return measured rates of computation, on the first process.

    One process measures one device, as many as cores, and all. Several measure only without a file
    of one process.
    """
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
