"""Backward slices through calls, branches and loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jdp.analysis import jaxprs
from jdp.analysis.diagnostics import source_of
from jdp.analysis.marks import SOURCE
from jdp.analysis.records import Record, value_of


class Frame(NamedTuple):
    """A body, its calling equation, and the frame around it."""

    record: Record
    eqn: Any
    around: Frame | None

    def key(self) -> tuple[int, ...]:
        """Return this call's key."""
        around = () if self.around is None else self.around.key()
        return *around, id(self.record), id(self.eqn)


class Node(NamedTuple):
    """A variable in one call of its body."""

    frame: Frame
    variable: Any

    def key(self) -> tuple[Any, ...]:
        """Return this node's key."""
        return self.variable, *self.frame.key()

    def shared_key(self) -> tuple[Any, ...]:
        """Return a key common to calls with equal input classes."""
        return self.variable, id(self.frame.record)


class WayBack:
    """A backward slice of a shard_map's body, from its record, for values with `bits`."""

    def __init__(self, body: Any, root: Record, eqn: Any, bits: int):
        self.body = body
        self.top = Frame(root.child(eqn, body), None, None)
        self._bits = bits
        self._makers: dict[int, dict[Any, Any]] = {}

    def back(
        self,
        nodes: list[Node],
        *,
        everything: bool = False,
        only_same: bool = False,
        until: Iterable[tuple[Any, ...]] = (),
    ) -> Iterator[Node]:
        """Yield the differing values up to `nodes`, nearest first."""
        seen, waiting = set(), deque(nodes)
        while waiting:
            node = waiting.popleft()
            if jaxprs.is_literal(node.variable):
                continue
            # Nested calls would take 2^depth keys.
            key = node.key() if len(seen) < _MANY_NODES else node.shared_key()
            if key in seen:
                continue
            seen.add(key)
            differs = self.differs(node)
            if not (everything or differs) or (only_same and differs):
                continue
            yield node
            if node.key() not in until:
                waiting += self.before(node)

    def before(self, node: Node) -> Iterator[Node]:
        """Yield a value's operands, in any body."""
        frame, variable = node
        if jaxprs.is_literal(variable):
            return
        eqn = self.maker(node)
        if jaxprs.is_ref(variable):
            yield from self._written(node)
        if eqn is None:
            yield from self._handed_in(frame, variable)
        elif frame.record.calls(eqn):
            yield from self._handed_out(frame, eqn, eqn.outvars.index(variable))
        elif not is_source(eqn):
            yield from (Node(frame, atom) for atom in eqn.invars)

    def varying_before(self, node: Node) -> Iterator[Node]:
        """Yield a value's differing operands."""
        return (each for each in self.before(node) if self.differs(each))

    def differs(self, node: Node) -> bool:
        """Whether a value may differ between ranks."""
        if jaxprs.is_literal(node.variable):
            return False
        return bool(value_of(node.frame.record.env.get(node.variable, 0)) & self._bits)

    def maker(self, node: Node) -> Any | None:
        """Return a value's equation, None for an input."""
        record = node.frame.record
        if id(record) not in self._makers:
            self._makers[id(record)] = {v: eqn for eqn in record.jaxpr.eqns for v in eqn.outvars}
        return self._makers[id(record)].get(node.variable)

    def plain(self, node: Node) -> Any | None:
        """Return a value's equation without bodies, else None."""
        eqn = self.maker(node)
        if eqn is None or node.frame.record.calls(eqn) or is_source(eqn):
            return None
        return eqn

    def predicates(self, frame: Frame | None, eqn: Any) -> Iterator[Node]:
        """Yield the values that decide how often bodies run."""
        if frame is None:
            return
        if eqn.primitive.name == "cond":
            yield Node(frame, eqn.invars[0])
        if eqn.primitive.name == "while":
            cond = jaxprs.while_parts(eqn)[0]
            yield Node(Frame(frame.record.child(eqn, cond), eqn, frame), cond.outvars[0])

    def frame_of(self, kind: str, eqn: Any) -> Frame | None:
        """Return a body with a finding."""
        waiting, seen = [self.top], set()
        while waiting:
            frame = waiting.pop()
            if id(frame.record) in seen:
                continue
            seen.add(id(frame.record))
            if frame.record.has(kind, eqn):
                return frame
            calls = reversed(frame.record.calls_with_notes())
            waiting += [Frame(body, around, frame) for around, body in calls]
        return None

    def line(self, frame: Frame | None, eqn: Any) -> str:
        """Return the author's line of an equation."""
        line = "" if eqn is None else source_of(eqn)
        while not line and frame is not None and frame.eqn is not None:
            line, frame = source_of(frame.eqn), frame.around
        return line

    def _handed_in(self, frame: Frame, variable: Any) -> Iterator[Node]:
        if frame.around is None or variable not in frame.record.jaxpr.invars:
            return
        i = frame.record.jaxpr.invars.index(variable)
        for operand, carried in _positions(frame.eqn, frame.record.jaxpr, i):
            if operand is not None:
                yield Node(frame.around, frame.eqn.invars[operand])
            if carried is not None:
                last = self._last_round(frame)
                yield Node(last, last.record.jaxpr.outvars[carried])
                yield from self.predicates(frame.around, frame.eqn)

    def _last_round(self, frame: Frame) -> Frame:
        if frame.eqn.primitive.name != "while":
            return frame
        assert frame.around is not None
        body = frame.around.record.child(frame.eqn, jaxprs.while_parts(frame.eqn)[1])
        return Frame(body, frame.eqn, frame.around)

    def _handed_out(self, frame: Frame, eqn: Any, i: int) -> Iterator[Node]:
        name = eqn.primitive.name
        bodies = frame.record.calls(eqn)
        is_known = name in _KNOWN or len(bodies) == 1 and _fits(eqn, bodies[0].jaxpr)
        if not is_known:
            yield from (Node(frame, atom) for atom in eqn.invars)
            return
        yield from self.predicates(frame, eqn)
        if name == "while":
            bodies = [each for each in bodies if each.jaxpr is jaxprs.while_parts(eqn)[1]]
            _, _, num_cond, num_body = jaxprs.while_parts(eqn)
            yield Node(frame, eqn.invars[num_cond + num_body + i])
        if name == "scan":
            _, num_constants, num_carry = jaxprs.scan_parts(eqn)
            if i < num_carry:
                yield Node(frame, eqn.invars[num_constants + i])
        for body in bodies:
            yield Node(Frame(body, eqn, frame), body.jaxpr.outvars[i])

    def _written(self, node: Node) -> Iterator[Node]:
        frame, ref = node
        for eqn in frame.record.jaxpr.eqns:
            if ref not in [atom for atom in eqn.invars if not jaxprs.is_literal(atom)]:
                continue
            if eqn.primitive.name in ("swap", "addupdate"):
                yield from (Node(frame, atom) for atom in eqn.invars if atom is not ref)
            for body in frame.record.calls(eqn):
                yield from self.predicates(frame, eqn)
                inner = Frame(body, eqn, frame)
                for i, variable in enumerate(body.jaxpr.invars):
                    for operand, _ in _positions(eqn, body.jaxpr, i):
                        if operand is not None and eqn.invars[operand] is ref:
                            yield from self._written(Node(inner, variable))


# With more nodes, equal calls count as one.
_MANY_NODES = 10_000

_KNOWN = frozenset({"cond", "scan", "shard_map", "while", "call_hi_primitive", *jaxprs.CALLS})


def is_source(eqn: Any) -> bool:
    """Whether an equation marks a differing value."""
    return eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == SOURCE


def _fits(eqn: Any, body: Any) -> bool:
    return len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)


def _positions(eqn: Any, body: Any, i: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield an input's operand, and the output that replaces it."""
    name = eqn.primitive.name
    if name == "cond":
        yield i + 1, None
    elif name == "while":
        cond, _, num_cond, num_body = jaxprs.while_parts(eqn)
        num_own = num_cond if body is cond else num_body
        first = 0 if body is cond else num_cond
        if i < num_own:
            yield first + i, None
        else:
            yield num_cond + num_body + i - num_own, i - num_own
    elif name == "scan":
        _, num_constants, num_carry = jaxprs.scan_parts(eqn)
        is_carry = num_constants <= i < num_constants + num_carry
        yield i, i - num_constants if is_carry else None
    elif _fits(eqn, body):
        yield i, None
    else:
        yield from ((operand, None) for operand in range(len(eqn.invars)))
