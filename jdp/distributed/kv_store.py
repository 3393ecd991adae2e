"""The key-value store of the joined processes, which is JAX's own, for small values."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from jdp import jax_compat

_LONGEST_S = 86400.0


def is_open() -> bool:
    """Whether `jax.distributed` joined the processes, and this JAX version gives jdp its store."""
    return _client() is not None


def put(key: str, value: str) -> None:
    """Put a value that all processes can read, once for each key."""
    _client().key_value_set(key, value)


def offer(key: str, value: str) -> bool:
    """Put a value unless the key already has one, and return whether this call put it."""
    try:
        put(key, value)
    except Exception as error:  # a RuntimeError of jaxlib, identified by its text
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def replace(key: str, value: str) -> None:
    """Put a value, in place of the one that this process put under this key before, if any."""
    _client().key_value_set(key, value, allow_overwrite=True)


def ends_within(timeout_s: float, write: Callable[[], object]) -> bool:
    """Run a function that writes to the store; return whether it has ended in time.

    For a process that ends: writing waits for process 0 without a deadline, forever where that is
    stopped. The thread of a function that has not ended is left behind.
    """

    def run() -> None:
        with contextlib.suppress(Exception):  # The store may have ended with its process.
            write()

    thread = threading.Thread(target=run, daemon=True, name="jdp store")
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def get_now(key: str) -> str | None:
    """Return the value of `key` without waiting, None if it has none."""
    try:
        return _client().key_value_try_get(key)
    except Exception as error:  # a RuntimeError of jaxlib, identified by its text
        if "NOT_FOUND" in str(error):
            return None
        raise


def get(key: str, *, timeout_s: float) -> str | None:
    """Wait for the value of a key, and return it; None if it has none in time."""
    try:
        return _client().blocking_key_value_get(key, max(1, int(timeout_s * 1000)))
    except Exception as error:  # a RuntimeError of jaxlib, identified by its text
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def wait_for_all(name: str, *, timeout_s: float) -> None:
    """Wait until all processes have made this call, once for each name. Works in any thread."""
    if is_open():
        # The barrier does not accept an infinite timeout.
        _client().wait_at_barrier(name, int(min(timeout_s, _LONGEST_S) * 1000))


def keys(prefix: str) -> list[str]:
    """Return the keys below `prefix` that already have a value, without `prefix`."""
    return [key.removeprefix(prefix) for key, _ in _client().key_value_dir_get(prefix)]


def delete(key: str) -> None:
    """Delete the value of `key`, or all values below a `key` that ends with "/"."""
    _client().key_value_delete(key)


def keep_programs_of_all() -> None:
    """Make every process write its programs to JAX's persistent compilation cache, on CPUs.

    JAX lets only process 0 write. On CPUs the key of a program differs between processes, so all
    other processes would compile again in each run, and after each replacement.
    """
    # Once the backend runs, JAX reads this value for nothing else.
    with contextlib.suppress(AttributeError):
        jax_compat.joined_processes().process_id = 0


def _client() -> Any:
    return getattr(jax_compat.joined_processes(), "client", None)
