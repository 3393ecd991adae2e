"""A program of one collective by one algorithm, with checked results.

Several consecutive calls make its start a small part. Each call has its own input and result.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.collectives import call_order, native_shards, shards, xla_shards
from jdp.tools import known_values

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
    """A collective of arrays of one size.

    Attributes:
      size: a rank's elements, as in nccl-tests: of the result of an all-gather, otherwise the
        input. The number of ranks divides it, except for an all-reduce.
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
    """A program of independent collectives on a mesh with one axis.

    All processes must make the same trials in the same order. With `in_place`, results overwrite
    the inputs, as in a compiled step. A ValueError says that an algorithm cannot run here.
    """

    def __init__(self, cases: Sequence[Case], mesh: Mesh, *, in_place: bool = False):
        self.cases, self._mesh, self._in_place = tuple(cases), mesh, in_place
        self._round = 0
        self._axis = mesh.axis_names[0]
        self._moduli = [known_values.modulus(mesh.size, case.dtype) for case in cases]
        self._inputs = [self._zeros(self._input_size(case), case.dtype) for case in cases]
        self._fill = self._mapped(self._filled, 2, donate=(0,))
        # New results overwrite the old ones, which are not read.
        donate = (0,) if in_place else (1,)
        platform = mesh.devices.flat[0].platform
        apart = {"cpu": _APART_ON_CPU, "gpu": _APART_ON_GPU}.get(platform, {})
        self._run = self._mapped(self._called, 2, donate=donate, compiler_options=apart)
        self._results: Any = None

    def prepare(self) -> None:
        """Write the next round's inputs, which differ from the last."""
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
