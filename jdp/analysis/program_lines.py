"""A traced program as lines, equal in every process and trace.

They leave out order, names, addresses, meshes and jdp's own numbers.
"""

import enum
import functools
import hashlib
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jdp.analysis.diagnostics import source_of
from jdp.analysis.jaxprs import bodies
from jdp.jax_compat import opened
from jdp.pytrees import is_deleted, without_key

_ARRAYS = bool, int, np.ndarray, np.generic, jax.Array
_MOST_ELEMENTS = 1 << 16  # elements read of an array
# Without effect on the result.
_LEFT_OUT = frozenset("name mesh weak_type out_sharding sharding debug_info ctx_mesh".split())


class ProgramLines(NamedTuple):
    """A program for files: 8 hexadecimal digits of a line -> its count, or both lines, in order."""

    counts: Mapping[str, int]
    texts: Mapping[str, tuple[str, str]]

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits."""
        return hashlib.sha256(repr(sorted(self.counts.items())).encode()).hexdigest()[:16]

    def difference(self, saved: Mapping[str, int]) -> str:
        """Describe the first line that occurs more often than in `saved`."""
        for line, (text, where) in self.texts.items():
            now, then = self.counts[line], saved.get(line, 0)
            if now > then:
                place = f" ({where})" if where else ""
                return f"it has `{text}`{place} {_times(now)}, and had that {_times(then)}"
        then, now = sum(saved.values()), sum(self.counts.values())
        return f"it has {now} of its {then} earlier operations"


def lines_of(jaxpr: Any) -> ProgramLines:
    """Return a program's lines."""
    texts: dict[str, tuple[str, str]] = {}
    known: dict[int, Counter[str]] = {}
    counts = _counts(jaxpr, texts, known)
    return ProgramLines(dict(counts), texts)


def _times(number: int) -> str:
    return {0: "nowhere", 1: "once"}.get(number, f"{number} times")


# A body counts per call; `known` is by a body's id.
def _counts(
    jaxpr: Any, texts: dict[str, tuple[str, str]], known: dict[int, Counter[str]]
) -> Counter[str]:
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    found: Counter[str] = Counter()
    for constant in getattr(jaxpr, "consts", ()):
        found[_recorded(f"constant {_described(constant)}", "", texts)] += 1
    for eqn in opened(jaxpr).eqns:
        found[_recorded(_line(eqn), eqn, texts)] += 1
        for body in bodies(eqn):
            found.update(_counts(body, texts, known))
    known[id(jaxpr)] = found
    return found


def _recorded(text: str, eqn: Any, texts: dict[str, tuple[str, str]]) -> str:
    line = f"{zlib.crc32(text.encode()):08x}"
    if line not in texts:
        texts[line] = text, source_of(eqn) if eqn else ""
    return line


def _line(eqn: Any) -> str:
    name, params = eqn.primitive.name, sorted(eqn.params.items())
    operands, results = [*map(_operand, eqn.invars)], [_type(x.aval) for x in eqn.outvars]
    if bodies(eqn):
        # Arrays of bodies are in trace order.
        operands, results = sorted(operands), sorted(results)
        params = [(key, value) for key, value in params if not isinstance(value, (tuple, list))]
    # Parameters such as texts, functions, or jdp's call numbers.
    if name.startswith("jdp_") or "callback" in name or "debug" in name:
        params = []
    shown = ((key, _param(value)) for key, value in params if key not in _LEFT_OUT)
    return " ".join(
        [name, *operands, "->", *results, *(f"{key}={text}" for key, text in shown if text)]
    )


def _operand(x: Any) -> str:
    return _described(x.val) if isinstance(x, Literal) else _type(x.aval)


@functools.lru_cache(1024)
def _type(aval: Any) -> str:
    shape = ",".join(map(str, getattr(aval, "shape", ())))
    return f"{getattr(aval, 'dtype', type(aval).__name__)}[{shape}]"


# Last bits may differ, so floats have few digits.
def _described(value: Any) -> str:
    if isinstance(value, (float, complex)):
        return f"{value:.6g}"
    if (
        isinstance(value, jax.core.Tracer) or not isinstance(value, _ARRAYS) or is_deleted(value)
    ):  # the script may have donated it
        return _type(jax.typeof(value))
    x = without_key(value)
    x = np.asarray(x.addressable_data(0) if isinstance(x, jax.Array) else x)
    if x.ndim == 0 and x.dtype != jax.dtypes.float0:
        if not jnp.issubdtype(x.dtype, np.inexact):
            return str(int(x))
        return f"{complex(x) if np.iscomplexobj(x) else float(x):.6g}"
    flat = x.reshape(-1)[:: 1 + x.size // _MOST_ELEMENTS]
    if not jnp.issubdtype(x.dtype, np.inexact):
        return f"{_type(jax.typeof(value))} ({zlib.crc32(flat.tobytes()):08x})"
    flat = flat.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    with np.errstate(all="ignore"):
        digits = np.abs(flat).sum(), (flat * np.linspace(1.0, 2.0, flat.size)).sum()
    return f"{_type(jax.typeof(value))} ({digits[0]:.3e}, {digits[1]:.3e})"


def _param(value: Any) -> str:
    if isinstance(value, (frozenset, set)):
        return f"{{{', '.join(sorted(map(_param, value)))}}}"
    if isinstance(value, PartitionSpec | np.dtype):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_param, value))})"
    if isinstance(value, (str, int, float, bool, enum.Enum)):
        return str(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _described(value)
    # None, functions, meshes, shardings, bodies.
    return ""
