import itertools
import math
import re

import pytest

from jdp.worker.hang_detector import HangDetector
from jdp.worker.process_status import (
    BEFORE,
    BETWEEN,
    DATA,
    ENDED,
    FIRST,
    JOINING,
    STARTING,
    STEP,
    UNSTEPPED,
    WAITING,
    ProcessStatus,
)


def at(phase, steps=10, since_s=0.0, **facts):
    facts = {"timeout_s": 600.0, "progress_s": since_s} | facts
    return ProcessStatus(pid=1000 + steps, steps=steps, phase=phase, since_s=since_s, **facts)


def looks(watch, processes, end_s, tick_s=1.0):
    """All that is said until `end_s`, by second; as a launcher looks, again and again."""
    times = (i * tick_s for i in range(round(end_s / tick_s) + 1))
    return {now: stall for now in times if (stall := watch.poll(now, processes))}


def first(processes, timeout_s=600.0):
    return next(iter(looks(HangDetector(timeout_s), processes, 3601).values()))


def test_a_run_that_gets_on_is_never_reported():
    watch = HangDetector(600.0)
    for now in range(1000):
        assert watch.poll(now, {0: at(STEP, now // 29, 29.0 * (now // 29))}) is None


def test_a_stall_is_reported_after_30_s_and_whenever_its_time_has_doubled_and_ends_at_timeout_s():
    said = looks(HangDetector(600.0), {0: at(STEP)}, 1000)
    assert [now for now, stall in said.items() if not stall.is_over] == [30, 60, 120, 240, 480, 960]
    assert [now for now, stall in said.items() if stall.is_over] == [600]


@pytest.mark.parametrize(
    ("timeout_s", "reported"), [(1.0, [0.5, 1.0]), (2.0, [1.0, 2.0]), (60.0, [30.0, 60.0])]
)
def test_a_short_limit_is_reported_at_half_of_it(timeout_s, reported):
    said = looks(HangDetector(timeout_s), {0: at(STEP)}, timeout_s, tick_s=0.25)
    assert list(said) == reported
    assert [stall.is_over for stall in said.values()] == [False, True]


def test_progress_begins_it_all_anew():
    watch = HangDetector(600.0)
    assert list(looks(watch, {0: at(STEP)}, 45)) == [30]
    assert watch.poll(46.0, {0: at(STEP, 11, 46.0)}) is None
    assert watch.poll(48.0, {0: at(STEP, 11, 46.0)}) is None
    again = {0: at(STEP, 11, 46.0)}
    assert [now for now in range(49, 90) if watch.poll(now, again)] == [76]


@pytest.mark.parametrize("phase", [UNSTEPPED, FIRST, "compiling", "evaluating", "saving", "my own"])
def test_phases_that_may_be_long_have_six_times_as_long(phase):
    said = looks(HangDetector(600.0), {0: at(phase)}, 3600)
    assert list(said)[0] == 180
    assert [now for now, stall in said.items() if stall.is_over] == [3600]


@pytest.mark.parametrize("phase", [STEP, BETWEEN, DATA])
def test_steps_and_what_lies_between_have_timeout_s(phase):
    assert [
        t for t, stall in looks(HangDetector(10.0), {0: at(phase)}, 100).items() if stall.is_over
    ] == [10]


def test_a_phase_may_have_a_limit_of_its_own():
    said = looks(HangDetector(600.0), {0: at("downloading", limit_s=100.0)}, 100)
    assert {now: stall.is_over for now, stall in said.items()} == {
        5: False, 10: False, 20: False, 40: False, 80: False, 100: True,
    }  # fmt: skip
    assert not looks(HangDetector(10.0), {0: at("downloading", limit_s=math.inf)}, 1000)


def test_the_limit_of_each_script_holds_unless_the_watch_has_one():
    processes = {0: at(STEP, timeout_s=4.0)}
    over = [
        [t for t, stall in looks(watch, processes, 100).items() if stall.is_over]
        for watch in (HangDetector(), HangDetector(2.0), HangDetector(8.0))
    ]
    assert over == [[4], [2], [8]]
    assert not looks(HangDetector(), {0: at(STEP, timeout_s=math.inf)}, 10_000)
    assert looks(HangDetector(), {0: at("slow", timeout_s=math.inf, limit_s=80.0)}, 80)[80].is_over


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_whoever_has_made_the_fewest_steps_is_named_first(order):
    places = [
        at(STEP, 12, 2.0, entered=1284, done=1283, bucket=3),
        at(BETWEEN, 12, 2.0, entered=1284, done=1283, is_running=True),
        at(DATA, 11, 1.0, entered=1283, done=1283),
    ]
    stall = first({i: places[kind] for i, kind in enumerate(order)})
    late = order.index(2)
    assert stall.processes == [late]
    assert stall.stalled_s == 30.0
    lines = stall.report.splitlines()
    assert re.search(r" 30 s; .* 600 s\.$", lines[0])
    assert lines[1].startswith(
        f"  process {late} (pid 1011), 1 step behind: {DATA} for 30 s, 11 steps "
    )
    inside = next(line for line in lines if f"process {order.index(0)} " in line)
    assert re.search(r"all-reduce 1,284 \(bucket 3\)", inside)
    assert "loader" in lines[-1]


def test_of_equal_steps_the_one_that_waits_for_nobody_is_the_cause():
    waits = at(STEP, entered=6, done=5)
    assert first({0: waits, 1: at(BETWEEN, entered=5, done=5)}).processes == [1]
    running = at(BETWEEN, is_running=True)
    assert first({0: running, 1: at(BETWEEN), 2: running}).processes == [1]
    assert first({0: at(FIRST, 0), 1: at("compiling", 0)}).processes == [1]


def test_of_those_in_a_step_the_one_that_entered_the_fewest_all_reduces_is_the_cause():
    places = {i: at(STEP, entered=number, done=5) for i, number in enumerate([6, 7, 6, 7])}
    assert first(places).processes == [0, 2]


def test_a_stopped_process_is_the_cause_wherever_it_stopped():
    stall = first({0: at(BETWEEN), 1: at(STEP, state="stopped")})
    assert stall.processes == [1]
    assert f"process 1 (pid 1010): stopped, {STEP} " in stall.report
    assert "kill -CONT" in stall.report


def test_a_stopped_process_has_no_more_time_for_its_phase_than_for_a_step():
    patient = {"limit_s": 1e9}
    processes = {0: at("waiting", **patient), 1: at("waiting", state="stopped", **patient)}
    said = looks(HangDetector(10.0), processes, 10)
    assert list(said) == [5, 10] and said[10].is_over and said[10].processes == [1]


def test_a_process_that_is_stopped_late_has_its_time_from_then_on():
    watch, busy = HangDetector(10.0), {0: at("waiting", limit_s=1e9)}
    assert not looks(watch, busy, 1000)
    stopped = {0: at("waiting", limit_s=1e9, state="stopped")}
    assert [now for now in range(1001, 1012) if watch.poll(now, stopped)] == [1006, 1011]


def test_a_script_that_has_ended_is_named_while_others_train():
    processes = {0: at(STEP, 12), 1: at(ENDED, 11, since_s=-9.0)}
    stall = first(processes)
    assert stall.processes == [1]
    assert f"process 1 (pid 1011), 1 step behind: {ENDED} for 39 s" in stall.report
    assert looks(HangDetector(10.0), processes, 10)[10].is_over


def test_scripts_that_have_all_ended_and_do_not_exit_are_given_up_as_late_as_a_long_phase():
    said = looks(HangDetector(600.0), {0: at(ENDED, 10), 1: at(ENDED, 9)}, 3600)
    assert [now for now, stall in said.items() if stall.is_over] == [3600]
    assert said[3600].processes == [0, 1]
    assert "atexit" in said[3600].report
    assert not looks(HangDetector(1.0), {}, 10)
    # Where another one still runs, that one's time counts.
    assert not looks(HangDetector(600.0), {0: at(ENDED), 1: at("saving", limit_s=math.inf)}, 3600)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_nobody_is_ended_for_waiting_while_the_one_waited_for_has_time(num_ahead):
    evaluates = at("evaluating", 10)
    waits = at(STEP, 10 + num_ahead)
    said = looks(HangDetector(10.0), {0: evaluates, 1: waits}, 100)
    assert [t for t, stall in said.items() if stall.is_over] == [60]
    assert said[30].processes == [0]


def test_a_process_that_waits_for_others_has_no_more_time_than_they_have():
    waits = at(WAITING)
    assert first({0: waits, 1: at(BETWEEN)}).processes == [1]
    for phase, over_s in ((BETWEEN, 10), ("saving", 60), (WAITING, 60)):
        said = looks(HangDetector(10.0), {0: waits, 1: at(phase)}, 100)
        assert [now for now, stall in said.items() if stall.is_over] == [over_s]


@pytest.mark.parametrize("step", [at(STEP), at(BETWEEN, 11, is_running=True)])
def test_who_waits_elsewhere_is_the_cause_that_others_wait_in_a_step(step):
    said = looks(HangDetector(600.0), {0: step, 1: at(WAITING), 2: step}, 600)
    assert {*map(str, (stall.processes for stall in said.values()))} == {"[1]"}
    assert [now for now, stall in said.items() if stall.is_over] == [600]
    assert "break" in said[30].report
    late = first({0: at(WAITING, 11), 1: at(STEP, 10)})
    assert late.processes == [1] and "break" not in late.report


def test_one_that_hangs_is_ended_while_others_get_on_ahead_of_it():
    watch, hangs = HangDetector(10.0), at(BETWEEN, 10)
    said = [watch.poll(now, {0: hangs, 1: at(STEP, 20 + now, now)}) for now in range(11)]
    assert said[10].is_over
    assert said[10].processes == [0]


def test_a_step_that_devices_still_run_has_a_limit_where_the_script_has_none():
    alone = at(BETWEEN, limit_s=math.inf)
    assert not looks(HangDetector(10.0), {0: alone}, 1000)
    stall = looks(HangDetector(10.0), {0: alone._replace(is_running=True)}, 10)[10]
    assert stall.is_over


def test_whoever_debugs_has_all_the_time_and_so_do_those_that_wait():
    debugged = at(BETWEEN, 12, state="debugged")
    assert not looks(HangDetector(1.0), {0: debugged, 1: at(STEP, 11)}, 1000)


def test_a_process_that_has_not_begun_is_left_out():
    said = looks(HangDetector(10.0), {0: ProcessStatus(pid=0), 1: at(STEP)}, 10)
    assert said[10].processes == [1]
    assert "process 0" not in said[10].report


def test_while_no_process_has_come_to_init_nobody_waits():
    assert not looks(HangDetector(10.0), {0: at(BEFORE, 0), 1: at(BEFORE, 0)}, 1000)


@pytest.mark.parametrize("num", [1, 2])
def test_processes_that_train_without_jdp_are_not_watched(num):
    watch = HangDetector(10.0)
    assert not looks(watch, {i: at(STARTING, 0) for i in range(num)}, 1000)
    assert watch.left_s(1000.0, at(STARTING, 0)) == math.inf


def test_a_process_that_does_nothing_is_named_when_another_one_waits_for_it():
    said = looks(HangDetector(10.0), {0: at(FIRST, 0), 1: at(STARTING, 0)}, 60)
    assert said[60].processes == [1] and said[60].is_over


def test_a_process_that_does_not_come_to_init_is_named_and_given_up_as_late_as_a_long_phase():
    said = looks(HangDetector(10.0), {0: at(JOINING, 0), 1: at(BEFORE, 0)}, 61)
    assert {now: stall.processes for now, stall in said.items()} == {30: [1], 60: [1]}
    assert [stall.is_over for stall in said.values()] == [False, True]
    assert f"process 1 (pid 1000): {BEFORE} for 30 s" in said[30].report
    assert f"{JOINING} for 30 s, 0 steps" in said[30].report


def test_time_in_which_nobody_looked_does_not_count():
    watch, processes = HangDetector(10.0), {0: at(STEP)}
    assert watch.poll(1.0, processes) is None
    assert watch.poll(1000.0, processes) is None
    assert [now for now in range(1001, 1012) if watch.poll(now, processes)] == [1005, 1010]


def test_a_watch_that_ends_nobody_does_not_say_that_it_will():
    watch = HangDetector(10.0, ends=False)
    for now, stall in looks(watch, {0: at(STEP)}, 20).items():
        limits = {"10 s"} - {f"{now:g} s"}
        assert not limits & {*re.findall("[0-9]+ s", stall.report.splitlines()[0])}


def test_what_is_left_is_the_limit_less_the_time_without_progress():
    watch = HangDetector(10.0)
    assert watch.left_s(4.0, at(STEP)) == 6.0
    assert watch.left_s(4.0, at("compiling")) == 56.0
    assert watch.left_s(4.0, at(STEP, state="debugged")) == math.inf
