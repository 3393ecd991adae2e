"""A checkpoint in parts that one process cannot write fails on all, and can be written again."""

import contextlib
import re
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from jdp.checkpoint import orbax_files
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.state_writer import checkpoint_writer
from jdp.distributed import agree, kv_store

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

VALUES = np.arange(24, dtype=np.float32)


def faulty(path, failing, slow, lost):
    """`orbax_files.write_parts`, which fails on one process while another one still writes."""
    write, me = orbax_files.write_parts, jax.process_index()

    def faulty(state, arrays):
        if me == failing:
            (path / "failed").touch()
            raise OSError("no space left on this disk")
        write(state, arrays)
        while me == slow and not (path / "failed").exists():
            time.sleep(0.01)
        for number in range(50 if me == slow else 0):
            time.sleep(0.01)
            if not state.exists():
                lost.append(number)
            state.mkdir(parents=True, exist_ok=True)  # as TensorStore does
            (state / str(number)).touch()

    return faulty


def attempts(path, failing, slow):
    """Save twice: the first time as `faulty` does.

    Returns the error of the first time, what the slow process lost while it wrote, and the folders
    after each time.
    """
    mesh, me = jdp.init(), jax.process_index()
    state = {"x": jax.device_put(VALUES, NamedSharding(mesh, PartitionSpec("data")))}
    folder, error, lost, found = Folder(path), "", [], []
    if me == 0:
        folder.lock()
    kv_store.wait_for_all(f"locked {path}", timeout_s=20.0)
    writer, write = checkpoint_writer(folder, keep=3, is_here=me == 0), orbax_files.write_parts
    for do in (faulty(path, failing, slow, lost), write):
        orbax_files.write_parts = do
        writer.begin_write(state, {"life": 1, "step": 7, "tag": str(path)})
        try:
            writer.wait()
        except OSError as failure:
            error = str(failure)
        found.append(sorted(each.name for each in path.iterdir() if each.is_dir()))
        kv_store.wait_for_all(f"listed {path} {len(found)}", timeout_s=20.0)
    writer.end_thread()
    folder.unlock()
    return error, lost, found


@pytest.mark.parametrize("failing, slow", [(0, 2), (1, 2), (2, 1), (1, 0)])
def test_nothing_is_removed_while_a_process_writes_and_the_next_attempt_succeeds(
    processes, tmp_path, failing, slow
):
    for error, lost, found in processes(3).run(attempts, tmp_path, failing, slow):
        assert "step 7 " in error and "no space left on this disk" in error
        assert lost == [] and found == [[], ["7-1"]]
    np.testing.assert_array_equal(jdp.load(tmp_path)["x"], VALUES)


def comes_late(path):
    """Process 1 writes until the second attempt has begun: it is given up before."""
    mesh, me = jdp.init(), jax.process_index()
    state = {"x": jax.device_put(VALUES, NamedSharding(mesh, PartitionSpec("data")))}
    folder, write, errors = Folder(path), orbax_files.write_parts, []
    if me == 0:
        folder.lock()
    kv_store.wait_for_all(f"locked {path}", timeout_s=20.0)
    parts = [folder.part(1, 7, attempt=number) for number in (0, 1)]

    def late(state, arrays):
        write(state, arrays)
        while me == 1 and not parts[1].exists() and state.parent == parts[0]:
            with contextlib.suppress(FileNotFoundError):  # removed between the two
                state.mkdir(parents=True, exist_ok=True)  # as TensorStore does
                (state / "more").touch()

    orbax_files.write_parts = late
    writer = checkpoint_writer(folder, keep=3, is_here=me == 0)
    before = agree.timeout_s()
    for timeout_s in (1.0, before):
        agree.set_timeout_s(timeout_s if me == 0 else before)
        writer.begin_write(state, {"life": 1, "step": 7, "tag": str(path)})
        try:
            writer.wait()
        except OSError as failure:
            errors.append(str(failure))
    orbax_files.write_parts = write
    writer.end_thread()
    folder.unlock()
    return errors


def test_a_process_that_is_given_up_does_not_disturb_the_next_attempt(processes, tmp_path):
    for errors in processes(2).run(comes_late, tmp_path):
        (error,) = errors
        assert re.search("process 1 .*step 7 .* 1 s", error)
    np.testing.assert_array_equal(jdp.load(tmp_path)["x"], VALUES)
    folder = Folder(tmp_path)
    folder.lock()
    folder.unlock()
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["7-1"]
