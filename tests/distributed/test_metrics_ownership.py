"""A file of metrics belongs to one run: another run does not continue it."""

import json
from types import SimpleNamespace

import pytest

import jdp
from jdp.distributed import metrics_file, metrics_log, this_process
from jdp.worker import launcher_client
from jdp.worker.launcher_client import Assignment


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "_claimed", set())
    monkeypatch.setattr(this_process, "current", this_process.ThisProcess())
    monkeypatch.delenv("JDP_RESUME", raising=False)
    yield tmp_path / "metrics.jsonl"
    metrics_log.end()


@pytest.fixture
def life(path, monkeypatch):
    """Play a life of a run: a process that logs some steps and ends."""

    def play(run_id, generation, *steps, resumes=None):
        resumes = generation > 0 if resumes is None else resumes
        assigned = Assignment(generation, 0, 1, 0, 1, "a:1", resumes, None, run_id)
        member = None if run_id is None else SimpleNamespace(assignment=assigned)
        monkeypatch.setattr(launcher_client, "current", lambda: member)
        metrics_file._claimed.clear()
        try:
            for step in steps:
                jdp.log({"loss": 1.0}, step, file=path)
        finally:
            metrics_log.end()
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    return play


def test_a_run_that_begins_later_does_not_continue_the_file_of_another_one(life, path):
    life("a", 0, 1, 2)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"metrics\.jsonl .* step 2.* step 100.*--resume"):
        life("b", 0, 100)
    assert path.read_bytes() == before


def test_a_later_generation_continues_the_file_of_its_own_run_alone(life):
    life("a", 0, 1, 2)
    assert life("a", 1, 2, 3) == [1, 2, 3]
    with pytest.raises(ValueError, match="earlier run"):
        life("b", 1, 4)  # its first generation has died before it logged


def test_a_file_whose_run_cannot_be_read_is_of_another_run(life, path):
    life("a", 0, 1, 2)
    path.with_name("metrics.jsonl.run").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="earlier run"):
        life("a", 1, 3)


def test_two_runs_of_one_name_are_two_runs(life):
    life("same", 0, 1)
    with pytest.raises(ValueError, match="earlier run"):
        life("same", 0, 2)


def test_a_resumed_run_takes_the_file_over(life, monkeypatch):
    life("a", 0, 1, 2)
    with monkeypatch.context() as resumed:
        resumed.setenv("JDP_RESUME", "1")  # as `jdp run --resume` sets it
        assert life("b", 0, 2, 3, resumes=True) == [1, 2, 3]
    assert life("b", 1, 3, 4) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="earlier run"):
        life("a", 1, 5)


def test_a_run_that_is_not_to_resume_does_not_take_the_file_over(life, monkeypatch):
    life("a", 0, 1, 2)
    monkeypatch.setenv("JDP_RESUME", "false")
    with pytest.raises(ValueError, match="earlier run"):
        life("b", 0, 3)


def test_a_run_whose_checkpointer_has_restored_continues(life):
    life("a", 0, 1, 2)
    this_process.current.has_restored = True
    assert life("b", 0, 2, 3) == [1, 2, 3]


def test_a_process_opens_its_file_again(life, path):
    assert life("a", 0, 1) == [1]
    metrics_file._claimed.add(path)
    jdp.log({"loss": 1.0}, 2, file=path)
    metrics_log.end()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_without_a_launcher_a_script_may_keep_checkpoints_of_its_own(life, path):
    life(None, 0, 1, 2)
    assert life(None, 0, 3) == [1, 2, 3]
    with pytest.raises(ValueError, match="earlier run"):
        life(None, 0, 1)
    assert not path.with_name("metrics.jsonl.run").exists()


def test_a_process_of_a_launcher_writes_nothing_before_it_has_its_number(path, monkeypatch):
    monkeypatch.setattr(launcher_client, "current", lambda: SimpleNamespace(assignment=None))
    with pytest.raises(RuntimeError, match=r"jdp\.init\(\)"):
        jdp.log({"loss": 1.0}, 0, file=path)
    assert not path.exists()


def test_a_file_that_was_moved_away_leaves_no_name_behind_that_counts(life, path):
    life("a", 0, 1)
    path.rename(path.with_suffix(".old"))
    assert life("b", 0, 1) == [1]
    assert life("b", 1, 2) == [1, 2]
