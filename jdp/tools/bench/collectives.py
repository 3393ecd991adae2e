"""Times of collectives by size and algorithm, with checked results."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.collectives import call_order, native_shards, shards, xla_shards
from jdp.distributed import agree
from jdp.tools import known_values, paired_timing
from jdp.tools.known_values import WrongResultError

AUTO = "auto"
_ALL_REDUCES = {
    AUTO: collectives.auto,
    "direct": collectives.native,
    "ring": functools.partial(collectives.native, algorithm="ring"),
    "ppermute": collectives.ring,
    "xla": collectives.xla,
}
_MODULES = {AUTO: shards, "native": native_shards, "xla": xla_shards}

# XLA would merge independent calls.
_APART_ON_CPU = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
_APART_ON_GPU = {
    f"xla_gpu_{name}_combine_threshold_bytes": 0
    for name in ("all_reduce", "all_gather", "reduce_scatter")
}


class Case(NamedTuple):
    """A collective of equally large arrays.

    Attributes:
      size: a rank's elements, as in nccl-tests: of an all-gather's result, otherwise the input. The
        number of ranks divides it, except for an all-reduce.
    """

    operation: str
    algorithm: str
    dtype: str
    size: int

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return self.size * jnp.dtype(self.dtype).itemsize


def algorithms(operation: str) -> tuple[str, ...]:
    """Return all algorithms; `xla` is the last."""
    return tuple(_ALL_REDUCES if operation == "all-reduce" else _MODULES)


class Trial:
    """Independent collectives in a program on a mesh with one axis.

    All processes must make the same trials in the same order. With `in_place`, results overwrite
    inputs, as in a compiled step.
    """

    def __init__(self, cases: Sequence[Case], mesh: Mesh, *, in_place: bool = False):
        self.cases, self._mesh, self._in_place = tuple(cases), mesh, in_place
        self._round = 0
        self._axis = mesh.axis_names[0]
        self._moduli = [known_values.modulus(mesh.size, case.dtype) for case in cases]
        self._inputs = [self._zeros(self._input_size(case), case.dtype) for case in cases]
        self._fill = self._mapped(self._filled, 2, donate=(0,))
        # New results overwrite the old ones unread.
        donate = (0,) if in_place else (1,)
        platform = mesh.devices.flat[0].platform
        apart = {"cpu": _APART_ON_CPU, "gpu": _APART_ON_GPU}.get(platform, {})
        self._run = self._mapped(self._called, 2, donate=donate, compiler_options=apart)
        self._results: Any = None

    def prepare(self) -> None:
        """Write the next round's inputs, unlike the last."""
        self._round += 1
        self._inputs = self._fill(self._inputs, np.int32(self._round % 1000))
        if self._in_place:
            self._results = ()
        elif self._results is None:
            self._results = [
                self._zeros(self._result_size(case), case.dtype) for case in self.cases
            ]
        jax.block_until_ready((self._inputs, self._results))

    def __call__(self) -> None:
        """Run the program, and wait for it: the timed part."""
        self._results = self._run(self._inputs, self._results)
        jax.block_until_ready(self._results)

    def check(self) -> None:
        """Compare every result on this process's ranks."""
        for number, (case, found) in enumerate(zip(self.cases, self._results, strict=True)):
            call, m = self._round % 1000 * len(self.cases) + number, self._moduli[number]
            for shard in found.addressable_shards:
                rank = shard.index[0].start or 0
                right = known_values.result(
                    case.operation, rank, self._mesh.size, call, case.size, m
                )
                known_values.require_equal(
                    shard.data,
                    right.astype(found.dtype),
                    contestant=f"{case.operation} ({case.algorithm})",
                    rank=rank,
                    round_number=self._round,
                    what=f"a result in {case.dtype} over {self._mesh.size} ranks",
                )
        if self._in_place:  # reused by the next inputs
            sizes = map(self._input_size, self.cases)
            self._inputs = [
                result if result.shape[1] == size else self._zeros(size, case.dtype)
                for result, size, case in zip(self._results, sizes, self.cases, strict=True)
            ]

    def lowered(self) -> Any:
        """Return the lowered program."""
        self.prepare()
        return self._run.lower(self._inputs, self._results)

    def _input_size(self, case: Case) -> int:
        return known_values.input_size(case.operation, self._mesh.size, case.size)

    def _result_size(self, case: Case) -> int:
        return case.size // self._mesh.size if case.operation == "reduce-scatter" else case.size

    def _zeros(self, size: int, dtype: str) -> jax.Array:
        where = NamedSharding(self._mesh, P(self._axis))
        return jax.make_array_from_callback(
            (self._mesh.size, size), where, lambda _: np.zeros((1, size), jnp.dtype(dtype))
        )

    def _mapped(self, function: Callable, num_args: int, *, donate: Any, **options: Any) -> Any:
        specs = (P(self._axis), P()) if function == self._filled else (P(self._axis),) * num_args
        mapped = jax.shard_map(
            function, mesh=self._mesh, in_specs=specs, out_specs=P(self._axis), check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate, keep_unused=True, **options)

    def _filled(self, inputs: list[jax.Array], round_number: jax.Array) -> list[jax.Array]:
        rank, filled = lax.axis_index(self._axis), []
        for number, (leaf, m) in enumerate(zip(inputs, self._moduli, strict=True)):
            call = round_number * len(inputs) + number
            more = (known_values.OF_RANK * rank + known_values.OF_CALL * call) % m
            place = lax.iota(jnp.int32, leaf.size) % m
            filled.append(((place + more) % m).astype(leaf.dtype).reshape(leaf.shape))
        return filled

    def _called(self, inputs: list[jax.Array], old: Any) -> list[jax.Array]:
        results: list[jax.Array] = []
        with call_order.entered():  # native calls in one order, as in a step
            for case, leaf in zip(self.cases, inputs, strict=True):
                if results:  # XLA's calls in one order, too
                    leaf, results[-1] = lax.optimization_barrier((leaf, results[-1]))
                results.append(_collective(case, leaf, self._axis, self._mesh))
        return results


def _collective(case: Case, leaf: jax.Array, axis: str, mesh: Mesh) -> jax.Array:
    if case.operation == "all-reduce":
        return _ALL_REDUCES[case.algorithm]([[leaf]], axis, mesh=mesh)[0][0]
    module = _MODULES[case.algorithm]
    if case.operation == "reduce-scatter":
        return module.reduce_scatter([[leaf]], [[1]], axis, mesh=mesh)[0][0]
    if case.operation == "all-gather":
        return module.all_gather([[leaf]], [[1]], axis, mesh=mesh)[0][0]
    return module.all_to_all([[leaf]], [[(1, 1)]], axis, mesh=mesh)[0][0]


PEER = "xla"
_MiB = 2**20
# Enough calls to make a program's start a small part. A `ppermute` of many operations compiles
# slowly.
_MAX_CALLS, _MAX_PPERMUTES = 16, 4


class Setting(NamedTuple):
    """How collectives are timed: each round times all algorithms twice, in both orders."""

    dtype: str = "float32"
    num_rounds: int = 10
    warm_up: int = 1
    in_place: bool = False


class CannotRun(Exception):
    """An algorithm that cannot run here, and why."""


def default_algorithms(operation: str, platform: str) -> tuple[str, ...]:
    """jdp's code for GPUs was never measured between GPUs, and runs only by name."""
    known = [name for name in algorithms(operation) if name != AUTO]
    on_gpu = ("direct", "ring", "native")
    return tuple(name for name in known if platform == "cpu" or name not in on_gpu)


def sizes(first: int, last: int, factor: int, *, itemsize: int, num_ranks: int) -> list[int]:
    """Return numbers of elements from `first` to `last` bytes, multiples of `num_ranks`.

    >>> sizes(16, 100, 2, itemsize=4, num_ranks=3)  # 12, 24, 60 bytes
    [3, 6, 15]
    """
    found = []
    while first <= last:
        elements = max(first // itemsize // num_ranks, 1) * num_ranks
        if not found or elements > found[-1]:
            found.append(elements)
        first *= factor
    return found


def bus_factor(operation: str, num_ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests does.

    >>> bus_factor("all-reduce", 4), bus_factor("all-gather", 4)
    (1.5, 0.75)
    """
    return (2 if operation == "all-reduce" else 1) * (num_ranks - 1) / num_ranks


def measure(
    mesh: Mesh,
    operation: str,
    algorithms: Sequence[str],
    elements: Sequence[int],
    setting: Setting,
    skipped: Callable[[str, str], None],
) -> Iterator[dict[str, Any]]:
    """Yield a row per size and algorithm, on all processes."""
    able = list(algorithms)
    for size in elements:
        clocks: dict[str, _Clock] = {}
        for name in list(able):
            try:
                clocks[name] = _Clock(mesh, Case(operation, name, setting.dtype, size), setting)
            except CannotRun as error:
                able.remove(name)
                skipped(name, str(error))
        if clocks:
            found = paired_timing.alternate(
                clocks,
                budget_s=0.0,
                min_rounds=setting.num_rounds,
                max_rounds=setting.num_rounds,
                warm_up=setting.warm_up,
            )
            for name, clock in clocks.items():
                case = Case(operation, name, setting.dtype, size)
                yield _row(mesh, case, found, float(np.median(clock.cpu_seconds)))


class _Clock:
    """Times a collective's calls, and checks the results; CPU seconds are of all processes."""

    def __init__(self, mesh: Mesh, case: Case, setting: Setting):
        most = _MAX_PPERMUTES if case.algorithm == "ppermute" else _MAX_CALLS
        self._num_calls = max(1, min(most, 2 * _MiB // case.num_bytes))
        self._made = Trial([case] * self._num_calls, mesh, in_place=setting.in_place)
        self._group = group = agree.peers(mesh)
        self.cpu_seconds: list[float] = []
        # Processes leave XLA's sum of one element at nearly the same time.
        one = Case("all-reduce", PEER, "float32", 1)
        self._start = Trial([one], mesh) if len(group) > 1 else None
        try:
            self._made.prepare()
            self._made()
        except ValueError as error:  # collectives.native raises it on all processes
            raise CannotRun(str(error)) from error
        _require_right(group, self._made)

    def __call__(self) -> float:
        self._made.prepare()
        if self._start is not None:
            self._start.prepare()
            self._start()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self._made()
        own = time.perf_counter() - begin, time.process_time() - cpu_begin
        found = _require_right(self._group, self._made, own)
        self.cpu_seconds.append(sum(cpu for _, cpu in found) / self._num_calls)
        return max(seconds for seconds, _ in found) / self._num_calls


def _require_right(
    group: tuple[int, ...], made: Trial, seconds: tuple[float, float] = (0.0, 0.0)
) -> list[tuple[float, float]]:
    wrong = None
    try:
        made.check()
    except WrongResultError as error:
        wrong = str(error)
    mine = [*seconds, wrong]
    found = agree.all_gather(group, mine, what="the results of jdp bench")
    for process, (*_, text) in found.items():
        if text is not None:
            where = f"process {process}: " if len(group) > 1 else ""
            raise WrongResultError(f"{where}{text}")
    return [(wall, cpu) for wall, cpu, _ in found.values()]


def _row(mesh: Mesh, case: Case, found: dict[str, np.ndarray], cpu_s: float) -> dict[str, Any]:
    seconds = found[case.algorithm]
    median = float(np.median(seconds))
    bandwidth = case.num_bytes / median
    peer = float(np.median(found[PEER] / seconds)) if PEER in found else None
    return {
        "operation": case.operation,
        "algorithm": case.algorithm,
        "dtype": jnp.dtype(case.dtype).name,
        "ranks": mesh.size,
        "processes": len({device.process_index for device in mesh.devices.flat}),
        "bytes": case.num_bytes,
        "median_s": median,
        "min_s": float(seconds.min()),
        "max_s": float(seconds.max()),
        "cpu_s": cpu_s,
        "algbw_bytes_per_s": bandwidth,
        "busbw_bytes_per_s": bandwidth * bus_factor(case.operation, mesh.size),
        "xla_over_this": peer,
        "rounds": len(seconds),
    }
