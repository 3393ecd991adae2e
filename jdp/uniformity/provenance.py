"""Where a value that differs from rank to rank comes from. Asked only when something is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jdp.mark import ALL_REDUCED, SOURCE
from jdp.uniformity import collectives, jaxprs
from jdp.uniformity.records import Record
from jdp.uniformity.refs import held
from jdp.uniformity.source import source


class Origin(NamedTuple):
    """What makes a value differ from rank to rank.

    Attributes:
      line: the author's line in which something that differs meets something that was reduced;
        empty if that happens nowhere.
      primitive: what that line does, such as "mul".
      sources: where what differs comes from: positions of inputs of the shard_map, and texts.
      is_reduced: whether anything was reduced on the way.
      is_of_gradient: whether what it meets comes from a gradient that was reduced.
    """

    line: str
    primitive: str
    sources: tuple[int | str, ...]
    is_reduced: bool
    is_of_gradient: bool = False


class _Frame(NamedTuple):
    """A body that is being looked at, and which equation of which other body calls it."""

    record: Record
    eqn: Any
    around: _Frame | None


class Node(NamedTuple):
    """A variable of a body; a body that is called twice has it twice."""

    frame: _Frame
    variable: Any

    def key(self) -> tuple[int, Any]:
        """Return what is the same for every call of the body with equal classes."""
        return id(self.frame.record), self.variable


# What its author calls a source that is no input.
_SOURCES = {
    "axis_index": "`axis_index` (the number of this rank)",
    "empty": "`jnp.empty` (memory that nobody has written)",
    "empty_ref": "a Ref that nobody has written",
    "ffi_call": "a foreign call (with side effects)",
    "infeed": "`infeed` (which each device reads by itself)",
    "io_callback": "`io_callback` (which each rank calls by itself)",
    "rng_uniform": "`rng_uniform` (which each device draws by itself)",
}


class Provenance:
    """The way back through a shard_map whose bodies were walked.

    Args:
      body: of the shard_map.
      root: of the walk through it.
      eqn: the shard_map.
      bits: of the axes along which it is asked what differs.
    """

    def __init__(self, body: Any, root: Record, eqn: Any, bits: int):
        self._body = body
        self._top = _Frame(root.child(eqn, body), None, None)
        self._bits = bits
        self._makers: dict[int, dict[Any, Any]] = {}

    def of_output(self, i: int) -> Node:
        """Return what an output of the shard_map is, casts and copies aside."""
        return self._computed(Node(self._top, self._body.outvars[i]))

    def of_input(self, i: int) -> Node:
        """Return an input of the shard_map."""
        return Node(self._top, self._body.invars[i])

    def of_mark(self, eqn: Any) -> Node | None:
        """Return what was marked."""
        frame = self._frame_of(id(eqn))
        return None if frame is None else Node(frame, eqn.invars[0])

    def of_predicate(self, eqn: Any) -> Node | None:
        """Return the predicate that keeps some ranks from a collective."""
        frame = self._frame_of((id(eqn), "deadlock"))
        while frame is not None and frame.eqn is not None:
            for node in self._predicates(frame.around, frame.eqn):
                if self._differs(node):
                    return node
            frame = frame.around
        return None

    def line(self, node: Node) -> str:
        """Return the author's line that computed a value, empty if there is none."""
        return self._line(node.frame, self._maker(node))

    def origin(self, node: Node) -> Origin:
        """Find where what differs came in: the nearest place where it met something reduced."""
        is_reduced = any(map(self._is_collective, self._back([node], everything=True)))
        sources: dict[int | str, None] = {}
        for each in self._back([node]):
            eqn = self._plain(each)
            if eqn is None:
                self._add_source(each, sources)
                continue
            operands = [Node(each.frame, atom) for atom in eqn.invars]
            differing = [operand for operand in operands if self._differs(operand)]
            same = [operand for operand in operands if not self._differs(operand)]
            if not differing:
                self._add_source(each, sources)
            elif reduced := [one for one in same if self._comes_from_reduction(one)]:
                line, met = self._line(each.frame, eqn), self._sources(differing)
                gradient = self._comes_from_gradient(reduced)
                return Origin(line, eqn.primitive.name, met, is_reduced, gradient)
        return Origin("", "", tuple(sources), is_reduced)

    def reduction(self, node: Node) -> str:
        """Return the author's line of the nearest reduction of a value that is reduced."""
        for each in self._back([node], everything=True):
            eqn = self._maker(each)
            if eqn is not None and self._reduces(each.frame, eqn):
                if line := self._line(each.frame, eqn):
                    return line
        return ""

    def repetition(self, node: Node) -> str:
        """Return the author's line of the nearest sum of what was the same on every rank."""
        for each in self._back([node], everything=True):
            eqn = self._maker(each)
            if eqn is not None and eqn.primitive.name in ("psum", "psum_invariant"):
                if line := self._line(each.frame, eqn):
                    return line
        return ""

    def is_consequence(self, node: Node, causes: Iterable[Node]) -> bool:
        """Whether a value differs only because some other ones do."""
        keys = {cause.key() for cause in causes} - {node.key()}
        met = False
        for each in self._back([node], until=keys):
            if each.key() in keys:
                met = True
            elif not any(True for _ in self._varying_before(each)):
                return False
        return met

    def _sources(self, nodes: list[Node]) -> tuple[int | str, ...]:
        found: dict[int | str, None] = {}
        for each in self._back(nodes):
            if not any(True for _ in self._varying_before(each)):
                self._add_source(each, found)
        return tuple(found)

    def _add_source(self, node: Node, found: dict[int | str, None]) -> None:
        if any(True for _ in self._varying_before(node)):
            return
        eqn = self._maker(node)
        if eqn is None:
            if node.frame.around is None and node.variable in self._body.invars:
                found[self._body.invars.index(node.variable)] = None
            elif node.frame.eqn is not None:
                line = self._line(node.frame.around, node.frame.eqn)
                found["a part that is split by a shard_map" + (f" at {line}" if line else "")] = (
                    None
                )
            return
        if eqn.primitive.name == "jdp_mark":
            found[f"`{eqn.params['path']}` (this rank's)"] = None
            return
        within = next(self._sources_within(node.frame.record, eqn), eqn)
        name = within.primitive.name
        line = self._line(node.frame, within)
        found[_SOURCES.get(name, f"`{name}`") + (f" at {line}" if line else "")] = None

    def _sources_within(self, record: Record, eqn: Any) -> Iterator[Any]:
        for body in record.calls(eqn):
            for inner in body.jaxpr.eqns:
                if inner.primitive.name in _SOURCES:
                    yield inner
                yield from self._sources_within(body, inner)

    def _comes_from_reduction(self, node: Node) -> bool:
        for each in self._back([node], everything=True, only_same=True):
            eqn = self._maker(each)
            if eqn is not None and self._reduces(each.frame, eqn):
                return True
        return False

    def _comes_from_gradient(self, nodes: list[Node]) -> bool:
        eqns = (self._maker(each) for each in self._back(nodes, everything=True))
        marks = (e for e in eqns if e is not None and e.primitive.name == "jdp_mark")
        return any(eqn.params["kind"] == "local" for eqn in marks)

    def _reduces(self, frame: _Frame, eqn: Any) -> bool:
        outs = [Node(frame, variable) for variable in eqn.outvars]
        return any(map(self._is_collective, outs)) and not all(map(self._differs, outs))

    def _is_collective(self, node: Node) -> bool:
        eqn = self._maker(node)
        if eqn is None or eqn.primitive.name not in _COLLECTIVES:
            return False
        return eqn.primitive.name != "jdp_mark" or eqn.params["kind"] == ALL_REDUCED

    def _back(
        self,
        nodes: list[Node],
        *,
        everything: bool = False,
        only_same: bool = False,
        until: Iterable[tuple[int, Any]] = (),
    ) -> Iterator[Node]:
        """Yield values that these were computed from, the nearest first: those that differ."""
        seen, waiting = set(), deque(nodes)
        while waiting:
            node = waiting.popleft()
            if jaxprs.is_literal(node.variable) or node.key() in seen:
                continue
            seen.add(node.key())
            differs = self._differs(node)
            if not (everything or differs) or (only_same and differs):
                continue
            yield node
            if node.key() not in until:
                waiting += self._before(node)

    def _varying_before(self, node: Node) -> Iterator[Node]:
        return (each for each in self._before(node) if self._differs(each))

    def _differs(self, node: Node) -> bool:
        if jaxprs.is_literal(node.variable):
            return False
        return bool(held(node.frame.record.env.get(node.variable, 0)) & self._bits)

    def _maker(self, node: Node) -> Any | None:
        record = node.frame.record
        if id(record) not in self._makers:
            self._makers[id(record)] = {v: eqn for eqn in record.jaxpr.eqns for v in eqn.outvars}
        return self._makers[id(record)].get(node.variable)

    def _plain(self, node: Node) -> Any | None:
        """Return the equation that computed a value, None if it has bodies or is a source."""
        eqn = self._maker(node)
        if eqn is None or node.frame.record.calls(eqn) or _is_source(eqn):
            return None
        return eqn

    def _computed(self, node: Node) -> Node:
        while True:
            eqn = self._maker(node)
            if eqn is None or not (_moves(eqn) or eqn.primitive.name in jaxprs.CALLS):
                return node
            before = list(self._before(node))
            if not before or jaxprs.is_literal(before[0].variable):
                return node
            node = before[0]

    def _before(self, node: Node) -> Iterator[Node]:
        frame, variable = node
        if jaxprs.is_literal(variable):
            return
        eqn = self._maker(node)
        if jaxprs.is_ref(variable):
            yield from self._written(node)
        if eqn is None:
            yield from self._handed_in(frame, variable)
        elif frame.record.calls(eqn):
            yield from self._handed_out(frame, eqn, eqn.outvars.index(variable))
        elif not _is_source(eqn):
            yield from (Node(frame, atom) for atom in eqn.invars)

    def _handed_in(self, frame: _Frame, variable: Any) -> Iterator[Node]:
        if frame.around is None or variable not in frame.record.jaxpr.invars:
            return
        i = frame.record.jaxpr.invars.index(variable)
        for operand, carried in _positions(frame.eqn, frame.record.jaxpr, i):
            if operand is not None:
                yield Node(frame.around, frame.eqn.invars[operand])
            if carried is not None:
                last = self._last_round(frame)
                yield Node(last, last.record.jaxpr.outvars[carried])
                yield from self._predicates(frame.around, frame.eqn)

    def _last_round(self, frame: _Frame) -> _Frame:
        """Return the body of the loop that `frame`, its body or its condition, belongs to."""
        if frame.eqn.primitive.name != "while":
            return frame
        assert frame.around is not None
        body = frame.around.record.child(frame.eqn, jaxprs.while_parts(frame.eqn)[1])
        return _Frame(body, frame.eqn, frame.around)

    def _handed_out(self, frame: _Frame, eqn: Any, i: int) -> Iterator[Node]:
        name = eqn.primitive.name
        bodies = frame.record.calls(eqn)
        is_known = name in _KNOWN or len(bodies) == 1 and _fits(eqn, bodies[0].jaxpr)
        if not is_known:
            yield from (Node(frame, atom) for atom in eqn.invars)
            return
        yield from self._predicates(frame, eqn)
        if name == "while":
            bodies = [each for each in bodies if each.jaxpr is jaxprs.while_parts(eqn)[1]]
            _, _, num_cond, num_body = jaxprs.while_parts(eqn)
            yield Node(frame, eqn.invars[num_cond + num_body + i])
        if name == "scan":
            _, num_constants, num_carry = jaxprs.scan_parts(eqn)
            if i < num_carry:
                yield Node(frame, eqn.invars[num_constants + i])
        for body in bodies:
            yield Node(_Frame(body, eqn, frame), body.jaxpr.outvars[i])

    def _predicates(self, frame: _Frame | None, eqn: Any) -> Iterator[Node]:
        if frame is None:
            return
        if eqn.primitive.name == "cond":
            yield Node(frame, eqn.invars[0])
        if eqn.primitive.name == "while":
            cond = jaxprs.while_parts(eqn)[0]
            yield Node(_Frame(frame.record.child(eqn, cond), eqn, frame), cond.outvars[0])

    def _written(self, node: Node) -> Iterator[Node]:
        """Yield what is written into a Ref where it is known by this name, and below."""
        frame, ref = node
        for eqn in frame.record.jaxpr.eqns:
            if ref not in [atom for atom in eqn.invars if not jaxprs.is_literal(atom)]:
                continue
            if eqn.primitive.name in ("swap", "addupdate"):
                yield from (Node(frame, atom) for atom in eqn.invars if atom is not ref)
            for body in frame.record.calls(eqn):
                yield from self._predicates(frame, eqn)
                inner = _Frame(body, eqn, frame)
                for i, variable in enumerate(body.jaxpr.invars):
                    for operand, _ in _positions(eqn, body.jaxpr, i):
                        if operand is not None and eqn.invars[operand] is ref:
                            yield from self._written(Node(inner, variable))

    def _frame_of(self, key: Any) -> _Frame | None:
        waiting, seen = [self._top], set()
        while waiting:
            frame = waiting.pop()
            if id(frame.record) in seen:
                continue
            seen.add(id(frame.record))
            if frame.record.has(key):
                return frame
            calls = frame.record.noted_calls()
            waiting += [_Frame(call.record, call.eqn, frame) for call in reversed(calls)]
        return None

    def _line(self, frame: _Frame | None, eqn: Any) -> str:
        line = "" if eqn is None else source(eqn)
        while not line and frame is not None and frame.eqn is not None:
            line, frame = source(frame.eqn), frame.around
        return line


_KNOWN = frozenset({"cond", "scan", "shard_map", "while", "call_hi_primitive", *jaxprs.CALLS})
_MOVES = frozenset("convert_element_type copy copy_p reshape squeeze".split())


_COLLECTIVES = frozenset(collectives.RULES) - {"axis_index"}


def _is_source(eqn: Any) -> bool:
    return eqn.primitive.name == "jdp_mark" and eqn.params["kind"] == SOURCE


def _moves(eqn: Any) -> bool:
    return eqn.primitive.name in _MOVES or (
        eqn.primitive.name == "jdp_mark" and not _is_source(eqn)
    )


def _fits(eqn: Any, body: Any) -> bool:
    return len(body.invars) == len(eqn.invars) and len(body.outvars) == len(eqn.outvars)


def _positions(eqn: Any, body: Any, i: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield which operand of `eqn` the i-th input of its body is, and which output of the body."""
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
    else:  # nobody knows which
        yield from ((operand, None) for operand in range(len(eqn.invars)))
