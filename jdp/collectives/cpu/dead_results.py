"""Drop results of native calls that nobody reads, before XLA sees the calls.

XLA drops its own collectives where nobody reads them. It keeps all leaves of a native call, since
the next call waits for its token. A step gathers its whole state and reads few leaves of it, so
JAX's own dead-code elimination, which runs before XLA, drops them here.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jax import lax

from jdp import jax_compat
from jdp.collectives import call_order

_NUM_BEFORE = call_order.TOKEN + 1


def drop(primitive: Any, *, of_leaves: Sequence[str] = ()) -> None:
    """Make JAX drop the leaves of a primitive whose results nobody reads, and empty calls."""
    jax_compat.set_dead_code_rule(primitive, functools.partial(_without_unread, of_leaves))


def _without_unread(
    of_leaves: Sequence[str], is_read: Sequence[bool], eqn: Any
) -> tuple[list[bool], Any]:
    """Return which operands are still needed, and the equation without the others, or None."""
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
    if not any(leaves):  # The next call waits for the one before this.
        return needed, eqn.replace(primitive=lax.copy_p, params={}, **changes)
    params = dict(eqn.params)
    for name in of_leaves:
        params[name] = tuple(params[name][i - 1] for i in chosen[1:])
    return needed, eqn.replace(params=params, **changes)
