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

# Of a traceback; the end of it says most. A message holds as many, whatever they are.
MAX_TRACEBACK_CHARS = 80_000

# Whoever fails first tells the others, waits up to 2 s until they know, and prints its traceback.
_GRACE_S = 3.0


class OtherFailedError(RuntimeError):
    """Another process failed, and has told this one."""


def fail_fast() -> None:
    """Have this process end at once when nobody catches an exception or `sys.exit`.

    JAX would have it wait for the others at its exit, for minutes, while they wait for it in a
    collective. Under a launcher, which ends the others, it says why. A second call does nothing.
    """
    if this_process.current.shows_errors is not None:
        return
    this_process.current.shows_errors = sys.excepthook
    sys.excepthook = _show_and_leave
    sys.exit = _exit
    # Called before what has the process wait for others, or says that it came to its end.
    atexit.register(leave_if_failed)


def _show_and_leave(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    assert this_process.current.shows_errors is not None
    this_process.current.shows_errors(kind, error, where)
    _leave_by(kind, error, where)


def _leave_by(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, where))
    if isinstance(error, OtherFailedError) and current() is not None:
        time.sleep(_GRACE_S)  # The launcher ends this process when it hears of the one that failed.
    _leave(130 if issubclass(kind, KeyboardInterrupt) else 1, text)


def leave_if_failed() -> None:
    """End this process if nobody caught an exception; for exit handlers that wait for others."""
    # Of a hook that was installed after ours and has taken its place, nothing is known but that
    # Python notes an exception before it calls any. At a prompt one may be long past.
    is_ours = this_process.current.shows_errors is not None
    is_replaced = is_ours and sys.excepthook is not _show_and_leave
    is_prompt = hasattr(sys, "ps1") or sys.flags.interactive
    error = getattr(sys, "last_value", None)
    if is_replaced and not is_prompt and error is not None:
        _leave_by(type(error), error, error.__traceback__)


# Nothing is called for a SystemExit that nobody catches, but it is dropped when the interpreter has
# taken its code, and then no Python is running: whoever catches one drops it in a frame. A thread
# that ends with one ends alone.
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
    if launched is not None and not this_process.current.has_told:
        this_process.current.has_told = True
        launched.tell("failed", code=code & 0xFF, traceback=why[-MAX_TRACEBACK_CHARS:])
    if not jax.distributed.is_initialized():
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or none
            pass
    os._exit(code)
