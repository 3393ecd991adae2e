"""In which order the backward pass of a traced step finishes its gradients."""

import itertools
from collections.abc import Iterator
from typing import Any

from jdp.uniformity import find_shard_maps, jaxprs

# What takes time. All else is done with its operands, as far as the order of gradients goes.
_HEAVY = frozenset(
    "conv_general_dilated custom_linear_solve dot_general ffi_call scan while".split()
)


def order_of_gradients(jaxpr: Any) -> dict[str, int]:
    """Number the gradients on their way to `sync_gradients` by when they are ready.

    A value is ready with the last matmul or loop among all that it depends on, in the order of
    the traced program, in which a backward pass goes from the last layer to the first.

    Args:
      jaxpr: the traced program, with the step's `shard_map` in it.

    Returns:
      path -> number; equal numbers for gradients that the same operation gives.
    """
    body = jaxprs.mapped_body(find_shard_maps(jaxpr)[0])
    found: dict[str, int] = {}
    _walk(body, [0] * len(body.invars), itertools.count(1), found)
    return found


def _walk(body: Any, ins: list[int], clock: Iterator[int], found: dict[str, int]) -> list[int]:
    ready = dict(zip(body.invars, ins, strict=True))

    def of(atom: Any) -> int:
        return 0 if jaxprs.is_literal(atom) else ready.get(atom, 0)

    for eqn in body.eqns:
        operands = [of(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        inner = jaxprs.called_body(eqn) if name in jaxprs.CALLS else None
        if inner is not None:
            outs = _walk(inner, operands, clock, found)
        else:
            when = next(clock) if _is_heavy(eqn) else max(operands, default=0)
            outs = [when] * len(eqn.outvars)
        if name == "jdp_mark" and eqn.params["kind"] == "local":
            found[eqn.params["path"]] = outs[0]
        ready.update(zip(eqn.outvars, outs, strict=True))
    return [of(atom) for atom in body.outvars]


def _is_heavy(eqn: Any) -> bool:
    if eqn.primitive.name in _HEAVY:
        return True
    return any(_is_heavy(inner) for body in jaxprs.bodies(eqn) for inner in body.eqns)
