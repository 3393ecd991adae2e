"""Trackers by name get each line once, also where a run continues, and each by its own library."""

import csv
import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import environment

import jdp
from jdp.distributed import metrics_log, trackers
from jdp.distributed.trackers import RunNote, beside

STEPS = 6


def log(path, steps, also):
    for step in steps:
        jdp.log({"loss": 1 / (step + 1), "nan": float("nan")}, step, file=path, also=also)
        if step % 2:
            jdp.log({"eval": {"rows": step}}, step, file=path, also=also)


def twice(path, make):
    """Log half of the steps, and the other half as a process does that continues."""
    log(path, range(STEPS // 2), make())
    metrics_log.end()
    log(path, range(1, STEPS), make())
    metrics_log.end()


def test_a_table_has_a_row_for_each_line_and_a_column_for_each_name(path):
    twice(path, lambda: "csv")
    with open(beside(path, "csv"), newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(int(row["step"]), row["loss"] != "") for row in rows] == [
        (0, True), (1, True), (1, False), (2, True), (3, True), (3, False), (4, True), (5, True),
        (5, False),
    ]  # fmt: skip
    assert [row["eval/rows"] for row in rows if row["eval/rows"]] == ["1", "3", "5"]
    assert rows[3]["loss"] == str(1 / 3) and rows[3]["nan"] == "nan"


def test_what_a_killed_process_had_not_written_is_written_by_the_next_one(path):
    log(path, range(3), jdp.tracker("csv"))
    metrics_log.end()
    beside(path, "csv").unlink()  # lines in the file that it does not have
    log(path, range(3, 4), jdp.tracker("csv"))
    metrics_log.end()
    with open(beside(path, "csv"), newline="") as table:
        assert [row["step"] for row in csv.DictReader(table)] == ["0", "1", "1", "2", "3", "3"]


def test_a_tracker_that_each_call_makes_is_one_and_each_file_has_its_own(path, tmp_path):
    other = tmp_path / "other.jsonl"
    for step in range(3):
        jdp.log({"loss": 1.0}, step, file=path, also=jdp.tracker("csv", config={"lr": 0.1}))
        jdp.log({"rows": step}, step, file=other, also="csv")
    metrics_log.end()
    assert beside(path, "csv").read_text().split() == ["step,loss", "0,1.0", "1,1.0", "2,1.0"]
    assert beside(other, "csv").read_text().split() == ["step,rows", "0,0", "1,1", "2,2"]


def test_functions_are_not_kept(path):
    for step in range(3):
        jdp.log({"loss": 1.0}, step, file=path, also=lambda step, values: None)
    (file,) = metrics_log._open.files.values()
    assert not file._tracked._own


def test_several_at_once(path):
    found = []
    log(path, range(2), ["csv", lambda step, values: found.append(step)])
    jdp.log.flush()
    assert found == [0, 1, 1] and beside(path, "csv").read_text().count("\n") == 4


def read_events(folder):
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter  # noqa: F401

    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(event.step, each.tag, each.simple_value) for each in event.summary.value]
    return found


def test_tensorboard_has_each_step_once(path):
    pytest.importorskip("tensorboardX")
    twice(path, lambda: jdp.tracker("tensorboard", name="one", config={"lr": 0.1}))
    found = read_events(beside(path, "tensorboard") / "one")
    losses = [(step, value) for step, tag, value in found if tag == "loss"]
    assert losses == [(step, pytest.approx(1 / (step + 1))) for step in range(STEPS)]
    assert [step for step, tag, _ in found if tag == "eval/rows"] == [1, 3, 5]
    assert any("config" in tag for _, tag, _ in found)


def test_mlflow_has_each_step_once_in_one_run(path, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    twice(path, lambda: jdp.tracker("mlflow", name="one", config={"lr": 0.1}, experiment="digits"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.info.run_name == "one" and run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(x.step, x.value) for x in history] == [(i, 1 / (i + 1)) for i in range(STEPS)]
    assert [x.step for x in client.get_metric_history(run.info.run_id, "eval/rows")] == [1, 3, 5]


def test_a_run_of_wandb_goes_on_under_its_id(path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    twice(path, lambda: jdp.tracker("wandb", name="one", config={"lr": 0.1}, project="digits"))
    folders = sorted((path.parent / "wandb").glob("offline-run-*"))
    run = json.loads(beside(path, "wandb.json").read_text())
    assert len(folders) == 2 and all(run["run"] in folder.name for folder in folders)
    assert run["last"] == STEPS - 1


def test_a_file_of_another_run_has_a_tracked_run_of_its_own(path):
    found = []
    for loss in (1.0, 2.0):
        jdp.log({"loss": loss}, 1, file=path)
        metrics_log.end()
        note = RunNote(path, "wandb")
        found.append(note.run_id(lambda: f"run {len(found)}"))
        note.write()
        assert RunNote(path, "wandb").run_id(str) == found[-1]
        path.unlink()
    assert found == ["run 0", "run 1"]


def test_lines_that_no_tracker_was_given_are_not_tracked_later(path):
    for steps in (range(1, 3), range(3, 4)):
        for step in steps:
            jdp.log({"loss": 1.0}, step, file=path, also="csv")
            jdp.log({"debug": 2.0}, step, file=path)
        metrics_log.end()
    jdp.log({"loss": 1.0}, 4, file=path, also="csv")
    metrics_log.end()
    assert beside(path, "csv").read_text().split()[0] == "step,loss"
    assert len(beside(path, "csv").read_text().split()) == 5


class Fails:
    """A run that fails at its third line, once."""

    def __init__(self, settings, file, note):
        self.taken, self._left = TAKEN, 3

    def lacking(self, step, values):
        return values

    def write(self, step, values):
        self._left -= 1
        if self._left == 0:
            raise ConnectionError("lost")
        self.taken.append(step)

    def flush(self): ...

    close = flush


TAKEN = []


def test_a_tracker_that_fails_once_gets_the_line_again(path, monkeypatch):
    TAKEN.clear()
    log(path, range(4), None)
    metrics_log.end()
    monkeypatch.setitem(trackers.BEGIN, "csv", Fails)
    jdp.log({"loss": 1.0, "nan": 0.0}, 4, file=path, also="csv")
    with pytest.raises(RuntimeError, match="also=csv failed at step 4: ConnectionError: lost"):
        jdp.log.flush()
    assert TAKEN == [0, 1, 2, 3, 4]  # the rest as it was flushed


def test_a_slow_tracker_holds_up_no_line_of_the_file(path):
    goes_on = threading.Event()
    for step in range(20):
        jdp.log({"loss": 1.0}, step, file=path, also=lambda *each: goes_on.wait(60))
    metrics_log.write_all()
    assert path.read_text().count("\n") == 20
    with pytest.raises(TimeoutError, match="also="):
        jdp.log.flush(0.1)
    goes_on.set()
    jdp.log.flush()


def test_wrong_trackers_are_refused_at_once(path):
    with pytest.raises(ValueError, match="'tensorboard'.*'tensorbord'"):
        jdp.log({"loss": 1.0}, 1, file=path, also="tensorbord")
    assert not path.exists()
    script = "import jdp, sys; sys.modules['wandb'] = None; jdp.tracker('wandb')"
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment(1), capture_output=True, text=True
    )
    assert "ImportError: the tracker 'wandb'" in run.stderr and "pip install wandb" in run.stderr


class Counted:
    """Fails where two threads call it at once, and keeps the lines of its run."""

    runs: list["Counted"] = []

    def __init__(self, named, file, note):
        self.lines, self._lock = [], threading.Lock()
        self.runs.append(self)

    def lacking(self, step, values):
        return values

    def write(self, step, values):
        assert self._lock.acquire(blocking=False), "two threads at once"
        time.sleep(0)
        self.lines.append(step)
        self._lock.release()

    def flush(self):
        assert self._lock.acquire(blocking=False), "two threads at once"
        time.sleep(0)
        self._lock.release()

    close = flush


@pytest.mark.parametrize("seed", range(20))
def test_threads_that_log_and_flush_begin_one_run_and_lose_no_line(path, monkeypatch, seed):
    monkeypatch.setitem(trackers.BEGIN, "csv", Counted)
    monkeypatch.setattr(Counted, "runs", [])
    draw, begin = random.Random(seed), threading.Barrier(4)
    pauses = [[draw.choice((0, 0, 1e-4, 1e-3)) for _ in range(20)] for _ in range(4)]

    def work(i):
        begin.wait()
        for step, pause in enumerate(pauses[i]):
            jdp.log({f"loss {i}": 1.0}, step, file=path, also="csv")
            time.sleep(pause)
            if draw.random() < 0.3:
                jdp.log.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    jdp.log.flush()
    (run,) = Counted.runs
    assert sorted(run.lines) == sorted([*range(20)] * 4)


def test_the_thread_of_a_tracker_runs_when_the_first_call_returns(path, monkeypatch):
    # The thread that writes lines may come to it when the interpreter starts no threads any more.
    monkeypatch.setattr(trackers.TrackerQueue, "put", lambda *args: None)
    before = {*threading.enumerate()}
    jdp.log({"loss": 1.0}, 1, file=path, also="csv")
    assert any(each.name == "jdp track" for each in {*threading.enumerate()} - before)
