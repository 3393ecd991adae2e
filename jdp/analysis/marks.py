"""Marks: identity operations that the uniformity analysis finds again in a traced program."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

# The kind of mark on a gradient on its way to being reduced.
LOCAL = "local"
# The kind of mark that a collective puts on its result, see `mark`.
ALL_REDUCED = "all_reduced"
# Marks the inputs of a step's weight; reading them for the weight does not count as a use.
WEIGHED = "weighed"
# The kind of mark on gradients that are weighed by something else than their step.
OWN_WEIGHT = "own_weight"
# Those of `jdp.scan_layers`: what must be the same on every rank; and a gradient that is a mean
# over ranks, of which a mean may be taken again.
SHARED = "shared"
AVERAGED = "averaged"
# On the parameters of `jdp.scan_layers`: the platform chose that it reduces late, or that it does
# not; and it would reduce late on more ranks than one.
LATE_HERE = "late_here"
LATE_ELSEWHERE = "late_elsewhere"
LATE_ON_MORE_RANKS = "late_on_more_ranks"
# Facts that the analysis cannot read off a reduction: it was divided by the number of ranks; a
# number is this rank's share of all weights, which add up to 1; the author wants the sum.
MEAN = "mean"
SHARE = "share"
SUMMED = "summed"
# A sum over a loop's rounds of what each round divided by their number already.
ROUNDS = "rounds"
# A gradient that is handed on as reduced already.
SYNCED = "synced"
# Where what differs from rank to rank is called by a name, its path.
SOURCE = "source"

# The scope of a sum over ranks that jdp transposes: JAX keeps the name where it transposes it, and
# the analysis tells it from a collective of the author's.
WEIGHTED_SUM = "jdp_weighted_sum"
# The name of a jitted function: one micro-batch with its gradient.
MICRO_BATCH = "jdp_micro_batch"


def mark(x: jax.Array, *, kind: str, path: str, axes: tuple[str, ...]) -> jax.Array:
    """Return `x` unchanged, and leave a mark in the traced program.

    The mark survives grad, vmap, jvp, scan, jit and rematerialization: it is an operation of its
    own, which no policy of `jax.checkpoint` saves by name and no lowering emits (on CPU a local
    gradient may leave a barrier, see `_unfolded`). Cotangents pass it by unmarked, and forward-mode
    tangents, too, unless it is `"all_reduced"`. Under a `vmap` that binds one of `axes`, that axis
    leaves the mark: what stands there happens among the rows of an array, not among ranks.

    Args:
      x: array of any shape and dtype.
      kind: of the mark. `"local"`: a gradient on its way to being reduced. The analysis reports
        such a mark and keeps the class of `x`. `"all_reduced"` is for
        collectives that are not one primitive of JAX, and believed: what stands here is the sum
        over `axes`, equal bits on every rank of them. Of some other kinds it is believed what they
        say of the scale of a value, never that ranks hold the same.
      path: the leaf's name as its author would write it.
      axes: names of the mesh axes that the mark is about.

    Returns:
      `x`.

    >>> import jax
    >>> noted = lambda x: mark(x, kind="local", path="['w']", axes=("data",)) ** 2
    >>> "path=['w']" in str(jax.make_jaxpr(jax.grad(noted))(3.0)), jax.grad(noted)(3.0)
    (True, Array(6., dtype=float32, weak_type=True))
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return _mark_p.bind(x, kind=kind, path=path, axes=tuple(axes))


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


_mark_p.def_impl(lambda x, **note: x)
_mark_p.def_abstract_eval(lambda x, **note: x)
ad.primitive_jvps[_mark_p] = _jvp
ad.primitive_transposes[_mark_p] = lambda cotangent, x, **note: [cotangent]
batching.fancy_primitive_batchers[_mark_p] = _batch
# Every mark is another one: JAX's cache of lowerings would emit a function for each.
mlir.register_lowering(_mark_p, lambda context, x, **note: [x], cacheable=False)
mlir.register_lowering(
    _mark_p,
    lambda context, x, *, kind, **note: [_unfolded(x) if kind == LOCAL else x],
    platform="cpu",
    cacheable=False,
)

# Operations between the product and the gradient that move or cast single elements.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.convert")


def _unfolded(x: Any) -> Any:
    """Keep XLA from folding the transpose of a weight's gradient into the product before it.

    JAX differentiates `x @ w` to the transpose of a product, and XLA's CPU backend is slower where
    the product writes the transpose (a transformer's step takes 6 to 15 % longer). In a step of
    plain jit the all-reduce keeps the two apart, and here a barrier.
    """
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
    # Over rows and positions, say. Where only rows are summed over, a product that writes the
    # transpose is as fast, and writing it a second time took a fifth longer.
    if op.name != "stablehlo.dot_general":
        return False
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return len(dims.lhs_contracting_dimensions) > 1


def _operation(value: Any) -> Any:
    return None if isinstance(value.owner, ir.Block) else value.owner
