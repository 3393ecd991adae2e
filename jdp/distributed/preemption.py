"""Signals that ask for an end: all processes save after the same step, and stop.

A scheduler sends SIGTERM; Slurm, submitit and MPI pass SIGUSR1 or SIGUSR2 on to their processes.
"""

import functools
import logging
import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from jdp.worker import exit_codes

_log = logging.getLogger("jdp")

_USER = (signal.SIGUSR1, signal.SIGUSR2)


class Preemption:
    """Listens for SIGTERM, SIGUSR1 and SIGUSR2 until `stop_listening`.

    With several processes, JAX listens for SIGTERM in each (it checks once a second), and they
    agree on a step that none has started; the other signals become SIGTERM. With one process, a
    Python handler listens, which only the main thread can install. SIGUSR1 and SIGUSR2 stay if
    ignored or with a C handler.
    """

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._before: dict[int, Any] = {}  # handlers, by signal
        self._pid = os.getpid()
        self._agrees = jax.process_count() > 1
        if self._agrees and not jax.config.jax_enable_preemption_service:
            _log.warning("jdp: SIGTERM saves no state: jax_enable_preemption_service is off.")
            self._agrees = False
        let_children_end()
        own = [number for number in _USER if not _is_taken(number)]
        if threading.current_thread() is threading.main_thread():
            for number in own if self._agrees else [signal.SIGTERM, *own]:
                self._before[number] = signal.signal(number, self._record)
        elif self._agrees:
            for number in own:
                if not callable(signal.getsignal(number)):
                    exit_codes.use_handler_of(signal.SIGTERM, number)

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; equal on all processes, which ask after each."""
        return (
            multihost_utils.reached_preemption_sync_point(step)
            if self._agrees
            else bool(self._received)
        )

    def stop_listening(self) -> None:
        """Restore the previous handlers."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                # None: Python cannot install it again.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def call_earlier_handlers(self) -> None:
        """Send SIGUSR1 and SIGUSR2 again, to the restored handlers."""
        for number in self._received.intersection(_USER):
            if callable(self._before[number]):
                signal.raise_signal(number)

    def _record(self, number: int, _: object) -> None:
        if os.getpid() != self._pid:
            return  # a forked data loader, which the steps up to the save need
        self._received.add(number)
        if self._agrees:
            signal.raise_signal(signal.SIGTERM)


def _is_taken(number: int) -> bool:
    """Whether a signal is ignored, or has a C handler as of `faulthandler`."""
    handler = signal.getsignal(number)
    if callable(handler):
        return False
    return handler == signal.SIG_IGN or exit_codes.catches_signal(os.getpid(), number)


@functools.cache
def let_children_end() -> None:
    """Let SIGTERM end later forks, which would inherit jdp's or JAX's handler; a user's stays."""
    os.register_at_fork(after_in_child=_restore_handler)


# JAX's handler is not a Python handler, so Python still knows the previous one.
def _restore_handler() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, Preemption):
        handler = owner._before[signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
