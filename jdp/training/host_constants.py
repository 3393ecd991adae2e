"""Constants of a step from Python: random numbers of NumPy, the time."""

import contextlib
import dis
import functools
import inspect
import pickle
import random
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from jdp import pytrees
from jdp.analysis import jaxprs, source_of
from jdp.analysis.diagnostics import innermost_line, whose_file
from jdp.step_spec import StepSpec

_UNKNOWN = "an array of the step"
_DRAWN = (
    "`{step}` draws a random number in Python ({lines}), so the compiled step repeats that "
    "number in each call.\n"
    "Write jax.random.normal(state.key, shape), or pass the number as an argument."
)
_MADE = (
    "`{step}` makes a random generator in Python ({lines}), so the compiled step repeats its "
    "numbers in each call.\n"
    "Write jax.random.normal(state.key, shape), or draw fixed numbers outside the step."
)
_READ = (
    "`{step}` reads the clock in Python ({lines}), so the compiled step repeats the time of its "
    "trace.\n"
    "Measure around the call of the step, or pass the time as an argument."
)
_GLOBAL: tuple[Any, ...] = (np.random.rand.__self__, random.random.__self__)  # type: ignore
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_CLOCKS = "time", "time_ns", "perf_counter", "perf_counter_ns"
_CALLS = [(np.random, "default_rng", _MADE), *((time, name, _READ) for name in _CLOCKS)]
_NO_DRAWS = ("seed", "get_state", "set_state", "getstate", "setstate")


@contextlib.contextmanager
def warned_of_draws(spec: StepSpec) -> Iterator[None]:
    """Warn once of lines of the step that draw numbers or read the clock."""
    generators = [*_GLOBAL, *_own_generators(_plain(spec.fn))]
    before = [*map(pickle.dumps, generators)]
    with _noting.noted() as noted:
        yield
    after = map(pickle.dumps, generators)
    changed = [
        x for x, *states in zip(generators, before, after, strict=True) if len({*states}) > 1
    ]
    # Threads that read data may draw, too: find a line of the step.
    found = {_DRAWN: [*_draws(spec.fn, changed, set())] if changed else [], **noted}
    for text, places in found.items():
        lines = ", ".join(innermost_line([place]) for place in [*dict.fromkeys(places)][:3])
        text = text.format(step=spec.name, lines=lines)
        if places and text not in spec.warned:
            spec.warned.add(text)
            warnings.warn_explicit(text, UserWarning, *places[0])


_Places = dict[str, list[tuple[str, int]]]
_places: ContextVar[_Places | None] = ContextVar("jdp_places", default=None)


class _Noting:
    """Records the author's calls of some functions while a thread traces a step."""

    def __init__(self) -> None:
        self._lock, self._num_traces = threading.Lock(), 0
        self._before: list[Any] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[_Places]:
        """Return the places of calls in the body, by text."""
        found: _Places = {}
        token = _places.set(found)
        self._count(1)
        try:
            yield found
        finally:
            self._count(-1)
            _places.reset(token)

    # Callbacks run in other threads, and the functions are those of all threads.
    def _count(self, by: int) -> None:
        with self._lock:
            if not self._num_traces:
                self._before = [getattr(module, name) for module, name, _ in _CALLS]
            self._num_traces += by
            for (module, name, text), fn in zip(_CALLS, self._before, strict=True):
                setattr(module, name, self._wrapped(fn, text) if self._num_traces else fn)

    def _wrapped(self, fn: Any, text: str) -> Any:
        @functools.wraps(fn)
        def noted(*args: Any, **keywords: Any) -> Any:
            code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
            found = None if args or keywords else _places.get()  # a seed repeats its numbers anyway
            if found is not None and whose_file(code.co_filename) == "author":
                found.setdefault(text, []).append((code.co_filename, line))
            return fn(*args, **keywords)

        return noted


_noting = _Noting()


def _plain(fn: Any) -> Any:
    fn = inspect.unwrap(fn)
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    return fn


def _known(fn: Any) -> dict[str, Any]:
    """Return the values that a function knows by name, other than its own."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return {**fn.__globals__, **{name: _content(cell) for name, cell in cells}}


def _own_generators(fn: Any) -> list[Any]:
    if not hasattr(fn, "__code__"):
        return []
    return [each for each in _known(fn).values() if type(each) in _GENERATORS]


def _draws(fn: Any, changed: Sequence[Any], seen: set[Any]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each draw of a function and of those that it names."""
    fn = _plain(fn)
    code = getattr(fn, "__code__", None)
    if code is None or code in seen or not innermost_line([(code.co_filename, 1)]):
        return
    seen.add(code)
    for line, value in _named(code, _known(fn)):
        if isinstance(value, types.BuiltinMethodType | types.MethodType):
            is_changed = any(value.__self__ is each for each in changed)
            if is_changed and value.__name__ not in _NO_DRAWS:
                yield code.co_filename, line
        elif any(value is each for each in changed):
            yield code.co_filename, line
        elif isinstance(value, Callable):
            yield from _draws(value, changed, seen)


def _named(code: types.CodeType, known: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of each name, and of each module's attribute."""
    value, line = None, code.co_firstlineno
    for each in dis.get_instructions(code):
        line = each.positions.lineno or line if each.positions else line
        if each.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            value = known.get(each.argval)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
            value = getattr(value, each.argval, None)
        elif each.opname != "EXTENDED_ARG":
            value = None
        if value is not None:
            yield line, value
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _named(inner, known)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def changing(step: Any, args: tuple, keywords: dict[str, Any]) -> list[str]:
    """Return the author's lines with another constant in each trace."""
    one, other = (type(step)(step.spec).trace(*args, **keywords).jaxpr for _ in range(2))
    lines: dict[str, None] = {}
    for eqn, again in zip(jaxprs.equations(one), jaxprs.equations(other), strict=False):
        if not eqn.outvars:
            continue  # a print
        for atom, atom_again in zip(eqn.invars, again.invars, strict=False):
            if jaxprs.is_literal(atom) and jaxprs.is_literal(atom_again):
                if not _are_equal(atom.val, atom_again.val):
                    lines[source_of(eqn) or _UNKNOWN] = None
    if not lines and not all(map(_are_equal, one.consts, other.consts)):
        lines[_UNKNOWN] = None
    return [*lines]


def _are_equal(one: Any, other: Any) -> bool:
    one, other = (np.asarray(pytrees.without_key(x)) for x in (one, other))
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
