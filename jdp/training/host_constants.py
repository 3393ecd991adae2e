"""Constants of a step that differ from trace to trace: random numbers of NumPy, the time."""

import contextlib
import dis
import functools
import inspect
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jdp import pytrees
from jdp.analysis import jaxprs, source_of
from jdp.analysis.diagnostics import innermost_line
from jdp.step_spec import StepSpec

_UNKNOWN = "an array of the step"
_DRAWN = (
    "`{step}` draws a random number in Python ({lines}): the compiled step repeats that number "
    "in each call.\nWrite jax.random.normal(state.key, shape), or pass the number as an argument."
)
_GLOBAL: tuple[Any, ...] = (np.random.rand.__self__, random.random.__self__)  # type: ignore
_NO_DRAWS = ("seed", "get_state", "set_state", "getstate", "setstate")


@contextlib.contextmanager
def warned_of_draws(spec: StepSpec) -> Iterator[None]:
    """Warn once of a line of the step that draws from a global generator in the body."""
    before = _generators()
    yield
    if _generators() == before:
        return
    # Threads that read data may draw, too: a line of the step has to.
    if not (found := list(dict.fromkeys(_draws(spec.fn, set())))):
        return
    lines = ", ".join(innermost_line([place]) for place in found[:3])
    text = _DRAWN.format(step=spec.name, lines=lines)
    if text not in spec.warned:
        spec.warned.add(text)
        warnings.warn_explicit(text, UserWarning, *found[0])


def _generators() -> Any:
    state = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"], state["gauss"]


def _draws(fn: Any, seen: set[Any]) -> Iterator[tuple[str, int]]:
    """Yield file and line of each draw of a function and of those that it names, as far as seen."""
    fn = inspect.unwrap(fn)
    while isinstance(fn, functools.partial | types.MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    code = getattr(fn, "__code__", None)
    if code is None or code in seen or not innermost_line([(code.co_filename, 1)]):
        return
    seen.add(code)
    cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
    known = {**fn.__globals__, **{name: _content(cell) for name, cell in cells}}
    for line, value in _named(code, known):
        if isinstance(value, types.BuiltinMethodType | types.MethodType):
            is_global = any(value.__self__ is each for each in _GLOBAL)
            if is_global and value.__name__ not in _NO_DRAWS:
                yield code.co_filename, line
        elif isinstance(value, Callable):
            yield from _draws(value, seen)


def _named(code: types.CodeType, known: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yield the line and the value of each name, and of each attribute of a module, in a code."""
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
    except ValueError:  # it is not set yet
        return None


def changing(step: Any, args: tuple, keywords: dict[str, Any]) -> list[str]:
    """Return the author's lines that compute another constant in each trace of a step."""
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
