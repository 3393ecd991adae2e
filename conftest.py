"""What tests and doctests run on: 8 virtual CPU devices and one compilation cache for all."""

import os
import zlib
from collections import Counter, defaultdict
from pathlib import Path

# Child processes inherit the environment, and with it platform and cache.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(_user_cache, "jdp", "xla")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax  # noqa: E402 - JAX reads the environment when it is imported
import pytest  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)


def pytest_addoption(parser):
    help = "of each test run N sets of its parameters, unless it is marked few_sets or all_sets"
    parser.addoption("--sets", type=int, metavar="N", help=help)
    help = "of a file's tests that start processes run N, but for tests marked all_sets"
    parser.addoption("--of-processes", type=int, metavar="N", help=help)
    help = "of a test with more sets than --sets, take those behind the first M"
    parser.addoption("--skip-sets", type=int, metavar="M", default=0, help=help)


@pytest.hookimpl(trylast=True)  # when tests know whether they start processes
def pytest_collection_modifyitems(config, items):
    def most_sets(item):
        most = config.getoption("--sets")
        if most is None:
            return None
        if few := item.get_closest_marker("few_sets"):
            return few.args[0]
        return None if item.get_closest_marker("all_sets") else most

    def most_of_file(item):
        marks = item.iter_markers("xdist_group")
        starts_processes = any(mark.args == ("processes",) for mark in marks)
        is_thinned = starts_processes and not item.get_closest_marker("all_sets")
        return config.getoption("--of-processes") if is_thinned else None

    skipped = config.getoption("--skip-sets")
    kept = _some(items, lambda item: item.nodeid.partition("[")[0], most_sets, skipped)
    kept = _some(kept, lambda item: item.path, most_of_file)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter):
    seconds = Counter()
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if duration := getattr(report, "duration", 0):
            seconds[report.nodeid.partition("::")[0]] += duration
    if len(seconds) > 1:
        terminalreporter.section(f"slowest of {len(seconds)} files, {seconds.total():.0f}s in all")
        for file, total in seconds.most_common(20):
            terminalreporter.line(f"{total:.2f}s {file}")


def _some(items, group_of, most_of, skipped=0):
    """Return of each group at most so many, the same in every run; those without a limit stay.

    Of a group that has enough, the first `skipped` are left to another run.
    """
    groups = defaultdict(list)
    for item in items:
        groups[group_of(item), most_of(item)].append(item)
    kept = set()
    for (_, most), group in groups.items():
        # By a hash of the name, which takes sets of one test from anywhere among them.
        group.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        begin = skipped if most is not None and len(group) >= skipped + most else 0
        kept.update(group[begin:][:most])
    return kept
