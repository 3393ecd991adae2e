"""Which arrays of a compiled step are in memory when most of it is taken."""

from collections import defaultdict
from typing import NamedTuple

from jdp.inspect import hlo
from jdp.inspect.computation import Computation, Instruction
from jdp.inspect.hlo import HloProgram
from jdp.inspect.made_arrays import MadeArray, is_name, joined, makes, parts_of, reads


class Live(NamedTuple):
    """The bytes that are in memory at once, beside arguments and results.

    Attributes:
      activations: made in the forward pass, and kept for the backward pass.
      gradients: made in the backward pass, or sums of that, over micro-batches or ranks.
      others: everything else.
    """

    activations: int = 0
    gradients: int = 0
    others: int = 0

    def __add__(self, other: tuple) -> "Live":
        return Live(*map(sum, zip(self, other, strict=True)))

    def __sub__(self, other: tuple) -> "Live":
        return Live(*(a - b for a, b in zip(self, other, strict=True)))

    def total(self) -> int:
        """Return all bytes."""
        return sum(self)


def fullest(program: HloProgram) -> Live:
    """Return what is in memory when the most temporary bytes are, by the order of operations."""
    return _Liveness(program).fullest(program.entry)


class _KindOfArray(NamedTuple):
    num_elements: int
    num_bytes: int
    kind: str  # a field of Live

    def live(self) -> Live:
        return Live(**{self.kind: self.num_bytes})


class _Liveness:
    def __init__(self, program: HloProgram):
        self._program = program
        self._found: dict[str, Live] = {}

    def fullest(self, name: str) -> Live:
        """Return the fullest moment of a computation and of the loops in it."""
        if name not in self._found:
            self._found[name] = self._of(name)
        return self._found[name]

    def _of(self, name: str) -> Live:
        computation = self._program.computations[name]
        parts, arrays = parts_of(computation), self._arrays(name)
        leaving = set(joined(parts[_result(computation)]))
        last = {made: i for i, one in enumerate(computation) if not is_name(one)
                for made in reads(one, parts)}  # fmt: skip
        ends: dict[int, list[MadeArray]] = defaultdict(list)
        now = most = Live()
        for i, one in enumerate(computation):
            inner = Live()
            if one.op in ("while", "conditional", "call"):
                called = [x for x in one.called() if x in self._program.computations]
                inner = max(map(self.fullest, called), key=Live.total, default=Live())
            freed, unread = ends.pop(i, []), []
            for made in makes(one, parts):
                if made in leaving or one.op == "parameter":
                    continue
                now += arrays[made].live()
                # An operation may write over an operand that nothing reads after it.
                size = arrays[made].num_bytes
                over = next((x for x in freed if arrays[x].num_bytes == size), None)
                if over is not None:
                    now -= arrays[over].live()
                    freed.remove(over)
                (ends[last[made]] if made in last else unread).append(made)
            most = max(most, now + inner, key=Live.total)
            for made in freed + unread:
                now -= arrays[made].live()
        return most

    def _arrays(self, name: str) -> dict[MadeArray, _KindOfArray]:
        """Return the arrays of a computation, but for those that a loop carries into it."""
        computation = self._program.computations[name]
        parts = parts_of(computation)
        found: dict[MadeArray, _KindOfArray] = {}
        for one in computation:
            if one.op == "parameter" and name != self._program.entry:
                continue
            read = [found[made] for made in reads(one, parts) if made in found]
            types = hlo.elements(one.shape)
            for made in makes(one, parts):
                found[made] = _array(one, types[made.index], read)
            if one.op == "while":
                for part, kind in zip(parts[one.name], self._written(one), strict=False):
                    for made in part if kind else ():
                        if made in found:
                            found[made] = found[made]._replace(kind=kind)
        return found

    def _written(self, loop: Instruction) -> list[str]:
        """Return of what kind the arrays are that a loop writes, "" for those that it keeps."""
        body = loop.computation("body")
        computation = self._program.computations[body]
        arrays, parts = self._arrays(body), parts_of(computation)
        return [
            next((arrays[made].kind for made in part if made in arrays), "")
            for part in parts[_result(computation)]
        ]


def _result(computation: Computation) -> str:
    assert computation.root is not None
    return computation.root.name


def _array(one: Instruction, shape: str, read: list[_KindOfArray]) -> _KindOfArray:
    # S(1) is a TPU's vector memory.
    sizes = (x.padded_bytes() for x in hlo.arrays(shape) if "S(1)" not in x.layout)
    num_elements = hlo.num_elements(shape)
    return _KindOfArray(num_elements, sum(sizes), _kind(one, num_elements, read))


def _kind(one: Instruction, num_elements: int, read: list[_KindOfArray]) -> str:
    name = one.op_name()
    is_sent = one.op.startswith(hlo.COLLECTIVES) or "jdp_" in one.target()
    # What is gathered are parameters, or, in the forward pass, what it makes.
    is_gathered = one.op.startswith("all-gather") or "all_gather" in one.target()
    if "transpose(" in name or is_sent and not is_gathered:
        return "gradients"
    if not name and read:  # made by XLA, as the packing of gradients is
        return read[0].kind
    if "jvp(" in name:
        return "activations"
    # A sum of gradients over micro-batches is not made of the parameters, as their update is.
    large = {x.kind for x in read if x.num_elements >= num_elements}
    return "gradients" if "gradients" in large and "others" not in large else "others"
