"""Findings in analysed bodies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jdp.analysis.diagnostics import source_of
from jdp.analysis.lattice import AbstractValue, Lattice


class Cell:
    """A Ref's contents: the join of all written values."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value


def value_of(value: int | Cell) -> int:
    """Return a value's class, or that of a Ref's contents."""
    return value.value if isinstance(value, Cell) else value


@dataclass(frozen=True)
class Deadlock:
    """A collective that ranks may skip along `under`; `is_compilers`: XLA adds it, to split."""

    primitive: str
    axes: tuple[str, ...]
    control: str
    source: str
    under: frozenset[str] = frozenset()
    eqn: Any = field(default=None, compare=False, repr=False)
    is_compilers: bool = False


@dataclass(frozen=True, slots=True)
class Marked:
    """A mark (`marks.mark`) of an equation; ranks may skip it along the axes `under`."""

    kind: str
    path: str
    axes: tuple[str, ...]
    value: AbstractValue
    under: frozenset[str]
    source: str
    eqn: Any = field(default=None, compare=False, repr=False)


class _Note(NamedTuple):
    """A "mark", "deadlock", "shift", "unknown" or "call"; a call's facts are its body's record."""

    kind: str
    eqn: Any
    facts: tuple[Any, ...]


class Record:
    """A body's classes of all variables, for one set of input classes."""

    __slots__ = ("_bodies", "_cells", "_notes", "_outs", "env", "has_notes", "jaxpr")

    def __init__(self, jaxpr: Any, env: dict[Any, Any]):
        self.jaxpr = jaxpr
        self.env = env
        self.has_notes = False
        # In order. Only a loop's last round counts; the first is kept for its marks.
        self._notes: dict[Any, _Note] = {}
        # The last records, by the ids of an equation and of its jaxpr.
        self._bodies: dict[int, dict[int, Record]] = {}
        self._outs: list[Any] = []
        self._cells: list[int | None] = []

    def add(self, kind: str, eqn: Any, *facts: Any) -> None:
        """Record a finding at an equation."""
        self._notes[kind, id(eqn)] = _Note(kind, eqn, facts)
        self.has_notes = True

    def add_call(self, eqn: Any, jaxpr: Any, body: Record) -> None:
        """Record the analysis of `jaxpr`, a body of `eqn`."""
        key = id(eqn), id(jaxpr)
        before = self._notes.get(key)
        if before is not None and before.facts != (body,):
            self._notes.setdefault((*key, "first round"), before)
        self._notes[key] = _Note("call", eqn, (body,))
        self._bodies.setdefault(id(eqn), {})[id(jaxpr)] = body
        self.has_notes |= body.has_notes

    def calls(self, eqn: Any) -> list[Record]:
        """Return the records of an equation's bodies."""
        return list(self._bodies.get(id(eqn), {}).values())

    def child(self, eqn: Any, jaxpr: Any) -> Record:
        """Return the record of `jaxpr`, a body of `eqn`."""
        return self._bodies[id(eqn)][id(jaxpr)]

    def has(self, kind: str, eqn: Any) -> bool:
        """Whether an equation has a finding of this kind."""
        return (kind, id(eqn)) in self._notes

    def calls_with_notes(self) -> list[tuple[Any, Record]]:
        """Return equations and body records with findings."""
        calls = [(note.eqn, *note.facts) for note in self._notes.values() if note.kind == "call"]
        return [(eqn, body) for eqn, body in calls if body.has_notes]

    def end(self, ins: Sequence[Any], outs: list[Any]) -> None:
        """Record the results, and the final contents of input Refs."""
        self._cells = [x.value if isinstance(x, Cell) else None for x in ins]
        self._outs = outs
        for i, out in enumerate(outs):
            if isinstance(out, Cell):
                self._outs[i] = next((j for j, x in enumerate(ins) if x is out), None), out.value

    def results(self, ins: Sequence[Any]) -> list[Any]:
        """Return a call's results for the recorded input classes."""
        for value, after in zip(ins, self._cells, strict=True):
            if isinstance(value, Cell) and after is not None:
                value.value = after
        return [self._ref(out, ins) if isinstance(out, tuple) else out for out in self._outs]

    def _ref(self, out: tuple[int | None, int], ins: Sequence[Any]) -> Cell:
        position, value = out
        return Cell(value) if position is None else ins[position]

    def deadlocks(self, lattice: Lattice) -> tuple[Deadlock, ...]:
        """Return the deadlocks in all bodies below."""
        found = {}
        for note, line in self._found("deadlock", "shift"):
            if note.kind == "shift":
                eqn, axes, control = note.facts
                each = Deadlock(eqn.primitive.name, axes, control, line, is_compilers=True)
            else:
                axes, absent, control = note.facts
                name = note.eqn.primitive.name
                is_mark = name == "jdp_mark"
                name = "all_reduce" if is_mark else name.removesuffix("_invariant")
                name = name.removeprefix("jdp_").removesuffix("_native")
                names = tuple(sorted(lattice.names(axes)))
                each = Deadlock(name, names, control, line, lattice.names(absent), note.eqn)
            found[id(note.eqn)] = each
        return tuple(found.values())

    def unknown(self) -> tuple[tuple[str, str], ...]:
        """Return the primitives without a rule, with a line."""
        found: dict[str, str] = {}
        for note, line in self._found("unknown"):
            found.setdefault(note.eqn.primitive.name, line)
        return tuple(found.items())

    def marks(self, lattice: Lattice) -> tuple[Marked, ...]:
        """Return the marks in all bodies, once per equation."""
        found: dict[int, Marked] = {}
        for note, line in self._found("mark"):
            value, under = lattice.decode(note.facts[0]), lattice.names(note.facts[1])
            other = found.get(id(note.eqn))
            if other is not None:
                value, under = value.either(other.value), under | other.under
            found[id(note.eqn)] = Marked(
                **note.eqn.params, value=value, under=under, source=line, eqn=note.eqn
            )
        return tuple(found.values())

    def _found(self, *kinds: str) -> list[tuple[_Note, str]]:
        seen: set[tuple[int, str]] = set()
        # The outermost shard_map's line is too unspecific.
        bodies = [body for _, body in self.calls_with_notes()]
        return [each for body in bodies for each in body._below(kinds, "", seen)]

    def _below(
        self, kinds: tuple[str, ...], around: str, seen: set[tuple[int, str]]
    ) -> Iterator[tuple[_Note, str]]:
        if (id(self), around) in seen:
            return
        seen.add((id(self), around))
        for note in self._notes.values():
            # JAX cuts tracebacks at bodies, so use the line around the body.
            if note.kind in kinds:
                line = source_of(note.facts[0]) if note.kind == "shift" else ""
                yield note, line or source_of(note.eqn) or around
            elif note.kind == "call" and note.facts[0].has_notes:
                yield from note.facts[0]._below(kinds, source_of(note.eqn) or around, seen)
