"""The file of `jdp.log` stays whole, and its writer in nobody's way, whatever goes wrong."""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.metrics import lines
from support.processes import environment

import jdp
from jdp.distributed import metrics_file, metrics_log


def test_a_file_that_another_run_writes_is_refused(path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_LOCK_S", 0.1)
    with open(path, "ab") as of_the_other:
        fcntl.flock(of_the_other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="metrics.jsonl.*file="):
            jdp.log({"loss": 1.0}, 2, file=path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_warned_about_once(path, monkeypatch, caplog, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    for step in (1, 2):
        jdp.log({"loss": 1.0}, step, file=path)
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert caplog.text.count(str(path)) == 1 and os.strerror(number) in caplog.text


@contextlib.contextmanager
def full_disk(path, num_free=9):
    """Have no room behind a file but for a part of a line."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_a_full_disk_refuses_are_written_once_it_takes_them(path, caplog):
    jdp.log({"loss": 1.0}, 1, file=path)
    metrics_log.flush()
    with full_disk(path):
        for step in (2, 3):
            jdp.log({"loss": float(step)}, step, file=path)
        with pytest.raises(OSError, match=r"metrics.jsonl.* \d+ bytes are free.*File too large"):
            metrics_log.write_all(0.3)
        assert path.read_text().count("\n") == 1 and path.read_text().endswith("\n")
    jdp.log({"loss": 4.0}, 4, file=path)
    assert [line["loss"] for line in lines(path)] == [1.0, 2.0, 3.0, 4.0]
    assert caplog.text.count("cannot be written") == 1
    jdp.log({"loss": 5.0}, 5, file=path)  # nothing is left to raise


def test_a_disk_that_stays_full_is_an_error_of_each_call_and_no_line_is_lost(path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(metrics_file, "_MAX_WAITING", 2)
    jdp.log({"loss": 1.0}, 1, file=path)
    metrics_log.flush()
    with full_disk(path):
        jdp.log({"loss": 2.0}, 2, file=path)
        with pytest.raises(OSError, match="metrics.jsonl"):
            metrics_log.flush(0.1)
        for step in (3, 4, 5, 5):  # there is no room for the last ones
            with pytest.raises(OSError, match="metrics.jsonl"):
                jdp.log({"loss": 1.0}, step, file=path)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]
    jdp.log({"loss": 1.0}, 5, file=path)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]


def test_lines_that_wait_at_the_end_are_tried_once_more_and_named(path, monkeypatch, caplog):
    monkeypatch.setattr(metrics_file, "_END_S", 0.5)
    monkeypatch.setattr(metrics_file, "_RETRY_S", 600)
    jdp.log({"loss": 1.0}, 1, file=path)
    metrics_log.flush()
    for is_full in (True, False):
        with full_disk(path, num_free=9):
            jdp.log({"loss": 2.0}, 2, file=path)
            with pytest.raises(OSError, match="metrics.jsonl"):
                metrics_log.flush(0.1)
            if is_full:
                metrics_log.end()
        if not is_full:
            metrics_log.end()
        assert len(path.read_text().splitlines()) == 2 - is_full
        assert caplog.text.count("lines of") == 1


def test_a_file_that_waits_for_its_disk_keeps_no_other_one_from_being_flushed(path, monkeypatch):
    flushed = []

    def flush(self, timeout_s):
        flushed.append(self._path.name)
        raise OSError(self._path.name)

    files = [path, path.with_name("other.jsonl")]
    with monkeypatch.context() as patch:
        patch.setattr(metrics_file.MetricsFile, "flush", flush)
        for each in files:
            jdp.log({"loss": 1.0}, 1, file=each)
        with pytest.raises(OSError, match="metrics.jsonl"):
            metrics_log.flush()
    assert flushed == [each.name for each in files]


def test_the_error_of_the_last_line_is_logged_at_the_end(path, caplog):
    def full(step, values):
        raise OSError(28, "No space left on device")

    jdp.log({"loss": 1.0}, 1, file=path, also=full)
    metrics_log.end()
    assert "metrics.jsonl" in caplog.text and "No space" in caplog.text


def test_a_file_that_was_moved_away_is_created_anew(path):
    jdp.log({"loss": 1.0}, 1, file=path)
    metrics_log.flush()
    moved = path.rename(path.with_suffix(".old"))
    jdp.log({"loss": 2.0}, 2, file=path)
    assert [line["step"] for line in lines(path)] == [2]
    assert [line["step"] for line in lines(moved)] == [1]


def test_a_metric_that_is_donated_before_it_is_written_is_an_error_of_the_next_call(
    path, monkeypatch
):
    goes_on = threading.Event()
    monkeypatch.setattr(metrics_file, "_show_loss", lambda *each: goes_on.wait(60))
    jdp.log({"loss": 1.0}, 1, file=path)
    loss = jnp.float32(2)
    jdp.log({"loss": loss}, 2, file=path)
    jax.jit(lambda x: x + 1, donate_argnums=0)(loss)
    goes_on.set()
    metrics_log.write_all()
    with pytest.raises(ValueError, match="'loss'.* step 2 "):
        jdp.log({"loss": 3.0}, 3, file=path)


def test_an_array_of_numpy_has_the_value_that_it_had_when_it_was_logged(path, monkeypatch):
    goes_on = threading.Event()
    monkeypatch.setattr(metrics_file, "_show_loss", lambda *each: goes_on.wait(60))
    jdp.log({"loss": 1.0}, 1, file=path)
    loss = np.array([2.0])
    jdp.log({"loss": loss}, 2, file=path)
    loss[:] = 3.0
    goes_on.set()
    assert [line["loss"] for line in lines(path)] == [1.0, 2.0]


def test_threads_may_write_the_first_lines_at_once(path):
    start, failed = threading.Barrier(8), []

    def write(i):
        start.wait(60)
        try:
            jdp.log({f"of {i}": i}, 1, file=path)
        except ValueError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for action in (threading.Thread.start, threading.Thread.join):
        for each in threads:
            action(each)
    assert not failed and len(lines(path)) == 8


def test_several_paths_of_one_file_are_one_file(path):
    link = path.with_name("link")
    link.symlink_to(path)
    for step, each in enumerate((path, link, path.parent / ".." / path.parent.name / path.name)):
        jdp.log({"loss": 1.0}, step, file=each)
    assert [line["step"] for line in lines(path)] == [0, 1, 2]


def test_lines_may_be_thrown_away():
    for step in range(2):
        jdp.log({"loss": 1.0}, step, file=os.devnull)
        metrics_log.end()


FORKED = """
import os, signal, sys, time
import jdp
from jdp.distributed import metrics_log
jdp.log({"loss": 1.0}, 1, file=sys.argv[1])
metrics_log.flush()
if os.fork() == 0:  # as a worker that reads data, which outlives its killed parent a little
    print("child", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_a_child_that_outlives_the_process_does_not_keep_its_file(path, monkeypatch):
    monkeypatch.setenv("JDP_RESUME", "1")
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(path)],
        env=environment(),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    with parent:
        try:
            _, child = parent.stdout.readline().split()
        finally:
            parent.kill()
    try:
        jdp.log({"loss": 2.0}, 2, file=path)
    finally:
        os.kill(int(child), signal.SIGKILL)
    assert [line["step"] for line in lines(path)] == [1, 2]


EXITING = """
import sys, threading
import jdp
from jdp.distributed import metrics_file
metrics_file._END_S = 0.1
for step in range(1001):  # as many as wait, and the first
    jdp.log({"loss": 1.0}, step, file=sys.argv[1], also=lambda *each: threading.Event().wait())
"""


def test_a_writer_that_hangs_does_not_keep_the_process(path):
    command = [sys.executable, "-c", EXITING, str(path)]
    cwd = Path(__file__).parents[2]
    assert subprocess.run(command, env=environment(), cwd=cwd, timeout=120).returncode == 0
