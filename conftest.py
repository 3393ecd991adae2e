"""What tests and doctests run on: 8 virtual CPU devices and one compilation cache for all."""

import os
from pathlib import Path

# Child processes inherit the environment, and with it platform and cache.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(_user_cache, "jdp", "xla")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax  # noqa: E402 - JAX reads the environment when it is imported

jax.config.update("jax_num_cpu_devices", 8)
