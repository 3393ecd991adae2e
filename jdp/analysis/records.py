"""Records of the marks, deadlocks, shifts and unknown primitives in each analysed body."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jdp.analysis.cells import Cell
from jdp.analysis.findings import Deadlock, Marked
from jdp.analysis.lattice import Lattice
from jdp.analysis.source_lines import source


class _Note(NamedTuple):
    """A finding at an equation: a "mark", "deadlock", "shift", "unknown" primitive or a "call".

    The facts of a call are the record of its body, those of the others the arguments of `add`.
    """

    kind: str
    eqn: Any
    facts: tuple[Any, ...]


class Record:
    """One body with the class of every variable, walked for one set of input classes.

    Calls that are alike share it.
    """

    __slots__ = ("_bodies", "_cells", "_notes", "_outs", "env", "has_notes", "jaxpr")

    def __init__(self, jaxpr: Any, env: dict[Any, Any]):
        self.jaxpr = jaxpr
        self.env = env
        self.has_notes = False
        # In the order of the program. What comes again overwrites what was there: the last round
        # of a loop is the one that counts. The first is kept beside it, for what is certain of it.
        self._notes: dict[Any, _Note] = {}
        # As they were walked last, by the ids of an equation and of its jaxpr.
        self._bodies: dict[int, dict[int, Record]] = {}
        self._outs: list[Any] = []
        self._cells: list[int | None] = []

    def add(self, kind: str, eqn: Any, *facts: Any) -> None:
        """Record a mark and its class and the axes along which ranks may not come to it; a deadlock
        with its axes, those along which ranks may skip it, and their control flow; an unknown
        primitive; or a control flow with a shift in it, the axes that XLA splits it over, and what
        the control flow is called.
        """
        self._notes[kind, id(eqn)] = _Note(kind, eqn, facts)
        self.has_notes = True

    def add_call(self, eqn: Any, jaxpr: Any, body: Record) -> None:
        """Record that `jaxpr`, a body of `eqn`, is `body`."""
        key = id(eqn), id(jaxpr)
        before = self._notes.get(key)
        if before is not None and before.facts != (body,):
            self._notes.setdefault((*key, "first round"), before)
        self._notes[key] = _Note("call", eqn, (body,))
        self._bodies.setdefault(id(eqn), {})[id(jaxpr)] = body
        self.has_notes |= body.has_notes

    def calls(self, eqn: Any) -> list[Record]:
        """Return the bodies of an equation."""
        return list(self._bodies.get(id(eqn), {}).values())

    def child(self, eqn: Any, jaxpr: Any) -> Record:
        """Return one body of an equation."""
        return self._bodies[id(eqn)][id(jaxpr)]

    def has(self, kind: str, eqn: Any) -> bool:
        """Whether something of this kind was met at an equation."""
        return (kind, id(eqn)) in self._notes

    def calls_with_notes(self) -> list[tuple[Any, Record]]:
        """Return the equations with bodies in which something was met, and these."""
        calls = [(note.eqn, *note.facts) for note in self._notes.values() if note.kind == "call"]
        return [(eqn, body) for eqn, body in calls if body.has_notes]

    def end(self, ins: Sequence[Any], outs: list[Any]) -> None:
        """Record what comes out, and what the Refs that went in hold now."""
        self._cells = [x.value if isinstance(x, Cell) else None for x in ins]
        self._outs = outs
        for i, out in enumerate(outs):
            if isinstance(out, Cell):
                self._outs[i] = next((j for j, x in enumerate(ins) if x is out), None), out.value

    def results(self, ins: Sequence[Any]) -> list[Any]:
        """Return what comes out of a call with inputs like those that were recorded."""
        for value, after in zip(ins, self._cells, strict=True):
            if isinstance(value, Cell) and after is not None:
                value.value = after
        return [self._ref(out, ins) if isinstance(out, tuple) else out for out in self._outs]

    def _ref(self, out: tuple[int | None, int], ins: Sequence[Any]) -> Cell:
        position, value = out
        return Cell(value) if position is None else ins[position]

    def deadlocks(self, lattice: Lattice) -> tuple[Deadlock, ...]:
        """Return the deadlocks in all that was called from here."""
        found = {}
        for note, line in self._found("deadlock", "shift"):
            if note.kind == "shift":
                eqn, axes, control = note.facts
                each = Deadlock(eqn.primitive.name, axes, control, line, is_compilers=True)
            else:
                axes, absent, control = note.facts
                name = note.eqn.primitive.name
                name = "all_reduce" if name.startswith("jdp_") else name.removesuffix("_invariant")
                names = tuple(sorted(lattice.names(axes)))
                each = Deadlock(name, names, control, line, lattice.names(absent), note.eqn)
            found[id(note.eqn)] = each
        return tuple(found.values())

    def unknown(self) -> tuple[tuple[str, str], ...]:
        """Return the primitives that are on no list, each with a line where it stands."""
        found: dict[str, str] = {}
        for note, line in self._found("unknown"):
            found.setdefault(note.eqn.primitive.name, line)
        return tuple(found.items())

    def marks(self, lattice: Lattice) -> tuple[Marked, ...]:
        """Return the marks, one for each equation, wherever it was called."""
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
        """Return the findings with their lines, once for each line that calls them."""
        seen: set[tuple[int, str]] = set()
        # The outermost line is that of the shard_map, which says too little.
        bodies = [body for _, body in self.calls_with_notes()]
        found = [each for body in bodies for each in body._below("", seen)]
        return [(note, line) for note, line in found if note.kind in kinds]

    def _below(self, around: str, seen: set[tuple[int, str]]) -> Iterator[tuple[_Note, str]]:
        if (id(self), around) in seen:
            return
        seen.add((id(self), around))
        for note in self._notes.values():
            # JAX cuts tracebacks where it traces a body: without a line of the author's in that,
            # the equation around it has one.
            if note.kind != "call":
                line = source(note.facts[0]) if note.kind == "shift" else ""
                yield note, line or source(note.eqn) or around
            elif note.facts[0].has_notes:
                yield from note.facts[0]._below(source(note.eqn) or around, seen)
