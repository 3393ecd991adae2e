"""Marks: identity operations for the uniformity analysis."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

# A gradient before its reduction.
LOCAL = "local"
# A gradient that updates one rank's parameters; an outer gradient before its reduction.
LOCAL_UPDATE = "local_update"
OUTER = "outer"
# A collective's result, see `mark`.
ALL_REDUCED = "all_reduced"
# An input of a step's weight; it does not count as used.
WEIGHED = "weighed"
# A gradient with another weight than the step's.
OWN_WEIGHT = "own_weight"
# `jdp.scan_layers`: a value that must be uniform; a mean that may be averaged again.
SHARED = "shared"
AVERAGED = "averaged"
# `jdp.scan_layers` reduces in the backward loop here; only on other platforms; only on more ranks.
LATE_HERE = "late_here"
LATE_ELSEWHERE = "late_elsewhere"
LATE_ON_MORE_RANKS = "late_on_more_ranks"
# Hidden facts: a sum divided by the number of ranks; a rank's share of the total weight; a wanted
# sum.
MEAN = "mean"
SHARE = "share"
SUMMED = "summed"
# A sum over rounds, of terms already divided by their number.
ROUNDS = "rounds"
# A gradient declared as reduced.
SYNCED = "synced"
# A gradient for parameters that losses see in fewer bits.
OF_MASTERS = "of_masters"
# A shard of a uniform value; a shard that must be one; the combined value.
SHARD = "shard"
PART = "part"
WHOLE = "whole"
# A differing value; its path is its name in errors.
SOURCE = "source"

# A value whose type has lost the mesh.
MESHLESS = "meshless"

# The scope of jdp's weighted sum, kept by JAX in its transpose.
WEIGHTED_SUM = "jdp_weighted_sum"
# The scope of losses with narrow parameters.
NARROW_LOSS = "jdp_narrow_loss"
# A micro-batch's jitted function and its gradient.
MICRO_BATCH = "jdp_micro_batch"


def mark(x: jax.Array, *, kind: str, path: str, axes: tuple[str, ...]) -> jax.Array:
    """Return `x` unchanged, with a mark in the traced program.

    The mark survives grad, vmap, jvp, scan, jit and rematerialization, is not saved by name by
    `jax.checkpoint`, and lowers to nothing but a barrier on CPU, see `_unfolded`. Cotangents are
    not marked, and tangents only for `"all_reduced"`. A `vmap` over one of `axes` removes that
    axis: the operation then runs over rows.
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return _mark_p.bind(x, kind=kind, path=path, axes=tuple(axes))


def without_mesh(x: jax.Array) -> jax.Array:
    """Return `x` with a type without mesh, marked as `MESHLESS`."""
    return _mark_p.bind(x, kind=MESHLESS, path="", axes=())


_mark_p = jax.extend.core.Primitive("jdp_mark")


def _jvp(primals: tuple, tangents: tuple, **note: Any) -> tuple[Any, Any]:
    (slope,) = tangents
    # The tangent of a sum over ranks is one, too.
    if note["kind"] == ALL_REDUCED and type(slope) is not ad.Zero:
        slope = _mark_p.bind(slope, **note)
    return _mark_p.bind(*primals, **note), slope


def _batch(
    axis_data: Any, values: tuple, dims: tuple, *, axes: tuple[str, ...], **note: Any
) -> tuple:
    remaining = tuple(name for name in axes if name != axis_data.name)
    return _mark_p.bind(*values, axes=remaining, **note), dims[0]


def _type(x: Any, *, kind: str, **note: Any) -> Any:
    if kind != MESHLESS:
        return x
    return jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type)


_mark_p.def_impl(lambda x, **note: x)
_mark_p.def_abstract_eval(_type)
ad.primitive_jvps[_mark_p] = _jvp
ad.primitive_transposes[_mark_p] = lambda cotangent, x, **note: [cotangent]
batching.fancy_primitive_batchers[_mark_p] = _batch
# JAX's cache would emit a function per mark.
mlir.register_lowering(_mark_p, lambda context, x, **note: [x], cacheable=False)
mlir.register_lowering(
    _mark_p,
    lambda context, x, *, kind, **note: [_unfolded(x) if kind == LOCAL else x],
    platform="cpu",
    cacheable=False,
)

_MOVES = ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.convert")


def _unfolded(x: Any) -> Any:
    """Keep XLA:CPU from folding a weight gradient's transpose into its slower product."""
    moves = []
    product = x
    while (op := _operation(product)) is not None and op.name in _MOVES:
        moves.append(op)
        product = op.operands[0]
    is_folded = any(move.name == "stablehlo.transpose" for move in moves)
    if not is_folded or op is None or not _sums_over_dims(op):
        return x
    (value,) = stablehlo.OptimizationBarrierOp([product]).results
    for move in reversed(moves):
        copy = move.clone()
        copy.operands[0] = value
        value = copy.results[0]
    return value


def _sums_over_dims(op: Any) -> bool:
    # Rows and positions. After a product over rows alone, a separate transpose takes a fifth
    # longer.
    if op.name != "stablehlo.dot_general":
        return False
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return len(dims.lhs_contracting_dimensions) > 1


def _operation(value: Any) -> Any:
    return None if isinstance(value.owner, ir.Block) else value.owner
