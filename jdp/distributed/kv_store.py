"""The key-value store of the joined processes, which is JAX's own, for small values."""

import contextlib
from typing import Any

from jdp import jax_compat


def is_open() -> bool:
    """Whether `jax.distributed` joined the processes, and this JAX lets jdp use its store."""
    return _client() is not None


def put(key: str, value: str) -> None:
    """Put a value that all processes can get, once for each key."""
    _client().key_value_set(key, value)


def offer(key: str, value: str) -> bool:
    """Put a value unless a process has put one under this key; return whether this one did."""
    try:
        put(key, value)
    except Exception as error:  # a RuntimeError of jaxlib, by its text
        if "ALREADY_EXISTS" in str(error):
            return False
        raise
    return True


def get(key: str, *, timeout_s: float) -> str | None:
    """Wait for the value of `key`, and return it; None if there is none within `timeout_s`."""
    try:
        return _client().blocking_key_value_get(key, max(1, int(timeout_s * 1000)))
    except Exception as error:  # a RuntimeError of jaxlib, by its text
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def keys(prefix: str) -> list[str]:
    """Return the keys below `prefix` that have a value by now, without `prefix`."""
    return [key.removeprefix(prefix) for key, _ in _client().key_value_dir_get(prefix)]


def delete(key: str) -> None:
    """Delete the value of `key`, or all values below a `key` that ends with "/"."""
    _client().key_value_delete(key)


def keep_programs_of_all() -> None:
    """Make each process write its programs to JAX's persistent compilation cache, on CPUs.

    JAX lets process 0 alone write, and on CPUs the key of a program differs from process to
    process: all others would compile again in each run, and after each replacement.
    """
    # JAX reads it for nothing else once the backend runs.
    with contextlib.suppress(AttributeError):
        jax_compat.joined_processes().process_id = 0


def _client() -> Any:
    return getattr(jax_compat.joined_processes(), "client", None)
