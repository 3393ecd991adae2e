"""Means over this rank's rows that count, in a step that weighs no rank."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.rules import collectives
from jdp.analysis.source_lines import source


class _Kind(IntEnum):
    """The data from which a value is computed."""

    CONSTANT = 0
    MASK = 1  # the mask and constants, for each row
    COUNT = 2  # the same, summed
    OTHER = 3


_SUMS = frozenset(("reduce_sum", "dot_general"))


def local_means(body: Any, mask: int) -> list[str]:
    """Return the author's lines that divide by the number of this rank's rows that count.

    None if that number, or the mask, is reduced over the ranks: then the author weighs by hand.

    Args:
      body: what a shard_map runs on every rank.
      mask: position of the padding mask among its inputs.
    """
    walk, inputs = _Walk(), [_Kind.OTHER] * len(body.invars)
    inputs[mask] = _Kind.MASK
    walk.follow(body, inputs)
    return [] if walk.is_weighed else list(walk.lines)


class _Walk:
    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.is_weighed = False

    def follow(self, jaxpr: Any, inputs: Sequence[_Kind]) -> list[_Kind]:
        """Return the kinds of the outputs of a jaxpr, for those of its inputs."""
        kinds = dict(zip(jaxpr.invars, inputs, strict=True))

        def kind_of(atom: Any) -> _Kind:
            return _Kind.CONSTANT if jaxprs.is_literal(atom) else kinds.get(atom, _Kind.OTHER)

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [kind_of(atom) for atom in eqn.invars])
            kinds.update(zip(eqn.outvars, results, strict=True))
        return [kind_of(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[_Kind]) -> list[_Kind]:
        name, unknown = eqn.primitive.name, [_Kind.OTHER] * len(eqn.outvars)
        if name in jaxprs.CALLS:
            body = jaxprs.called_body(eqn)
            return unknown if body is None else self.follow(body, operands)
        if name == "scan":
            body, num_constants, num_carry = jaxprs.scan_parts(eqn)
            carry = [_Kind.OTHER] * num_carry
            rest = operands[num_constants + num_carry :]
            self.follow(body, [*operands[:num_constants], *carry, *rest])
            return unknown
        if name == "cond":
            for branch in jaxprs.branches(eqn):
                self.follow(branch, operands[1:])
            return unknown
        if name in collectives.RULES and name != "jdp_mark":
            self.is_weighed |= any(kind in (_Kind.MASK, _Kind.COUNT) for kind in operands)
            return unknown
        if any(True for _ in jaxprs.bodies(eqn)):
            return unknown
        if name == "div" and operands[1] == _Kind.COUNT:
            self.lines[source(eqn)] = None
        kind = max(operands, default=_Kind.CONSTANT)
        if name in _SUMS and kind == _Kind.MASK:
            kind = _Kind.COUNT
        return [kind] * len(eqn.outvars)
