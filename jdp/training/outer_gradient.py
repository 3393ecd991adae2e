"""Reverse-mode derivatives of a whole step, which are wrong where ranks weigh differently.

Inside a step the transpose of a weighted mean is made for the gradient of a loss, which the step
weighs once more when it reduces it. Around the step nothing does.
"""

from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jdp.error_codes import with_code


def refuse(tree: Any, step: str) -> Any:
    """Return `tree` unchanged; its transpose is an error.

    Args:
      tree: what a step returns.
      step: its name.

    >>> import jax
    >>> square = lambda x: refuse(x, "fit") ** 2
    >>> jax.jvp(square, (3.0,), (1.0,))[1]
    Array(6., dtype=float32, weak_type=True)
    """

    def guarded(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return leaf
        return _refuse_p.bind(jnp.asarray(leaf), step=step)

    return jax.tree.map(guarded, tree)


_refuse_p = jax.extend.core.Primitive("jdp_refuse_transpose")


def _transpose(cotangent: Any, x: Any, *, step: str) -> Any:
    text = (
        f"jax.grad, jax.vjp or jax.jacrev goes through the whole of `{step}`, which has a weight=: "
        "that gradient would be wrong where ranks weigh differently. Take the gradient inside the "
        "step, or leave out weight= and return the loss "
        '`(losses * batch["mask"]).mean() / jdp.mean_over_ranks(batch["mask"].mean())`. Forward '
        "mode, such as jax.jvp, is right."
    )
    raise ValueError(with_code("JDP125", text))


_refuse_p.def_impl(lambda x, *, step: x)
_refuse_p.def_abstract_eval(lambda x, *, step: x)
ad.deflinear2(_refuse_p, _transpose)
batching.defvectorized(_refuse_p)
mlir.register_lowering(_refuse_p, lambda context, x, *, step: [x])
