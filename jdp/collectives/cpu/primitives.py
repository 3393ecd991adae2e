"""The native collectives' JAX primitives."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh

from jdp import axis, jax_compat
from jdp.collectives import call_order
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu import shared_memory
from jdp.collectives.xla import Scale, scaled


def of_one_row(args: Sequence[Any], places: Sequence[int | None]) -> list[Any]:
    """Return the operands before the leaves, equal in all `vmap` rows."""
    before = zip(args[: call_order.TOKEN + 1], places, strict=False)
    return [
        x if place is None else lax.index_in_dim(x, 0, place, keepdims=False) for x, place in before
    ]


# XLA keeps all leaves of a native call, whose token the next call reads. A step gathers its whole
# state and reads few leaves, so JAX drops the others before.
_NUM_BEFORE = call_order.TOKEN + 1


def drop_dead_results(primitive: Any, *, of_leaves: Sequence[str] = ()) -> None:
    """Make JAX drop a primitive's unread leaves, and empty calls."""
    jax_compat.set_dead_code_rule(primitive, functools.partial(_without_unread, of_leaves))


def _without_unread(
    of_leaves: Sequence[str], is_read: Sequence[bool], eqn: Any
) -> tuple[list[bool], Any]:
    """Return which operands are needed, and the reduced equation."""
    _, *leaves = is_read
    if all(leaves) or not any(is_read):
        kept = eqn if any(is_read) else None
        return [kept is not None] * len(eqn.invars), kept
    more = itertools.compress(leaves, eqn.params.get("overwrites", ()))
    needed = [i == call_order.TOKEN or any(leaves) for i in range(_NUM_BEFORE)] + [*leaves, *more]
    chosen = [0, *(i for i, flag in enumerate(leaves, 1) if flag)]
    changes = {
        "invars": [x for x, flag in zip(eqn.invars, needed, strict=True) if flag],
        "outvars": [eqn.outvars[i] for i in chosen],
    }
    if not any(leaves):  # The next call waits for this one.
        return needed, eqn.replace(primitive=lax.copy_p, params={}, **changes)
    params = dict(eqn.params)
    for name in of_leaves:
        params[name] = tuple(params[name][i - 1] for i in chosen[1:])
    return needed, eqn.replace(params=params, **changes)


def _lowered_call(
    name: str,
    context: Any,
    args: Sequence[Any],
    *,
    in_place: Iterable[int],
    number: int,
    num_ranks: int,
    communicator: int,
    beside_xla: bool,
    as_xla: bool,
    **attributes: Any,
) -> Any:
    rule = jax.ffi.ffi_lowering(
        cpu_runtime.target(name, beside_xla=beside_xla),
        operand_output_aliases={i: i - call_order.TOKEN for i in in_place},
    )
    return rule(
        context,
        *args,
        num_ranks=np.int32(num_ranks),
        bucket=np.int32(number),
        communicator=np.int64(communicator),
        as_xla=as_xla,
        **attributes,
    )


# (rank, group, scale, token, *leaves) -> (token, *leaves)
all_reduce_p = jax.extend.core.Primitive("jdp_all_reduce")
all_reduce_p.multiple_results = True


@all_reduce_p.def_impl
def _run(*args: Any, **params: Any) -> Any:
    return jax.jit(functools.partial(all_reduce_p.bind, **params))(*args)


# JAX types them as uniform, so a typed shard_map may return them as P().
@all_reduce_p.def_abstract_eval
def _sum_type(rank: Any, group: Any, scale: Any, *rest: Any, **params: Any) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in rest]


def _lower_sum(context: Any, *args: Any, axes: Any, algorithm: int, **params: Any) -> Any:
    # In place: gradients are usually dead afterwards, and XLA copies live leaves.
    places = range(call_order.TOKEN, len(args))
    kind = np.int32(algorithm)
    return _lowered_call(
        cpu_runtime.TARGET, context, args, in_place=places, algorithm=kind, **params
    )


def _sum_jvp(primals: tuple, tangents: tuple, *, number: int, **params: Any) -> tuple[Any, Any]:
    rank, group, scale, _, *_ = primals
    token, *sums = all_reduce_p.bind(*primals, number=number, **params)
    slopes = [ad.instantiate_zeros(t) for t in tangents[_NUM_BEFORE:]]
    number = call_order.derived(number, "tangent")
    _, *slopes = all_reduce_p.bind(rank, group, scale, token, *slopes, number=number, **params)
    return [token, *sums], [ad.Zero(jax.typeof(token).to_tangent_aval()), *slopes]


def _sum_transpose(
    cotangents: Sequence[Any], rank: Any, group: Any, scale: Any, token: Any, *leaves: Any,
    axes: tuple[str, ...], number: int, **params: Any,
) -> list[Any]:  # fmt: skip
    # As for psum: each rank's loss depends on the sum, so cotangents add up, except in a typed
    # shard_map, where all ranks have the same one.
    given = [ad.instantiate_zeros(ct) for ct in cotangents[1:]]
    if axis.is_typed(axes):
        given = [axis.as_varying(scaled(ct, scale), axes) for ct in given]
    else:
        number = call_order.derived(number, "cotangent")
        _, *given = all_reduce_p.bind(
            rank, group, scale, token, *given, axes=axes, number=number, **params
        )
    asked = map(ad.is_undefined_primal, leaves)
    given = [ct if is_asked else None for ct, is_asked in zip(given, asked, strict=True)]
    return [None] * _NUM_BEFORE + given


# Rows of a vmap are summed independently, unless they have the axis's name.
def _sum_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, axes: Any, **params: Any
) -> tuple[Any, Any]:
    before, leaves = of_one_row(args, dims), args[_NUM_BEFORE:]
    if axis_data.name in axes:
        remaining = tuple(name for name in axes if name != axis_data.name)
        sums = [
            _sum_of_rows(x, dim, axis_data.size, remaining, scale=before[2])
            for x, dim in zip(leaves, dims[_NUM_BEFORE:], strict=True)
        ]
        return [before[-1], *sums], [None] * (1 + len(sums))
    out = all_reduce_p.bind(*before, *leaves, axes=axes, **params)
    return out, [None, *dims[_NUM_BEFORE:]]


def _sum_of_rows(x: Any, dim: Any, size: int, axes: tuple[str, ...], *, scale: Any) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_float else x
    total = wide * size if dim is None else wide.sum(dim, dtype=wide.dtype)
    total = lax.psum(total, axes) if axes else total
    return (total * scale).astype(x.dtype) if is_float else total


ad.primitive_jvps[all_reduce_p] = _sum_jvp
ad.primitive_transposes[all_reduce_p] = _sum_transpose
batching.fancy_primitive_batchers[all_reduce_p] = _sum_batch
drop_dead_results(all_reduce_p)
mlir.register_lowering(all_reduce_p, _lower_sum, platform="cpu", cacheable=False)


# (rank, group, scale, token, *leaves) -> (token, *leaves), with the parameters
#   dims: each leaf's split dim, None for a whole leaf of a reduce-scatter; of an all-to-all
#     the pair of split and concatenated dims,
#   overwrites: of an all-gather, for each leaf whether its result reuses the memory of an operand
#     after the leaves, whose value is ignored,
#   axes, num_ranks, number, communicator, beside_xla, as_xla: as for the all-reduce.
# In a typed shard_map the results vary, except whole sums. Reduce-scatter and all-gather are mutual
# transposes; an all-to-all's transpose swaps its dims.
reduce_scatter_p = jax.extend.core.Primitive(cpu_runtime.REDUCE_SCATTER)
all_gather_p = jax.extend.core.Primitive(cpu_runtime.ALL_GATHER)
all_to_all_p = jax.extend.core.Primitive(cpu_runtime.ALL_TO_ALL)
_ONE = np.float32(1)
_WHOLE = -1  # in the native code: unsplit


def _split_and_joined(primitive: Any, dim: Any) -> tuple[int | None, int | None]:
    """Return the dims that shrink and grow by the number of ranks."""
    if primitive is all_to_all_p:
        return dim
    return (None, dim) if primitive is all_gather_p else (dim, None)


def _typed(
    primitive: Any, rank: Any, group: Any, scale: Any, token: Any, *leaves: Any,
    dims: tuple[Any, ...], num_ranks: int, **params: Any,
) -> list[Any]:  # fmt: skip
    resized = []
    for x, dim in zip(leaves[: len(dims)], dims, strict=True):
        if dim is None:  # equal on every rank
            resized.append(jax.core.ShapedArray(x.shape, x.dtype))
            continue
        shape = list(x.shape)
        split, joined = _split_and_joined(primitive, dim)
        if split is not None:
            shape[split] //= num_ranks
        if joined is not None:
            shape[joined] *= num_ranks
        resized.append(x.update(shape=tuple(shape)))
    return [jax.core.ShapedArray(token.shape, token.dtype), *resized]


def _lower(
    name: str, context: Any, *args: Any, axes: Any, dims: tuple[Any, ...],
    overwrites: tuple[bool, ...] = (), **params: Any,
) -> Any:  # fmt: skip
    # In place only inside arrays of the results' size.
    places = [call_order.TOKEN, *(_NUM_BEFORE + i for i, flag in enumerate(overwrites) if flag)]
    if len(places) > 1:
        context, args = _put_into_wholes(context, args, dims, overwrites)
    flat = np.array([_WHOLE if dim is None else dim for dim in dims], np.int64).reshape(-1)
    return _lowered_call(name, context, args, in_place=places, dims=flat, **params)


def _put_into_wholes(
    context: Any, args: Sequence[Any], dims: tuple[int, ...], overwrites: tuple[bool, ...]
) -> tuple[Any, tuple[Any, ...]]:
    """Make leaves slices of arrays they overwrite; a barrier parts XLA's copy from the write."""

    def operands(*args: jax.Array) -> list[jax.Array]:
        rank, leaves, wholes = args[0], args[_NUM_BEFORE:][: len(dims)], args[_NUM_BEFORE:]
        left = iter(wholes[len(dims) :])
        put = [
            lax.dynamic_update_slice_in_dim(next(left), x, rank * x.shape[dim], dim) if flag else x
            for x, dim, flag in zip(leaves, dims, overwrites, strict=True)
        ]
        return [*args[:_NUM_BEFORE], *lax.optimization_barrier(put)]

    types = jax.eval_shape(
        operands, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in context.avals_in)
    )
    types = [jax.core.ShapedArray(x.shape, x.dtype) for x in types]
    within = context.replace(primitive=None, avals_out=types)
    args = mlir.lower_fun(operands, multiple_results=True)(within, *args)
    return context.replace(avals_in=types), tuple(args)


def _jvp(
    primitive: Any, primals: tuple, tangents: tuple, *, number: int, **params: Any
) -> tuple[Any, Any]:
    rank, group, scale, _, *_ = primals
    token, *results = primitive.bind(*primals, number=number, **params)
    count = len(params["dims"])
    slopes = [ad.instantiate_zeros(slope) for slope in tangents[_NUM_BEFORE:][:count]]
    slopes = axis.as_varying(slopes, params["axes"])
    params |= _nothing_overwritten(params)
    number = call_order.derived(number, "tangent")
    _, *slopes = primitive.bind(rank, group, scale, token, *slopes, number=number, **params)
    return [token, *results], [ad.Zero(jax.typeof(token).to_tangent_aval()), *slopes]


def _nothing_overwritten(params: dict[str, Any]) -> dict[str, Any]:
    flags = params.get("overwrites")
    return {} if flags is None else {"overwrites": (False,) * len(flags)}


def _transpose(
    other: Any, cotangents: Sequence[Any], rank: Any, group: Any, scale: Any, token: Any,
    *leaves: Any, number: int, dims: tuple[Any, ...], overwrites: Any = None, **params: Any,
) -> list[Any]:  # fmt: skip
    leaves, wholes = leaves[: len(dims)], leaves[len(dims) :]
    given = axis.as_varying([ad.instantiate_zeros(ct) for ct in cotangents[1:]], params["axes"])
    whole = [i for i, dim in enumerate(dims) if dim is None]
    cut = [i for i, dim in enumerate(dims) if dim is not None]
    found = {i: given[i] for i in whole}
    if whole and not axis.is_typed(params["axes"]):  # as an all-reduce's cotangents
        token, *sums = reduce_scatter_p.bind(
            rank, group, _ONE, token, *found.values(), dims=(None,) * len(whole),
            number=call_order.derived(number, "cotangent of whole"), **params,
        )  # fmt: skip
        found = dict(zip(whole, sums, strict=True))
    if cut:
        of_cut = tuple(dims[i] for i in cut)
        if other is all_gather_p:
            params["overwrites"] = (False,) * len(cut)
        if other is all_to_all_p:
            of_cut = tuple((joined, split) for split, joined in of_cut)
        _, *results = other.bind(
            rank, group, _ONE, token, *(given[i] for i in cut), dims=of_cut,
            number=call_order.derived(number, "cotangent"), **params,
        )  # fmt: skip
        found |= dict(zip(cut, results, strict=True))
    asked = map(ad.is_undefined_primal, leaves)
    own = [scaled(found[i], scale) if is_asked else None for i, is_asked in enumerate(asked)]
    return [None] * _NUM_BEFORE + own + [None] * len(wholes)


def _batch(
    primitive: Any, of_rows: Callable, axis_data: Any, args: Sequence[Any], places: Sequence[Any],
    *, axes: tuple[str, ...], dims: tuple[Any, ...], num_ranks: int, **params: Any,
) -> tuple[Any, Any]:  # fmt: skip
    before, leaves = of_one_row(args, places), args[_NUM_BEFORE:][: len(dims)]
    places, params = places[: _NUM_BEFORE + len(dims)], params | _nothing_overwritten(params)
    leaves = [
        x if place is None else jnp.moveaxis(x, place, 0)
        for x, place in zip(leaves, places[_NUM_BEFORE:], strict=True)
    ]
    is_batched = [place is not None for place in places[_NUM_BEFORE:]]
    if axis_data.name in axes:  # its rows have the axis's name
        if axes != (axis_data.name,):
            raise NotImplementedError(
                f"{primitive.name} over {axes} is ambiguous, because a vmap also uses the name "
                f"{axis_data.name!r}. Rename the axis of the vmap."
            )
        rows = [
            x if flag else jnp.broadcast_to(x, (num_ranks, *x.shape))
            for x, flag in zip(leaves, is_batched, strict=True)
        ]
        results = [of_rows(x, dim, before[2]) for x, dim in zip(rows, dims, strict=True)]
        return [before[-1], *results], [None, *[0] * len(results)]
    dims = tuple(
        jax.tree.map(lambda i, flag=flag: i + flag, dim)
        for dim, flag in zip(dims, is_batched, strict=True)
    )
    out = primitive.bind(*before, *leaves, axes=axes, dims=dims, num_ranks=num_ranks, **params)
    return out, [None, *(0 if flag else None for flag in is_batched)]


def _scatter_rows(rows: jax.Array, dim: int | None, scale: Any) -> jax.Array:
    """Return each row's slice of the sum, `[n, ...]`."""
    is_float = jnp.issubdtype(rows.dtype, jnp.floating)
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32)) if is_float else rows
    total = wide.sum(0, dtype=wide.dtype)
    total = (total * scale if is_float else total).astype(rows.dtype)
    if dim is None:
        return jnp.broadcast_to(total, rows.shape)
    return jnp.stack(jnp.split(total, len(rows), axis=dim))


def _gather_rows(rows: jax.Array, dim: int, scale: Any) -> jax.Array:
    return jnp.broadcast_to(whole := jnp.concatenate([*rows], axis=dim), (len(rows), *whole.shape))


def _exchange_rows(rows: jax.Array, dims: tuple[int, int], scale: Any) -> jax.Array:
    split, joined = dims
    slices = [jnp.split(row, len(rows), axis=split) for row in rows]
    return jnp.stack([jnp.concatenate(each, axis=joined) for each in zip(*slices, strict=True)])


def _register(
    primitive: Any, transpose: Any, of_rows: Callable[..., jax.Array], of_leaves: Sequence[str]
) -> None:
    def run(*args: Any, **params: Any) -> Any:
        return jax.jit(functools.partial(primitive.bind, **params))(*args)

    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(functools.partial(_typed, primitive))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = functools.partial(_transpose, transpose)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, primitive, of_rows)
    drop_dead_results(primitive, of_leaves=of_leaves)
    lower = functools.partial(_lower, primitive.name)
    mlir.register_lowering(primitive, lower, platform="cpu", cacheable=False)


_register(reduce_scatter_p, all_gather_p, _scatter_rows, ["dims"])
_register(all_gather_p, reduce_scatter_p, _gather_rows, ["dims", "overwrites"])
_register(all_to_all_p, all_to_all_p, _exchange_rows, ["dims"])


SUMMED_DTYPES = frozenset(
    "float32 float64 bfloat16 float16 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
)

# MLIR compares a call's leaves pairwise: 1.5 s for 10,000.
_MAX_LEAVES = 512


class Calls:
    """A function's calls, each after the previous one; `axes` number the ranks in their order."""

    def __init__(self, axes: tuple[str, ...], mesh: Mesh | None):
        self._rank, self._group = lax.axis_index(axes), _group(axes)
        self._options = dict(
            axes=axes,
            num_ranks=axis.size(axes),
            communicator=shared_memory.communicator(mesh, axes),
            beside_xla=call_order.is_beside_xla(),
            as_xla=call_order.is_as_xla(),
        )
        token = call_order.token()
        self._token: Any = np.zeros(1, np.float32) if token is None else token

    def summed(
        self, primitive: Any, bucket: Sequence[jax.Array], scale: Scale, **params: Any
    ) -> list[jax.Array]:
        """Return the sums of one dtype's leaves, times `scale`."""
        # The call fuses a number's scaling into its rounding. Integers are scaled as in XLA's sums.
        dtype = bucket[0].dtype
        is_fused = isinstance(scale, (int, float)) and jnp.issubdtype(dtype, jnp.floating)
        fused = np.asarray(scale if is_fused else 1, "float64" if dtype == "float64" else "float32")
        sums = self.results(primitive, bucket, fused, **params)
        return sums if is_fused else [scaled(leaf, scale) for leaf in sums]

    def results(
        self,
        primitive: Any,
        bucket: Sequence[jax.Array],
        scale: Any,
        overwritten: Sequence[jax.Array | None] = (),
        **params: Any,
    ) -> list[jax.Array]:
        """Return a primitive's results with a `[]` `scale`, in calls of 512 leaves."""
        results: list[jax.Array] = []
        for first in range(0, len(bucket), _MAX_LEAVES):
            chosen = slice(first, first + _MAX_LEAVES)
            part = bucket[chosen]
            own = {
                key: value[chosen] if isinstance(value, tuple) else value
                for key, value in params.items()
            }
            more = [x for x in overwritten[chosen] if x is not None]
            number = call_order.next_number(part)
            self._token, *leaves = primitive.bind(
                self._rank, self._group, scale, self._token, *part, *more,
                number=number, **own, **self._options,
            )  # fmt: skip
            results += leaves
        return results

    def end(self) -> None:
        """Record the last token for the program's next calls."""
        if isinstance(self._token, jax.Array):
            call_order.passed(self._token)


def _group(axes: tuple[str, ...]) -> jax.Array:
    # Ranks along another axis belong to another reduction.
    around = axis.enclosing_mesh()
    others = tuple(n for n in around.axis_names if n in around.manual_axes and n not in axes)
    return lax.axis_index(others) if others else jnp.int32(0)
