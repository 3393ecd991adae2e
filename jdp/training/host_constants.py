"""Constants of a step from Python: NumPy's random numbers, the time."""

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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_SEEDED = "seeds, and draws of other threads"
_NO_DRAWS = ("seed", "get_state", "set_state", "getstate", "setstate")
_CALLS = [
    (np.random, "default_rng", _MADE),
    (np.random, "seed", _SEEDED),
    *((time, name, _READ) for name in _CLOCKS),
    *(
        (module, name, _SEEDED if name in _NO_DRAWS else _DRAWN)
        for module, generator in zip((np.random, random), _GLOBAL, strict=True)
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator
    ),
]


@contextlib.contextmanager
def warned_of_draws(spec: StepSpec) -> Iterator[None]:
    """Warn once of the step's lines that draw numbers or read the clock."""
    generators = [*_GLOBAL, *_own_generators(spec.fn)]
    before = [*map(pickle.dumps, generators)]
    with _noting.noted() as noted:
        yield
    after = map(pickle.dumps, generators)
    changed = [
        x for x, *states in zip(generators, before, after, strict=True) if len({*states}) > 1
    ]
    # Threads that read data may draw, too: find a line of the step.
    is_explained = noted.pop(_SEEDED, None) is not None
    if changed and _DRAWN not in noted:
        noted[_DRAWN] = [*_draws(spec.fn, changed, set())]
    for text, places in noted.items():
        lines = ", ".join(innermost_line([place]) for place in [*dict.fromkeys(places)][:3])
        is_hidden = text == _DRAWN and not places and not is_explained
        if is_hidden and _GLOBAL[0] in changed:  # type checkers draw from `random`
            places, lines = [_place_of(spec.fn)], "from numpy.random"
        text = text.format(step=spec.name, lines=lines)
        if places and text not in spec.warned:
            spec.warned.add(text)
            warnings.warn_explicit(text, UserWarning, *places[0])


_Places = dict[str, list[tuple[str, int]]]
_places: ContextVar[_Places | None] = ContextVar("jdp_places", default=None)


class _Noting:
    """Records the author's calls of some functions while a thread traces a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: list[_Places] = []
        self._before: list[Any] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[_Places]:
        """Return the places of the body's calls, by text."""
        found: _Places = {}
        token = _places.set(found)
        self._change(found, is_new=True)
        try:
            yield found
        finally:
            self._change(found, is_new=False)
            _places.reset(token)

    # Callbacks run in other threads, and the functions are common to all.
    def _change(self, trace: _Places, is_new: bool) -> None:
        with self._lock:
            if not self._traces:
                self._before = [getattr(module, name) for module, name, _ in _CALLS]
            others = [each for each in self._traces if each is not trace]
            self._traces = [*others, trace] if is_new else others
            for (module, name, text), fn in zip(_CALLS, self._before, strict=True):
                setattr(module, name, self._wrapped(fn, text) if self._traces else fn)

    def _wrapped(self, fn: Any, text: str) -> Any:
        @functools.wraps(fn)
        def noted(*args: Any, **keywords: Any) -> Any:
            code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
            found = _places.get()
            if text == _SEEDED or text == _DRAWN and found is None:
                for each in self._traces:
                    each[_SEEDED] = []
            elif text == _MADE and (args or keywords):
                pass  # a seed repeats its numbers anyway
            elif found is not None and whose_file(code.co_filename) == "author":
                found.setdefault(text, []).append((code.co_filename, line))
            return fn(*args, **keywords)

        return noted


_noting = _Noting()


def _plain(fn: Any) -> tuple[Any, Any]:
    """Return a callable's function, and the object whose method it is."""
    fn, of = inspect.unwrap(fn), None
    while isinstance(fn, functools.partial | types.MethodType):
        of = getattr(fn, "__self__", of)
        fn = inspect.unwrap(fn.func if isinstance(fn, functools.partial) else fn.__func__)
    call = inspect.getattr_static(type(fn), "__call__", None)
    return (call, fn) if isinstance(call, types.FunctionType) else (fn, of)


def _place_of(fn: Any) -> tuple[str, int]:
    code = getattr(_plain(fn)[0], "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code else ("jdp", 1)


def _known(fn: Any, of: Any) -> dict[str, Any]:
    """Return the values known by name to a function, other than its own."""
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    known = {**fn.__globals__, **{name: _content(cell) for name, cell in cells}}
    return known if of is None else {**known, fn.__code__.co_varnames[0]: of}


def _own_generators(fn: Any) -> list[Any]:
    """Return generators known to a function and to those it knows, also in attributes."""
    found: dict[int, Any] = {id(fn): fn}
    level = [fn]
    for _ in range(3):
        inside = [each for value in level for each in _inside(value) if id(each) not in found]
        level = [*{id(each): each for each in inside}.values()]
        found |= {id(each): each for each in level}
    others = [each for each in found.values() if all(each is not known for known in _GLOBAL)]
    return [each for each in others if type(each) in _GENERATORS]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, types.ModuleType | type) or type(value) in _GENERATORS:
        return ()
    own = {} if isinstance(value, types.FunctionType) else getattr(value, "__dict__", {})
    fn, of = _plain(value) if isinstance(value, Callable) else (None, None)
    code = getattr(fn, "__code__", None)
    is_authors = code is not None and whose_file(code.co_filename) == "author"
    return [*own.values(), *(_known(fn, of).values() if is_authors else ())]


def _draws(fn: Any, changed: Sequence[Any], seen: set[Any]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each draw of a function and of those named in it."""
    fn, of = _plain(fn)
    code = getattr(fn, "__code__", None)
    if code is None or (code, id(of)) in seen or not innermost_line([(code.co_filename, 1)]):
        return
    seen.add((code, id(of)))
    for line, value in _named(code, _known(fn, of), () if of is None else code.co_varnames[:1]):
        if isinstance(value, types.BuiltinMethodType | types.MethodType):
            is_changed = any(value.__self__ is each for each in changed)
            if is_changed and value.__name__ not in _NO_DRAWS:
                yield code.co_filename, line
                continue
        if any(value is each for each in changed):
            yield code.co_filename, line
        elif isinstance(value, Callable):
            yield from _draws(value, changed, seen)


def _named(
    code: types.CodeType, known: dict[str, Any], of: Sequence[str]
) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of each name, or of its attribute; `of`: a method's object."""
    value, line = None, code.co_firstlineno
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            value = _attribute(value, each.argval)
        elif each.opname != "EXTENDED_ARG":
            if value is not None:
                yield line, value
            value = None
            if each.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
                value = known.get(each.argval)
            elif "LOAD_FAST" in each.opname:
                name = each.argval[-1] if isinstance(each.argval, tuple) else each.argval
                value = known[name] if name in of else None
        line = each.positions.lineno or line if each.positions else line
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _named(inner, known, ())


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, types.ModuleType):
        return getattr(value, name, None)
    if value is None or type(value) in _GENERATORS:
        return value
    found = inspect.getattr_static(value, name, None)
    found = found.fget if isinstance(found, property) else found
    return types.MethodType(found, value) if isinstance(found, types.FunctionType) else found


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
