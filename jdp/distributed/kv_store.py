"""JAX's private state of the joined processes: its store, through which they tell small things."""

import contextlib
from typing import Any

from jdp import jax_compat


def is_open() -> bool:
    """Whether the processes were joined by `jax.distributed`, and this JAX gives its store."""
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
    """Delete the value of `key`, or all below a `key` with a last "/", once all read it."""
    _client().key_value_delete(key)


def keep_programs_of_all() -> None:
    """Let each process keep its programs in JAX's persistent compilation cache, on CPUs.

    JAX lets process 0 alone write, and on CPUs looks for programs under another key in each
    process: all others would compile again in each run, and whenever one takes over.
    """
    # Nothing else asks for it once the backend runs.
    with contextlib.suppress(AttributeError):
        jax_compat.joined_processes().process_id = 0


def _client() -> Any:
    return getattr(jax_compat.joined_processes(), "client", None)
