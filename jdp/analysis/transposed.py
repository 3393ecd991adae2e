"""Collectives of a traced program that JAX made by transposing those of a loss."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jdp.analysis import jaxprs, source_lines
from jdp.analysis.forward import Forward
from jdp.analysis.marks import MICRO_BATCH, WEIGHTED_SUM
from jdp.analysis.rules import RULES, collectives

# No cotangent goes through a maximum, and these do not communicate.
_HARMLESS = frozenset("axis_index jdp_mark pmax pmin unreduced_pmax unreduced_pmin".split())
_COLLECTIVES = frozenset(collectives.RULES) - _HARMLESS
_TRANSPOSE_OF = {
    "all_gather": "psum_scatter",
    "jdp_all_reduce": "collectives.native",
    "psum_invariant": "psum",
    "reduce_scatter": "all_gather",
}


class Differentiated(NamedTuple):
    """A collective that adds up cotangents.

    Attributes:
      name: of the author's collective, of which it is the transpose; `MICRO_BATCH` where a sum of
        jdp's weighs the ranks as a micro-batch does, and is transposed from outside of it.
      source: the author's line; empty if no line is the author's.
    """

    name: str
    source: str


def find(jaxpr: Any, axes: frozenset[str]) -> list[Differentiated]:
    """Return the transposed collectives over one of `axes` that do not weigh the ranks."""
    found: dict[Differentiated, None] = {}
    for eqn, around in jaxprs.placed_equations(jaxpr, _Place(), _Place.within):
        here = around.within(eqn)
        if here.is_transposed and _communicates(eqn, axes):
            if not here.is_ours:
                found[Differentiated(_name(eqn), here.line)] = None
            elif here.in_micro_batch:
                found[Differentiated(MICRO_BATCH, here.line)] = None
    return list(found)


def find_before(jaxpr: Any, axes: frozenset[str], kind: str) -> list[Differentiated]:
    """Return the transposed collectives over one of `axes` on which a mark of `kind` depends."""
    found: dict[Differentiated, None] = {}

    def visit(eqn: Any, operands: list[Any], around: _Place) -> list[Any] | None:
        here = around.within(eqn)
        if here.is_transposed and _communicates(eqn, axes):
            causes = _join([*operands, (Differentiated(_name(eqn), here.line),)])
            return [causes] * len(eqn.outvars)
        if eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == kind:
            found.update(dict.fromkeys(operands[0]))
        return None

    body = jaxprs.opened(jaxpr)
    Forward(_join, visit, _Place.within).outputs(body, [()] * len(body.invars), _Place())
    return list(found)


def _join(causes: Sequence[tuple[Differentiated, ...]]) -> tuple[Differentiated, ...]:
    return tuple(dict.fromkeys(itertools.chain(*causes)))


class _Place(NamedTuple):
    """Where an equation stands.

    Attributes:
      is_transposed: whether JAX made it by transposing another.
      is_ours: whether it belongs to a sum that weighs the ranks.
      in_micro_batch: whether it is in a micro-batch that was transposed as a whole.
      line: the author's line.
    """

    is_transposed: bool = False
    is_ours: bool = False
    in_micro_batch: bool = False
    line: str = ""

    def within(self, eqn: Any) -> "_Place":
        # The name stack of an equation says that it was transposed, and also which part of that
        # is the forward pass that `jax.checkpoint` computes again.
        stack = eqn.source_info.name_stack.stack
        names = {part.name for part in stack if type(part).__name__ == "Scope"}
        transforms = {part.name for part in stack if type(part).__name__ == "Transform"}
        goes_on = self.is_transposed and "rematted_computation" not in names
        is_transposed = goes_on or "transpose" in transforms
        is_micro_batch = is_transposed and eqn.params.get("name") == MICRO_BATCH
        return _Place(
            is_transposed,
            self.is_ours or WEIGHTED_SUM in names,
            self.in_micro_batch or is_micro_batch,
            source_lines.source(eqn) or self.line,
        )


def _name(eqn: Any) -> str:
    return _TRANSPOSE_OF.get(eqn.primitive.name, eqn.primitive.name)


def _communicates(eqn: Any, axes: frozenset[str]) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return not axes.isdisjoint(jaxprs.collective_axes(eqn))
    return name not in RULES and not axes.isdisjoint(jaxprs.named_axes(eqn))
