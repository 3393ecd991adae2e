"""How far a run is: exact numbers from statuses at known times."""

import json
import math

import pytest

from jdp.launch.leader.run_report import Events
from jdp.worker.process_status import DATA, ProcessStatus, RunCounts
from jdp.worker.run_progress import WINDOW_S, RunProgress, RunSummary


def status(steps, phase="", since_s=0.0, **counts):
    return ProcessStatus(7, steps=steps, phase=phase, since_s=since_s, counts=RunCounts(**counts))


def begun(size=1, at=100.0, **restored):
    progress = RunProgress()
    if restored:
        restored["base"] = restored["step"]
    progress.begin_generation(at, size, {i: restored for i in range(size)} if restored else {})
    return progress


def test_there_is_nothing_to_show_before_the_first_step():
    progress = RunProgress()
    progress.record(0.0, {0: status(3)})
    assert progress.summary(1.0) is None


def test_the_next_leader_goes_on_with_recoveries_and_lost_time():
    first = begun(at=100.0)
    first.record(110.0, {0: status(5)})
    first.record_failure(110.0, 5, "JDP302")
    first.begin_generation(112.0, 1, {0: {"step": 5, "base": 5, "tier": "commit"}})
    first.record(112.0, {0: status(0)})
    second = RunProgress()
    second.take_over(first.history(115.0).moved(1000.0))
    second.record_failure(1120.0, 9, "JDP311")
    second.begin_generation(1124.0, 1, {0: {"step": 9, "base": 9, "tier": "commit"}})
    second.record(1124.0, {0: status(0)})
    found = second.summary(1200.0)
    assert (found.step, found.recoveries, found.ettr) == (9, 2, 1 - (2 + 4) / 100)
    assert second.history(1200.0).recoveries == {"JDP302": 1, "JDP311": 1}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_steps_and_rows_are_those_that_all_processes_have_called(size):
    progress = begun(size, step=40, tier="commit")
    for i in range(5):  # the last process is one step behind, and calls a step in half a second
        ahead = {p: status(i + 1, rows=64 * (i + 1)) for p in range(size - 1)}
        progress.record(100.0 + i / 2, {**ahead, size - 1: status(i, rows=64 * i)})
    found = progress.summary(102.0)
    assert (found.step, found.steps_per_s, found.rows_per_s) == (44, 2.0, 128.0)


def test_the_target_counts_from_the_step_that_was_restored():
    progress = begun(size=2, step=40, tier="commit")
    progress.record(100.0, {i: status(3, target=60) for i in (0, 1)})
    assert progress.summary(100.0).target == 100
    progress.record(101.0, {i: status(4) for i in (0, 1)})
    assert progress.summary(101.0).target is None


def test_a_process_whose_status_is_not_known_is_waited_for():
    progress = begun(size=2)
    progress.record(100.0, {0: status(5)})
    assert progress.summary(100.0).step == 0
    progress.record(101.0, {1: status(4)})
    assert progress.summary(101.0).step == 4


def test_the_last_status_of_a_process_wins_over_a_late_one():
    progress = begun(size=2)
    for process_id in (0, 1):
        progress.record_end(101.0 + process_id, process_id, status(9))
        progress.record(101.5 + process_id, {0: status(7), 1: status(8)})
    assert progress.summary(103.0).step == 9


def test_rates_are_of_the_window_or_of_the_last_two_steps():
    progress = begun()
    for at, steps in [(100.0, 1), (101.0, 2), (200.0, 3), (200.0 + WINDOW_S, 6)]:
        progress.record(at, {0: status(steps, rows=10 * steps)})
    assert progress.summary(230.0).rows_per_s == 30 / WINDOW_S
    progress.record(500.0, {0: status(7, rows=70)})  # a slow step
    assert progress.summary(500.0).rows_per_s == pytest.approx(10 / 270)
    assert progress.summary(500.0 + 540).rows_per_s == pytest.approx(10 / 810)  # and one that hangs


def test_the_share_of_waiting_is_that_of_the_process_that_waits_longest():
    progress = begun(size=3)
    for i in range(3):
        waits = (0.0, 0.5 * i, 0.25 * i)
        now = {p: status(i, rows=8 * i, data_s=waited) for p, waited in enumerate(waits)}
        progress.record(100.0 + i, now)
    assert progress.summary(102.0).data_share == 0.5


def test_a_wait_that_lasts_counts():
    progress = begun()
    progress.record(100.0, {0: status(1, rows=8)})
    progress.record(104.0, {0: status(2, DATA, 101.0, rows=16, data_s=0.0)})
    assert progress.summary(104.0).data_share == 0.75


def test_without_batches_of_jdp_there_are_steps_alone():
    progress = begun()
    for i in range(3):
        progress.record(100.0 + i, {0: status(i)})
    found = progress.summary(102.0)
    assert (found.steps_per_s, found.rows_per_s, found.data_share) == (1.0, None, None)


def test_the_loss_and_what_is_kept_are_the_latest_and_outlive_a_generation():
    progress = begun(size=2)
    writer = status(30, commit=30, checkpoint=20, logged=28, loss=0.5)
    progress.record(101.0, {0: writer, 1: status(30)})
    progress.record_failure(102.0, 30, "JDP302")
    progress.begin_generation(
        103.0, 2, dict.fromkeys((0, 1), {"step": 30, "base": 30, "tier": "commit"})
    )
    found = progress.summary(103.0)
    assert (found.loss, found.commit, found.checkpoint, found.recoveries) == (0.5, 30, 20, 1)


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_loss_that_json_lacks_is_a_text_among_the_events(loss, tmp_path):
    events = Events(tmp_path / "events.jsonl", pytest.fail)
    events.write("progress", **RunSummary(1, loss, 2.0, None, None, None, None, 0, 1.0)._asdict())
    events.close_file()
    [line] = (tmp_path / "events.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["step"], found["loss"], found["ettr"]) == (1, str(loss), 1.0)


def test_a_commit_counts_once_all_hosts_have_it():
    progress = begun(size=3)
    commits = {0: status(9, commit=9), 1: status(9), 2: status(9, commit=6)}
    progress.record(101.0, commits)
    assert progress.summary(101.0).commit == 6


def test_a_commit_that_was_lost_is_not_shown():
    progress = begun()
    progress.record(101.0, {0: status(30, commit=30, checkpoint=20)})
    progress.record_failure(102.0, 30, "JDP302")
    progress.begin_generation(103.0, 1, {0: {"step": 20, "base": 20, "tier": "checkpoint"}})
    found = progress.summary(103.0)
    assert (found.commit, found.checkpoint) == (None, 20)


def test_time_counts_until_the_failure_and_from_where_the_run_comes_further():
    progress = begun(at=100.0)
    progress.record(180.0, {0: status(80)})
    progress.record_failure(180.0, 82, "JDP302")  # 80 s that count
    assert progress.summary(180.0).step == 82
    assert progress.summary(190.0).ettr == pytest.approx(80 / 90)  # while it recovers
    progress.begin_generation(185.0, 1, {0: {"step": 70, "base": 70, "tier": "commit"}})
    progress.record(190.0, {0: status(5)})  # step 75 is made again
    assert progress.summary(190.0).ettr == pytest.approx(80 / 90)
    progress.record(195.0, {0: status(12)})
    progress.record(200.0, {0: status(15)})
    found = progress.summary(200.0)
    assert found.ettr == pytest.approx(85 / 100) and found.recoveries == 1


def test_failures_on_the_way_are_one_outage_and_growth_is_no_recovery():
    progress = begun(at=0.0)
    progress.record(10.0, {0: status(10)})
    for at, error_code in ((10.0, "JDP305"), (12.0, "JDP302")):
        progress.record_failure(at, 10, error_code)
    progress.begin_generation(15.0, 1, {0: {"step": 10, "base": 10, "tier": "commit"}})
    progress.record(15.0, {0: status(1)})
    progress.record_failure(17.0, 11, "")
    progress.begin_generation(
        18.0, 2, dict.fromkeys((0, 1), {"step": 11, "base": 11, "tier": "commit"})
    )
    progress.record(18.0, {0: status(1), 1: status(1)})
    found = progress.summary(20.0)
    assert found.recoveries == 1 and found.ettr == pytest.approx(14 / 20)
    assert progress.history(20.0).recoveries == {"JDP305": 1}  # the first failure is the cause


def test_a_script_without_a_checkpointer_makes_its_steps_again():
    progress = begun(at=0.0)
    progress.record(10.0, {0: status(10)})
    progress.record_failure(10.0, 10, "JDP302")
    progress.begin_generation(12.0, 1, {})
    progress.record(20.0, {0: status(9)})
    assert progress.summary(20.0).ettr == 0.5
    progress.record(21.0, {0: status(10)})
    progress.record(42.0, {0: status(31)})
    assert progress.summary(42.0).ettr == pytest.approx(31 / 42)


def test_an_evaluation_is_named_though_its_steps_are_phases_of_their_own():
    progress = begun()
    for i in range(5):
        progress.record(100.0 + i, {0: status(7, "running a step", 100.0 + i, is_evaluating=True)})
    assert progress.summary(104.0).activity == "evaluating for 4 s"
    progress.record(105.0, {0: status(8, "running a step", 105.0)})
    assert progress.summary(105.0).activity is None
