"""A compiled program, read from its text."""

import functools
import math
import re
from collections import defaultdict
from typing import NamedTuple

from jdp.analysis import diagnostics

_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:called|branch)_computations|(?:true|false)_computation)="
    r"\{?%?([\w.\-]+(?:, ?%[\w.\-]+)*)"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Instruction(NamedTuple):
    """A program's operation."""

    name: str
    shape: str
    op: str
    rest: str  # operands and attributes
    is_root: bool = False

    def operands(self) -> list[str]:
        """Return its operands' names."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    def called(self) -> list[str]:
        """Return called computations' names."""
        found = _CALLED.findall(self.attributes())
        return [name.strip().lstrip("%") for names in found for name in names.split(",")]

    def computation(self, attribute: str) -> str:
        """Return an attribute's computation, such as the `body` of a loop."""
        return re.findall(rf"\b{attribute}=%?([\w.\-]+)", self.rest)[0]

    def number(self) -> int:
        """Return a parameter's number."""
        return int(self.rest.split(")")[0])

    def element(self) -> int:
        """Return a get-tuple-element's element number."""
        return int(re.findall(r"\bindex=(\d+)", self.rest)[0])

    def attributes(self) -> str:
        """Return its attributes, without the metadata."""
        return self.rest.partition(")")[2].partition(", metadata={")[0]

    def op_name(self) -> str:
        """Return JAX's name, such as `jit(step)/transpose(jvp())/dot_general`."""
        found = _NAME.search(self.rest)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    def target(self) -> str:
        """Return a custom call's target, otherwise empty."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""


class Computation(list[Instruction]):
    """Instructions in execution order."""

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {one.name: one for one in self}

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """The results' types by name."""
        return {one.name: one.shape for one in self}

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Its parameters by number."""
        return {one.number(): one for one in self if one.op == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Each result's users by name."""
        users: dict[str, list[Instruction]] = defaultdict(list)
        for one in self:
            for name in dict.fromkeys(one.operands()):
                users[name].append(one)
        return users

    @functools.cached_property
    def root(self) -> Instruction | None:
        """The result's instruction; None if empty."""
        return next((one for one in self if one.is_root), self[-1] if self else None)


def callers_of(computations: dict[str, Computation]) -> dict[str, list[tuple[str, Instruction]]]:
    """Return each computation's calls, with their computations."""
    callers: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
    for name, own in computations.items():
        for one in own:
            for called in one.called():
                callers[called].append((name, one))
    return callers


# One instruction, or a start and a done, of which the start counts.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COLLECTIVES += ("ragged-all-to-all",)

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "s8": 8, "u8": 8, "s16": 16}
_BITS |= {"u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "c64": 64, "c128": 128}
_BITS |= {"s4": 4, "u4": 4, "s2": 2, "u2": 2}

_SHAPE = re.compile(r"\b([a-z]+[0-9]+(?:e[0-9]m[0-9]\w*)?|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")


class Array(NamedTuple):
    """An array's type in a program."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    def num_elements(self) -> int:
        """Count the elements."""
        return math.prod(self.dims)

    def num_bytes(self) -> int:
        """Return the bytes without the tiles' padding."""
        return self.num_elements() * _bits(self.dtype) // 8

    def order(self) -> list[int]:
        """Return the dims in memory order, minor first."""
        order = [int(i) for i in self.layout.split(":")[0].split(",") if i]
        return order or list(range(len(self.dims)))[::-1]

    def padded_bytes(self) -> int:
        """Return the bytes with the tiles' padding."""
        tile = re.search(r"T\(([\d,]+)\)", self.layout)
        if tile is None:
            return self.num_bytes()
        minor_first = [self.dims[i] for i in self.order()] or [1]
        sizes = [int(size) for size in reversed(tile[1].split(","))]
        minor_first += [1] * (len(sizes) - len(minor_first))
        for i, size in enumerate(sizes):
            minor_first[i] = -(-minor_first[i] // size) * size
        return math.prod(minor_first) * _bits(self.dtype) // 8


class HloProgram:
    """A compiled program; `entry` runs first."""

    def __init__(self, text: str):
        self.computations, self.entry = parse(text)
        entry = self.computations[self.entry]
        self.parameters = _parameters(entry)
        self._frames = _Frames(text)
        self._callers = callers_of(self.computations)

    def num_loops(self, computation: str) -> int:
        """Count the loops around a computation."""
        found = 0
        while callers := self._callers.get(computation):
            computation, one = callers[-1]
            found += one.op == "while"
        return found

    def where(self, one: Instruction) -> tuple[str, ...]:
        """Return an instruction's files and lines, innermost first."""
        found = _FRAME.search(one.rest)
        return self._frames.chain(int(found[1])) if found else ()

    def author_line(self, one: Instruction) -> str:
        """Return the author's line, such as "train.py:41"."""
        return diagnostics.innermost_line(
            (name, int(line)) for name, _, line in (x.rpartition(":") for x in self.where(one))
        )


class _Frames:
    def __init__(self, text: str):
        # Each table is a heading, and numbered lines up to an empty one.
        files = dict(re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M))
        locations = dict(
            (number, f"{files.get(file, '')}:{line}")
            for number, file, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(text, "FileLocations"), re.M
            )
        )
        self._frames = {
            int(number): (locations.get(location, ""), int(parent or 0))
            for number, location, parent in re.findall(
                r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
                _table(text, "StackFrames"),
                re.M,
            )
        }

    def chain(self, number: int) -> tuple[str, ...]:
        found = []
        while number in self._frames:
            location, parent = self._frames[number]
            found.append(location)
            number = parent - 1  # 1 stands for none
        return tuple(found)


def _table(text: str, heading: str) -> str:
    found = re.search(rf"^{heading}\n(.*?)\n\n", text, re.M | re.S)
    return found[1] if found else ""


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of `compiled.as_text()`, and the entry's name."""
    computations: dict[str, Computation] = {}
    entry = name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
            entry = name if line.startswith("ENTRY") else entry
            computations[name] = Computation()
        elif name and (found := _INSTRUCTION.match(line)):
            root, *fields = found.groups()
            computations[name].append(Instruction(*fields, is_root=bool(root)))
    return computations, entry


def _parameters(entry: Computation) -> dict[str, Array]:
    ordered = [one for _, one in sorted(entry.parameters.items())]
    return {one.op_name() or one.name: arrays(one.shape)[0] for one in ordered}


def dot_flops(one: Instruction, shapes: dict[str, str]) -> int:
    """Return a matmul's operations, 2 for each product."""
    lhs = arrays(shapes[one.operands()[0]])[0].dims
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
    inner = [lhs[int(i)] for i in contracted[1].split(",") if i] if contracted else []
    return 2 * num_elements(one.shape) * math.prod(inner)


def num_bytes(shape: str) -> int:
    """Return all arrays' bytes."""
    return sum(array.num_bytes() for array in arrays(shape))


def num_elements(shape: str) -> int:
    """Return all arrays' elements."""
    return sum(array.num_elements() for array in arrays(shape))


def _bits(dtype: str) -> int:
    return _BITS.get(dtype, 8)  # the others are floats of 8 bits


def elements(shape: str) -> list[str]:
    """Return the types in a tuple; an array is one."""
    if not shape.startswith("("):
        return [shape]
    found, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return found


@functools.lru_cache(maxsize=4096)
def arrays(shape: str) -> tuple[Array, ...]:
    """Return the arrays in a type, such as `(f32[8,2]{1,0}, s32[])`."""
    return tuple(
        Array(dtype, tuple(int(dim) for dim in dims.split(",") if dim), layout)
        for dtype, dims, layout in _SHAPE.findall(shape)
    )
