"""SIGTERM, which says that this machine is wanted back: all processes stop after the same step."""

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

    Several processes: JAX listens in each of them (it looks once a second), and they agree on a
    step that none has begun; asking costs less than a microsecond. One process: a signal handler,
    which only the main thread can have; in another thread SIGTERM ends the process as ever.
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
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_mine = True

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; all processes ask after each step, and get one answer.

        Args:
          step: number of it, the same on all processes, one more each time.
        """
        return (
            multihost_utils.reached_preemption_sync_point(step)
            if self._agrees
            else self._got_sigterm
        )

    def stop_listening(self) -> None:
        """Put back the handler of SIGTERM that was there before."""
        if self._is_mine and threading.current_thread() is threading.main_thread():
            self._is_mine = False
            # None: a handler that Python did not install, and cannot install again.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)

    def _note(self, *_: object) -> None:
        self._got_sigterm = True


@functools.cache
def let_children_end() -> None:
    """Have SIGTERM end what this process forks off from now on, such as a data loader's processes.

    They inherit a handler, JAX's since the processes are connected or that of `Preemption`, which
    would keep the signal from ending them. An author's own handler is theirs, too.
    """
    os.register_at_fork(after_in_child=_hand_back)


# JAX's handler is not of Python, which knows what stood there before.
def _hand_back() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    owner = getattr(handler, "__self__", None)
    if isinstance(owner, Preemption):
        handler = owner._before
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
