"""Which processes of a run share a host."""

import os
import socket
from collections.abc import Iterable
from pathlib import Path

import jax

from jdp.distributed import this_process


def own_host() -> str:
    """Return a name of this host. A network namespace, such as of a container, counts as a host."""
    try:  # processes of one host see each other in /proc
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces])
    except OSError:  # not Linux
        return socket.gethostname()


def is_here(process: int) -> bool:
    """Whether a process is on the host of this one, as `jdp.init` has found."""
    known, me = this_process.current.hosts, jax.process_index()
    return process == me or (process in known and known[process] == known.get(me))


def numbered(processes: Iterable[int]) -> list[int]:
    """Return the number of the host of each process, as `jdp.init` has found.

    >>> numbered([0, 0])
    [0, 0]
    """
    known = this_process.current.hosts
    names = [known.get(process, str(process)) for process in processes]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]
