"""How a process leaves the others that it trains with when it fails: at once."""

import atexit
import inspect
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

import jax

from jdp.distributed import this_process
from jdp.worker.exit_codes import SAVED
from jdp.worker.launcher_client import current

# The end of a traceback explains most. A message to the launcher holds that many of any characters.
MAX_TRACEBACK_CHARS = 80_000

# A process that fails reports that to the others, waits up to 2 s until they have come to read it,
# and prints its traceback. JAX would end it in the middle of that if process 0 left before.
_GRACE_S = 3.0


class OtherFailedError(RuntimeError):
    """Another process failed, and reported that to this one."""


def fail_fast() -> None:
    """Make this process end at once when nobody catches an exception or `sys.exit`.

    JAX would let it wait for the others at its exit, for minutes, while they wait for it in a
    collective. Under a launcher, it reports its traceback, and the launcher ends the others. A
    second call does nothing.
    """
    if this_process.current.excepthook is not None:
        return
    this_process.current.excepthook = sys.excepthook
    sys.excepthook = _show_and_leave
    sys.exit = _exit
    # Runs before the handlers that wait for other processes, or report a normal end.
    atexit.register(leave_if_failed)


def _show_and_leave(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    assert this_process.current.excepthook is not None
    this_process.current.excepthook(kind, error, where)
    _leave_by(kind, error, where)


def _leave_by(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, where))
    if isinstance(error, OtherFailedError):
        time.sleep(_GRACE_S)  # A launcher ends this process when it hears of the one that failed.
    _leave(130 if issubclass(kind, KeyboardInterrupt) else 1, text)


def leave_if_failed() -> None:
    """End this process if nobody caught an exception; for exit handlers that wait for others."""
    # Another hook may have replaced ours later. Python records an exception before it calls any
    # hook. At a prompt, that exception may be long past.
    is_ours = this_process.current.excepthook is not None
    is_replaced = is_ours and sys.excepthook is not _show_and_leave
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive
    error = getattr(sys, "last_value", None)
    if is_replaced and not is_prompt and error is not None:
        _leave_by(type(error), error, error.__traceback__)


# Python calls no hook for a SystemExit that nobody catches, but deletes it once the interpreter has
# read its code, when no frame is running: one that is caught is deleted in a frame. In a thread, it
# ends the thread alone.
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
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or none
            pass
    os._exit(code)
