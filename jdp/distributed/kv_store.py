"""JAX's key-value store between joined processes."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from jdp import jax_compat

_LONGEST_S = 86400.0


def is_open() -> bool:
    """Whether the processes are joined, and this JAX exposes its store."""
    return _client() is not None


def put(key: str, value: str) -> None:
    """Put a value, once per key."""
    _client().key_value_set(key, value)


def offer(key: str, value: str) -> bool:
    """Put a value unless the key has one; return whether this call put it."""
    try:
        put(key, value)
    except Exception as error:  # a RuntimeError of jaxlib, identified by its text
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def replace(key: str, value: str) -> None:
    """Put a value, perhaps over this process's earlier one."""
    _client().key_value_set(key, value, allow_overwrite=True)


def ends_within(timeout_s: float, write: Callable[[], object]) -> bool:
    """Whether a function that writes to the store ended in time; else its thread is left."""

    def run() -> None:
        with contextlib.suppress(Exception):  # the store may have ended
            write()

    thread = threading.Thread(target=run, daemon=True, name="jdp store")
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def get_now(key: str) -> str | None:
    """Return the value of `key` without waiting."""
    try:
        return _client().key_value_try_get(key)
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def get(key: str, *, timeout_s: float) -> str | None:
    """Wait for a key's value; None after the timeout."""
    try:
        return _client().blocking_key_value_get(key, max(1, int(timeout_s * 1000)))
    except Exception as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def wait_for_all(name: str, *, timeout_s: float) -> None:
    """Wait until all processes have made this call, once per name."""
    if is_open():
        # The barrier rejects an infinite timeout.
        _client().wait_at_barrier(name, int(min(timeout_s, _LONGEST_S) * 1000))


def keys(prefix: str) -> list[str]:
    """Return the keys below `prefix`, without it."""
    return [key.removeprefix(prefix) for key, _ in _client().key_value_dir_get(prefix)]


def delete(key: str) -> None:
    """Delete a key, or all below a `key` that ends with "/"."""
    _client().key_value_delete(key)


def keep_programs_of_all() -> None:
    """Let all processes write JAX's compilation cache on CPUs, where their keys differ."""
    # Once the backend runs, JAX reads this value only for the cache.
    with contextlib.suppress(AttributeError):
        jax_compat.joined_processes().process_id = 0


def _client() -> Any:
    return getattr(jax_compat.joined_processes(), "client", None)
