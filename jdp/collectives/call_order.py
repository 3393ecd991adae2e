"""The numbers and the order of a program's native calls.

XLA may reorder independent operations differently on each rank, and merges equal operations. So
each call has a unique number, and takes a token from the previous call.
"""

import contextlib
import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

# The CPU library's calls, and the token's index.
NATIVE = frozenset(
    "jdp_add_rows_native jdp_all_gather jdp_all_reduce jdp_all_to_all jdp_reduce_scatter "
    "jdp_take_rows_native".split()
)
TOKEN = 3

START, DONE = "jdp_ring_start", "jdp_ring_done"

PART_OF_ANOTHER = "the step is part of a larger program, and jdp sees only the step."


class _Order:
    def __init__(self, why_not: str | None, series: str, beside_xla: bool, as_xla: bool) -> None:
        self.why_not = why_not
        self.series = series
        self.beside_xla = beside_xla
        self.as_xla = as_xla
        self.numbers = itertools.count()
        self.token: jax.Array | None = None
        self.trace: Any = None  # that made the token; no other may use it
        self.trace_of_step = jax.extend.core.get_opaque_trace_state()


class _Outside:
    """For calls outside jdp's steps: the last trace, and its calls by leaf types."""

    def __init__(self) -> None:
        self.trace: Any = None
        self.num_equal: Counter[int] = Counter()


# Part of the key of JAX's trace caches: a program with unordered all-reduces must not reuse an
# all-reduce that a user's jitted function traced in a step.
_traced_where = jax.make_user_context("")
_order: ContextVar[_Order | None] = ContextVar("jdp_order", default=None)
_outside = _Outside()
# Steps inside other programs, by function name.
_num_steps: Counter[str] = Counter()


@contextlib.contextmanager
def entered(
    *, why_not: str | None = None, series: str = "", beside_xla: bool = False, as_xla: bool = False
) -> Iterator[None]:
    """Order the native calls traced in the body, all of one program.

    `as_xla`: they treat subnormal numbers as XLA does, as 0.
    """
    token = _order.set(_Order(why_not, series, beside_xla, as_xla))
    where = "step beside XLA" if beside_xla else "step"
    try:
        with _traced_where(where if why_not is None else "unordered step"):
            yield
    finally:
        _order.reset(token)


def next_series(name: str) -> str:
    """Return a unique name for a step of a larger program, equal in all processes."""
    _num_steps[name] += 1
    return f"step {name} {_num_steps[name] - 1}"


def why_not() -> str | None:
    """Return why this program's all-reduces are not ordered."""
    order = _order.get()
    if order is None:
        return (
            "outside jdp.train_step jdp does not order it with the program's other calls "
            "(all_reduce=jdp.collectives.native uses it where each step reduces once)."
        )
    return order.why_not


def is_beside_xla() -> bool:
    """Whether XLA's collectives may run beside the program's native calls."""
    order = _order.get()
    return order is not None and order.beside_xla


def is_as_xla() -> bool:
    """Whether the program's native calls treat subnormal numbers as XLA does."""
    order = _order.get()
    return order is not None and order.as_xla


def is_in_step() -> bool:
    """Whether a call traced now belongs to a step, and no function or loop within it."""
    order = _order.get()
    return order is not None and order.trace_of_step == jax.extend.core.get_opaque_trace_state()


def require(reason: str | None) -> None:
    """Raise a ValueError with a reason against native calls."""
    if reason:
        raise ValueError(
            f"collectives.native cannot reduce in this step: {reason} Ranks could confuse two "
            "reductions. Write all_reduce=jdp.collectives.auto, which uses XLA for such a step, "
            "or call apply_gradients in the step itself."
        )


def next_number(bucket: Sequence[jax.Array]) -> int:
    """Return the number of the program's next all-reduce, >= 0.

    It is in the compilation cache's key, so equal in every process and run: a count from 0, or
    derived from the shapes of `bucket` if jdp does not trace the whole program.
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
    """Return an all-reduce's number derived from another."""
    return zlib.crc32(f"{number} {by}".encode()) % 2**30 + 2**30


def token() -> jax.Array | None:
    """Return this trace's last all-reduce token."""
    order = _order.get()
    if order is None or order.trace != jax.extend.core.get_opaque_trace_state():
        return None
    return order.token


def first_token() -> jax.Array | None:
    """Return the last token, or a new one, for a loop; None without an order."""
    order = _order.get()
    if order is None or order.why_not is not None:
        return None
    last = token()
    return jnp.zeros(1, np.float32) if last is None else last


def threaded(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Return `(token, *args) -> (last token, result)` for a loop's native calls; None passes."""

    @functools.wraps(fn)
    def in_order(given: jax.Array | None, *args: Any) -> tuple[Any, Any]:
        order = _order.get()
        if order is None or given is None:
            return given, fn(*args)
        before = order.token, order.trace
        passed(given)
        try:
            result = fn(*args)
            last = token()
            return given if last is None else last, result
        finally:
            order.token, order.trace = before

    return in_order


def passed(token: jax.Array) -> None:
    """Record an all-reduce's token, for the next one."""
    order = _order.get()
    if order is not None:
        order.token, order.trace = token, jax.extend.core.get_opaque_trace_state()
