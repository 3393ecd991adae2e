"""What was met in each body that an analysis walked through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jdp.analysis.cells import Cell
from jdp.analysis.findings import Deadlock, Marked
from jdp.analysis.lattice import Lattice
from jdp.analysis.source_lines import source


class _Mark(NamedTuple):
    eqn: Any
    value: int
    where: int


class _Skipped(NamedTuple):
    eqn: Any
    axes: int
    absent: int
    control: str


class _Shift(NamedTuple):
    eqn: Any
    around: Any
    axes: tuple[str, ...]
    control: str


class _Unknown(NamedTuple):
    eqn: Any


_Note = _Mark | _Skipped | _Shift | _Unknown


class _FirstRound(NamedTuple):
    """The body of a loop as its first round runs it, where later rounds know less of its inputs."""

    eqn: Any
    record: Record


class Call(NamedTuple):
    """A body of an equation, as it was walked the last time."""

    eqn: Any
    record: Record


class Record:
    """One body, walked for one set of input classes; calls that are alike share it.

    Args:
      jaxpr: the body.
      env: class of every variable in it.
    """

    __slots__ = ("_cells", "_is_noted", "_notes", "_outs", "env", "jaxpr")

    def __init__(self, jaxpr: Any, env: dict[Any, Any]):
        self.jaxpr = jaxpr
        self.env = env
        # In the order of the program. What comes again overwrites what was there: the last round
        # of a loop is the one that counts. The first is kept beside it, for what is certain of it.
        self._notes: dict[Any, _Note | Call | _FirstRound] = {}
        self._is_noted = False
        self._outs: list[Any] = []
        self._cells: list[int | None] = []

    def note_mark(self, eqn: Any, value: int, where: int) -> None:
        """Record a mark, its class, and along which axes ranks may not come to it."""
        self._notes[id(eqn)] = _Mark(eqn, value, where)
        self._is_noted = True

    def note_deadlock(self, eqn: Any, axes: int, absent: int, control: str) -> None:
        """Record a collective that some ranks may skip."""
        self._notes[id(eqn), "deadlock"] = _Skipped(eqn, axes, absent, control)
        self._is_noted = True

    def note_shift(self, eqn: Any, around: Any, axes: tuple[str, ...], control: str) -> None:
        """Record an operation that XLA splits over `axes`, under the control flow of `around`."""
        self._notes[id(around), "shift"] = _Shift(eqn, around, axes, control)
        self._is_noted = True

    def note_unknown(self, eqn: Any) -> None:
        """Record a primitive that is on no list."""
        self._notes[id(eqn), "unknown"] = _Unknown(eqn)
        self._is_noted = True

    def call(self, eqn: Any, jaxpr: Any, body: Record) -> None:
        """Record that `jaxpr`, a body of `eqn`, is `body`."""
        before = self._notes.get((id(eqn), id(jaxpr)))
        if isinstance(before, Call) and before.record is not body:
            self._notes.setdefault((id(eqn), id(jaxpr), "first"), _FirstRound(*before))
        self._notes[id(eqn), id(jaxpr)] = Call(eqn, body)
        self._is_noted |= body._is_noted

    def calls(self, eqn: Any) -> list[Record]:
        """Return the bodies of an equation."""
        found = [note for note in self._notes.values() if isinstance(note, Call)]
        return [note.record for note in found if note.eqn is eqn]

    def child(self, eqn: Any, jaxpr: Any) -> Record:
        """Return one body of an equation."""
        call = self._notes[id(eqn), id(jaxpr)]
        assert isinstance(call, Call)
        return call.record

    def has(self, key: Any) -> bool:
        """Whether something was noted of an equation, by its id."""
        return key in self._notes

    def noted_calls(self) -> list[Call]:
        """Return the bodies in which something was noted."""
        notes = self._notes.values()
        return [note for note in notes if isinstance(note, Call) and _matters(note)]

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
        for note, line in self._noted():
            if isinstance(note, _Skipped):
                name = note.eqn.primitive.name
                found[id(note.eqn)] = Deadlock(
                    "all_reduce" if name.startswith("jdp_") else name.removesuffix("_invariant"),
                    tuple(sorted(lattice.names(note.axes))),
                    note.control,
                    line,
                    lattice.names(note.absent),
                    note.eqn,
                )
            elif isinstance(note, _Shift):
                name = note.eqn.primitive.name
                found[id(note.around)] = Deadlock(
                    name, note.axes, note.control, line, is_compilers=True
                )
        return tuple(found.values())

    def unknown(self) -> tuple[tuple[str, str], ...]:
        """Return the primitives that are on no list, each with a line where it stands."""
        found: dict[str, str] = {}
        for note, line in self._noted():
            if isinstance(note, _Unknown):
                found.setdefault(note.eqn.primitive.name, line)
        return tuple(found.items())

    def marks(self, lattice: Lattice) -> tuple[Marked, ...]:
        """Return the marks, one for each equation, wherever it was called."""
        found: dict[int, Marked] = {}
        for note, line in self._noted():
            if isinstance(note, _Mark):
                value, under = lattice.decode(note.value), lattice.names(note.where)
                other = found.get(id(note.eqn))
                if other is not None:
                    value, under = value.either(other.value), under | other.under
                found[id(note.eqn)] = Marked(
                    **note.eqn.params, value=value, under=under, source=line, eqn=note.eqn
                )
        return tuple(found.values())

    def _noted(self) -> Iterator[tuple[_Note, str]]:
        """Yield what was noted, each with its line, once for each line that it is called from."""
        seen = set()
        # JAX cuts tracebacks where it traces a body: without a line of the author's in that, the
        # equation around it has one. The outermost is the shard_map, which says too little.
        waiting = [(call, "") for call in self._calls_with_notes()]
        while waiting:
            call, line = waiting.pop()
            if isinstance(call, (Call, _FirstRound)):
                if (id(call.record), line) not in seen:
                    seen.add((id(call.record), line))
                    notes = call.record._notes.values()
                    inner = [(each, line) for each in notes if _matters(each)]
                    waiting += reversed([(each, _line(each, line)) for each, line in inner])
            else:
                yield call, line

    def _calls_with_notes(self) -> list[Any]:
        return [note for note in self._notes.values() if _matters(note)]


def _matters(note: _Note | Call | _FirstRound) -> bool:
    return not isinstance(note, (Call, _FirstRound)) or note.record._is_noted


def _line(note: _Note | Call | _FirstRound, around: str) -> str:
    near = source(note.around) if isinstance(note, _Shift) else ""
    return source(note.eqn) or near or around
