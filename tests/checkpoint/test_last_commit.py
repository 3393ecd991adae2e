"""The latest commit of a host becomes a checkpoint, when the processes of the run have ended."""

import os

import numpy as np
import pytest

from jdp.checkpoint import restore_candidates
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.directory import Folder
from jdp.checkpoint.last_commit import save_last_commit
from jdp.checkpoint.saved_leaves import describe, disk_names, from_disk, leaves_of, pack, to_disk

VALUES = [np.arange(3, dtype=np.float32), np.ones((), np.int32)]


@pytest.fixture
def memory():
    file = os.memfd_create("commits")
    yield file
    os.close(file)


def facts(folder, life, step):
    leaves = [list(leaf) for leaf in describe(VALUES)]
    return {"directory": str(folder), "life": life, "step": step, "leaves": leaves}


def commit(memory, folder, life, step):
    CommitMemory(memory).write(facts(folder, life, step), pack(VALUES))


def save(folder, life, step):
    its = facts(folder, life, step)
    Folder(folder).write(life, step, its, to_disk(leaves_of(its), VALUES))


def test_a_commit_is_written_once_with_its_values_and_facts(memory, tmp_path):
    commit(memory, tmp_path, 2, 30)
    for _ in range(2):
        answer = save_last_commit(memory)
        assert answer == {"life": 2, "step": 30, "directory": str(tmp_path)}
    folder = Folder(tmp_path)
    [checkpoint] = folder.checkpoints()
    assert checkpoint[:2] == (2, 30)
    leaves = disk_names(leaves_of(folder.facts(checkpoint)))
    restored = from_disk(leaves, lambda names: folder.read(checkpoint, names))
    assert all(map(np.array_equal, restored, VALUES))


@pytest.mark.parametrize(
    ("life", "step", "latest"), [(2, 31, (2, 31)), (2, 29, (2, 30)), (1, 99, (2, 30))]
)
def test_a_commit_is_written_unless_a_checkpoint_is_later(memory, tmp_path, life, step, latest):
    commit(memory, tmp_path, 2, 30)
    save(tmp_path, life, step)
    answer = save_last_commit(memory)
    assert (answer["life"], answer["step"]) == latest
    assert Folder(tmp_path).checkpoints()[0][:2] == latest


def test_a_damaged_checkpoint_does_not_count(memory, tmp_path):
    commit(memory, tmp_path, 2, 30)
    save(tmp_path, 3, 40)
    (tmp_path / "40-3" / "manifest").write_text("{}")
    assert save_last_commit(memory)["step"] == 30


def test_without_a_commit_nothing_is_written(memory, tmp_path):
    assert save_last_commit(memory) == {}


def test_a_directory_that_is_on_another_host_is_not_made(memory, tmp_path):
    commit(memory, tmp_path / "elsewhere", 1, 10)
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        save_last_commit(memory)
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_without_a_step_of_the_processes_before_is_named(tmp_path, caplog):
    # Another Checkpointer of theirs may have kept one: of a model that is trained before.
    offer = {"keys": [], "resumes": True, "is_later": True}
    assert restore_candidates.latest({0: offer}, str(tmp_path)) is None
    (line,) = caplog.messages
    assert str(tmp_path) in line and "starts at step 0" in line
