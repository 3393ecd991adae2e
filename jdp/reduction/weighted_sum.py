"""Sums over ranks with the gradients of the step's weighted loss.

Let rank r have the share s_r of all weights, sum(s) = 1, and the local loss l_r. The step's loss is
sum(s_r l_r). Each rank differentiates its own l_r, and multiplies only the complete gradient by
s_r. If the ranks compute t = sum(z_r), and ct_q is the cotangent of t on rank q, then that of z_r
must be sum(s_q ct_q) / s_r. JAX transposes a psum to sum(ct_q), right only for equal shares.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp import axis
from jdp.analysis.marks import WEIGHTED_SUM
from jdp.axis import AxisName
from jdp.reduction import row_weight, step_context
from jdp.reduction.row_weight import weighed
from jdp.reduction.step_context import Scope


class Weighting(NamedTuple):
    """The factors of a sum over ranks, and those of its cotangents.

    Attributes:
      forward: `[]`, multiplies this rank's term; None: 1.
      is_adjoint: whether ranks have different weights, so JAX's transpose would be wrong.
      after: `[]`, multiplies the sum's cotangent.
      before: `[]`, multiplies this rank's cotangent; None: 1.
    """

    forward: jax.Array | None
    is_adjoint: bool = False
    after: jax.Array | None = None
    before: jax.Array | None = None
    why_not: str = ""

    def term(self, x: jax.Array) -> jax.Array:
        """Return this rank's term, in the dtype of `x`; weight 0 gives 0, even for NaN."""
        if self.is_adjoint and not self.why_not and _is_float(x):
            if self.forward is None or self.before is None:
                return _weigh(x, self.forward, self.before)
            # not the step's weight: it may depend on differentiated values
            return _weigh(weighed(x, self.forward).astype(x.dtype), None, self.before)
        return x if self.forward is None else weighed(x, self.forward).astype(x.dtype)

    def total(self, x: jax.Array) -> jax.Array:
        """Return the sum, and multiply its cotangent by `after`."""
        if not self.is_adjoint or not _is_float(x):
            return x
        return _weigh(x, None, self.after, why_not=self.why_not)

    def by_share(self, share: jax.Array | None) -> "Weighting":
        """Return the weighting in the trace of `share`."""
        if share is None:
            return self
        share = lax.stop_gradient(share)  # A second derivative gives it a tangent of zeros.
        return self._replace(forward=share, after=share)

    def named(self) -> contextlib.AbstractContextManager:
        """Return a name scope for a transposed collective."""
        return jax.named_scope(WEIGHTED_SUM) if self.is_adjoint else contextlib.nullcontext()


def weighting(weight: jax.Array | None, axis_name: AxisName, *, mean: bool) -> Weighting:
    """Return the weights of a sum's terms: the step's, another one, or None for a plain sum."""
    step = step_context.around(axis_name)
    own = None if step is None else step.weight
    if own is None:
        if weight is None:
            return Weighting(None)
        return Weighting(
            step_context.share_of(weight, axis_name) if mean else jnp.asarray(weight, float)
        )
    assert step is not None
    share = step_context.share_of(
        own, step.axis_name
    )  # among some of the ranks, too, up to a factor
    options: dict[str, Any] = {"is_adjoint": True, "why_not": _why_not(step, share)}
    if weight is own:
        forward = share if mean else jnp.asarray(own, float)
        return Weighting(forward, after=forward, **options)
    # The gradient of a rank of weight 0 is multiplied by 0.
    inverse = jnp.where(share == 0, 0, 1 / jnp.where(share == 0, 1, share))
    plain = Weighting(None, after=share, before=inverse, **options)
    if weight is None:
        return plain
    weight = jnp.asarray(weight, float)
    if not mean:
        return plain._replace(forward=weight)
    total = summed(weight, axis_name, plain)
    return plain._replace(forward=weight / row_weight.divisor(total))


def factors(
    weight: jax.Array | None, axis_name: AxisName, *, mean: bool
) -> tuple[Weighting, float]:
    """Return the weights of gradients before their sum, and the sum's factor."""
    if weight is not None:
        return weighting(weight, axis_name, mean=mean), 1.0
    return Weighting(None), 1.0 / axis.size(axis_name) if mean else 1.0


def summed(x: Any, axis_name: AxisName, weights: Weighting) -> Any:
    """Sum a tree over ranks, with the transpose of `weights`."""
    x = jax.tree.map(weights.term, x)
    with weights.named():
        sums = lax.psum(x, axis.names(axis_name))
    return jax.tree.map(weights.total, sums)


def without_transpose(tree: Any, why_not: str) -> Any:
    """Return a tree unchanged; reverse mode through it raises a ValueError with that text.

    >>> square = lambda x: without_transpose(x, "why it has no gradient") ** 2
    >>> jax.jvp(square, (3.0,), (1.0,))[1]
    Array(6., dtype=float32, weak_type=True)
    """
    return jax.tree.map(
        lambda x: _weigh(x, None, None, why_not=why_not) if _is_float(x) else x, tree
    )


def _why_not(step: Scope, share: jax.Array) -> str:
    why_not = step.why_no_gradient
    if not why_not and axis.varying_axes(share):
        why_not = (
            "in a shard_map with check_vma=True JAX itself sums the cotangents, unweighted. "
            "Write check_vma=False there, or jdp.train_step(weight=...)."
        )
    start = "a sum or mean over ranks cannot be differentiated here: "
    return why_not and start + why_not


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _weigh(
    x: jax.Array, forward: jax.Array | None, backward: jax.Array | None, *, why_not: str = ""
) -> jax.Array:
    """Multiply `x` by `forward`, and its cotangent by `backward`; None: by 1."""
    factors = [factor for factor in (forward, backward) if factor is not None]
    has = forward is not None, backward is not None
    return _weigh_p.bind(jnp.asarray(x), *factors, has=has, why_not=why_not)


# (x, *factors) -> x. `has`: which of forward and backward exist. A factor has no dims, or those of
# x, each possibly 1.
_weigh_p = jax.extend.core.Primitive("jdp_weigh")


@_weigh_p.def_impl
def weigh(x: jax.Array, *factors: jax.Array, has: tuple[bool, bool], why_not: str) -> jax.Array:
    """Return `x` by its forward factor."""
    return weighed(x, factors[0]).astype(x.dtype) if has[0] else x


@_weigh_p.def_abstract_eval
def _typed(x: Any, *factors: Any, has: tuple[bool, bool], why_not: str) -> Any:
    return x


def _jvp(
    primals: tuple, tangents: tuple, *, has: tuple[bool, bool], why_not: str
) -> tuple[Any, Any]:
    if has[0] and type(tangents[1]) is not ad.Zero:
        raise ValueError(
            "the weight of the step depends on a differentiated value, but jdp computes no "
            "gradient of a weight. Write jax.lax.stop_gradient around the inputs of weight=."
        )
    params: dict[str, Any] = {"has": has, "why_not": why_not}
    out = _weigh_p.bind(*primals, **params)
    slope = tangents[0]
    if type(slope) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, _weigh_p.bind(slope, *primals[1:], **params)


def _transpose(
    cotangent: Any, x: Any, *factors: Any, has: tuple[bool, bool], why_not: str
) -> list[Any]:
    nothing = [None] * len(factors)
    if type(cotangent) is ad.Zero:
        return [cotangent, *nothing]
    if why_not:
        raise ValueError(why_not)
    turned = _weigh_p.bind(cotangent, *factors[::-1], has=has[::-1], why_not=why_not)
    return [turned, *nothing]


def _batch(args: tuple, dims: tuple, **params: Any) -> tuple[Any, Any]:
    (x, *factors), (dim, *factor_dims) = args, dims
    if all(d is None for d in factor_dims) and all(not jnp.ndim(f) for f in factors):
        return _weigh_p.bind(x, *factors, **params), dim
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    x = jnp.moveaxis(x, dim, 0) if dim is not None else jnp.broadcast_to(x, (size, *x.shape))
    wide = []
    for factor, d in zip(factors, factor_dims, strict=True):
        factor = jnp.moveaxis(factor, d, 0) if d is not None else jnp.asarray(factor)[None]
        wide.append(factor.reshape(*factor.shape, *[1] * (x.ndim - factor.ndim)))
    return _weigh_p.bind(x, *wide, **params), 0


ad.primitive_jvps[_weigh_p] = _jvp
ad.primitive_transposes[_weigh_p] = _transpose
batching.primitive_batchers[_weigh_p] = _batch
mlir.register_lowering(_weigh_p, mlir.lower_fun(weigh, multiple_results=False))
