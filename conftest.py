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


# What depends on the version of JAX: where its differences are, and what users call first.
ON_OLDEST = (
    "jdp",  # doctests
    "tests/test_axis.py",
    "tests/test_rank_state.py",
    "tests/analysis",
    "tests/checkpoint/test_checkpointer_processes.py",
    "tests/checkpoint/test_commit_snapshot.py",
    "tests/checkpoint/test_format.py",
    "tests/checkpoint/test_load.py",
    "tests/checkpoint/test_sharded_state.py",
    "tests/collectives/test_xla_interleaving.py",
    "tests/collectives/test_collectives.py",
    "tests/collectives/test_native.py",
    "tests/collectives/test_several_processes.py",
    "tests/collectives/test_shards.py",
    "tests/data/test_batches.py",
    "tests/distributed/test_initialize.py",
    "tests/fuzz",
    "tests/tools/test_explain.py",
    "tests/tools/test_findings.py",
    "tests/tools/test_profile.py",
    "tests/reduction/test_extremes.py",
    "tests/reduction/test_gradients.py",
    "tests/reduction/test_integer_sums.py",
    "tests/reduction/test_micro_batches.py",
    "tests/reduction/test_optimizer.py",
    "tests/reduction/test_partition_rules.py",
    "tests/reduction/test_ragged.py",
    "tests/reduction/test_scanned_layers.py",
    "tests/repository/test_environment.py",
    "tests/training/test_check_step.py",
    "tests/training/test_compiled_step.py",
    "tests/training/test_donation.py",
    "tests/training/test_flax_stage_3.py",
    "tests/training/test_further_axes.py",
    "tests/training/test_libraries.py",
    "tests/training/test_local_steps.py",
    "tests/training/test_mixed_precision.py",
    "tests/training/test_nnx_stage_3.py",
    "tests/training/test_overwritten.py",
    "tests/training/test_placing.py",
    "tests/training/test_sharded.py",
    "tests/training/test_sharded_processes.py",
    "tests/training/test_stage_2.py",
    "tests/training/test_state.py",
    "tests/training/test_step.py",
    "tests/training/test_virtual_ranks.py",
)

pytest_plugins = ["second_try"]


def pytest_addoption(parser):
    help = """
    newest: without thorough tests, one set of parameters of each other test, and two tests of each
    file that starts processes; tests marked all_sets are not thinned. oldest: of these, what
    depends on the version of JAX, with every sixth set of the tests marked all_sets, and one test
    of each file that starts processes.
    """
    parser.addoption("--daily", choices=("newest", "oldest"), help=help)


@pytest.hookimpl(trylast=True)  # when tests know whether they start processes
def pytest_collection_modifyitems(config, items):
    daily = config.getoption("--daily")
    if daily is None:
        return
    on_oldest = daily == "oldest"

    def most_sets(item):
        if few := item.get_closest_marker("few_sets"):
            return few.args[0]
        return None if item.get_closest_marker("all_sets") else 1

    def most_of_file(item):
        marks = item.iter_markers("xdist_group")
        starts_processes = any(mark.args == ("processes",) for mark in marks)
        is_thinned = starts_processes and not item.get_closest_marker("all_sets")
        return (1 if on_oldest else 2) if is_thinned else None

    kept = [item for item in items if not item.get_closest_marker("thorough")]
    if on_oldest:
        folders = [config.rootpath / each for each in ON_OLDEST]
        kept = [item for item in kept if any(item.path.is_relative_to(each) for each in folders)]
        kept = _every_sixth_set(kept)
    kept = _some(kept, _test_of, most_sets, skipped=0 if on_oldest else 1)
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


def _test_of(item):
    return item.nodeid.partition("[")[0]


def _every_sixth_set(items):
    """Return of each test marked all_sets every sixth item, and all others."""
    numbers = Counter()
    kept = []
    for item in items:
        test = _test_of(item)
        if not item.get_closest_marker("all_sets") or numbers[test] % 6 == 0:
            kept.append(item)
        numbers[test] += 1
    return kept


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
