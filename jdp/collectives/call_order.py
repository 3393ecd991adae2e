"""What tells the native all-reduces of one program apart, and in which order they run.

XLA runs what does not depend on each other in another order on each rank, and makes one call of
two that are equal: each call has a number of its own, and takes a token from the one before.
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

# Where the token stands among the operands of an all-reduce.
TOKEN = 3

# The calls that start a reduction between GPUs, and wait for it.
START, DONE = "jdp_ring_start", "jdp_ring_done"

# At most two of XLA's threads for each rank wait for other ranks at once: one for its own
# collectives. A second chain of these would be the third.
_MAX_CHAINS = 1


PART_OF_ANOTHER = "the step is part of a larger program, of which jdp sees no more than itself."


class _Order:
    """Of the program being traced."""

    def __init__(self, why_not: str | None, series: str) -> None:
        self.why_not = why_not
        self.series = series
        self.numbers = itertools.count()
        self.token: jax.Array | None = None
        self.trace: Any = None  # where the token was made, and may be used


# JAX keeps what it traced of the author's jitted functions for each value of this, and must not
# hand the all-reduces of a step to a program where nothing orders them.
_traced_where = jax.make_user_context("")
_order: ContextVar[_Order | None] = ContextVar("jdp_order", default=None)


class _Outside:
    """The numbers given outside of jdp's programs.

    Attributes:
      trace: where the last one was given.
      num_equal: how often one was given there for equal leaves, by what they are.
    """

    def __init__(self) -> None:
        self.trace: Any = None
        self.num_equal: Counter[int] = Counter()


_outside = _Outside()
# Of steps that are part of another program, by the name of their function.
_num_steps: dict[str, int] = {}


@contextlib.contextmanager
def entered(*, why_not: str | None = None, series: str = "") -> Iterator[None]:
    """Order the all-reduces that are traced inside: those of one program.

    Args:
      why_not: in a sentence, why they cannot be told apart after all; see `why_unordered`.
      series: see `next_series`; empty for a program that is not part of another.
    """
    token = _order.set(_Order(why_not, series))
    try:
        with _traced_where("step" if why_not is None else "unordered step"):
            yield
    finally:
        _order.reset(token)


def next_series(name: str) -> str:
    """Return a name for a step that is part of a larger program, different for each step.

    The same in every process that makes its steps in the same order.

    Args:
      name: of the step's function.
    """
    _num_steps[name] = _num_steps.get(name, -1) + 1
    return f"step {name} {_num_steps[name]}"


def why_not() -> str | None:
    """Return in a sentence why nothing orders the all-reduces of this program, or None."""
    order = _order.get()
    if order is None:
        return (
            "outside of jdp.train_step nothing puts it in one order with the program's other "
            "calls (all_reduce=jdp.collectives.native takes it where each step reduces once)."
        )
    return order.why_not


def why_unordered(jaxpr: Any) -> str | None:
    """Return in a sentence why the all-reduces of a traced program could meet wrong ones.

    JAX traces a function that is jitted by itself once, whoever calls it: its all-reduces then
    stand in the program several times, under the same numbers, and outside of its chain.

    Args:
      jaxpr: of the whole program.
    """
    found = _look_through(jaxpr, {})
    if found.is_repeated:
        return "a function that reduces is called twice in one program, and JAX traced it once."
    if found.num_chains > _MAX_CHAINS:
        return f"{found.num_chains} functions within the program reduce, and nothing orders them."
    return None


def require(jaxpr: Any) -> None:
    """Refuse a program whose all-reduces could meet others than their own.

    Raises:
      ValueError: saying why.
    """
    reason = why_unordered(jaxpr)
    if reason:
        raise ValueError(
            f"collectives.native cannot reduce in this step: {reason} Ranks could take one "
            "reduction for another. Write all_reduce=jdp.collectives.auto, which leaves such a "
            "step to XLA, or call apply_gradients in the step itself."
        )


class _Chains(NamedTuple):
    """The all-reduces of a jaxpr and of all bodies in it.

    Attributes:
      num_chains: how many wait for no other one.
      numbers: of all of them.
      is_repeated: whether one stands there twice.
    """

    num_chains: int
    numbers: frozenset[int]
    is_repeated: bool

    def joined(self, other: "_Chains") -> "_Chains":
        """Return what is found where both stand."""
        return _Chains(
            self.num_chains + other.num_chains,
            self.numbers | other.numbers,
            self.is_repeated or other.is_repeated or bool(self.numbers & other.numbers),
        )


def _look_through(jaxpr: Any, known: dict[int, _Chains]) -> _Chains:
    """Find all all-reduces of a jaxpr.

    Args:
      jaxpr: where to look.
      known: what was found in bodies by their id, so that one called from many places is read once.
    """
    jaxpr = opened(jaxpr)
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    found, given = _Chains(0, frozenset(), False), set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "jdp_all_reduce":
            token, waits = id(equation.invars[TOKEN]), id(equation.outvars[0])
            number = frozenset([equation.params["number"]])
            found = found.joined(_Chains(int(token not in given), number, False))
            given.discard(token)  # A second one that takes it runs beside the first.
            given.add(waits)
            continue
        if equation.params.get("target_name") == START:  # no rank waits in it
            number = frozenset([int(dict(equation.params["attributes"])["bucket"])])
            found = found.joined(_Chains(0, number, False))
        for body in jaxprs.bodies(equation):
            found = found.joined(_look_through(body, known))
    known[id(jaxpr)] = found
    return found


def next_number(bucket: Sequence[jax.Array]) -> int:
    """Number the next all-reduce of the program, from 0.

    The same in every process and in every run of the same program: the numbers are part of what
    the compilation cache looks at.

    Args:
      bucket: what is reduced. Where jdp does not trace the whole program, numbers are made from
        its shapes.
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
    """Number the all-reduce that a transformation makes of another: its tangent, say."""
    return zlib.crc32(f"{number} {by}".encode()) % 2**30 + 2**30


def token() -> jax.Array | None:
    """Return the token of the last all-reduce, None if the next one is the first here."""
    order = _order.get()
    if order is None or order.trace != jax.extend.core.get_opaque_trace_state():
        return None
    return order.token


def passed(token: jax.Array) -> None:
    """Record the token that the next all-reduce has to take."""
    order = _order.get()
    if order is not None:
        order.token, order.trace = token, jax.extend.core.get_opaque_trace_state()
