"""Means over this rank's rows that count, in a step that weighs no rank."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.rules import collectives
from jdp.analysis.source_lines import source


class _Kind(IntEnum):
    """What a value is made of."""

    CONSTANT = 0
    MASK = 1  # the mask and constants, for each row
    COUNT = 2  # the same, summed
    OTHER = 3


_SUMS = frozenset(("reduce_sum", "dot_general"))


def local_means(body: Any, mask: int) -> list[str]:
    """Return the author's lines that divide by the number of this rank's rows that count.

    Args:
      body: what a shard_map runs on every rank.
      mask: position of the padding mask among its inputs.
    """
    found: dict[str, None] = {}
    inputs = [_Kind.OTHER] * len(body.invars)
    inputs[mask] = _Kind.MASK
    _follow(body, inputs, found)
    return list(found)


def _follow(jaxpr: Any, inputs: Sequence[_Kind], found: dict[str, None]) -> list[_Kind]:
    kinds = dict(zip(jaxpr.invars, inputs, strict=True))

    def kind_of(atom: Any) -> _Kind:
        return _Kind.CONSTANT if jaxprs.is_literal(atom) else kinds.get(atom, _Kind.OTHER)

    for eqn in jaxpr.eqns:
        operands = [kind_of(atom) for atom in eqn.invars]
        results = _results(eqn, operands, found)
        kinds.update(zip(eqn.outvars, results, strict=True))
    return [kind_of(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, operands: list[_Kind], found: dict[str, None]) -> list[_Kind]:
    name, unknown = eqn.primitive.name, [_Kind.OTHER] * len(eqn.outvars)
    if name == "div" and operands[1] == _Kind.COUNT:
        found[source(eqn)] = None
    if name in jaxprs.CALLS:
        body = jaxprs.called_body(eqn)
        return unknown if body is None else _follow(body, operands, found)
    if name == "scan":
        body, num_constants, num_carry = jaxprs.scan_parts(eqn)
        carry = [_Kind.OTHER] * num_carry
        rest = operands[num_constants + num_carry :]
        _follow(body, [*operands[:num_constants], *carry, *rest], found)
        return unknown
    if name == "cond":
        for branch in jaxprs.branches(eqn):
            _follow(branch, operands[1:], found)
        return unknown
    if name in collectives.RULES or any(True for _ in jaxprs.bodies(eqn)):
        return unknown  # of all ranks
    kind = max(operands, default=_Kind.CONSTANT)
    if name in _SUMS and kind == _Kind.MASK:
        kind = _Kind.COUNT
    return [kind] * len(eqn.outvars)
