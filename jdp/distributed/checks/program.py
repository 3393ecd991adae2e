"""Check that a step is the same program on all processes, and find the first difference."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from jdp import pytrees
from jdp.distributed import agree
from jdp.error_codes import with_code
from jdp.jax_compat import opened

_SHOWN_CHARACTERS = 400
_ADVICE = (
    "Give every process the same code, settings and constants; what is meant to differ from rank "
    "to rank goes into the batch."
)
_CONSTANT = " = stablehlo.constant "
_OF_CONSTANT = (
    "Python computed this constant while it traced the step. Give every process the same one, or "
    "give it to the step in the batch; in place of np.random write jax.random with state.key."
)


class ProgramText(NamedTuple):
    """The program of a step in the form that is compared.

    Attributes:
      name: name of the author's function.
      lines: lines of its lowered text.
      constants: the arrays that it captures.
      source: index of a line -> file and line of the author's code, or "".
    """

    name: str
    lines: Sequence[str]
    constants: Sequence[np.ndarray]
    source: Callable[[int], str]

    @classmethod
    def of_trace(cls, name: str, traced: Any, lowered: Any) -> "ProgramText":
        """Return the text of a traced and lowered step."""
        lines = lowered.as_text().splitlines()  # without file names, which may differ
        # The text has only the constants that JAX does not turn into arguments.
        constants = [*_constants(traced.jaxpr, set())]
        return cls(name, lines, constants, lambda index: _source(lowered, lines, index))


def require_program(group: tuple[int, ...], program: ProgramText) -> None:
    """Raise an error if the programs of a step differ between the processes of `group`."""
    shown = [program.lines, *map(_described, program.constants)]
    gathered = agree.all_gather(
        group,
        f"`{program.name}` {agree.digest(shown)}",
        what="the program",
        of=f" of `{program.name}`",
    )
    pair = agree.odd_one(gathered)
    if pair is None:
        return
    odd, usual = pair
    names = [gathered[process].rpartition(" ")[0] for process in pair]
    if names[0] != names[1]:
        difference = f"it is {names[0]} there, and {names[1]} here."
    else:
        difference = _different_constant(group, pair, program.constants)
        difference = difference or _different_line(group, pair, program.lines, program.source)
    advice = _OF_CONSTANT if difference.count(_CONSTANT) == 2 else _ADVICE
    text = (
        f"process {odd} is about to run another program than process {usual}: {difference} Ranks "
        "would wait for each other, or drift apart without an error. Nothing was sent or donated. "
        f"{advice}"
    )
    raise ValueError(with_code("JDP205", text))


def _different_constant(
    group: tuple[int, ...], pair: tuple[int, int], constants: Sequence[np.ndarray]
) -> str | None:
    gathered = agree.all_gather(group, [*map(_described, constants)], what="constants")
    odd, usual = pair
    if len(gathered[odd]) != len(gathered[usual]) or gathered[odd] == gathered[usual]:
        return None  # if the numbers of constants differ, so do the lines
    both = enumerate(zip(gathered[odd], gathered[usual], strict=True))
    number = next(i for i, (one, other) in both if one != other)
    shapes = {process: gathered[process][number].rpartition(" ")[0] for process in pair}
    if shapes[odd] != shapes[usual]:
        return (
            f"an array that it captures is {shapes[odd]} on process {odd} and {shapes[usual]} on "
            f"process {usual}."
        )
    mine = constants[number] if number < len(constants) else np.zeros(0)
    position = agree.first_difference(pair, group, mine.reshape(-1))
    index = [int(i) for i in np.unravel_index(position, mine.shape)] if mine.size else []
    value = str(mine.reshape(-1)[position]) if position < mine.size else ""
    values = agree.all_gather(group, [index, value], what="values")
    return (
        f"an array that it captures, {shapes[odd]}, holds {values[odd][1]} at {values[odd][0]} on "
        f"process {odd} and {values[usual][1]} on process {usual}. Load or draw it the same on "
        "each process, or hand it to the step as an argument."
    )


def _different_line(
    group: tuple[int, ...],
    pair: tuple[int, int],
    lines: Sequence[str],
    source: Callable[[int], str],
) -> str:
    index = agree.first_difference(pair, group, lines)
    shown, where = "(no such line)", ""
    if index < len(lines):
        shown, where = lines[index].strip()[:_SHOWN_CHARACTERS], source(index)
    gathered = agree.all_gather(group, f"{shown}  ({where})" if where else shown, what="lines")
    odd, usual = pair
    return (
        f"its line {index + 1} is\n    {gathered[odd]}\non process {odd}, and\n    "
        f"{gathered[usual]}\non process {usual}."
    )


# MLIR's text of a location: `#loc7 = loc("train.py":31:4 to :9)`, or `loc(#loc3)`.
_PLACE = re.compile(r"(#loc\d*) = loc\((.*)\)$")
_FILE = re.compile(r'"([^"]+)":(\d+)')


def _source(lowered: Any, lines: Sequence[str], index: int) -> str:
    places, others = {}, []
    for line in lowered.as_text(debug_info=True).splitlines():
        if place := _PLACE.match(line):
            places[place[1]] = place[2]
        else:
            others.append(line)
    if len(others) != len(lines):
        return ""
    # A constant has no location of its own. Use that of the first line that reads it.
    value = lines[index].partition(" = ")[0].strip()
    reads = re.compile(rf"{re.escape(value)}(?!\w)")
    readers = (i for i in range(index + 1, len(lines)) if value and reads.search(lines[i]))
    found = (_file(others[i], places) for i in (index, next(readers, index)))
    return next(filter(None, found), "")


def _file(line: str, places: dict[str, str]) -> str:
    open_places = re.findall(r"#loc\d*", line)[-1:]
    while open_places:
        place = places.get(open_places.pop(0), "")
        if file := _FILE.match(place):
            return f"{Path(file[1]).name}:{file[2]}"
        open_places = re.findall(r"#loc\d*", place) + open_places
    return ""


def _constants(jaxpr: Any, seen: set[int]) -> Iterator[np.ndarray]:
    """Yield the arrays (constants or literals) that a jaxpr or one within it captures.

    A jaxpr that is called from several places is read once. `seen` holds the ids of those read.
    """
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    yield from map(_numbers, getattr(jaxpr, "consts", ()))
    for equation in opened(jaxpr).eqns:
        literals = (x.val for x in equation.invars if isinstance(x, Literal))
        yield from (_numbers(value) for value in literals if np.ndim(value))
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(opened(inner), "eqns"):
                    yield from _constants(inner, seen)


def _described(constant: np.ndarray) -> str:
    return f"{constant.dtype}{[*constant.shape]} {agree.digest(constant)}"


def _numbers(constant: Any) -> np.ndarray:
    return np.asarray(pytrees.without_key(constant))


def require_schedule(group: tuple[int, ...], name: str, compiled: str) -> None:
    """Raise ValueError if the order of a compiled step's collectives differs between processes."""
    lines = schedule(compiled)
    gathered = agree.all_gather(group, agree.digest(lines), what="the schedule", of=f" of `{name}`")
    pair = agree.odd_one(gathered)
    if pair is None:
        return
    odd, usual = pair
    difference = _different_line(group, pair, lines, lambda index: "")
    text = (
        f"XLA has compiled `{name}` to another order of collectives on process {odd} than on "
        f"process {usual}, though the programs are equal: {difference} They would wait for each "
        "other forever. Nothing was sent or donated. Look for other drivers and GPUs, and empty "
        "the compilation cache."
    )
    raise ValueError(with_code("JDP206", text))


_COLLECTIVE = re.compile(
    r"(.*?) ?\b((?:all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-permute|"
    r"collective-broadcast|send|recv|async)(?:-start|-update|-done)?)\("
)
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=.*?(?=, \w+=|$)")
# jdp's own collectives between GPUs.
_RING = re.compile(r'(.*?) ?\bcustom-call\(.*custom_call_target="(jdp_\w+)".*backend_config=(.*)')


def schedule(compiled: str) -> list[str]:
    """Return the collectives of a compiled program, in the order in which it runs them.

    Names of values and computations, which may differ in equal programs, are left out.

    >>> schedule("  %r.3 = f32[8] all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add.2")
    ['all-reduce-start f32[8] replica_groups={{0,1}}']
    """
    found = []
    for line in compiled.splitlines():
        _, _, operation = line.partition(" = ")
        if ring := _RING.match(operation):
            found.append(f"{ring[2]} {ring[1]} {ring[3]}")
        elif collective := _COLLECTIVE.match(operation):
            groups = _GROUPS.findall(operation)
            found.append(" ".join([collective[2], collective[1], *groups]))
    return found
