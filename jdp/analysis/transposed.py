"""Collectives of a traced program that JAX made by transposing those of a loss."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jdp.analysis import jaxprs, source_lines
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
    """Find the transposed collectives over one of `axes` that do not weigh the ranks.

    The name stack of an equation says that it was transposed, and also which part of that is the
    forward pass that `jax.checkpoint` computes again.

    Args:
      jaxpr: of a rank.
      axes: names of the axes along which ranks weigh differently.
    """
    return list(dict.fromkeys(_find(jaxprs.opened(jaxpr), axes, _Place(), set())))


def find_before(jaxpr: Any, axes: frozenset[str], kind: str) -> list[Differentiated]:
    """Find the transposed collectives over one of `axes` on which a mark of this kind depends.

    Args:
      jaxpr: of a rank.
      axes: names of axes.
      kind: of the mark, see `jdp.mark`.
    """
    body, marks = jaxprs.opened(jaxpr), _Marks(axes, kind)
    marks.follow(body, _Place(), [{} for _ in body.invars])
    return list(marks.found)


# Collectives that a value depends on, in order.
_Causes = dict[Differentiated, None]


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
        stack = eqn.source_info.name_stack.stack
        names = {part.name for part in stack if type(part).__name__ == "Scope"}
        transforms = {part.name for part in stack if type(part).__name__ == "Transform"}
        goes_on = self.is_transposed and "rematted_computation" not in names
        return _Place(
            goes_on or "transpose" in transforms,
            self.is_ours or WEIGHTED_SUM in names,
            self.in_micro_batch,
            source_lines.source(eqn) or self.line,
        )


def _find(
    jaxpr: Any, axes: frozenset[str], place: _Place, seen: set[tuple[int, _Place]]
) -> Iterator[Differentiated]:
    if (id(jaxpr), place) in seen:
        return
    seen.add((id(jaxpr), place))
    for eqn in jaxpr.eqns:
        here = place.within(eqn)
        if here.is_transposed and eqn.params.get("name") == MICRO_BATCH:
            here = here._replace(in_micro_batch=True)
        if here.is_transposed and _communicates(eqn, axes):
            if not here.is_ours:
                yield Differentiated(_name(eqn), here.line)
            elif here.in_micro_batch:
                yield Differentiated(MICRO_BATCH, here.line)
        for body in jaxprs.bodies(eqn):
            yield from _find(body, axes, here, seen)


class _Marks:
    """The collectives that the marks of one kind depend on.

    Attributes:
      found: them.
    """

    def __init__(self, axes: frozenset[str], kind: str):
        self.found: _Causes = {}
        self._axes, self._kind = axes, kind
        # The results of bodies that were followed, so that nested calls cost no 2^depth.
        self._known: dict[Any, list[_Causes]] = {}

    def follow(self, jaxpr: Any, place: _Place, ins: list[_Causes]) -> list[_Causes]:
        """Return on which collectives each output depends; add those of marks to `found`."""
        key = id(jaxpr), place, *map(tuple, ins)
        if key not in self._known:
            self._known[key] = self._followed(jaxpr, place, ins)
        return self._known[key]

    def _followed(self, jaxpr: Any, place: _Place, ins: list[_Causes]) -> list[_Causes]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))

        def read(atom: Any) -> _Causes:
            return {} if jaxprs.is_literal(atom) else env.get(atom, {})

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            outs = self._outputs(eqn, place.within(eqn), operands)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, eqn: Any, here: _Place, operands: list[_Causes]) -> list[_Causes]:
        value = {each: None for operand in operands for each in operand}
        if here.is_transposed and _communicates(eqn, self._axes):
            value[Differentiated(_name(eqn), here.line)] = None
        if eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == self._kind:
            self.found.update(value)
        if eqn.primitive.name in jaxprs.CALLS and (body := jaxprs.called_body(eqn)) is not None:
            return self.follow(body, here, operands)
        # What another body gets depends on all operands of its equation.
        for body in list(jaxprs.bodies(eqn)) * 2:  # what a loop carries comes back
            for each in self.follow(body, here, [value] * len(body.invars)):
                value = {**value, **each}
        return [value] * len(eqn.outvars)


def _name(eqn: Any) -> str:
    return _TRANSPOSE_OF.get(eqn.primitive.name, eqn.primitive.name)


def _communicates(eqn: Any, axes: frozenset[str]) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return not axes.isdisjoint(jaxprs.collective_axes(eqn))
    return name not in RULES and not axes.isdisjoint(jaxprs.named_axes(eqn))
