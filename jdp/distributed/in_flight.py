"""Steps in flight: how many there may be, and the errors of those that have run."""

import operator
from collections import deque

from jdp.distributed import failed_run, this_process
from jdp.distributed.checks.overdue import Overdue
from jdp.distributed.step_call import StepCall
from jdp.error_codes import with_code
from jdp.step_spec import StepSpec
from jdp.worker import progress

# XLA's CPU client before JAX 0.11 hangs for good with more than about 30 undrained steps on all
# of its devices; elsewhere a few steps in flight are enough to hide dispatch.
_MAX = 8

# How long a process whose step failed waits until the others report their arguments.
_EXPLAIN_FAILURE_S = 2.0

_calls: deque[StepCall] = deque()
# The call that is being made: JAX runs a small program on CPU before it returns.
_being_made: deque[StepCall] = deque(maxlen=1)
_overdue = Overdue()


def begin_call(call: StepCall) -> None:
    """Record that a call is being made, until `end_call`."""
    _being_made.append(call)


def end_call() -> None:
    """Record that the call that began was handed to the devices, or failed."""
    _being_made.clear()


def add(call: StepCall) -> None:
    """Record a call that is now running."""
    _calls.append(call)


def make_room() -> None:
    """Wait until one more call may be in flight, and raise the errors of calls that have run.

    Before the call, so that the state that goes into it is not donated for nothing.
    """
    _drain(_MAX - 1)


def drain() -> None:
    """Wait for all steps in flight, and raise their errors."""
    _drain(0)


def latest_spec() -> StepSpec | None:
    """Return the step of the latest call in flight; None if there is none."""
    return _calls[-1].spec if _calls else None


class Unchecked:
    """The training steps in flight now, which may turn out to be wrong.

    A step checks itself, and its reports are ready when its state is: a thread that writes the
    state waits for nothing more.
    """

    def __init__(self) -> None:
        self._calls = [call for call in _calls if call.spec.returns_state and call.is_checked()]

    def went_wrong(self) -> bool:
        """Whether a call differed between processes, or got an invalid weight; in any thread."""
        return any(call.differs() or call.weight_error() for call in self._calls)

    def require_right(self) -> None:
        """Wait for these steps, and raise their errors, or those of steps before them."""
        if self._calls:
            while any(call is self._calls[-1] for call in _calls):
                _drain(len(_calls) - 1)
        require_right_states()


def require_right_states() -> None:
    """Raise the error of a wrong training step again: later states are wrong, caught or not.

    Raises:
      RuntimeError: on every process, until `accept_new_state`.
    """
    if this_process.current.state_error is not None:
        raise RuntimeError(this_process.current.state_error)


def accept_new_state() -> None:
    """Record that training continues with a state that all processes got from one source."""
    this_process.current.state_error = None


def _drain(num_left: int) -> None:
    while len(_calls) > num_left:
        call = _calls[0]  # stays there while it is waited for, see `_num_running`
        try:
            call.weight.block_until_ready()
            call.check()
            text = _error_of(call)
        except RuntimeError as error:
            if not call.is_deleted():
                raise failed(call, call.spec.donate, error) from error
            text = None  # The author deleted all arrays, so that nothing is left to be wrong.
        _calls.popleft()
        if text is not None:
            if call.spec.returns_state:
                this_process.current.state_error = text
            _forget(call.spec)
            raise RuntimeError(text)


def _error_of(call: StepCall) -> str | None:
    """Return the error of a call that ran to its end; None if it was right."""
    if call.differs():
        assert call.arguments is not None and call.given is not None
        return call.arguments.explained(call.given, str(call))
    if why := call.weight_error():
        returned = "it and later calls" if call.spec.returns_state else "it"
        return with_code("JDP212", f"{call}: {why} What {returned} returned is NaN.")
    return None


def failed(call: StepCall, is_gone: bool, error: Exception) -> RuntimeError:
    """Return the error for a call that failed while it ran, and forget the calls of its step.

    Args:
      call: the call.
      is_gone: whether the state that went in was donated.
      error: of JAX.
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
    text = f"{call} failed: {failed_run.reason(error)}.{cause} {gone}"
    return RuntimeError(with_code("JDP214", text))


def _forget(spec: StepSpec) -> None:
    """Forget the calls of a step. Those of other steps may go on, or have errors of their own."""
    others = [call for call in _calls if call.spec is not spec]
    _calls.clear()
    _calls.extend(others)


# Called from a thread, now and then while no step begins or ends.
def _num_running() -> int:
    # All of JAX's arrays have it, though the interface of `jax.Array` does not declare it.
    is_ready = operator.methodcaller("is_ready")
    try:
        running = [call for call in tuple(_calls) if not is_ready(call.weight)]
    except (AttributeError, RuntimeError):  # RuntimeError: the step failed, so it does not run.
        return 0
    # Other processes may be ahead or behind.
    _overdue.look([*_calls, *_being_made] if running or _being_made else [])
    return len(running)


progress.own.num_running = _num_running
