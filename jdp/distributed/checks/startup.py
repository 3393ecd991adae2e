"""Compares processes' programs and environments before they communicate."""

import functools
import hashlib
import json
import math
import os
import platform
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jaxlib
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh

from jdp import pytrees
from jdp.distributed import agree, call_log, this_process
from jdp.distributed.call_log import Call
from jdp.distributed.checks import call_mismatch
from jdp.distributed.this_process import own_host
from jdp.error_codes import with_code
from jdp.jax_compat import opened
from jdp.worker import build_info, launcher_client
from jdp.worker.build_info import version
from jdp.worker.process_status import PATIENCE

# Kept programs of each kind, and kinds.
_MAX_PROGRAMS, _MAX_KINDS = 8, 32


class Lines(Protocol):
    """A program's lines, such as `analysis.program_lines.ProgramLines`."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Return each line's number of occurrences, by its digest."""
        ...

    @property
    def digest(self) -> str:
        """Return a digest of all lines."""
        ...

    def difference(self, saved: Mapping[str, int]) -> str:
        """Describe the first difference from another program's `counts`."""
        ...


class TracedProgram:
    """A program whose facts, JSON of what it depends on, and lines are not requested yet."""

    def __init__(self, name: str, facts_of: Callable[[], Any], lines_of: Callable[[], Lines]):
        self.name = name
        self._of: tuple[Callable[[], Any], Callable[[], Lines]] | None = facts_of, lines_of

    def take(self) -> tuple[Any, Lines]:
        """Return facts and lines, and release the program; once."""
        of, self._of = self._of, None
        assert of is not None
        facts_of, lines_of = of
        return facts_of(), lines_of()


class TracedPrograms:
    """Programs by kind: name of the step, and what its program depends on."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, Lines]] = {}
        # Held by their steps: a process that drops a step also drops its program.
        self._traced: deque[weakref.ref[TracedProgram]] = deque(maxlen=_MAX_KINDS)

    def record(self, traced: TracedProgram) -> None:
        """Record a program while the caller holds it, or until it is taken."""
        self._traced.append(weakref.ref(traced))

    def kinds(self) -> dict[str, dict[str, Lines]]:
        """Return the programs by kind and digest."""
        while self._traced:
            if (traced := self._traced.popleft()()) is not None:
                self._add(traced.name, *traced.take())
        return {kind: {**programs} for kind, programs in self._kinds.items()}

    def _add(self, name: str, facts: Any, lines: Lines) -> None:
        text = json.dumps(facts, sort_keys=True)
        kind = f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        programs = self._kinds.setdefault(kind, {})
        programs[lines.digest] = lines
        for several, most in ((programs, _MAX_PROGRAMS), (self._kinds, _MAX_KINDS)):
            if len(several) > most:
                del several[next(iter(several))]


traced = TracedPrograms()


_SHOWN_CHARACTERS = 400
_ADVICE = (
    "Use the same code, settings and constants on every process; pass values that differ by rank "
    "in the batch."
)
_CONSTANT = " = stablehlo.constant "
_OF_CONSTANT = (
    "Python computed this constant while it traced the step. Use the same one on every process, "
    "or pass it in the batch; instead of np.random write jax.random with state.key."
)


class ProgramText(NamedTuple):
    """A step's program in the compared form.

    Attributes:
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
        # The text lacks constants turned into arguments by JAX.
        constants = [*_constants(traced.jaxpr, set())]
        return cls(name, lines, constants, lambda index: _source(lowered, lines, index))


def require_program(group: tuple[int, ...], program: ProgramText) -> None:
    """Raise an error if a step's programs differ between processes."""
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
        f"would wait for each other, or drift apart silently. The step did not run. {advice}"
    )
    raise ValueError(with_code("JDP205", text))


def _different_constant(
    group: tuple[int, ...], pair: tuple[int, int], constants: Sequence[np.ndarray]
) -> str | None:
    gathered = agree.all_gather(group, [*map(_described, constants)], what="constants")
    odd, usual = pair
    if len(gathered[odd]) != len(gathered[usual]) or gathered[odd] == gathered[usual]:
        return None  # with other numbers of constants, the lines differ, too
    both = enumerate(zip(gathered[odd], gathered[usual], strict=True))
    number = next(i for i, (one, other) in both if one != other)
    shapes = {process: gathered[process][number].rpartition(" ")[0] for process in pair}
    if shapes[odd] != shapes[usual]:
        return (
            f"a captured array is {shapes[odd]} on process {odd} and {shapes[usual]} on process "
            f"{usual}."
        )
    mine = constants[number] if number < len(constants) else np.zeros(0)
    position = agree.first_difference(pair, group, mine.reshape(-1))
    index = [int(i) for i in np.unravel_index(position, mine.shape)] if mine.size else []
    value = str(mine.reshape(-1)[position]) if position < mine.size else ""
    values = agree.all_gather(group, [index, value], what="values")
    return (
        f"a captured array, {shapes[odd]}, holds {values[odd][1]} at {values[odd][0]} on process "
        f"{odd} and {values[usual][1]} on process {usual}. Load or draw it equally on each "
        "process, or pass it to the step as an argument."
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
    # A constant has no location; the first line that reads it has.
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
    """Yield the arrays captured by a jaxpr, each inner jaxpr once."""
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
    """Raise ValueError if the order of a compiled step's collectives differs."""
    lines = schedule_of(compiled)
    gathered = agree.all_gather(group, agree.digest(lines), what="the schedule", of=f" of `{name}`")
    pair = agree.odd_one(gathered)
    if pair is None:
        return
    odd, usual = pair
    difference = _different_line(group, pair, lines, lambda index: "")
    text = (
        f"XLA compiled `{name}` to another order of collectives on process {odd} than on process "
        f"{usual}, though the programs are equal: {difference} They would wait for each other "
        "forever. The step did not run. Compare drivers and GPUs, and empty the compilation "
        "cache."
    )
    raise ValueError(with_code("JDP206", text))


_COLLECTIVE = re.compile(
    r"(.*?) ?\b((?:all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-permute|"
    r"collective-broadcast|send|recv|async)(?:-start|-update|-done)?)\("
)
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=.*?(?=, \w+=|$)")
_RING = re.compile(r'(.*?) ?\bcustom-call\(.*custom_call_target="(jdp_\w+)".*backend_config=(.*)')


def schedule_of(compiled: str) -> list[str]:
    """Return a compiled program's collectives in order, without names."""
    found = []
    for line in compiled.splitlines():
        _, _, operation = line.partition(" = ")
        if ring := _RING.match(operation):
            found.append(f"{ring[2]} {ring[1]} {ring[3]}")
        elif collective := _COLLECTIVE.match(operation):
            groups = _GROUPS.findall(operation)
            found.append(" ".join([collective[2], collective[1], *groups]))
    return found


# Flags that may differ: where a process writes, its number of devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


def require_start(mesh: Mesh, timeout_s: float | None) -> None:
    """Raise an error if processes differ in versions, devices or the mesh."""
    agree.set_timeout_s(300.0 if timeout_s is None else timeout_s)
    group = agree.peers(mesh)
    if len(group) > 1:
        mine = _facts(mesh), own_host()
        gathered = agree.all_gather(group, mine, what="versions in jdp.init")
        facts = {process: its for process, (its, _) in gathered.items()}
        this_process.current.hosts = {process: host for process, (_, host) in gathered.items()}
        if len({its["jdp"] for its in facts.values()}) > 1:  # perhaps only in comments
            build = f"{version()} (code {build_info.code_digest()})"
            builds = agree.all_gather(group, build, what="builds of jdp")
            facts = {process: its | {"jdp": builds[process]} for process, its in facts.items()}
        require_equal_facts(facts)
        call_mismatch.current.watch_end()
    is_watched = launcher_client.current() is not None
    agree.set_timeout_s(math.inf if is_watched or timeout_s is None else PATIENCE * timeout_s)


def require_equal_facts(facts: Mapping[int, Mapping[str, str | None]]) -> None:
    """Raise ValueError if processes differ, given process -> name -> fact."""
    for name in next(iter(facts.values())):
        known = {process: its.get(name) for process, its in facts.items() if its.get(name)}
        if pair := agree.odd_one(known):
            odd, usual = pair
            text = (
                f"process {odd} has another {name} than process {usual}: {known[odd]}, and "
                f"{known[usual]} there. The processes would run different programs, and wait for "
                "each other or drift apart. Start all processes in the same environment, with "
                "the same arguments of jdp.init."
            )
            raise ValueError(with_code("JDP201", text))


def _facts(mesh: Mesh) -> dict[str, str | None]:
    flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if not x.startswith(_OWN_FLAGS)]
    return {
        "jdp": f"{version()} (sources {build_info.source_digest()})",
        "JAX": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # A process may lack one: then all use XLA.
        "native library": _stamp("libjdp_cpu"),
        "CUDA library": _stamp("libjdp_cuda"),
        "kind of device": ", ".join(sorted({d.device_kind for d in jax.local_devices()})),
        "number of devices": str(jax.device_count()),
        "mesh": f"{dict(mesh.shape)} over the devices {[d.id for d in mesh.devices.flat]}",
        "XLA_FLAGS": repr(" ".join(sorted(flags))),
    }


# setup.py records the digest of a library's sources.
def _stamp(name: str) -> str | None:
    path = build_info.PACKAGE / "lib" / f"{name}.json"
    return json.loads(path.read_text())["digest"][:8] if path.exists() else None


class FirstRuns:
    """Compares a step between processes before each new trace runs."""

    def __init__(self, mesh: Mesh, name: str):
        self._mesh = mesh
        self._name = name
        self._group = agree.peers(mesh)
        self._log, self._num_calls = call_log.log_of(self._group), 0
        self._known: set[Any] = set()  # shapes whose programs were compared
        self._equal: list[Any] = []  # jaxprs that all processes share
        self._is_expected = True

    def run(
        self,
        run: Callable[..., Any],
        trace: Callable[..., Any],
        args: tuple,
        *,
        is_returned: bool,
        first: Callable[[], None],
    ) -> Any:
        """Return `run(*args)`, once all processes agreed on the program."""
        shapes = _shapes(args[1:] if is_returned else args)
        self._num_calls += 1
        what = f"call {self._num_calls} of `{self._name}`"
        shown = functools.partial(_shown, shapes, is_returned=is_returned)
        call = self._log.record(Call(what, self._name, shown))
        if shapes in self._known:
            self._is_expected = False
            try:
                return run(*args)
            except _NewTrace:
                pass
            finally:
                self._is_expected = True
        # The returned state may have other shapes than the input: then compare again.
        try:
            is_new = self._compare(trace, args, first)
        except Exception:
            call.was_refused = True
            raise
        if not is_new or not is_returned:
            self._known.add(shapes)
        return run(*args)

    def on_trace(self) -> None:
        """Record a trace; if `run` did not expect it, it compares first."""
        if not self._is_expected:
            raise _NewTrace

    def _compare(self, trace: Callable[..., Any], args: tuple, first: Callable[[], None]) -> bool:
        """Compare the program for these shapes; return whether it is new."""
        with agree.propagating_errors(self._group, f"while it traced `{self._name}`"):
            traced = trace(*args)
            if any(traced.jaxpr is jaxpr for jaxpr in self._equal):
                return False
            lowered = traced.lower()
            program = ProgramText.of_trace(self._name, traced, lowered)
        require_program(self._group, program)
        if self._mesh.devices.flat[0].platform == "gpu":
            with agree.propagating_errors(self._group, f"while it compiled `{self._name}`"):
                compiled = lowered.compile().as_text()
            require_schedule(self._group, self._name, compiled)
        first()
        self._equal.append(traced.jaxpr)
        return True


class _NewTrace(Exception):  # noqa: N818 - only this file catches it
    pass


def _shapes(args: tuple) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)


# args begin with the state and end with the checksums.
def _shown(shapes: Any, *, is_returned: bool) -> dict[str, str]:
    tree, leaves = shapes
    args = jax.tree.unflatten(tree, [aval for aval, _ in leaves])[0 if is_returned else 1 : -1]
    found = {}
    for i, arg in enumerate(args):
        for path, aval in jax.tree_util.tree_leaves_with_path(arg):
            name = "batch" if i == 0 else f"argument {i + 2}"
            found[name + jax.tree_util.keystr(path)] = aval.str_short()
    return found
