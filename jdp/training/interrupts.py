"""Ctrl-C during the call of a step: once the state is donated, the new one must be returned."""

# `signal` itself makes enums of numbers, in more time than all else here takes.
import _signal  # pyrefly: ignore[missing-import]
import signal
import threading
from typing import Any

from jdp import pytrees

# By then the caller has stored the state that the step returned.
_DELAY_S = 0.02
_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread().ident or 0
_getsignal, _get_ident = _signal.getsignal, threading.get_ident


class Shield:
    """Puts off an interrupt from when the state of a step is donated until the step returns.

    It comes soon after the call, or when the next one begins. Handlers of Python run, and raise,
    in the main thread alone: a call in another thread needs no shield.
    """

    def __init__(self) -> None:
        self._handler: Any = None  # the author's
        self._donated: Any = None
        self._is_due = False
        self._shielding = self._handle  # one object, so that `is` compares it

    # Written so that an interrupt between any two lines leaves a handler that works.
    def begin(self, shielded: list[Any]) -> None:
        """Handle interrupts from here on, until `end` with the same list, which is empty."""
        handler = _getsignal(_SIGINT)
        # In the trace of another step; without a handler; in another thread.
        if handler is self._shielding or not callable(handler) or _get_ident() != _MAIN:
            return
        if self._is_due:
            self._interrupt()
        self._handler = handler
        shielded.append(handler)  # first: an interrupt may raise once the handler is set
        _signal.signal(_SIGINT, self._shielding)

    def end(self, shielded: list[Any]) -> None:
        """Leave interrupts to the author's handler again."""
        if shielded:
            self._donated = None
            _signal.signal(_SIGINT, shielded[0])
            if self._is_due:
                threading.Timer(_DELAY_S, self._interrupt).start()

    def donates(self, state: Any) -> None:
        """Record the arrays that the call is about to donate, if an interrupt would lose them."""
        if _get_ident() == _MAIN:
            self._donated = state

    def _handle(self, number: int, frame: Any) -> None:
        if pytrees.any_deleted(self._donated):
            self._is_due = True
        else:
            self._handler(number, frame)

    def _interrupt(self) -> None:
        if self._is_due:  # the timer and the next call may both come here
            self._is_due = False
            signal.pthread_kill(_MAIN, signal.SIGINT)


SHIELD = Shield()
