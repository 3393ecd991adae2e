"""This process's state in a run, and which processes share its host."""

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh


class ThisProcess:
    """The state that `jdp.init` sets up; `current` is the only instance.

    Attributes:
      mesh: of the last `jdp.init`.
      hosts: host name by process of that mesh, if it has several.
      timeout_s: to wait for others in comparisons; inf: no limit.
      excepthook: the `sys.excepthook` that `fail_fast` replaced.
      state_error: of a wrong training step, which makes later states wrong.
      exchange_error: why a ragged exchange did not fit.
      why_over: why no process can continue, as found by a loop over batches.
      leaving_by: the exception that leaves a `with` block of jdp, while the block still waits:
        Python reports it only after all blocks.
      is_interrupted: whether Ctrl-C ends this process.
      has_restored: whether a Checkpointer restored a saved state.
      has_reported_failure: to the launcher.
    """

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.hosts: dict[int, str] = {}
        self.timeout_s = 300.0
        self.excepthook: Callable[..., Any] | None = None
        self.state_error: str | None = None
        self.exchange_error: str | None = None
        self.why_over: str | None = None
        self.leaving_by: BaseException | None = None
        self.is_interrupted = False
        self.has_restored = False
        self.has_reported_failure = False

    @contextlib.contextmanager
    def leaving(self, error: BaseException | None) -> Iterator[None]:
        """Record the exception that leaves a `with` block of jdp."""
        before, self.leaving_by = self.leaving_by, error
        try:
            yield
        finally:
            self.leaving_by = before


current = ThisProcess()


@functools.cache
def log_once(level: int, message: str) -> None:
    """Log a message to "jdp", in the first call with it."""
    logging.getLogger("jdp").log(level, message, stacklevel=2)


def own_host() -> str:
    """Return a name of this host; a network namespace, as of a container, counts as one."""
    try:  # processes of one host see each other in /proc
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    except OSError:  # not Linux
        return socket.gethostname()


def is_on_own_host(process: int) -> bool:
    """Whether `jdp.init` found a process on this host."""
    known, me = current.hosts, jax.process_index()
    return process == me or (process in known and known[process] == known.get(me))


def numbered_hosts(processes: Iterable[int]) -> list[int]:
    """Return a host index per process, as `jdp.init` found it.

    >>> numbered_hosts([0, 0])
    [0, 0]
    """
    known = current.hosts
    names = [known.get(process, str(process)) for process in processes]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
