"""Steps in flight: how many there may be, and what went wrong in those that have run."""

import functools
import operator
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.distributed import failed_run, this_process
from jdp.distributed.checks import arguments, overdue
from jdp.error_codes import with_code
from jdp.step_spec import StepSpec
from jdp.worker import progress

# XLA's CPU client before JAX 0.11 hangs for good with more than about 30 undrained steps on all
# of its devices; elsewhere a few steps in flight are enough to hide dispatch.
_MAX = 8

# How long a process whose step failed waits for what the others got.
_EXPLAIN_FAILURE_S = 2.0


class RankReports(NamedTuple):
    """What each rank says of itself, split over the ranks.

    Attributes:
      differs: whether its process got other arguments than others, `[ranks]` bool; None where that
        is not compared.
      weight: what `weight_fn` returned, `[ranks]` float; None without one.
    """

    differs: jax.Array | None
    weight: jax.Array | None


class StepCall(NamedTuple):
    """A call of a step that may still be running.

    Attributes:
      spec: of the step, which tells its calls from those of others.
      number: of the call.
      arguments: compares it between processes; None where it is not compared.
      given: what is compared.
      check: raises a RuntimeError if something failed while it ran that JAX does not know of.
      why_invalid: returns what is wrong with the weights of its ranks, given `weight` and
        `reports.weight`; None if nothing is.
      reports: what each rank says of itself; None while the call is being made.
      weight: of the batch, which is ready when the call has run.
    """

    spec: StepSpec
    number: int
    arguments: arguments.Arguments | None
    given: arguments.Given | None
    check: Callable[[], None]
    why_invalid: Callable[[jax.Array, jax.Array], str | None]
    reports: RankReports | None = None
    weight: Any = None


_calls: deque[StepCall] = deque()
# The call that is being made: JAX runs a small program on CPU before it returns.
_made: deque[StepCall] = deque(maxlen=1)


def begins(call: StepCall) -> None:
    """Record that a call is being made, until `ends`."""
    _made.append(call)


def ends() -> None:
    """Record that the call that began is handed to the devices, or failed."""
    _made.clear()


def make_room() -> None:
    """Wait until one more call may be in flight, and raise what went wrong in those that have run.

    Before the call, so that the state that goes into it is not donated for nothing.
    """
    _drain(_MAX - 1)


def add(call: StepCall) -> None:
    """Record a call that runs now."""
    _calls.append(call)


def latest_spec() -> StepSpec | None:
    """Return the step of the latest call in flight; None if there is none."""
    return _calls[-1].spec if _calls else None


def drain() -> None:
    """Wait for all steps in flight, and raise what went wrong in them."""
    _drain(0)


class Unchecked:
    """The training steps in flight now, which may have gone wrong.

    A step checks itself, and has done so when the state that it returned is there: to write that
    state waits for nothing more.
    """

    def __init__(self) -> None:
        self._calls = [call for call in _calls if call.spec.returns_state and _is_checked(call)]

    def went_wrong(self) -> bool:
        """Whether one was not the same on all processes, or got what is not a weight.

        Waits for them, in any thread.
        """
        return any(_differs(call) or _why_invalid(call) for call in self._calls)

    def require_right(self) -> None:
        """Wait for these steps, and raise what went wrong in them or in one before them."""
        if self._calls:
            while any(call is self._calls[-1] for call in _calls):
                _drain(len(_calls) - 1)
        require_right_states()


def require_right_states() -> None:
    """Raise once more what was wrong with a training step that ran to its end.

    It was not the same on all processes, or got what is not a weight.

    The states that it and later steps returned are wrong, whether or not its error was caught.

    Raises:
      RuntimeError: on every process, until `begins_anew`.
    """
    if this_process.current.why_wrong is not None:
        raise RuntimeError(this_process.current.why_wrong)


def begins_anew() -> None:
    """Record that training goes on with a state that all processes have from one place."""
    this_process.current.why_wrong = None


def _drain(num_left: int) -> None:
    while len(_calls) > num_left:
        call = _calls[0]  # stays there while it is waited for, see `_num_running`
        try:
            call.weight.block_until_ready()
            call.check()
        except RuntimeError as error:
            raise failed(call, call.spec.donate, error) from error
        _calls.popleft()
        _require_right(call)


def _is_checked(call: StepCall) -> bool:
    return call.reports is not None and any(report is not None for report in call.reports)


def _differs(call: StepCall) -> bool:
    # Each rank says it of itself, and all of a process got the same.
    differs = None if call.reports is None else call.reports.differs
    return differs is not None and bool(np.asarray(differs.addressable_data(0)).any())


def _why_invalid(call: StepCall) -> str | None:
    given = None if call.reports is None else call.reports.weight
    return None if given is None else call.why_invalid(call.weight, given)


def _require_right(call: StepCall) -> None:
    if _differs(call):
        assert call.arguments is not None and call.given is not None
        text = call.arguments.explained(call.given, call.spec.name, call.number)
    elif why := _why_invalid(call):
        returned = "it and later calls" if call.spec.returns_state else "it"
        called = f"call {call.number} of `{call.spec.name}`"
        text = with_code("JDP212", f"{called}: {why} What {returned} returned is NaN.")
    else:
        return
    if call.spec.returns_state:
        this_process.current.why_wrong = text
    # Other steps may go on, or be wrong by themselves: only this one's own calls are reported here.
    others = [each for each in _calls if each.spec is not call.spec]
    _calls.clear()
    _calls.extend(others)
    raise RuntimeError(text)


def failed(call: StepCall, is_gone: bool, error: Exception) -> RuntimeError:
    """Return what to raise for a call that failed while it ran; none is in flight any more.

    Args:
      call: the call.
      is_gone: whether the state that went in was donated.
      error: of JAX.
    """
    difference = _difference(call, _EXPLAIN_FAILURE_S)
    cause = f" It was not the same call on all processes: {difference}" if difference else ""
    _calls.clear()
    gone = "The input state was not donated and is intact."
    if is_gone:
        kept = progress.own.latest_kept
        back = "a checkpoint" if kept is None else f"what was kept of {kept}"
        gone = (
            f"The input state was donated and is gone: go back to {back} with jdp.Checkpointer, or "
            "train with donate=False."
        )
    called = f"call {call.number} of `{call.spec.name}`"
    text = f"{called} failed: {failed_run.reason(error)}.{cause} {gone}"
    return RuntimeError(with_code("JDP214", text))


def _difference(call: StepCall, timeout_s: float) -> str | None:
    """Return in what a call differed between processes, as a sentence, if that is known."""
    if call.arguments is None or call.given is None or not (call.given.small or call.given.large):
        return None
    return call.arguments.difference(call.given, timeout_s=timeout_s)


_overdue = overdue.Overdue()


# Called from a thread, now and then while no step begins or ends.
def _num_running() -> int:
    # All of JAX's arrays have it, though the interface of `jax.Array` does not say so.
    is_ready = operator.methodcaller("is_ready")
    try:
        running = [call for call in tuple(_calls) if not is_ready(call.weight)]
    except (AttributeError, RuntimeError):  # the latter of a step that failed, which is none
        return 0
    # The others may have come further, or less far.
    calls = [*_calls, *_made] if running or _made else []
    _overdue.look([_unfinished(call) for call in calls])
    return len(running)


def _unfinished(call: StepCall) -> overdue.Unfinished:
    explain = functools.partial(_difference, call, overdue.PATIENCE_S)
    return overdue.Unfinished(call.spec.name, call.number, explain)


progress.own.num_running = _num_running
