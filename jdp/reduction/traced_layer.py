"""The function of a scan, traced once, as a jaxpr without captured values."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax

from jdp.analysis import jaxprs


class TracedLayer(NamedTuple):
    """The computation of one round of a scan.

    Attributes:
      jaxpr: of `(closed-over values, carry, layer, x) -> (carry, y)`, flat.
      closed_over: the arrays that the author's function reads without being handed them.
      num_carry: how many leaves a carry has.
      carry_tree: of a carry.
      y_tree: of what a round returns beside the carry.
    """

    jaxpr: Any
    closed_over: list[jax.Array]
    num_carry: int
    carry_tree: Any
    y_tree: Any

    def __call__(
        self, closed_over: Sequence, carry: Sequence, layer: Sequence, x: Sequence
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the leaves of the next carry, and those of y."""
        closed = jax.extend.core.ClosedJaxpr(self.jaxpr, [])
        outs = jax.extend.core.jaxpr_as_fun(closed)(*closed_over, *carry, *layer, *x)
        return outs[: self.num_carry], outs[self.num_carry :]


def traced(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, params: Any, xs: Any, *, reverse: bool
) -> tuple[TracedLayer, list[jax.Array]]:
    """Trace the function of a scan, and return it with the leaves of the first carry."""

    def scan(init: Any, params: Any, xs: Any) -> Any:
        return lax.scan(f, init, params if xs is None else (params, xs), reverse=reverse)

    last, _ = jax.eval_shape(scan, init, params, xs)
    carry, carry_tree = jax.tree.flatten(init)
    # A carry that begins as a Python number has the dtype that the layers give it.
    carry = [_typed_like(x, like) for x, like in zip(carry, jax.tree.leaves(last), strict=True)]

    def one(carry: Any, params: Any, xs: Any) -> Any:
        return f(carry, params if xs is None else (params, xs))

    first = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), (params, xs))
    closed, (_, y) = jax.make_jaxpr(one, return_shape=True)(carry_tree.unflatten(carry), *first)
    body = jaxprs.opened(closed)
    jaxpr = body.replace(constvars=[], invars=[*body.constvars, *body.invars])
    layer = TracedLayer(jaxpr, [*closed.consts], len(carry), carry_tree, jax.tree.structure(y))
    return layer, carry


def is_inexact(x: Any) -> bool:
    """Whether an array has a gradient: not integers, bools and random keys."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _typed_like(x: Any, like: Any) -> jax.Array:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jax.typeof(x).weak_type and not like.weak_type:
        return lax.convert_element_type(x, like.dtype)
    return x
