"""Whether a program reads arrays after a native all-gather has overwritten them.

XLA copies such an array before it is overwritten, which takes longer than a gather that overwrites
nothing.
"""

from collections.abc import Iterator
from typing import Any

from jax.interpreters import partial_eval

from jdp.analysis import jaxprs

_GATHER = "jdp_all_gather"  # the one primitive that overwrites operands


def is_read_later(jaxpr: Any) -> bool:
    """Whether an operation reads an array that a gather before it overwrites.

    True if a loop or branch overwrites arrays: XLA copies what enters it.
    """
    if _GATHER not in jaxprs.primitive_names(jaxpr):
        return False
    body = jaxprs.opened(jaxpr)
    body, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars))
    return _is_read_later(body, frozenset())


def _is_read_later(jaxpr: Any, read: frozenset[int]) -> bool:
    """Return the answer for a jaxpr whose inputs at some positions are read after it."""
    jaxpr = jaxprs.opened(jaxpr)
    later = {id(x) for x in jaxpr.outvars} | {id(jaxpr.invars[i]) for i in read}
    for eqn in reversed(jaxpr.eqns):
        if any(id(x) in later for x in _overwritten(eqn)):
            return True
        for body in jaxprs.bodies(eqn):
            if eqn.primitive.name in {*jaxprs.CALLS, "shard_map"}:
                within = {i for i, x in enumerate(eqn.invars) if id(x) in later}
                if _is_read_later(body, frozenset(within)):
                    return True
            elif any(any(_overwritten(each)) for each in jaxprs.equations(body)):
                return True
        later.update(map(id, eqn.invars))
    return False


def _overwritten(eqn: Any) -> Iterator[Any]:
    """Yield the arrays that an equation overwrites: the operands behind its leaves."""
    if any(eqn.params.get("overwrites", ())):
        yield from eqn.invars[-sum(eqn.params["overwrites"]) :]
