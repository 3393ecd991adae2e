"""Steps in flight: limit their number, and raise the errors of those that have run."""

import atexit
import operator
import time
from collections import deque
from typing import Any

from jdp.distributed import call_log, failed_run, this_process
from jdp.distributed.checks import call_mismatch
from jdp.distributed.checks.stuck_step import Overdue
from jdp.distributed.step_call import StepCall
from jdp.error_codes import with_code
from jdp.step_spec import StepSpec
from jdp.worker import progress

# XLA's CPU client before JAX 0.11 hangs forever with more than about 30 pending steps on all of its
# devices. On other backends a few steps in flight are enough to hide dispatch.
_MAX = 8

# How long a process whose step failed waits for the arguments of the others.
_EXPLAIN_FAILURE_S = 2.0

# Python aborts the process if a step calls back during interpreter shutdown. How long to wait.
_END_S = 10.0

_calls: deque[StepCall] = deque()
# Weights of the latest calls that were forgotten because another call of their step failed.
_forgotten: deque[Any] = deque(maxlen=4 * _MAX)
# The call that is being dispatched. JAX runs a small program on CPU before the dispatch returns.
_being_made: deque[StepCall] = deque(maxlen=1)
_overdue = Overdue()


def begin_call(call: StepCall) -> None:
    """Record that a call is being dispatched, until `end_call`."""
    _being_made.append(call)
    if progress.own.step_clock is not None:
        progress.own.step_clock.begin_dispatch()


def end_call() -> None:
    """Record that the call of `begin_call` was dispatched to the devices, or failed."""
    _being_made.clear()


def add(call: StepCall) -> None:
    """Record that a call is running."""
    _calls.append(call)
    if progress.own.step_clock is not None and call.spec.returns_state:
        progress.own.step_clock.end_dispatch(call.weight, call.program.waits_in_xla)


def make_room() -> None:
    """Wait until one more call may be in flight, and raise the errors of calls that have run.

    This comes before the dispatch, so that an error is raised before the state is donated.
    """
    if len(_calls) >= _MAX:
        _drain(_MAX - 1)


def drain() -> None:
    """Wait for all steps in flight, and raise their errors."""
    _drain(0)


def latest_spec() -> StepSpec | None:
    """Return the step of the latest call in flight; None if there is none."""
    return _calls[-1].spec if _calls else None


def latest_call() -> StepCall | None:
    """Return the latest call in flight; None if there is none."""
    return _calls[-1] if _calls else None


def settle() -> None:
    """Wait for all steps in flight, and leave their errors to the next step."""
    for call in tuple(_calls):
        _wait_for(call)


class Unchecked:
    """The training steps that are in flight now, and not yet known to be right.

    A step checks itself, and its reports are ready when its state is, so a thread that writes the
    state does not wait longer for them.
    """

    def __init__(self) -> None:
        self._calls = [call for call in _calls if call.spec.returns_state and call.is_checked()]

    def went_wrong(self) -> bool:
        """Whether a call differed between processes or computed wrong values; in any thread."""
        return any(call.differs() or call.overflow() or call.weight_error() for call in self._calls)

    def require_right(self) -> None:
        """Wait for these steps, and raise their errors or those of earlier steps."""
        if self._calls:
            while any(call is self._calls[-1] for call in _calls):
                _drain(len(_calls) - 1)
        require_right_states()


def require_right_states() -> None:
    """Raise the error of a wrong training step again, because all later states are wrong too."""
    if this_process.current.state_error is not None:
        raise RuntimeError(this_process.current.state_error)


def accept_new_state() -> None:
    """Record that training continues with a state that all processes got from one source.

    Training steps that failed led to a state that is given up, and JAX may have raised their errors
    already where the author read a value. So these are forgotten; others are checked as before.
    """
    this_process.current.state_error = None
    right = [call for call in _calls if not (call.spec.returns_state and _wait_for(call))]
    _calls.clear()
    _calls.extend(right)


def _drain(num_left: int) -> None:
    while len(_calls) > num_left:
        call = _calls[0]  # keep it there while waiting for it, see `_num_running`
        try:
            call.weight.block_until_ready()
            call.program.check()
            text = _error_of(call) if call.is_checked() else None
        except RuntimeError as error:
            if not call.is_deleted():
                raise failed(call, call.spec.donate, error) from error
            text = None  # the author deleted all arrays, so none can be wrong
        _calls.popleft()
        if text is not None:
            if call.spec.returns_state:
                this_process.current.state_error = text
            _forget(call.spec)
            raise RuntimeError(text)


def _error_of(call: StepCall) -> str | None:
    """Return the error of a call that ran to its end, None if it was right."""
    if call.differs():
        assert call.arguments is not None and call.given is not None
        return call.arguments.explained(call.given, str(call))
    if lines := call.overflow():
        return with_code(
            "JDP215",
            f"{call}: jdp.sum_over_ranks at {lines} adds up integers to a sum that their type "
            "cannot hold.\nThe result is smaller by a multiple of 2**32, or of 2**64.\nWrite "
            "jdp.sum_over_ranks(x.astype(float)), or add up fewer.",
        )
    if why := call.weight_error():
        returned = "it and later calls" if call.spec.returns_state else "it"
        return with_code("JDP212", f"{call}: {why} What {returned} returned is NaN.")
    return None


def failed(call: StepCall, is_gone: bool, error: Exception) -> RuntimeError:
    """Return the error for a call that failed while it ran, and remove its step's other calls.

    Args:
      is_gone: whether its input state was donated.
    """
    difference = call.difference(_EXPLAIN_FAILURE_S)
    cause = f" It was not the same call on all processes: {difference}" if difference else ""
    _forget(call.spec)
    gone = "The input state was not donated and is intact."
    if is_gone:
        kept = progress.own.latest_kept
        back = "a checkpoint" if kept is None else f"what was kept of {kept}"
        gone = (
            f"The input state was donated and is gone: go back to {back} with jdp.Checkpointer, or "
            "train with donate=False."
        )
    # If loops over batches differ, this failure is a consequence.
    reason = this_process.current.why_over or failed_run.reason(error)
    text = f"{call} failed: {reason}.{cause} {gone}"
    return RuntimeError(with_code("JDP214", text))


def _wait_for(call: StepCall) -> bool:
    """Wait for a call, and return whether it failed while it ran."""
    try:
        call.weight.block_until_ready()
    except RuntimeError:
        return not call.is_deleted()
    return False


def _forget(spec: StepSpec) -> None:
    """Remove the calls of a step. Those of other steps may continue, or have their own errors."""
    others = [call for call in _calls if call.spec is not spec]
    _forgotten.extend(call.weight for call in _calls if call.spec is spec)
    _calls.clear()
    _calls.extend(others)


@atexit.register
def _wait_at_end() -> None:
    end = time.monotonic() + _END_S
    for weight in [*_forgotten, *(call.weight for call in _calls)]:
        while not _has_run(weight) and time.monotonic() < end:
            time.sleep(0.005)


def _has_run(weight: Any) -> bool:
    try:
        return _is_ready(weight)
    except (AttributeError, RuntimeError):
        return True  # the step failed, or the author deleted its arrays


# All of JAX's arrays have this method, though the interface of `jax.Array` does not declare it.
_is_ready = operator.methodcaller("is_ready")


# A thread calls this periodically while no step starts or ends.
def _num_running() -> int:
    try:
        running = [call for call in tuple(_calls) if not _is_ready(call.weight)]
    except (AttributeError, RuntimeError):  # RuntimeError: the step failed, so it is not running
        return 0
    call_mismatch.current.poll(bool(running or _being_made or call_log.num_waiting))
    # Call this even if no step runs here, because other processes may be ahead or behind.
    _overdue.poll([*_calls, *_being_made] if running or _being_made else [])
    return len(running)


progress.own.num_running = _num_running
