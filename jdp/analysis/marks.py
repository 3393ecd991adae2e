"""Marks: identity operations that the uniformity analysis looks for in a traced program."""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

# The kind of mark on a gradient that is about to be reduced.
LOCAL = "local"
# The kind of mark that a collective puts on its result, see `mark`.
ALL_REDUCED = "all_reduced"
# Marks the inputs of a step's weight. Reading an input for the weight does not count as a use.
WEIGHED = "weighed"
# The kind of mark on gradients that have a weight other than that of their step.
OWN_WEIGHT = "own_weight"
# Marks of `jdp.scan_layers`: a value that must be the same on every rank, and a gradient that is
# a mean over ranks and may be averaged again.
SHARED = "shared"
AVERAGED = "averaged"
# Marks on the parameters of `jdp.scan_layers`: on this platform it reduces in the backward loop;
# on this platform it does not; it would do so on more than one rank.
LATE_HERE = "late_here"
LATE_ELSEWHERE = "late_elsewhere"
LATE_ON_MORE_RANKS = "late_on_more_ranks"
# Facts that a program does not show: a reduction was divided by the number of ranks; a number is
# this rank's share of the weights of all ranks, which add up to 1; the user wants the sum.
MEAN = "mean"
SHARE = "share"
SUMMED = "summed"
# A sum over the rounds of a loop, of terms that each round has divided by the number of rounds.
ROUNDS = "rounds"
# A gradient that the user has declared as reduced.
SYNCED = "synced"
# A gradient that goes into the update of parameters which losses see in fewer bits. Its result is
# not used.
OF_MASTERS = "of_masters"
# A rank's part of a value that is equal on all ranks; a value that must be equal on all ranks
# because their parts of it are put together; and the value that was put together.
SHARD = "shard"
PART = "part"
WHOLE = "whole"
# A value that differs from rank to rank. Its path is the name for it in errors.
SOURCE = "source"

# A value whose type has lost the mesh.
MESHLESS = "meshless"

# The name scope of jdp's weighted sum over ranks. JAX keeps the name in the transposed sum, which
# the analysis thereby distinguishes from a user's collective.
WEIGHTED_SUM = "jdp_weighted_sum"
# The name scope of `jdp.value_and_grad` where it hands the loss parameters in fewer bits.
NARROW_LOSS = "jdp_narrow_loss"
# The name of the jitted function that computes one micro-batch and its gradient.
MICRO_BATCH = "jdp_micro_batch"


def mark(x: jax.Array, *, kind: str, path: str, axes: tuple[str, ...]) -> jax.Array:
    """Return `x` unchanged, with a mark in the traced program.

    The mark survives grad, vmap, jvp, scan, jit and rematerialization. It is an operation that no
    policy of `jax.checkpoint` saves by name and that no lowering emits (on CPU a local gradient may
    get an optimization barrier, see `_unfolded`). Cotangents are not marked, and tangents only if
    the kind is `"all_reduced"`. Under a `vmap` that binds one of `axes`, the mark loses that axis:
    the operation then runs over the rows of an array, not over ranks.

    >>> import jax
    >>> noted = lambda x: mark(x, kind="local", path="['w']", axes=("data",)) ** 2
    >>> "path=['w']" in str(jax.make_jaxpr(jax.grad(noted))(3.0)), jax.grad(noted)(3.0)
    (True, Array(6., dtype=float32, weak_type=True))
    """
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return _mark_p.bind(x, kind=kind, path=path, axes=tuple(axes))


def without_mesh(x: jax.Array) -> jax.Array:
    """Return `x` with a type that has no mesh, marked as `MESHLESS`."""
    return _mark_p.bind(x, kind=MESHLESS, path="", axes=())


_mark_p = jax.extend.core.Primitive("jdp_mark")


def _jvp(primals: tuple, tangents: tuple, **note: Any) -> tuple[Any, Any]:
    (slope,) = tangents
    # The tangent of a sum over ranks is also a sum over ranks.
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
# Every mark is different, so JAX's cache of lowerings would emit a function for each.
mlir.register_lowering(_mark_p, lambda context, x, **note: [x], cacheable=False)
mlir.register_lowering(
    _mark_p,
    lambda context, x, *, kind, **note: [_unfolded(x) if kind == LOCAL else x],
    platform="cpu",
    cacheable=False,
)

# Operations that may stand between product and gradient, and move or cast single elements.
_MOVES = ("stablehlo.transpose", "stablehlo.reshape", "stablehlo.convert")


def _unfolded(x: Any) -> Any:
    """Keep XLA from folding the transpose of a weight's gradient into the product before it.

    JAX turns the gradient of `x @ w` into a transposed product, and XLA's CPU backend is slower if
    the product writes the transpose (a transformer's step takes 6 to 15 % longer). In a jitted step
    without jdp, the all-reduce separates the two. Here a barrier does.
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
    # For example over rows and positions. If the product sums over rows only, it can write the
    # transpose at full speed, and a separate transpose took a fifth longer.
    if op.name != "stablehlo.dot_general":
        return False
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    return len(dims.lhs_contracting_dimensions) > 1


def _operation(value: Any) -> Any:
    return None if isinstance(value.owner, ir.Block) else value.owner
