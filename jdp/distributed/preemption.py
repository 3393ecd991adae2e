"""SIGTERM, which announces that the machine is taken away: all processes stop after one step."""

import functools
import logging
import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

_log = logging.getLogger("jdp")


class Preemption:
    """Listens for SIGTERM until `stop_listening`.

    With several processes, JAX listens in each of them (it checks once a second), and they agree on
    a step that none has started. A check takes less than a microsecond. With one process, a signal
    handler listens. Only the main thread can install it; in another thread, SIGTERM ends the
    process.
    """

    def __init__(self) -> None:
        self._got_sigterm = False
        self._before: Any = None
        self._is_mine = False
        self._agrees = jax.process_count() > 1
        if self._agrees and not jax.config.jax_enable_preemption_service:
            _log.warning("jdp: nothing is saved at SIGTERM: jax_enable_preemption_service is off.")
            self._agrees = False
        let_children_end()
        if not self._agrees and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._record)
            self._is_mine = True

    def reached(self, step: int) -> bool:
        """Whether to stop after this step: the same on all processes, which ask after each step."""
        return (
            multihost_utils.reached_preemption_sync_point(step)
            if self._agrees
            else self._got_sigterm
        )

    def stop_listening(self) -> None:
        """Restore the previous handler of SIGTERM."""
        if self._is_mine and threading.current_thread() is threading.main_thread():
            self._is_mine = False
            # None: a handler that Python did not install, and cannot install again.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _record(self, *_: object) -> None:
        self._got_sigterm = True


@functools.cache
def let_children_end() -> None:
    """Let SIGTERM end the children that this process forks from now on, such as data loaders.

    They inherit a handler that would let them survive it: JAX's handler, once the processes are
    connected, or that of `Preemption`. A handler of the user's stays in place.
    """
    os.register_at_fork(after_in_child=_restore_handler)


# JAX's handler is not a Python handler, so Python still knows the previous one.
def _restore_handler() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, Preemption):
        handler = owner._before
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
