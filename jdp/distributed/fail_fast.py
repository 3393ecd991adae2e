"""Ends a failed process at once, without waiting for others."""

import atexit
import contextlib
import functools
import inspect
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax

from jdp.distributed import kv_store, metrics_log, this_process
from jdp.error_codes import with_code
from jdp.worker.exit_codes import SAVED
from jdp.worker.launcher_client import current
from jdp.worker.progress import own

# Must fit a message to the launcher; the end explains most.
MAX_TRACEBACK_CHARS = 80_000

# Key of a report to the other processes' loops.
UNCAUGHT = "jdp/uncaught"
TEXT_CHARACTERS = 600

# Others read the report for up to 2 s. If process 0 exited first, JAX would end this one meanwhile.
_GRACE_S = 3.0
# Process 0 holds the store: its early exit would end the others before they print where Ctrl-C
# interrupted them.
_INTERRUPT_GRACE_S = 1.0
# For the last lines of `jdp.log`.
_LINES_S = 1.0
_POLL_S = 0.05
# Errors of JAX and pickle that newcomers meet, and what to write.
_HINTS = (
    (
        re.compile(r"(?:Array|[Bb]uffer) has been deleted"),
        "a train step donates its state, so arrays of an earlier state are deleted. Keep a copy "
        "before the next step: best = jax.tree.map(jnp.copy, state).",
    ),
    (
        re.compile(r"Can't (?:pickle|get) local object .*\b(?:chain|scale\w*)\.<locals>\.\w+_fn"),
        "a state holds its optimizer, whose functions cannot be pickled. Save the state with "
        "jdp.Checkpointer, or only its arrays: pickle.dump(jax.device_get(state.params), file).",
    ),
    (
        re.compile(r"Gloo context initialization failed"),
        "one process computed with an array of all processes, and the others did not. Compute "
        "with it on all processes, outside `if jax.process_index() == 0:`.",
    ),
    (
        re.compile(r"^unbound axis name"),
        "a layer or a collective over the ranks runs outside a step. Call it in jdp.train_step "
        "or jdp.eval_step; for a layer with batch statistics call model.eval() first.",
    ),
    (
        re.compile(r"spans non-addressable"),
        "parts of this array are on other processes. On all processes write "
        "jax.experimental.multihost_utils.process_allgather(x, tiled=True), or read a checkpoint "
        "with jdp.load.",
    ),
)

# For a report; then the traceback is shown without it.
_REPORT_S = 2.0


class OtherFailedError(RuntimeError):
    """Another process failed, and reported that to this one."""


def fail_fast() -> None:
    """Make this process exit at once, and report, after an uncaught exception or `sys.exit`."""
    if this_process.current.excepthook is not None:
        return
    this_process.current.excepthook = sys.excepthook
    sys.excepthook = _show_and_leave
    sys.exit = _exit
    # Before handlers that wait for others or report a normal end.
    atexit.register(leave_if_failed)


def hint_at_uncaught() -> None:
    """Add a hint to an uncaught exception of JAX or pickle."""
    hook = sys.excepthook
    is_ours = isinstance(hook, functools.partial) and hook.func is _show_with_hint
    if hook is not _show_and_leave and not is_ours:
        sys.excepthook = functools.partial(_show_with_hint, hook)


def _show_with_hint(
    before: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    where: TracebackType | None,
) -> None:
    _add_hint(error)
    before(kind, error, where)


def _add_hint(error: BaseException) -> None:
    text, notes = str(error), getattr(error, "__notes__", ())
    for pattern, hint in _HINTS:
        if pattern.search(text) and f"jdp: {hint}" not in notes:
            error.add_note(f"jdp: {hint}")


def _show_and_leave(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    assert this_process.current.excepthook is not None
    _add_hint(error)
    # So that a launcher reports the error and not a hang.
    own.slot.write_progress()
    report_uncaught(error)
    this_process.current.excepthook(kind, error, where)
    _leave_by(kind, error, where)


def _leave_by(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, where))
    why, is_interrupted = this_process.current.why_over, isinstance(error, KeyboardInterrupt)
    if why is not None and why not in text and not is_interrupted:
        text += f"jdp: {why}\n"
        print(f"jdp: {why}", file=sys.stderr, flush=True)
    if isinstance(error, OtherFailedError) or (why is not None and not is_interrupted):
        time.sleep(_GRACE_S)  # a launcher that knows of the failed process ends this one
    if is_interrupted and current() is None and jax.distributed.is_initialized():
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(_INTERRUPT_GRACE_S if jax.process_index() == 0 else 0.0)
    _leave(130 if is_interrupted else 1, text)


def report_uncaught(error: BaseException) -> None:
    """Report an exception to other processes' loops, unless one caused it."""
    this_process.current.is_interrupted = isinstance(error, KeyboardInterrupt)
    if this_process.current.why_over is not None or isinstance(error, OtherFailedError):
        return
    how = f"failed with {type(error).__name__}: {error}"[:TEXT_CHARACTERS]
    if isinstance(error, SystemExit):
        how = f"ended by sys.exit({error.code!r})"[:TEXT_CHARACTERS]
    elif this_process.current.is_interrupted:
        how = "was interrupted (Ctrl-C)"
    if kv_store.is_open():
        text = json.dumps([jax.process_index(), how])
        kv_store.ends_within(_REPORT_S, lambda: kv_store.offer(UNCAUGHT, text))


def uncaught(
    peers: Sequence[int], *, timeout_s: float, or_own: bool = False
) -> tuple[int, str] | None:
    """Return (process, text) of an uncaught exception."""
    end = time.monotonic() + timeout_s
    while True:
        if or_own and (error := this_process.current.leaving_by) and not _is_success(error):
            report_uncaught(error)
        text = kv_store.get(UNCAUGHT, timeout_s=min(timeout_s, _POLL_S))
        process, how = json.loads(text or '[-1, ""]')
        if process in peers and (or_own or process != jax.process_index()):
            text = f"process {process} {how}, so no process can continue"
            return process, with_code("JDP208", text)
        if time.monotonic() >= end:
            return None


def end_process(error: Exception) -> None:
    """End this process for a thread's error, unless interactive: its state would be lost."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = "".join(traceback.format_stack(frame))
    text = f"Traceback (most recent call last):\n{place}{type(error).__name__}: {error}\n"
    print(text, file=sys.stderr, end="", flush=True)
    if not (hasattr(sys, "ps1") or sys.flags.interactive):
        _leave(1, text)


def fail_at_exit(error: Exception) -> None:
    """Report an error found while Python exits; one of several processes leaves with status 1."""
    print(f"jdp: {error}", file=sys.stderr, flush=True)
    _leave(1, f"{type(error).__name__}: {error}\n")


# `sys.exit()`, also after SIGTERM: other processes may go on.
def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0, SAVED)


def leave_if_failed() -> None:
    """End this process after an uncaught exception; for exit handlers that wait."""
    # Another hook may have replaced ours. Python records an exception before any hook; at a prompt
    # it may be an old one.
    is_ours = this_process.current.excepthook is not None
    is_replaced = is_ours and sys.excepthook is not _show_and_leave
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive
    error = getattr(sys, "last_value", None)
    if is_replaced and not is_prompt and error is not None:
        _leave_by(type(error), error, error.__traceback__)


# Python calls no hook for an uncaught SystemExit, but deletes it when no frame is running; a caught
# one is deleted while a frame runs. In another thread an uncaught one ends only that thread.
class _Exit(SystemExit):
    def __del__(self) -> None:
        frame = inspect.currentframe()
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self.code and self.code != SAVED and frame is not None and frame.f_back is None:
            _leave(self.code if isinstance(self.code, int) else 1, f"SystemExit: {self.code}\n")


def _exit(status: Any = None, /) -> NoReturn:
    raise _Exit(status)


def _leave(code: int, why: str) -> None:
    launched = current()
    if launched is not None and not this_process.current.has_reported_failure:
        this_process.current.has_reported_failure = True
        launched.tell("failed", code=code & 0xFF, traceback=why[-MAX_TRACEBACK_CHARS:])
    if not jax.distributed.is_initialized():
        return
    with contextlib.suppress(Exception):
        metrics_log.flush(_LINES_S)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # the stream is closed or None
            pass
    os._exit(code)
