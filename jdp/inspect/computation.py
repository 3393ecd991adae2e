"""A computation of a compiled program: its instructions, and which of them take which results."""

import functools
import re
from collections import defaultdict
from typing import NamedTuple

_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|called_computations|branch_computations)="
    r"\{?%?([\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Instruction(NamedTuple):
    """One operation of a program."""

    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool = False

    def operands(self) -> list[str]:
        """Return the names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    def called(self) -> list[str]:
        """Return the names of the computations that it calls."""
        found = _CALLED.findall(self.attributes())
        return [name.strip().lstrip("%") for names in found for name in names.split(",")]

    def computation(self, attribute: str) -> str:
        """Return the name of the computation of an attribute, such as the `body` of a loop."""
        return re.findall(rf"\b{attribute}=%?([\w.\-]+)", self.rest)[0]

    def number(self) -> int:
        """Return the number of a parameter."""
        return int(self.rest.split(")")[0])

    def element(self) -> int:
        """Return the number of the element that a get-tuple-element takes."""
        return int(re.findall(r"\bindex=(\d+)", self.rest)[0])

    def attributes(self) -> str:
        """Return its attributes, without the metadata."""
        return self.rest.partition(")")[2].partition(", metadata={")[0]

    def op_name(self) -> str:
        """Return the name that JAX gave it, such as `jit(step)/transpose(jvp())/dot_general`."""
        found = _NAME.search(self.rest)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    def target(self) -> str:
        """Return the target of a custom call, empty for other operations."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""


class Computation(list[Instruction]):
    """Instructions in the order in which they run."""

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by their names."""
        return {one.name: one for one in self}

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """The type of each result, by name."""
        return {one.name: one.shape for one in self}

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by their numbers."""
        return {one.number(): one for one in self if one.op == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each result, by its name."""
        users: dict[str, list[Instruction]] = defaultdict(list)
        for one in self:
            for name in dict.fromkeys(one.operands()):
                users[name].append(one)
        return users

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The instruction that makes the result; None if the computation is empty."""
        return next((one for one in self if one.is_root), self[-1] if self else None)


def callers_of(computations: dict[str, Computation]) -> dict[str, list[tuple[str, Instruction]]]:
    """Return the operations that call each computation, and the computations that these are in."""
    callers: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
    for name, own in computations.items():
        for one in own:
            for called in one.called():
                callers[called].append((name, one))
    return callers
