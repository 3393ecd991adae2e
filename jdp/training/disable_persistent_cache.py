"""Compiling without JAX's persistent cache, for programs that it does not restore as they were."""

import threading
from typing import Any

import jax

# JAX writes no program that compiles faster than this.
_OPTION = "jax_persistent_cache_min_compile_time_secs"
_NEVER = float("inf")


class _Cache:
    """Whether JAX writes compiled programs, for all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_held = 0
        self._before: Any = None

    def hold(self) -> None:
        with self._lock:
            if not self._num_held:
                self._before = getattr(jax.config, _OPTION)
                jax.config.update(_OPTION, _NEVER)
            self._num_held += 1

    def let_go(self) -> None:
        with self._lock:
            self._num_held -= 1
            if not self._num_held:
                jax.config.update(_OPTION, self._before)


_cache = _Cache()


def begin() -> None:
    """Keep JAX from writing compiled programs, in any thread, until `end` is called as often."""
    _cache.hold()


def end() -> None:
    """Let JAX write compiled programs again, once no thread needs the opposite."""
    _cache.let_go()
