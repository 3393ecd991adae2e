"""An identity that waits: its results are not there before some other arrays are."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jdp.collectives import call_order


def after(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Return values unchanged, but not before some others have been computed.

    Unlike `lax.optimization_barrier` it lasts until XLA has chosen an order: XLA drops barriers
    before it merges and schedules collectives on GPUs, and with JAX 0.10 before it merges equal
    operations on CPUs.

    >>> float(after([jnp.float32(2)], [jnp.float32(jnp.nan)])[0])
    2.0
    """
    others = [x for x in others if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    if not values or not others:
        return list(values)
    count = len(values)
    return _tied_p.bind(*values, *others, count=count)[:count]


def next_call_after(others: Sequence[jax.Array]) -> None:
    """Let the next native call of this program wait for arrays, and copy nothing.

    Native calls take a token from the call before. It alone waits, where `after` would write each
    value that a call takes into new memory.
    """
    token = call_order.first_token()
    if token is not None:
        call_order.passed(*after([token], others))


# (*values, *others) -> the same. The proof and liveness look at each operand by itself.
_tied_p = jax.extend.core.Primitive("jdp_tied")
_tied_p.multiple_results = True


def _run(*operands: jax.Array, count: int) -> list[jax.Array]:
    firsts = [x.ravel()[0] for x in operands[count:]]
    # XLA does not see that no number differs from itself and equals itself.
    never = functools.reduce(jnp.logical_or, ((x != x) & (x == x) for x in firsts))
    values = [jnp.where(never, jnp.zeros_like(x), x) for x in operands[:count]]
    return [*values, *operands[count:]]


def _jvp(primals: tuple, tangents: tuple, *, count: int) -> tuple[Any, Any]:
    return _tied_p.bind(*primals, count=count), list(tangents)


_tied_p.def_impl(lambda *operands, count: list(operands))
_tied_p.def_abstract_eval(lambda *operands, count: list(operands))
ad.primitive_jvps[_tied_p] = _jvp
batching.primitive_batchers[_tied_p] = lambda values, dims, *, count: (
    _tied_p.bind(*values, count=count),
    list(dims),
)
mlir.register_lowering(_tied_p, mlir.lower_fun(_run, multiple_results=True))
