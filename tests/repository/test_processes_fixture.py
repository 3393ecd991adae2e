"""The fixture `processes` names what fails, and does not wait for it."""

import os
import re
import signal
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils
from support.processes import ProcessError


def raise_in(index):
    if jax.process_index() == index:
        raise ValueError(f"process {index} was asked to fail")


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


def warn():
    jnp.asarray(1 << 20, dtype="float64")  # JAX warns: truncated to float32


def error_of(group, *args, **kwargs):
    with pytest.raises(ProcessError) as error:
        group.run(*args, **kwargs)
    return str(error.value)


def test_processes_live_on_after_an_exception_which_names_process_and_line(processes):
    before = processes(2).run(os.getpid)
    text = error_of(processes(2), raise_in, 1)
    assert re.match(r"process 1 of 2: Traceback(.|\n)*, line \d+, in raise_in\n", text)
    assert "asked to fail" in text and "process 0 of 2" not in text
    assert processes(2).run(os.getpid) == before


def test_a_warning_is_an_error(processes):
    with pytest.raises(ProcessError, match="UserWarning"):
        processes(2).run(warn)


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
    assert len({*processes(2).run(os.getpid)}) == 2
