"""Identities that hooks are made of: with a backward pass of their own, or mapped together."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir


def hooked(same: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `same(*args, share, witness)` with a backward pass of its own.

    The hooks act together or not at all. Where derivatives are nested, one of them may be of the
    carry alone: its backward pass is a plain one, `is_ours=False`, and leaves them to that in
    which the parameters, and with them the witness that came from `enter`, are differentiated.
    """
    hook = jax.custom_vjp(same)

    def forward(*args: Any) -> tuple[Any, tuple]:
        values = jax.tree.map(lambda arg: arg.value, args)
        if args[-1].perturbed:
            return same(*values), (values[-2],)  # None of JAX's residuals is a bool: a tuple
        return hook(*values), (values[-2], None)

    def pull_back(residuals: tuple, cotangents: Any) -> tuple:
        share, is_ours = residuals[0], len(residuals) == 1
        return *backward(share, instantiated(cotangents), is_ours), jnp.float32(0)

    hook.defvjp(forward, pull_back, symbolic_zeros=True)
    return hook


def is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is zero everywhere, which JAX says by its type."""
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def instantiated(cotangents: Any) -> Any:
    """Return a tree of cotangents with arrays of zeros in place of symbolic ones."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if is_zero(x) else x, cotangents, is_leaf=is_zero
    )


def together(values: Sequence[Any]) -> list[jax.Array]:
    """Return `values` unchanged. Where `vmap` maps one of them, it maps all.

    A `jax.custom_vjp` function under `vmap` has one cotangent for an output that is not mapped:
    the sum over all rows, where its backward pass may need that of each.

    >>> import jax, jax.numpy as jnp
    >>> jax.vmap(lambda x: together([x, jnp.float32(1)]))(jnp.arange(2.0))
    [Array([0., 1.], dtype=float32), Array([1., 1.], dtype=float32)]
    """
    return _together_p.bind(*map(jnp.asarray, values)) if values else []


_together_p = jax.extend.core.Primitive("jdp_together")
_together_p.multiple_results = True


def _jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # The tangents as they are: one of zeros stays one.
    return _together_p.bind(*primals), list(tangents)


def _batch(values: tuple, dims: tuple) -> tuple[Any, Any]:
    size = next(x.shape[d] for x, d in zip(values, dims, strict=True) if d is not None)
    mapped = [
        jnp.moveaxis(x, d, 0) if d is not None else jnp.broadcast_to(x, (size, *x.shape))
        for x, d in zip(values, dims, strict=True)
    ]
    return _together_p.bind(*mapped), [0] * len(values)


_together_p.def_impl(lambda *values: list(values))
_together_p.def_abstract_eval(lambda *values: list(values))
ad.primitive_jvps[_together_p] = _jvp
batching.primitive_batchers[_together_p] = _batch
mlir.register_lowering(_together_p, lambda context, *values: list(values))
