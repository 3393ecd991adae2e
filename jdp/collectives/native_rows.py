"""Lookups of `split_rows`, and their transposes, by native calls in the order of a step's calls."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh

from jdp import jax_compat
from jdp.collectives import call_order, row_exchange, shards
from jdp.collectives.cpu.calls import Calls
from jdp.collectives.cpu.shard_primitives import all_gather_p, all_to_all_p
from jdp.collectives.native_shards import COPIED_DTYPES
from jdp.collectives.split_rows import add_p, added_type, take_p, taken_type

# (rank, group, scale, token, part or rows, ids) -> (token, rows or part), with the parameters of
# `split_rows` and those of the all-reduce. One equation is several calls, some of them in a loop
# whose length depends on the ids. For the order of a step's calls, it is one of them.
_NATIVE = {each: jax.extend.core.Primitive(f"{each.name}_native") for each in (take_p, add_p)}
_ONE = np.float32(1)


def exchanged(
    eqn: Any, operands: Sequence[Any], around: Sequence[Any], mesh: Mesh | None
) -> list[jax.Array] | None:
    """Return the results of an equation of `split_rows` by native calls.

    None for other equations, and where the calls are left to XLA: where `shards` leaves its own to
    XLA, and inside of a loop or a function, where no token of the step orders them.
    """
    if eqn.primitive not in _NATIVE or operands[0].dtype.name not in COPIED_DTYPES:
        return None
    params = dict(eqn.params)
    axes, num_ranks = params.pop("axes"), params.pop("num_ranks")
    if num_ranks == 1 or not (call_order.is_in_step() and shards.is_native(axes, mesh)):
        return None
    calls = Calls(axes, mesh)
    with jax_compat.placed(eqn, around):
        results = calls.results(_NATIVE[eqn.primitive], operands, _ONE, **params)
    calls.end()
    return results


class _NativeCalls(NamedTuple):
    """The `row_exchange.Collectives` of one equation."""

    rank: Any
    group: Any
    number: int
    num_ranks: int
    options: dict[str, Any]

    def gathered(self, token: Any, x: jax.Array, name: str) -> tuple[Any, jax.Array]:
        """Implement `Collectives`."""
        token, (whole,) = self._results(all_gather_p, token, [x], [0], name)
        return token, whole

    def sent(
        self, token: Any, leaves: Sequence[jax.Array], split: int, joined: int, name: str
    ) -> tuple[Any, list[jax.Array]]:
        """Implement `Collectives`."""
        return self._results(all_to_all_p, token, leaves, [(split, joined)] * len(leaves), name)

    def _results(
        self,
        primitive: Any,
        token: Any,
        leaves: Sequence[jax.Array],
        dims: Sequence[Any],
        name: str,
    ) -> tuple[Any, list[jax.Array]]:
        token, *results = primitive.bind(
            self.rank, self.group, _ONE, token, *leaves, dims=tuple(dims),
            number=call_order.derived(self.number, name), num_ranks=self.num_ranks, **self.options,
        )  # fmt: skip
        return token, results


def _run(
    exchange: Callable, rank: Any, group: Any, scale: Any, token: Any, x: Any, ids: Any,
    *, axes: Any, num_ranks: int, number: int, communicator: int, beside_xla: bool, **params: Any,
) -> tuple[Any, Any]:  # fmt: skip
    options = dict(axes=axes, communicator=communicator, beside_xla=beside_xla)
    calls = _NativeCalls(rank, group, number, num_ranks, options)
    return exchange(calls, token, x, ids, **params)


def _typed(
    type_of: Callable, rank: Any, group: Any, scale: Any, token: Any, x: Any, ids: Any,
    *, number: int, communicator: int, beside_xla: bool, **params: Any,
) -> list[Any]:  # fmt: skip
    return [jax.core.ShapedArray(token.shape, token.dtype), type_of(x, ids, **params)]


for _of_xla, _type_of, _exchange in (
    (take_p, taken_type, row_exchange.take),
    (add_p, added_type, row_exchange.add),
):
    _primitive = _NATIVE[_of_xla]
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(functools.partial(_typed, _type_of))
    _rule = mlir.lower_fun(functools.partial(_run, _exchange), multiple_results=True)
    mlir.register_lowering(_primitive, _rule, platform="cpu", cacheable=False)
