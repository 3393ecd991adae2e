"""A differing value's origin, for refusals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdp.analysis import jaxprs
from jdp.analysis.backward_slice import Frame, Node, WayBack, is_source
from jdp.analysis.lattice import AbstractValue
from jdp.analysis.marks import ALL_REDUCED, LOCAL
from jdp.analysis.records import Deadlock, Marked, Record
from jdp.analysis.rules import collectives


class Origin(NamedTuple):
    """The reason why a value differs from rank to rank.

    Attributes:
      line: the author's line that combines a varying value with a reduced one, or empty.
      sources: of the varying value: positions of shard_map inputs, and descriptions.
      is_reduced: whether any value on the way was reduced.
      is_of_gradient: whether the reduced value depends on a gradient.
    """

    line: str
    primitive: str
    sources: tuple[int | str, ...]
    is_reduced: bool
    is_of_gradient: bool = False


_SOURCES = {
    "axis_index": "`axis_index` (the number of this rank)",
    "empty": "`jnp.empty` (uninitialized memory)",
    "empty_ref": "an uninitialized Ref",
    "ffi_call": "a foreign call (with side effects)",
    "infeed": "`infeed` (each device reads its own)",
    "io_callback": "`io_callback` (each rank calls it separately)",
    "rng_uniform": "`rng_uniform` (each device draws its own)",
}

_SUMS = frozenset({"jdp_all_reduce", "psum", "psum_invariant"})
_ADDING = frozenset(
    {*_SUMS, "jdp_mark", "jdp_reduce_scatter", "psum_start", "reduce_scatter", "reduce_sum"}
    | {"unreduced_psum"}
)


class Provenance(WayBack):
    """A backward slice that finds origins and reductions."""

    def of_output(self, i: int) -> Node:
        """Return an output of the shard_map before casts and copies."""
        return self._computed(Node(self.top, self.body.outvars[i]))

    def of_mark(self, eqn: Any) -> Node | None:
        """Return a mark's operand."""
        frame = self.frame_of("mark", eqn)
        return None if frame is None else Node(frame, eqn.invars[0])

    def of_predicate(self, eqn: Any) -> Node | None:
        """Return the predicate by which some ranks skip a collective."""
        frame = self.frame_of("deadlock", eqn)
        while frame is not None and frame.eqn is not None:
            for node in self.predicates(frame.around, frame.eqn):
                if self.differs(node):
                    return node
            frame = frame.around
        return None

    def origin(self, node: Node) -> Origin:
        """Return the nearest operation that combines a value with a reduced one."""
        is_reduced = any(map(self._is_collective, self.back([node], everything=True)))
        sources: dict[int | str, None] = {}
        for each in self.back([node]):
            eqn = self.plain(each)
            if eqn is None:
                self._add_source(each, sources)
                continue
            operands = [Node(each.frame, atom) for atom in eqn.invars]
            differing = [operand for operand in operands if self.differs(operand)]
            # A uniform choice does not combine its cases.
            first = 1 if eqn.primitive.name == "select_n" else 0
            same = [operand for operand in operands[first:] if not self.differs(operand)]
            if not differing:
                self._add_source(each, sources)
            elif reduced := [one for one in same if any(self._reductions(one, only_same=True))]:
                line, met = self.line(each.frame, eqn), self._sources(differing)
                gradient = self._comes_from_gradient(reduced)
                return Origin(line, eqn.primitive.name, met, is_reduced, gradient)
        return Origin("", "", tuple(sources), is_reduced)

    def reduction(self, node: Node) -> str:
        """Return the nearest reduction's line."""
        lines = (self.line(each.frame, eqn) for each, eqn in self._reductions(node))
        return next(filter(None, lines), "")

    def nearest_line(self, node: Node) -> str:
        """Return the nearest line that makes a value differ."""
        lines = (self.line(each.frame, self.maker(each)) for each in self.back([node]))
        return next(filter(None, lines), "")

    def repetition(self, node: Node) -> tuple[Any, str] | None:
        """Return the nearest sum of an equal value, and its line."""
        sums = self.sums(node, _SUMS, everything=True)
        return next(((eqn, line) for eqn, line, _ in sums), None)

    def sums(
        self, node: Node, names: Collection[str] = _ADDING, *, everything: bool = False
    ) -> Iterator[tuple[Any, str, Node]]:
        """Yield the undivided sums over ranks, nearest first."""
        for each in self.back([node], everything=everything):
            eqn = self.maker(each)
            if eqn is not None and eqn.primitive.name in names:
                # The first operands of jdp's own sums are a rank, its group and the scale.
                i = eqn.outvars.index(each.variable) - len(eqn.outvars)
                operand = Node(each.frame, eqn.invars[i])
                if not self.differs(operand):
                    yield eqn, self.line(each.frame, eqn), operand

    def is_of_cotangent(self, node: Node) -> bool:
        """Whether a number depends on a differing cotangent."""
        seen, waiting = set(), [node]
        while waiting:
            each = waiting.pop()
            may_be_gradient = jnp.issubdtype(each.variable.aval.dtype, jnp.inexact)
            if each.key() in seen or not self.differs(each) or not may_be_gradient:
                continue
            seen.add(each.key())
            eqn = self.maker(each)
            if eqn is not None and jaxprs.is_transposed(eqn):
                return True
            waiting += self.before(each)
        return False

    def is_consequence(self, node: Node, causes: Iterable[Node]) -> bool:
        """Whether a value differs only because `causes` do."""
        keys = {cause.key() for cause in causes} - {node.key()}
        met = False
        for each in self.back([node], until=keys):
            if each.key() in keys:
                met = True
            elif not any(self.varying_before(each)):
                return False
        return met

    def _sources(self, nodes: list[Node]) -> tuple[int | str, ...]:
        found: dict[int | str, None] = {}
        for each in self.back(nodes):
            self._add_source(each, found)
        return tuple(found)

    def _add_source(self, node: Node, found: dict[int | str, None]) -> None:
        if any(self.varying_before(node)):
            return
        eqn = self.maker(node)
        if eqn is None:
            if node.frame.around is None and node.variable in self.body.invars:
                found[self.body.invars.index(node.variable)] = None
            elif node.frame.eqn is not None:
                line = self.line(node.frame.around, node.frame.eqn)
                found["a part split by a shard_map" + (f" at {line}" if line else "")] = None
            return
        if eqn.primitive.name == "jdp_mark":
            found[f"`{eqn.params['path']}` (this rank's)"] = None
            return
        within = next(self._sources_within(node.frame.record, eqn), eqn)
        name = within.primitive.name
        line = self.line(node.frame, within)
        found[_SOURCES.get(name, f"`{name}`") + (f" at {line}" if line else "")] = None

    def _sources_within(self, record: Record, eqn: Any) -> Iterator[Any]:
        for body in record.calls(eqn):
            for inner in body.jaxpr.eqns:
                if inner.primitive.name in _SOURCES:
                    yield inner
                yield from self._sources_within(body, inner)

    def _reductions(self, node: Node, *, only_same: bool = False) -> Iterator[tuple[Node, Any]]:
        for each in self.back([node], everything=True, only_same=only_same):
            eqn = self.maker(each)
            if eqn is not None and self._reduces(each.frame, eqn):
                yield each, eqn

    def _comes_from_gradient(self, nodes: list[Node]) -> bool:
        eqns = (self.maker(each) for each in self.back(nodes, everything=True))
        marks = (e for e in eqns if e is not None and e.primitive.name == "jdp_mark")
        return any(eqn.params["kind"] == LOCAL for eqn in marks)

    def _reduces(self, frame: Frame, eqn: Any) -> bool:
        outs = [Node(frame, variable) for variable in eqn.outvars]
        return any(map(self._is_collective, outs)) and not all(map(self.differs, outs))

    def _is_collective(self, node: Node) -> bool:
        eqn = self.maker(node)
        if eqn is None or eqn.primitive.name not in _COLLECTIVES:
            return False
        return eqn.primitive.name != "jdp_mark" or eqn.params["kind"] == ALL_REDUCED

    def _computed(self, node: Node) -> Node:
        while True:
            eqn = self.maker(node)
            if eqn is None or not (_moves(eqn) or eqn.primitive.name in jaxprs.CALLS):
                return node
            before = list(self.before(node))
            if not before or jaxprs.is_literal(before[0].variable):
                return node
            node = before[0]


_MOVES = frozenset("convert_element_type copy copy_p reshape squeeze".split())
_COLLECTIVES = frozenset(collectives.RULES) - {"axis_index"}


def _moves(eqn: Any) -> bool:
    return eqn.primitive.name in _MOVES or (eqn.primitive.name == "jdp_mark" and not is_source(eqn))


@dataclass(frozen=True)
class Report:
    """The analysis of one `shard_map`.

    Attributes:
      outputs: class of each body output, before `out_specs` combines shards.
      output_sources: lines of outputs that vary along an axis missing in `out_specs`, else empty.
      opaque: primitives with a body that jdp could not open.
      unknown: primitives without a rule, with the author's line.
      refs: position and final class of each input `jax.Ref`.
      back: the backward slice of varying, "undivided" or "duplicated" values.
    """

    outputs: tuple[AbstractValue, ...]
    output_sources: tuple[str, ...]
    deadlocks: tuple[Deadlock, ...]
    marks: tuple[Marked, ...]
    opaque: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    num_inputs: int
    refs: tuple[tuple[int, AbstractValue], ...]
    back: Callable[..., Provenance] = field(compare=False, repr=False)


def decision(back: Provenance, node: Node) -> Node | None:
    """Return the farthest boolean that alone makes a value differ, unless an input or counted."""
    found, seen = None, set()
    while node.key() not in seen:
        seen.add(node.key())
        if node.variable.aval.dtype == np.bool_:
            found = node
        elif found is not None:
            return found
        eqn = back.plain(node)
        if eqn is not None and eqn.primitive.name in _COUNTS:
            return None
        before = {each.key(): each for each in back.varying_before(node)}
        if len(before) != 1:
            return found if back.maker(node) is not None else None
        (node,) = before.values()
    return found


_COUNTS = frozenset({"cumsum", "dot_general", "reduce_sum"})


def without_skipped(
    back: Provenance, nodes: Mapping[int, Node], deadlocks: Iterable[Deadlock]
) -> dict[int, Node]:
    """Drop values that differ only by a skipped collective."""
    skipping = [node for each in deadlocks if (node := back.of_predicate(each.eqn))]
    return {i: node for i, node in nodes.items() if not back.is_consequence(node, skipping)}


# For a differing value {0} and an equal one {1}.
_VERBS = {
    "add": "adds {} to {}",
    "add_any": "adds {} to {}",
    "div": "divides {1} by {0}, or the other way round",
    "dot_general": "multiplies {1} by {0}",
    "mul": "multiplies {1} by {0}",
    "select_n": "selects by {0} between {1} and something else",
    "sub": "subtracts {} and {} from each other",
}
_COMBINES = "combines {1} with {0}"
# Ends an unreduced value's explanation.
NEVER_AVERAGED = "was never averaged"


def since(origin: Origin, inputs: Sequence[str]) -> str:
    """Return `why` for one value, after a comma."""
    return f", since {why([origin], inputs)}"


def why(origins: Sequence[Origin], inputs: Sequence[str]) -> str:
    """Return a clause that explains why values differ, by input names."""
    origin = origins[0]
    sources = _named(origin.sources, inputs)
    if origin.line:
        same = "the mean gradient" if origin.is_of_gradient else "a value reduced over ranks"
        verb = _VERBS.get(origin.primitive, _COMBINES).format(sources, same)
        return f"{origin.line} {verb}, and the result is not averaged"
    if any(each.is_reduced for each in origins):
        return f"it depends on {sources}"
    return f"it depends on {sources}, and {NEVER_AVERAGED}"


def _named(sources: Sequence[int | str], inputs: Sequence[str]) -> str:
    # At most three inputs and two other sources.
    rows = sorted({f"`{inputs[each]}`" for each in sources if isinstance(each, int)})
    if len(rows) > 3:
        rows = [*rows[:3], f"{len(rows) - 3} more"]
    others = [each for each in sources if isinstance(each, str)][:2]
    named = [f"{_listed(rows)} (this rank's rows)"] if rows else []
    return _listed(named + others) or "a hidden value inside it"


def _listed(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
