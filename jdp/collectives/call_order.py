"""The numbers of the native calls of a program, and the order in which they run.

XLA may run independent operations in a different order on each rank, and merges equal operations.
So each call has a unique number, and takes a token from the previous call.
"""

import contextlib
import itertools
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.extend.core

from jdp.analysis import jaxprs
from jdp.jax_compat import opened

# The calls of the CPU library, and the position of the token among their operands.
NATIVE = frozenset(
    "jdp_add_rows_native jdp_all_gather jdp_all_reduce jdp_all_to_all jdp_reduce_scatter "
    "jdp_take_rows_native".split()
)
TOKEN = 3

# The calls between GPUs that start a reduction, and that wait for it.
START, DONE = "jdp_ring_start", "jdp_ring_done"

# XLA gives a rank two threads that may block on other ranks, and its own collectives use one, so
# only one chain of native calls is safe.
_MAX_CHAINS = 1

PART_OF_ANOTHER = "the step is part of a larger program, and jdp sees only the step."


class _Order:
    """The order of the calls in the program that is being traced."""

    def __init__(self, why_not: str | None, series: str, beside_xla: bool) -> None:
        self.why_not = why_not
        self.series = series
        self.beside_xla = beside_xla
        self.numbers = itertools.count()
        self.token: jax.Array | None = None
        self.trace: Any = None  # the trace that made the token; no other may use it
        self.trace_of_step = jax.extend.core.get_opaque_trace_state()


class _Outside:
    """The state for calls outside of jdp's steps: the last trace, and its calls by leaf types."""

    def __init__(self) -> None:
        self.trace: Any = None
        self.num_equal: Counter[int] = Counter()


# JAX caches the trace of a user's jitted function for each value of this. It must not reuse an
# all-reduce that was traced in a step in a program that does not order its all-reduces.
_traced_where = jax.make_user_context("")
_order: ContextVar[_Order | None] = ContextVar("jdp_order", default=None)
_outside = _Outside()
# Name of a function -> the number of its steps that are part of another program.
_num_steps: Counter[str] = Counter()


@contextlib.contextmanager
def entered(
    *, why_not: str | None = None, series: str = "", beside_xla: bool = False
) -> Iterator[None]:
    """Order the native calls that are traced in the with block, all of one program.

    Args:
      why_not: a sentence that says why nothing can order them, see `why_unordered`; else None.
      series: a unique name, see `next_series`; empty for a program that is not part of another.
      beside_xla: the result of `is_beside_xla` for these calls.
    """
    token = _order.set(_Order(why_not, series, beside_xla))
    where = "step beside XLA" if beside_xla else "step"
    try:
        with _traced_where(where if why_not is None else "unordered step"):
            yield
    finally:
        _order.reset(token)


def next_series(name: str) -> str:
    """Return a unique name for a step of the function `name` that is part of a larger program.

    It is the same in every process that creates its steps in the same order.
    """
    _num_steps[name] += 1
    return f"step {name} {_num_steps[name] - 1}"


def why_not() -> str | None:
    """Return a sentence that says why nothing orders the all-reduces of this program, or None."""
    order = _order.get()
    if order is None:
        return (
            "outside of jdp.train_step nothing puts it in one order with the program's other "
            "calls (all_reduce=jdp.collectives.native takes it where each step reduces once)."
        )
    return order.why_not


def is_beside_xla() -> bool:
    """Whether collectives of XLA may run at the same time as the native calls of this program.

    See `beside_xla.runs_beside`. Outside of a step jdp does not know, and returns False.
    """
    order = _order.get()
    return order is not None and order.beside_xla


def is_in_step() -> bool:
    """Whether a call that is traced now is one of a step, and in no function or loop within it."""
    order = _order.get()
    return order is not None and order.trace_of_step == jax.extend.core.get_opaque_trace_state()


def why_unordered(jaxpr: Any) -> str | None:
    """Return a sentence that says why ranks could match different all-reduces, or None.

    JAX traces a user's jitted function once for all its calls. The program then has its all-reduces
    several times, with the same numbers, and not ordered by jdp's token.
    """
    found = _chains(jaxpr, {})
    if found.is_repeated:
        return "a function that reduces is called twice in one program, and JAX traced it once."
    if found.num_chains > _MAX_CHAINS:
        return f"{found.num_chains} functions within the program reduce, and nothing orders them."
    return None


def require(reason: str | None) -> None:
    """Raise a ValueError if there is a reason against the native calls of a program."""
    if reason:
        raise ValueError(
            f"collectives.native cannot reduce in this step: {reason} Ranks could take one "
            "reduction for another. Write all_reduce=jdp.collectives.auto, which leaves such a "
            "step to XLA, or call apply_gradients in the step itself."
        )


class _Chains(NamedTuple):
    """The all-reduces of a jaxpr and of the bodies in it.

    Attributes:
      num_chains: number of all-reduces that do not wait for another all-reduce.
      numbers: the numbers of all of them.
      is_repeated: whether two of them share a number.
    """

    num_chains: int
    numbers: frozenset[int]
    is_repeated: bool

    def joined(self, other: "_Chains") -> "_Chains":
        """Return the chains of two bodies of one program."""
        return _Chains(
            self.num_chains + other.num_chains,
            self.numbers | other.numbers,
            self.is_repeated or other.is_repeated or bool(self.numbers & other.numbers),
        )


def _chains(jaxpr: Any, known: dict[int, _Chains]) -> _Chains:
    """Return the all-reduces of a jaxpr. `known` has those of bodies, by id, to read each once."""
    jaxpr = opened(jaxpr)
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    found, given = _Chains(0, frozenset(), False), set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in NATIVE:
            token, passed_on = id(equation.invars[TOKEN]), id(equation.outvars[0])
            number = frozenset([equation.params["number"]])
            found = found.joined(_Chains(int(token not in given), number, False))
            given.discard(token)  # a second call with this token may run beside the first
            given.add(passed_on)
            continue
        if equation.params.get("target_name") == START:  # a start does not block
            number = frozenset([int(dict(equation.params["attributes"])["bucket"])])
            found = found.joined(_Chains(0, number, False))
        for body in jaxprs.bodies(equation):
            found = found.joined(_chains(body, known))
    known[id(jaxpr)] = found
    return found


def next_number(bucket: Sequence[jax.Array]) -> int:
    """Return the number of the next all-reduce of the program, >= 0.

    It is the same in every process and every run of the program, since the key of the compilation
    cache depends on it. It counts from 0, or is computed from the shapes of `bucket` if jdp does
    not trace the whole program.
    """
    order = _order.get()
    if order is not None:
        number = next(order.numbers)
        return derived(number, order.series) if order.series else number
    trace = jax.extend.core.get_opaque_trace_state()
    if trace != _outside.trace:
        _outside.trace, _outside.num_equal = trace, Counter()
    content = zlib.crc32(repr([(leaf.shape, str(leaf.dtype)) for leaf in bucket]).encode())
    _outside.num_equal[content] += 1
    return derived(content, f"outside {_outside.num_equal[content] - 1}")


def derived(number: int, by: str) -> int:
    """Return the number of an all-reduce that JAX derives from another.

    Args:
      number: the number of the other all-reduce.
      by: name of the transformation, such as the tangent's.
    """
    return zlib.crc32(f"{number} {by}".encode()) % 2**30 + 2**30


def token() -> jax.Array | None:
    """Return the token of the last all-reduce, None before the first one of this trace."""
    order = _order.get()
    if order is None or order.trace != jax.extend.core.get_opaque_trace_state():
        return None
    return order.token


def passed(token: jax.Array) -> None:
    """Record the token of an all-reduce, for the next one."""
    order = _order.get()
    if order is not None:
        order.token, order.trace = token, jax.extend.core.get_opaque_trace_state()
