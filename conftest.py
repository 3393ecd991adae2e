"""What tests and doctests run on: 8 virtual CPU devices and one compilation cache for all."""

import os
import zlib
from collections import defaultdict
from pathlib import Path

# Child processes inherit the environment, and with it platform and cache.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(_user_cache, "jdp", "xla")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax  # noqa: E402 - JAX reads the environment when it is imported

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser):
    help = "of each test with parameters run N sets of them, the same in every run"
    parser.addoption("--sets", type=int, metavar="N", help=help)


def pytest_collection_modifyitems(config, items):
    most = config.getoption("--sets")
    if most is None:
        return
    of_test = defaultdict(list)
    chosen = {item for item in items if item.get_closest_marker("all_sets")}
    for item in items:
        of_test[item.nodeid.partition("[")[0]].append(item)
    for each in of_test.values():
        # By a hash of the name, which takes sets of one test from anywhere among them.
        chosen.update(sorted(each, key=lambda item: zlib.crc32(item.nodeid.encode()))[:most])
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
