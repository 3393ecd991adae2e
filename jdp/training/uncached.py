"""Compiling without JAX's persistent cache, for programs that it does not restore as they were."""

import threading
from typing import Any

import jax

# JAX writes no program that compiles faster than this.
_OPTION = "jax_persistent_cache_min_compile_time_secs"
_NEVER = float("inf")

_lock = threading.Lock()
_num_held = 0
_before: Any = None


def begin() -> None:
    """Keep JAX from writing what it compiles, in any thread, until `end` is called as often."""
    global _num_held, _before
    with _lock:
        if not _num_held:
            _before = getattr(jax.config, _OPTION)
            jax.config.update(_OPTION, _NEVER)
        _num_held += 1


def end() -> None:
    """Let JAX write again what it compiles, once no thread needs the opposite."""
    global _num_held
    with _lock:
        _num_held -= 1
        if not _num_held:
            jax.config.update(_OPTION, _before)
