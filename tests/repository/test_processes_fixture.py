import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from support.processes import ProcessError, environment


def index_and(value):
    return jax.process_index(), value


def count_devices():
    return jax.local_device_count(), jax.device_count()


# Rank r holds r + 1.
def sum_over_all_devices():
    mesh = jax.make_mesh((jax.device_count(),), ("data",), devices=jax.devices())
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.make_array_from_callback(
        (jax.device_count(),), rows, lambda index: np.arange(1.0, 5.0, dtype=np.float32)[index]
    )
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    )
    return np.asarray(jax.jit(total)(x))


def raise_in(index):
    if jax.process_index() == index:
        raise ValueError(f"process {index} was asked to fail")


# The others wait for a process that never comes.
def raise_in_last_before_barrier():
    if jax.process_index() == jax.process_count() - 1:
        raise ValueError("left before the barrier")
    multihost_utils.sync_global_devices("a barrier that one process never reaches")


def sleep_in(index):
    if jax.process_index() == index:
        time.sleep(3600)


def die_in(index):
    if jax.process_index() == index:
        os.kill(os.getpid(), signal.SIGKILL)


def leave_process_id_and_sleep(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(3600)


def process_id():
    return os.getpid()


def warn():
    jnp.asarray(1 << 20, dtype="float64")  # JAX warns: truncated to float32


def error_of(group, *args, **kwargs):
    with pytest.raises(ProcessError) as error:
        group.run(*args, **kwargs)
    return str(error.value)


def test_results_come_in_the_order_of_the_processes(processes):
    assert processes(2).run(index_and, "value") == [(0, "value"), (1, "value")]


def test_each_process_has_two_of_four_devices(processes):
    assert processes(2).run(count_devices) == [(2, 4), (2, 4)]


def test_psum_covers_the_devices_of_all_processes(processes):
    for total in processes(2).run(sum_over_all_devices):
        np.testing.assert_array_equal(total, [1 + 2 + 3 + 4])


def test_an_exception_is_shown_with_its_process_and_line(processes):
    text = error_of(processes(2), raise_in, 1)
    assert re.match(r"process 1 of 2: Traceback(.|\n)*, line \d+, in raise_in\n", text)
    assert "asked to fail" in text
    assert "process 0 of 2" not in text


def test_processes_live_on_after_an_exception(processes):
    before = processes(2).run(process_id)
    with pytest.raises(ProcessError, match="asked to fail"):
        processes(2).run(raise_in, 0)
    assert processes(2).run(process_id) == before


def test_a_warning_is_an_error(processes):
    with pytest.raises(ProcessError, match="UserWarning"):
        processes(2).run(warn)


def test_a_nested_function_is_refused(processes):
    with pytest.raises(ValueError, match="test_processes_fixture.*<lambda>"):
        processes(2).run(lambda: None)


def test_a_hang_is_ended_with_the_stack_of_the_process_that_hangs(processes):
    text = error_of(processes(2), sleep_in, 1, timeout_s=2)
    assert re.match(r"process 1 of 2: ended(.|\n)*Timeout(.|\n)* in sleep_in\n", text)
    assert "process 0 of 2" not in text


def test_a_process_that_waits_for_a_failed_one_does_not_hide_its_error(processes):
    text = error_of(processes(2), raise_in_last_before_barrier)
    assert "process 0 of 2: " in text and "process 0 of 2: Traceback" not in text
    assert re.search(r"process 1 of 2: Traceback(.|\n)*left before the barrier", text)


def test_a_process_that_dies_is_named_and_the_next_run_starts_new_ones(processes):
    with pytest.raises(ProcessError, match="process 1 of 2: .* -9;"):
        processes(2).run(die_in, 1)
    assert processes(2).run(count_devices) == [(2, 4), (2, 4)]


PARENT = """
import sys
from support.processes import Processes
from test_processes_fixture import leave_process_id_and_sleep
Processes(2).run(leave_process_id_and_sleep, sys.argv[1])
"""


def test_processes_end_with_a_parent_that_is_killed(processes, tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], env=environment())
    with parent:
        wait_until(lambda: parent.poll() is not None or len(list(tmp_path.iterdir())) == 2)
        parent.kill()
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert len(children) == 2
    wait_until(lambda: not any(is_running(child) for child in children), timeout_s=10)
    assert not any(is_running(child) for child in children)


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


# A child whose parent is gone may stay for a while as a zombie.
def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tests_with_processes_stay_together(request, processes):
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("needs pytest -n 2 --dist loadgroup")
    assert request.node.nodeid.endswith("@processes")
