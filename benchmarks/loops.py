"""All-reduces in a loop of one compiled program: jdp's, `lax.psum`, and none at all."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import buckets, collectives
from jdp.sync import BUCKET_BYTES

Leaves = list[jax.Array]
Mean = Callable[[Leaves, Mesh], Leaves]  # of a rank's leaves over the ranks of the mesh


def _psum(leaves: Leaves, mesh: Mesh) -> Leaves:
    return [leaf * np.float32(1 / mesh.size) for leaf in lax.psum(leaves, "data")]


def _none(leaves: Leaves, mesh: Mesh) -> Leaves:
    return [leaf * np.float32(1 / mesh.size) for leaf in leaves]


def _native(leaves: Leaves, mesh: Mesh, *, algorithm: str) -> Leaves:
    plan = buckets.plan(leaves, BUCKET_BYTES)
    given = [[leaves[i] for i in bucket] for bucket in plan]
    scale = 1 / mesh.size
    sums = collectives.native(given, "data", scale=scale, mesh=mesh, algorithm=algorithm)
    found = dict(zip(sum(plan, []), sum(sums, []), strict=True))
    return [found[i] for i in range(len(leaves))]


MEANS: dict[str, Mean] = {
    "direct": functools.partial(_native, algorithm="direct"),
    "ring": functools.partial(_native, algorithm="ring"),
    "psum": _psum,
    "none": _none,
}


class Loop:
    """A mean, the program that takes it `num_calls` times, and its data."""

    def __init__(
        self, name: str, mesh: Mesh, sizes: Sequence[int], num_calls: int, *, donate: bool = True
    ):
        """Compile, run once, and see that the mean is right.

        Args:
          name: of MEANS.
          mesh: one axis, "data".
          sizes: elements of each leaf, float32.
          num_calls: means in one run.
          donate: use the same memory in every run; else each run's results lie in new memory.

        Raises:
          AssertionError: if it is not the mean.
        """
        self._donate = donate
        # Without a mean, every run scales what is left: zeros stay as they are.
        first = 0.0 if name == "none" else 1.0
        where = NamedSharding(mesh, P("data"))

        def part(size: int, index: Any) -> np.ndarray:
            rank = index[0].start or 0
            return np.full((1, size), first * (rank + 1), np.float32)

        self._leaves = [
            jax.make_array_from_callback((mesh.size, size), where, functools.partial(part, size))
            for size in sizes
        ]

        def run(leaves: Leaves) -> Leaves:
            step = functools.partial(_mean, MEANS[name], mesh)
            return lax.scan(step, leaves, length=num_calls)[0]

        mapped = jax.shard_map(
            run, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
        )
        self._run = jax.jit(mapped, donate_argnums=0 if donate else ())
        _require_all(self._run(self._leaves) if not donate else self(), first * (mesh.size + 1) / 2)

    def __call__(self) -> Leaves:
        leaves = self._run(self._leaves)
        if self._donate:
            self._leaves = leaves
        return leaves


def _mean(mean: Mean, mesh: Mesh, leaves: Leaves, _: None) -> tuple[Leaves, None]:
    return mean(leaves, mesh), None


def _require_all(leaves: Leaves, value: float) -> None:
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            if not (data == value).all():
                raise AssertionError(f"the mean is {data.min()} to {data.max()}, not {value}.")
