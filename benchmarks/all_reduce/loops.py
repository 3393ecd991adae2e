"""All-reduces in a loop of one compiled program: jdp's, `lax.psum`, and none."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness import exact
from jdp import collectives
from jdp.collectives import buckets
from jdp.reduction.gradients import BUCKET_BYTES

Leaves = list[jax.Array]
Sum = Callable[[Leaves, Mesh], Leaves]  # of a rank's leaves over the ranks of the mesh, scaled


# Not 1 / n: a mean of equal numbers changes nothing, so the check would miss a call that did
# nothing, or returned the result of the call before.
def _scale(mesh: Mesh) -> float:
    return 2 / mesh.size


def _psum(leaves: Leaves, mesh: Mesh) -> Leaves:
    return [leaf * np.float32(_scale(mesh)) for leaf in lax.psum(leaves, "data")]


def _none(leaves: Leaves, mesh: Mesh) -> Leaves:
    return [leaf * np.float32(_scale(mesh)) for leaf in leaves]


def _native(leaves: Leaves, mesh: Mesh, *, algorithm: str) -> Leaves:
    plan = buckets.plan(leaves, BUCKET_BYTES)
    given = [[leaves[i] for i in bucket] for bucket in plan]
    sums = collectives.native(given, "data", scale=_scale(mesh), mesh=mesh, algorithm=algorithm)
    found = dict(zip(sum(plan, []), sum(sums, []), strict=True))
    return [found[i] for i in range(len(leaves))]


SUMS: dict[str, Sum] = {
    "direct": functools.partial(_native, algorithm="direct"),
    "ring": functools.partial(_native, algorithm="ring"),
    "psum": _psum,
    "none": _none,
}


class Loop:
    """A scaled sum, the program that takes it `num_calls` times, and its data."""

    def __init__(
        self,
        name: str,
        mesh: Mesh,
        sizes: Sequence[int],
        num_calls: int,
        *,
        repeats: int = 1,
        donate: bool = True,
    ):
        """Compile, run once, and check.

        Args:
          name: key of SUMS.
          mesh: mesh with one axis, "data".
          sizes: number of elements of each leaf, float32.
          num_calls: number of sums in one run of the program.
          repeats: number of runs of the program in one call, each waited for.
          donate: reuse the same memory in every run; if False, each run's results are in new
          memory.

        Raises:
          exact.WrongResultError: if the result is not the sum.
        """
        self._name, self._mesh, self._sizes = name, mesh, sizes
        self._num_calls, self._repeats, self._donate = num_calls * repeats, repeats, donate
        self._round = 0
        self._made = self._leaves = [self._zeros(size) for size in sizes]
        # Into the memory of the previous round.
        self._fill = _filler(mesh, tuple(sizes))

        def run(leaves: Leaves) -> Leaves:
            step = functools.partial(_once, SUMS[name], mesh)
            return lax.scan(step, leaves, length=num_calls)[0]

        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        self._run = jax.jit(mapped, donate_argnums=0 if donate else ())
        self.prepare()
        self()
        self.check()

    def prepare(self) -> None:
        """Write different numbers than in the previous round."""
        self._round += 1
        self._leaves = jax.block_until_ready(self._fill(self._leaves, np.int32(self._round)))

    def __call__(self) -> Leaves:
        for i in range(self._repeats):
            if i:
                jax.block_until_ready(self._made)
            self._made = self._run(self._leaves)
            if self._donate:
                self._leaves = self._made
        return self._made

    def check(self) -> None:
        """Compare all elements on all ranks of this process.

        Raises:
          exact.WrongResultError: if one is wrong.
        """
        starts = np.cumsum([0, *self._sizes])
        for number, (leaf, start) in enumerate(zip(self._made, starts, strict=False)):
            for shard in leaf.addressable_shards:
                rank = shard.index[0].start or 0
                exact.require(
                    shard.data,
                    self._expected(rank, self._sizes[number], int(start)),
                    contestant=self._name,
                    rank=rank,
                    round_number=self._round,
                    what=f"leaf {number} after {self._num_calls} sums",
                )

    def _expected(self, rank: int, size: int, start: int) -> np.ndarray:
        scale, num_ranks = _scale(self._mesh), self._mesh.size
        if self._name == "none":
            own = exact.values(rank, self._round, size, start)
            return own * np.float32(scale**self._num_calls)
        return exact.reduced(
            num_ranks, self._round, self._num_calls, size, scale=scale, start=start
        )

    def _zeros(self, size: int) -> jax.Array:
        where = NamedSharding(self._mesh, P("data"))
        return jax.make_array_from_callback(
            (self._mesh.size, size), where, lambda _: np.zeros((1, size), np.float32)
        )


def _once(one: Sum, mesh: Mesh, leaves: Leaves, _: None) -> tuple[Leaves, None]:
    return one(leaves, mesh), None


# Writes `exact.values` in place, computed where they are needed.
@functools.cache
def _filler(mesh: Mesh, sizes: tuple[int, ...]) -> Callable[[Leaves, np.int32], Leaves]:
    starts = np.cumsum([0, *sizes])

    def fill(leaves: Leaves, round_number: jax.Array) -> Leaves:
        rank, more = lax.axis_index("data"), round_number % exact.NUM_ROUNDS

        def one(leaf: jax.Array, start: int) -> jax.Array:
            place = lax.iota(jnp.int32, leaf.size) + start % exact.PERIOD
            numbers = (place % exact.PERIOD + 1) * (rank + 1) + more
            return numbers.astype(leaf.dtype).reshape(leaf.shape)

        return [one(leaf, int(start)) for leaf, start in zip(leaves, starts, strict=False)]

    mapped = jax.shard_map(
        fill, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0, keep_unused=True)
