"""Exchanges rows of a sharded table, without gathering the table.

If the rows are sharded, each rank sends the ids of its needed rows to their owners, each id once,
and receives the rows; to add, it sends them too. This takes rounds of a fixed size: one if all
ranks own about equally many of the needed rows, up to n if one rank owns all. If another dim is
sharded, every rank gets all ids, and sends its part of the rows back in one round.

In a round with s rows for each of n ranks, a rank sends n s ids and n s rows, in two calls; to add,
in one. If several rounds are possible, a call before them finds their number.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from jdp import axis, jax_compat
from jdp.collectives import call_order, shards
from jdp.collectives.cpu.primitives import Calls, all_gather_p, all_to_all_p
from jdp.collectives.native_shards import COPIED_DTYPES

# Orders an exchange's calls; None for XLA's.
Token = Any


class Collectives(Protocol):
    """An exchange's calls, each with a unique name."""

    num_ranks: int

    def gathered(self, token: Token, x: jax.Array, name: str) -> tuple[Token, jax.Array]:
        """Concatenate `x`, of one shape on all ranks, along dim 0."""
        ...

    def sent(
        self, token: Token, leaves: Sequence[jax.Array], split: int, joined: int, name: str
    ) -> tuple[Token, list[jax.Array]]:
        """Return the received slices, as `shards.all_to_all` does."""
        ...


class _XlaCollectives(NamedTuple):
    """XLA's collectives over the ranks of `axes`."""

    axes: tuple[str, ...]
    num_ranks: int

    def gathered(self, token: Token, x: jax.Array, name: str) -> tuple[Token, jax.Array]:
        return token, lax.all_gather(x, self.axes, tiled=True)

    def sent(
        self, token: Token, leaves: Sequence[jax.Array], split: int, joined: int, name: str
    ) -> tuple[Token, list[jax.Array]]:
        return token, [lax.all_to_all(x, self.axes, split, joined, tiled=True) for x in leaves]


def exchange_and_take(
    calls: Collectives, token: Token, part: jax.Array, ids: jax.Array, *, dim: int
) -> tuple[Token, jax.Array]:
    """Return a token and rows, as `take_rows` does."""
    flat = ids.reshape(-1)
    if dim == 0:
        token, rows = _take_from_rows(calls, token, part, flat)
    else:
        token, everyones = calls.gathered(token, flat, "ids")
        found = part.at[everyones].get(mode="promise_in_bounds")
        token, [rows] = calls.sent(token, [found], 0, dim, "rows")
    return token, rows.reshape(*ids.shape, *rows.shape[1:])


def exchange_and_add(
    calls: Collectives, token: Token, rows: jax.Array, ids: jax.Array, *, num_rows: int, dim: int
) -> tuple[Token, jax.Array]:
    """Return a token, and this rank's shard of a table that sums all ranks' rows."""
    flat, rows = ids.reshape(-1), rows.reshape(ids.size, *rows.shape[ids.ndim :])
    if dim == 0:
        return _add_to_rows(calls, token, rows, flat, num_rows // calls.num_ranks)
    token, everyones = calls.gathered(token, flat, "ids")
    token, [parts] = calls.sent(token, [rows], dim, 0, "rows")
    total = jnp.zeros((num_rows, *parts.shape[1:]), rows.dtype)
    return token, total.at[everyones].add(parts, mode="promise_in_bounds")


def round_size(num_ids: int, rows_per_rank: int, num_ranks: int) -> int:
    """Return the rows to request from each rank in a round: a little more than an equal share."""
    equal = -(-num_ids // num_ranks)
    return min(num_ids, rows_per_rank, equal + equal // 4 + 32)


class _Route(NamedTuple):
    """This rank's requested rows, and their owners.

    Attributes:
      wanted: `[ids]`, each needed row once, ascending, padded with an invalid row.
      start: `[n + 1]`, where each rank's rows begin in `wanted`.
      place: `[ids]`, each id's index in `wanted`.
      owner: `[ids]`, the rank that owns each id.
      num_rounds: `[]`, the same on every rank; or an int.
      size: rows per round.
    """

    wanted: jax.Array
    start: jax.Array
    place: jax.Array
    owner: jax.Array
    num_rounds: Any
    size: int

    def asked(self, round_number: Any, rows_per_rank: int) -> tuple[jax.Array, jax.Array]:
        """Return indices in `wanted`, out of range after its end, and ids, each `[n, size]`."""
        index = self.start[:-1, None] + round_number * self.size + jnp.arange(self.size)
        rank = jnp.arange(len(self.start) - 1)[:, None]
        rows = self.wanted.at[index].get(mode="clip") - rank * rows_per_rank
        return jnp.where(index < self.start[1:, None], index, len(self.wanted)), rows


def _num_smaller(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """As `jnp.searchsorted`, which fails in a typed shard_map beside a compiler's axis."""
    found = jnp.zeros(values.shape, jnp.int32)
    for i in reversed(range(ascending.size.bit_length())):
        more = found + 2**i
        is_smaller = (more <= ascending.size) & (ascending[more - 1] < values)
        found = jnp.where(is_smaller, more, found)
    return found


def _route(
    calls: Collectives, token: Token, ids: jax.Array, rows_per_rank: int
) -> tuple[Token, _Route]:
    (num_ids,), num_ranks = ids.shape, calls.num_ranks
    order = jnp.argsort(ids)
    in_order = ids[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])
    place_in_order = jnp.cumsum(is_first) - 1
    end = num_ranks * rows_per_rank
    wanted = jnp.full_like(ids, end).at[place_in_order].set(in_order, indices_are_sorted=True)
    place = jnp.zeros_like(order).at[order].set(place_in_order, unique_indices=True)
    start = _num_smaller(wanted, jnp.arange(num_ranks + 1, dtype=ids.dtype) * rows_per_rank)
    size = round_size(num_ids, rows_per_rank, num_ranks)
    num_rounds: Any = 1
    if size < min(num_ids, rows_per_rank):
        own = -(-jnp.max(jnp.diff(start)) // size)
        token, everyones_rounds = calls.gathered(token, own[None], "rounds")
        num_rounds = jnp.max(everyones_rounds)
    return token, _Route(wanted, start, place, ids // rows_per_rank, num_rounds, size)


_Turn = tuple[Token, jax.Array]


def _rounds(route: _Route, body: Callable[[Any, _Turn], _Turn], start: _Turn) -> _Turn:
    if isinstance(route.num_rounds, int):
        return body(0, start)
    return lax.fori_loop(0, route.num_rounds, body, start)


def _take_from_rows(calls: Collectives, token: Token, part: jax.Array, ids: jax.Array) -> _Turn:
    token, route = _route(calls, token, ids, len(part))
    offset = route.place - route.start[route.owner]
    slot = route.owner * route.size + offset % route.size

    def one_round(i: Any, turn: _Turn) -> _Turn:
        token, found = turn
        _, asked = route.asked(i, len(part))
        token, [to_find] = calls.sent(token, [asked], 0, 0, "ids")
        rows = part.at[to_find].get(mode="fill", fill_value=0)
        token, [rows] = calls.sent(token, [rows], 0, 0, "rows")
        is_here = (offset // route.size == i).reshape(-1, *[1] * (part.ndim - 1))
        return token, jnp.where(is_here, rows.reshape(-1, *part.shape[1:])[slot], found)

    nothing = jnp.zeros((len(ids), *part.shape[1:]), part.dtype)
    return _rounds(route, one_round, (token, axis.as_typed_like(nothing, part)))


def _add_to_rows(
    calls: Collectives, token: Token, rows: jax.Array, ids: jax.Array, per_rank: int
) -> _Turn:
    token, route = _route(calls, token, ids, per_rank)
    sums = jnp.zeros_like(rows).at[route.place].add(rows)

    def one_round(i: Any, turn: _Turn) -> _Turn:
        token, total = turn
        index, asked = route.asked(i, per_rank)
        to_add = sums.at[index].get(mode="fill", fill_value=0)
        token, [where, received] = calls.sent(token, [asked, to_add], 0, 0, "rows")
        return token, total.at[where].add(received, mode="drop")

    nothing = jnp.zeros((per_rank, *rows.shape[1:]), rows.dtype)
    return _rounds(route, one_round, (token, axis.as_typed_like(nothing, rows)))


_NO_SECOND_TRANSPOSE = (
    "the gradient of jdp.sharded_embedding is differentiated in reverse mode, which jdp does not "
    "support. Write the outer derivative in forward mode (jax.jvp, jax.jacfwd), or look up rows "
    "in an unsharded table."
)


def take_rows(part: jax.Array, ids: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """Return rows of a table sharded over `axes`; its transpose sums rows into the shards.

    Args:
      part: this rank's shard, `[rows / n, ...]`, or `[rows, ..., size / n, ...]` for dim > 0.
      ids: int, any shape, 0 <= ids < rows; they may differ between ranks.
    """
    return take_p.bind(part, ids, dim=dim, axes=axes, num_ranks=lax.axis_size(axes))


# JAX cannot transpose a loop with collectives. Under `vmap` a batch's ids are one lookup; JAX would
# batch the loop.
take_p = jax.extend.core.Primitive("jdp_take_rows")
add_p = jax.extend.core.Primitive("jdp_add_rows")


def _resized(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@take_p.def_abstract_eval
def _taken_type(part: Any, ids: Any, *, dim: int, axes: tuple[str, ...], num_ranks: int) -> Any:
    whole = _resized(part.shape, dim, part.shape[dim] * num_ranks)
    return axis.reshaped(part, (*ids.shape, *whole[1:]))


@add_p.def_abstract_eval
def _added_type(
    rows: Any, ids: Any, *, num_rows: int, dim: int, axes: tuple[str, ...], num_ranks: int
) -> Any:
    whole = (num_rows, *rows.shape[ids.ndim :])
    return axis.reshaped(rows, _resized(whole, dim, whole[dim] // num_ranks))


def _jvp(primitive: Any, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
    out = primitive.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, primitive.bind(tangents[0], primals[1], **params)


def _take_transpose(cotangent: Any, part: Any, ids: Any, *, dim: int, **split: Any) -> list[Any]:
    aval = part.aval
    if type(cotangent) is ad.Zero:
        return [ad.Zero(aval), None]
    num_rows = aval.shape[0] * (split["num_ranks"] if dim == 0 else 1)
    return [add_p.bind(cotangent, ids, num_rows=num_rows, dim=dim, **split), None]


def _add_transpose(cotangent: Any, rows: Any, ids: Any, **params: Any) -> list[Any]:
    raise ValueError(_NO_SECOND_TRANSPOSE)


def _batch(primitive: Any, args: tuple, dims: tuple, *, dim: int, **params: Any) -> tuple[Any, Any]:
    (x, ids), (x_dim, ids_dim) = args, dims
    is_take = primitive is take_p
    if ids_dim is None:  # the batch dim becomes the first one of the rows
        x = jnp.moveaxis(x, x_dim, 1 if is_take else ids.ndim)
        out = primitive.bind(x, ids, dim=dim + (dim > 0), **params)
        return out, ids.ndim if is_take else 1
    ids = jnp.moveaxis(ids, ids_dim, 0)
    if is_take and x_dim is None:
        return primitive.bind(x, ids, dim=dim, **params), 0
    each = [x] * len(ids) if x_dim is None else jnp.moveaxis(x, x_dim, 0)
    outs = [primitive.bind(y, i, dim=dim, **params) for y, i in zip(each, ids, strict=True)]
    return jnp.stack(outs), 0


def _run(
    exchange: Callable, x: Any, ids: Any, *, axes: tuple[str, ...], num_ranks: int, **params: Any
) -> jax.Array:
    calls = _XlaCollectives(axes, num_ranks)
    return exchange(calls, None, x, ids, **params)[1]


for _primitive, _exchange, _transpose in (
    (take_p, exchange_and_take, _take_transpose),
    (add_p, exchange_and_add, _add_transpose),
):
    ad.primitive_jvps[_primitive] = functools.partial(_jvp, _primitive)
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = functools.partial(_batch, _primitive)
    _by_xla = functools.partial(_run, _exchange)
    mlir.register_lowering(_primitive, mlir.lower_fun(_by_xla, multiple_results=False))


# (rank, group, scale, token, shard or rows, ids) -> (token, rows or shard). One equation is several
# calls, some in a loop of data-dependent length; in the order of a step it counts as one.
_NATIVE = {each: jax.extend.core.Primitive(f"{each.name}_native") for each in (take_p, add_p)}
_ONE = np.float32(1)


def exchanged(
    eqn: Any, operands: Sequence[Any], around: Sequence[Any], mesh: Mesh | None
) -> list[jax.Array] | None:
    """Run `take_p` or `add_p` by native calls; None for others, or without a token's order."""
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
    rank: Any
    group: Any
    number: int
    num_ranks: int
    options: dict[str, Any]

    def gathered(self, token: Any, x: jax.Array, name: str) -> tuple[Any, jax.Array]:
        token, (whole,) = self._results(all_gather_p, token, [x], [0], name)
        return token, whole

    def sent(
        self, token: Any, leaves: Sequence[jax.Array], split: int, joined: int, name: str
    ) -> tuple[Any, list[jax.Array]]:
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


def _run_native(
    exchange: Callable, rank: Any, group: Any, scale: Any, token: Any, x: Any, ids: Any,
    *, axes: Any, num_ranks: int, number: int, communicator: int, beside_xla: bool, as_xla: bool,
    **params: Any,
) -> tuple[Any, Any]:  # fmt: skip
    options = dict(axes=axes, communicator=communicator, beside_xla=beside_xla, as_xla=as_xla)
    calls = _NativeCalls(rank, group, number, num_ranks, options)
    return exchange(calls, token, x, ids, **params)


def _typed(
    type_of: Callable, rank: Any, group: Any, scale: Any, token: Any, x: Any, ids: Any,
    *, number: int, communicator: int, beside_xla: bool, as_xla: bool, **params: Any,
) -> list[Any]:  # fmt: skip
    return [jax.core.ShapedArray(token.shape, token.dtype), type_of(x, ids, **params)]


for _of_xla, _type_of, _native_exchange in (
    (take_p, _taken_type, exchange_and_take),
    (add_p, _added_type, exchange_and_add),
):
    _native_primitive = _NATIVE[_of_xla]
    _native_primitive.multiple_results = True
    _native_primitive.def_abstract_eval(functools.partial(_typed, _type_of))
    _rule = mlir.lower_fun(functools.partial(_run_native, _native_exchange), multiple_results=True)
    mlir.register_lowering(_native_primitive, _rule, platform="cpu", cacheable=False)
