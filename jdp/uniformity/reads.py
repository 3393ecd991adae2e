"""Which inputs of a jaxpr anything reads."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Literal

from jdp.uniformity import jaxprs

# Primitives that hand operands to bodies one by one.
_HAND_ON = jaxprs.CALLS | {"cond", "scan", "shard_map", "while"}


def used_inputs(jaxpr: Any) -> tuple[bool, ...]:
    """Tell for each input whether an equation or an output reads it.

    What is only handed to the body of a call, a branch or a loop counts as read if that body
    reads it.
    """
    return _used(jaxpr, {})


def _used(jaxpr: Any, known: dict[int, tuple[bool, ...]]) -> tuple[bool, ...]:
    if id(jaxpr) not in known:
        read = {v for v in jaxpr.outvars if not jaxprs.is_literal(v)}
        for eqn in jaxpr.eqns:
            operands = [v for v in eqn.invars if type(v) is not Literal]
            if eqn.primitive.name in _HAND_ON and not read.issuperset(operands):
                operands = _read(eqn, known)
            read.update(operands)
        known[id(jaxpr)] = tuple(v in read for v in jaxpr.invars)
    return known[id(jaxpr)]


def _read(eqn: Any, known: dict[int, tuple[bool, ...]]) -> list[Any]:
    read, handed_on = set(), set()
    for body, operands in _handed_on(eqn):
        handed_on.update(operands)
        uses = _used(body, known)
        read.update(i for i, used in zip(operands, uses, strict=True) if used)
    return [
        v
        for i, v in enumerate(eqn.invars)
        if not jaxprs.is_literal(v) and (i in read or i not in handed_on)
    ]


def _handed_on(eqn: Any) -> Iterator[tuple[Any, list[int]]]:
    # Bodies, each with the positions of the operands that become its inputs.
    name, operands = eqn.primitive.name, list(range(len(eqn.invars)))
    if name == "scan":
        yield jaxprs.scan_parts(eqn)[0], operands
    elif name == "cond":
        for branch in jaxprs.branches(eqn):
            yield branch, operands[1:]
    elif name == "while":
        cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
        carry = operands[num_cond + num_body :]
        yield cond, operands[:num_cond] + carry
        yield body, operands[num_cond : num_cond + num_body] + carry
    elif name == "shard_map":
        yield jaxprs.mapped_body(eqn), operands
    elif (body := jaxprs.called_body(eqn)) is not None:
        yield body, operands
