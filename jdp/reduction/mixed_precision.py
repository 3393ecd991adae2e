"""Dtypes of parameters in losses, and of sent gradients.

`jdp.value_and_grad` casts the parameters, the masters, for a loss, and returns gradients in their
dtype. Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdp import pytrees
from jdp.analysis.marks import NARROW_LOSS, OF_MASTERS, mark
from jdp.reduction import step_context


def float_dtype(option: str, given: Any) -> np.dtype | None:
    """Return an option's dtype.

    >>> float_dtype("gather_dtype", "bfloat16")
    dtype(bfloat16)
    """
    if given is None:
        return None
    dtype = _dtype(option, given)
    if not jnp.issubdtype(dtype, jnp.floating):
        why = "which holds no fractions, so parameters and gradients would be truncated to integers"
        if jnp.issubdtype(dtype, jnp.complexfloating):
            why = "which is complex, but parameters and gradients are real"
    elif jnp.finfo(dtype).bits < 16:
        why = (
            f"which has {jnp.finfo(dtype).bits} bits. Without a scale per array most gradients "
            "and many parameters would become 0. Cast to it in the loss, with your own scales"
        )
    elif jax.dtypes.canonicalize_dtype(dtype) != dtype:
        why = "which JAX converts to float32 unless jax_enable_x64 is set"
    else:
        return dtype
    raise ValueError(f"{option}={dtype.name}, {why}. Write {option}=jnp.bfloat16, or remove it.")


def _dtype(option: str, given: Any) -> np.dtype:
    try:
        if pytrees.is_array(given):
            raise TypeError
        return jnp.dtype(given)
    except (TypeError, ValueError):
        raise ValueError(
            f"{option}={given!r} is not a dtype of NumPy or JAX. Write {option}=jnp.bfloat16 or "
            f'{option}="bfloat16", or remove it.'
        ) from None


def narrower(leaf: Any, dtype: np.dtype | None) -> np.dtype | None:
    """Return the dtype if a leaf has more bits, else None."""
    own = jnp.result_type(leaf)
    if dtype is None or not jnp.issubdtype(own, jnp.floating):
        return None
    return dtype if jnp.finfo(own).bits > jnp.finfo(dtype).bits else None


def require_masters(params: Any, gather_dtype: np.dtype | None) -> None:
    """Refuse parameters with fewer bits than they are gathered in."""
    if gather_dtype is None:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            continue
        bits, more = jnp.finfo(dtype).bits, jnp.finfo(gather_dtype).bits
        if bits < more:
            raise ValueError(
                f"`params{jax.tree_util.keystr(path)}` is {dtype}{list(jnp.shape(leaf))}, of "
                f"{bits} bits, and gather_dtype={gather_dtype.name} has {more}. The gather would "
                f"send {more // bits} times the bytes without more digits. Pass float32 "
                "parameters with gather_dtype=jnp.bfloat16, or remove gather_dtype."
            )


def claim(params: Any, owner: Any) -> None:
    """Record the parameters that losses see in their optimizer's dtype."""
    scope = step_context.innermost()
    if scope is None:
        return
    for leaf in jax.tree.leaves(params):
        dtype = narrower(leaf, owner.sharding.gather_dtype)
        if dtype is not None:  # kept, so that its id stays its own
            scope.loss_dtypes[id(leaf)] = leaf, dtype, owner


def loss_dtypes(leaves: Sequence[Any]) -> list[np.dtype | None]:
    """Return each parameter's loss dtype, None for its own."""
    scope = step_context.innermost()
    if scope is None or not scope.loss_dtypes:
        return [None] * len(leaves)
    found = [scope.loss_dtypes.get(id(leaf)) for leaf in leaves]
    return [None if entry is None else entry[1] for entry in found]


def for_loss(params: Any) -> Any:
    """Return parameters as a loss sees them."""
    leaves, tree = jax.tree.flatten(params)
    dtypes = loss_dtypes(leaves)
    return tree.unflatten(map(cast, leaves, dtypes)) if any(dtypes) else params


def named_loss(params: Any) -> contextlib.AbstractContextManager:
    """Return a scope for a loss with narrow parameters."""
    scope = step_context.innermost()
    seen = {} if scope is None else scope.loss_dtypes
    is_narrow = any(id(leaf) in seen for leaf in jax.tree.leaves(params)) if seen else False
    return jax.named_scope(NARROW_LOSS) if is_narrow else contextlib.nullcontext()


def mark_gradients(grads: Any, owner: Any) -> None:
    """Mark narrow losses' gradients, for `lints.require_narrow`."""
    scope = step_context.innermost()
    if scope is None or all(entry[2] != owner for entry in scope.loss_dtypes.values()):
        return
    dtype = owner.sharding.gather_dtype
    scope.updated.add(dtype.name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        # Not the result: a known shard belongs to the gradient itself.
        if isinstance(leaf, jax.Array) and narrower(leaf, dtype) is not None:
            mark(leaf, kind=OF_MASTERS, path=jax.tree_util.keystr(path), axes=())


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Return an array in a dtype; None and complex keep their own."""
    if dtype is None or x.dtype == dtype or jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return lax.convert_element_type(x, dtype)
