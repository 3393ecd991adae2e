"""Steps in flight: limits their number, and raises their errors."""

import atexit
import operator
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import pytrees
from jdp.distributed import call_log, fail_fast, this_process
from jdp.distributed.checks import call_mismatch
from jdp.distributed.checks.arguments import Arguments, Given
from jdp.error_codes import with_code
from jdp.step_spec import StepSpec
from jdp.worker import progress


class RankReports(NamedTuple):
    """One value of each rank, sharded over the ranks.

    Attributes:
      differs: whether the arguments differ between ranks, `[ranks]` bool; None if not compared.
      weight: the result of `weight_fn`, `[ranks]` float, or None.
      skips: of skipped updates, `[ranks, k]` int32, or None.
    """

    differs: jax.Array | None
    weight: jax.Array | None
    skips: jax.Array | None


@dataclass(slots=True, eq=False)
class CalledProgram:
    """What calls keep of their program, without its executables.

    Attributes:
      jaxprs: the step's latest programs on its mesh, with input names.
      check: raises a RuntimeError for a failure unreported by JAX.
      why_invalid: returns an error for invalid weights, given `weight` and `reports.weight`.
      why_skipped: returns the gradients of too many skipped updates, given `reports.skips` and the
        gradients' paths.
      waits_in_xla: whether the last traced program has collectives of XLA.
    """

    arguments: Arguments | None
    jaxprs: Sequence[tuple[Any, list[str]]]
    check: Callable[[], None]
    why_invalid: Callable[[jax.Array, jax.Array], str | None]
    why_skipped: Callable[[jax.Array, Sequence[tuple[str, ...]]], str | None]
    waits_in_xla: bool = False


class StepCall:
    """A call of a step, perhaps still running.

    Attributes:
      number: among the step's calls, from 1.
      reports: of the ranks; None during the dispatch.
      weight: of the batch, `[]` float, ready when the call has run; -inf after an overflow of a sum
        of integers.
      integer_sums: the author's lines of integer sums over ranks.
      skips: as in `TraceFindings`.
    """

    __slots__ = ("given", "integer_sums", "number", "program", "reports", "skips", "spec", "weight")

    def __init__(
        self, spec: StepSpec, number: int, program: CalledProgram, given: Given | None = None
    ) -> None:
        self.spec, self.number, self.program, self.given = spec, number, program, given
        self.reports: RankReports | None = None
        self.weight: Any = None
        self.integer_sums: tuple[str, ...] = ()
        self.skips: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        return f"call {self.number} of `{self.spec.name}`"

    @property
    def arguments(self) -> Arguments | None:
        """What compares the arguments."""
        return self.program.arguments

    def is_checked(self) -> bool:
        """Whether its ranks report anything."""
        return bool(self.integer_sums) or any(x is not None for x in self.reports or ())

    def differs(self) -> bool:
        """Wait; return whether its arguments differ between processes."""
        # All ranks of a process got the same arguments.
        differs = None if self.reports is None else self.reports.differs
        return differs is not None and bool(np.asarray(differs.addressable_data(0)).any())

    def weight_error(self) -> str | None:
        """Wait; return the error for invalid weights."""
        given = None if self.reports is None else self.reports.weight
        return None if given is None else self.program.why_invalid(self.weight, given)

    def skipped(self) -> str | None:
        """Wait; return the gradients of too many skipped updates."""
        given = None if self.reports is None else self.reports.skips
        return None if given is None else self.program.why_skipped(given, self.skips)

    def overflow(self) -> str | None:
        """Wait; return the lines of sums, if one overflowed."""
        if not self.integer_sums or not np.isneginf(self.weight.addressable_data(0)):
            return None
        return " or ".join(line or "a line of a library" for line in self.integer_sums)

    def is_deleted(self) -> bool:
        """Whether the arrays needed to check the call were deleted."""
        return any(map(pytrees.is_deleted, (self.weight, *(self.reports or ()))))

    def difference(self, timeout_s: float) -> str | None:
        """Return a sentence about an argument that differs between processes."""
        if self.arguments is None or self.given is None:
            return None
        if not (self.given.small or self.given.large):
            return None
        return self.arguments.difference(self.given, timeout_s=timeout_s)


# Without a finished step, until processes compare their calls.
PATIENCE_S = 5.0


class Overdue:
    """Checks the calls in flight, and ends this process if an overdue one differs."""

    def __init__(self, patience_s: float = PATIENCE_S):
        self._patience_s = patience_s
        self._oldest: str | None = None
        self._since = 0.0
        self._is_explained = False

    def poll(self, calls: Sequence[StepCall]) -> threading.Thread | None:
        """Check the unfinished calls, oldest first, without waiting."""
        oldest = str(calls[0]) if calls else None
        if oldest != self._oldest:
            self._oldest, self._since, self._is_explained = oldest, time.monotonic(), False
        late_s = time.monotonic() - self._since
        if not calls or late_s < self._patience_s or self._is_explained:
            return None
        self._is_explained = True
        thread = threading.Thread(target=_explain, args=(calls,), daemon=True)
        thread.start()
        return thread


def _explain(calls: Sequence[StepCall]) -> None:
    for call in calls:
        if call.difference(PATIENCE_S):
            assert call.arguments is not None and call.given is not None
            text = call.arguments.explained(call.given, str(call))
            return fail_fast.end_process(RuntimeError(text))


_STATUS = re.compile(
    "(CANCELLED|UNKNOWN|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|RESOURCE_EXHAUSTED|"
    "FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS): "
)
_NO_CPU = re.compile(r"HLO opcode `([\w-]+)` is not supported by XLA:CPU")
_RAISED = re.compile(r'File "([^"]+)", line (\d+), in ')

# XLA's name of a collective -> JAX's name, and the alternative on CPUs.
_ON_CPU = {
    "ragged-all-to-all": ("jax.lax.ragged_all_to_all", "write jdp.ragged_all_to_all"),
    "reduce-scatter": (
        "jax.lax.psum_scatter",
        "write jax.lax.psum, and take this rank's slice at jax.lax.axis_index",
    ),
    "collective-broadcast": (
        "jax.lax.pbroadcast",
        "write jax.lax.all_gather, and take the row of the source",
    ),
}


def is_failed_run(error: Exception) -> bool:
    """Whether XLA could not compile or finish a program."""
    # JAX raises a ValueError with XLA's status for a failed ahead-of-time program.
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(_STATUS.match(str(error)))


def why_failed(error: Exception) -> str:
    """Return the cause in an error of XLA, without status and stack."""
    text = _STATUS.sub("", str(error).strip(), count=1).strip()
    if unsupported := _NO_CPU.search(text):
        return _not_on_cpu(unsupported[1])
    if "Traceback (most recent call last)" in text:
        return _callback_raised(text)
    first = text.partition("\n")[0].removeprefix("jdp: ").strip()
    return first.rstrip(".") or type(error).__name__


def _not_on_cpu(opcode: str) -> str:
    name, instead = _ON_CPU.get(opcode, (f"the operation {opcode}", "use other operations"))
    return f"XLA cannot run {name} on CPUs, though it may on GPUs and TPUs. On CPUs, {instead}"


def _callback_raised(text: str) -> str:
    raised = text.splitlines()[-1].strip().rstrip(".")
    frames = _RAISED.findall(text)
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return f"a callback raised {raised}{where}"


# XLA's CPU client before JAX 0.11 hangs forever with more than about 30 pending steps on all its
# devices. Elsewhere a few hide dispatch.
_MAX = 8

# For others' arguments after a failed step.
_EXPLAIN_FAILURE_S = 2.0

# Python aborts the process if a step calls back during interpreter shutdown.
_END_S = 10.0

_calls: deque[StepCall] = deque()
# Weights of calls forgotten after a failure of their step.
_forgotten: deque[Any] = deque(maxlen=4 * _MAX)
# JAX runs a small CPU program before the dispatch returns.
_being_made: deque[StepCall] = deque(maxlen=1)
_overdue = Overdue()


def begin_call(call: StepCall) -> None:
    """Record that a call is being dispatched, until `end_call`."""
    _being_made.append(call)
    if progress.own.step_clock is not None:
        progress.own.step_clock.begin_dispatch()


def end_call() -> None:
    """Record that the dispatch ended or failed."""
    _being_made.clear()


def add(call: StepCall) -> None:
    """Record that a call is running."""
    _calls.append(call)
    if progress.own.step_clock is not None and call.spec.returns_state:
        progress.own.step_clock.end_dispatch(call.weight, call.program.waits_in_xla)


def make_room() -> None:
    """Before a dispatch, wait for room in flight, and raise errors of finished calls."""
    if len(_calls) >= _MAX:  # rarely, and then for several calls: each wait costs
        since_ns = time.monotonic_ns()
        _drain(_MAX // 2)
        if progress.own.step_clock is not None:
            progress.own.step_clock.add_blocked(since_ns)


def drain() -> None:
    """Wait for all steps in flight, and raise their errors."""
    _drain(0)


def latest_spec() -> StepSpec | None:
    """Return the step of the latest call in flight."""
    return _calls[-1].spec if _calls else None


def latest_call() -> StepCall | None:
    """Return the latest call in flight."""
    return _calls[-1] if _calls else None


def settle() -> None:
    """Wait for all steps, and leave their errors to the next one."""
    for call in tuple(_calls):
        _wait_for(call.weight)


class Unchecked:
    """The training steps in flight now, not yet known to be right."""

    def __init__(self) -> None:
        self._calls = [call for call in _calls if call.spec.returns_state and call.is_checked()]

    def went_wrong(self) -> bool:
        """Whether a call differed between processes or computed wrong values; in any thread."""
        wrong = (call.differs() or call.overflow() or call.weight_error() for call in self._calls)
        return this_process.current.exchange_error is not None or any(wrong)

    def require_right(self) -> None:
        """Wait for these steps, and raise their or earlier errors."""
        if self._calls:
            while any(call is self._calls[-1] for call in _calls):
                _drain(len(_calls) - 1)
        require_right_states()


def require_right_states() -> None:
    """Raise a wrong training step's error again, since all later states are wrong."""
    if this_process.current.state_error is not None:
        raise RuntimeError(this_process.current.state_error)


def accept_new_state() -> None:
    """Forget the errors of failed steps: training continues with all processes' common state."""
    right = [call for call in _calls if not (call.spec.returns_state and _wait_for(call.weight))]
    _calls.clear()
    _calls.extend(right)
    for weight in _forgotten:  # running calls may report an exchange
        _wait_for(weight)
    this_process.current.state_error = this_process.current.exchange_error = None


def _drain(num_left: int) -> None:
    while len(_calls) > num_left:
        call = _calls[0]  # stays there while waited for, see `_num_running`
        try:
            call.weight.block_until_ready()
            call.program.check()
            text = _exchange_error(call) or (_error_of(call) if call.is_checked() else None)
        except RuntimeError as error:
            if not call.is_deleted():
                raise failed(call, call.spec.donate, error) from error
            _calls.popleft()
            continue  # the author deleted all arrays, so none can be wrong
        _calls.popleft()
        if text is not None:
            if call.spec.returns_state:
                this_process.current.state_error = text
            _forget(call.spec)
            raise RuntimeError(text)
        if call.is_checked() and (why := call.skipped()):  # the state stays right
            raise RuntimeError(
                with_code(
                    "JDP217",
                    f"{call} has NaN or infinity in {why}: the last of max_consecutive skipped "
                    "updates in a row.\n"
                    "The state is right: it has the parameters from before these updates.\n"
                    "Find the operation with jdp.debug.first_nonfinite(step, state, batch).",
                )
            )


def _exchange_error(call: StepCall) -> str | None:
    """Return a ragged exchange's error, perhaps of a later call in flight."""
    found = this_process.current.exchange_error
    if found is None:
        return None
    if not call.spec.returns_state:  # else later states are wrong
        this_process.current.exchange_error = None
    return with_code("JDP216", f"{call} or a later call: {found}")


def _error_of(call: StepCall) -> str | None:
    if call.differs():
        assert call.arguments is not None and call.given is not None
        return call.arguments.explained(call.given, str(call))
    if lines := call.overflow():
        return with_code(
            "JDP215",
            f"{call}: jdp.sum_over_ranks at {lines} overflows the integer type of its sum.\n"
            "The result is smaller by a multiple of 2**32, or of 2**64.\n"
            "Write jdp.sum_over_ranks(x.astype(float)), or sum fewer integers.",
        )
    if why := call.weight_error():
        returned = "it and later calls" if call.spec.returns_state else "it"
        return with_code("JDP212", f"{call}: {why} What {returned} returned is NaN.")
    return None


def failed(call: StepCall, is_gone: bool, error: Exception) -> RuntimeError:
    """Return the error for a call that failed, and forget its step's other calls."""
    difference = call.difference(_EXPLAIN_FAILURE_S)
    cause = f" It was not the same call on all processes: {difference}" if difference else ""
    _forget(call.spec)
    gone = "The input state was not donated and is intact."
    if is_gone:
        kept = progress.own.latest_kept
        back = "a checkpoint" if kept is None else f"the rest of {kept}"
        gone = (
            f"The input state was donated and is lost: return to {back} with jdp.Checkpointer, "
            "or train with donate=False."
        )
    # If loops over batches differ, this failure is a consequence.
    reason = this_process.current.why_over or why_failed(error)
    text = f"{call} failed: {reason}.{cause} {gone}"
    return RuntimeError(with_code("JDP214", text))


def _wait_for(weight: Any) -> bool:
    """Wait for a call; return whether it failed while it ran."""
    try:
        weight.block_until_ready()
    except RuntimeError:
        return not pytrees.is_deleted(weight)
    return False


def _forget(spec: StepSpec) -> None:
    """Remove a step's calls; others may have their own errors."""
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
    if time.monotonic() < end:
        try:
            drain()
        except RuntimeError as error:
            fail_fast.fail_at_exit(error)


def _has_run(weight: Any) -> bool:
    try:
        return _is_ready(weight)
    except (AttributeError, RuntimeError):
        return True  # the step failed, or the author deleted its arrays


# All JAX arrays have this method, undeclared by `jax.Array`.
_is_ready = operator.methodcaller("is_ready")


# Called periodically by a thread while no step starts or ends.
def _num_running() -> int:
    try:
        running = [call for call in tuple(_calls) if not _is_ready(call.weight)]
    except (AttributeError, RuntimeError):  # RuntimeError: the step failed, so it is not running
        return 0
    call_mismatch.current.poll(bool(running or _being_made or call_log.num_waiting))
    # Poll even if no step runs here: other processes may be ahead or behind.
    _overdue.poll([*_calls, *_being_made] if running or _being_made else [])
    return len(running)


progress.own.num_running = _num_running
