"""When a process is called slow: the rule alone, over windows and over sequences of records."""

import json
import random
from pathlib import Path

import pytest

from jdp.launch.leader.progress_watch import (
    PARTS,
    SEVERAL,
    Comparison,
    ProgressWatch,
    SlowProcesses,
)
from jdp.worker.progress_board import NUM_RECORDS, StepRecord, window_of

US, MS = 1000, 1_000_000

# Records of 3 processes that trained on 2 cores which other work kept busy, none of them slow:
# number of steps, and microseconds of a step, data, host, waited, all together.
NOISE = json.loads((Path(__file__).parent / "step_noise.json").read_text())


def recorded(process, number):
    num_steps, *us = NOISE[process][number]
    return StepRecord(num_steps, *(each * US for each in us))


def step(ms=20.0, *, data=0.0, host=0.5, waited=0.0, paused=0.0):
    return StepRecord(1, *(round(each * MS) for each in (ms, data, host, waited, paused)))


def windows(*records_of_processes):
    return {
        i: window_of(len(records), records[-NUM_RECORDS:])
        for i, records in enumerate(records_of_processes)
    }


def lines_of(steps_of_processes, every=1):
    """All that is said while the processes make these steps, with the number of the step."""
    slow, said = SlowProcesses(), []
    for end in range(1, len(steps_of_processes[0]) + 1, every):
        for process, (_, line) in slow.poll(
            windows(*(steps[:end] for steps in steps_of_processes))
        ).items():
            said.append((end, process, line))
    return said


def with_slow(process, size, late_ms, part="compute", knows_waits=True):
    """A step of all processes, of which one is late. Each step of the others takes 20 ms."""
    own = {"compute": {}, "host": {"host": late_ms + 0.5}}
    own |= {name: {name: late_ms} for name in ("data", "paused")}
    slow = step(20 + late_ms, **own[part])
    usual = step(20 + late_ms, waited=late_ms if knows_waits else 0.0)
    return [slow if i == process else usual for i in range(size)]


@pytest.mark.parametrize("late_ms", [4.0, 20.0])  # 1.2 and 2 times as slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("size", "process"), [(2, 0), (2, 1), (3, 1), (8, 7)])
def test_a_slow_process_is_named_with_its_part_and_its_cost(size, process, part, late_ms):
    steps = [*zip(*[with_slow(process, size, late_ms, part)] * NUM_RECORDS, strict=True)]
    found = Comparison(windows(*steps)).slow()
    assert list(found) == [process]
    slow = found[process]
    assert slow.part == part
    assert slow.share == pytest.approx(late_ms / (20 + late_ms))
    assert slow.own_us - slow.usual_us == late_ms * 1000


@pytest.mark.parametrize("part", ["data", "host", "paused"])
@pytest.mark.parametrize(("size", "process"), [(2, 0), (3, 2), (8, 3)])
def test_without_known_waits_idle_devices_name_a_process(size, process, part):
    one = with_slow(process, size, 4.0, part, knows_waits=False)
    found = Comparison(windows(*[[each] * NUM_RECORDS for each in one])).slow()
    assert {i: (it.part, it.cost_us) for i, it in found.items()} == {process: (part, 4000)}


def test_without_known_waits_a_slow_computation_cannot_be_seen():
    one = with_slow(1, 2, 20.0, knows_waits=False)
    assert Comparison(windows(*[[each] * NUM_RECORDS for each in one])).slow() == {}


# The others wait for it in a collective of XLA's, and then a little in those of jdp's library.
@pytest.mark.parametrize("part", ["data", "host", "paused"])
def test_in_mixed_steps_idle_devices_name_a_process(part):
    one = [it._replace(num_in_xla=1, waited_ns=MS // 5) for it in with_slow(1, 3, 4.0, part)]
    found = Comparison(windows(*[[each] * NUM_RECORDS for each in one])).slow()
    assert {i: (it.part, it.cost_us) for i, it in found.items()} == {1: (part, 4000)}
    one = [each._replace(num_in_xla=0) for each in one]
    assert Comparison(windows(*[[each] * NUM_RECORDS for each in one])).slow() == {}


def test_in_mixed_steps_waits_name_a_process_that_computes_longer():
    one = [each._replace(num_in_xla=1) for each in with_slow(2, 3, 4.0)]
    found = Comparison(windows(*[[each] * NUM_RECORDS for each in one])).slow()
    assert {i: (it.part, it.cost_us) for i, it in found.items()} == {2: ("compute", 4000)}


def test_two_slow_processes_of_eight_are_both_named():
    one = [step(24.0, waited=0.0 if i in (2, 5) else 4.0) for i in range(8)]
    found = Comparison(windows(*[[each] * NUM_RECORDS for each in one])).slow()
    assert {i: it.cost_us for i, it in found.items()} == {2: 4000, 5: 4000}


@pytest.mark.parametrize(
    ("step_ms", "late_ms", "is_named"),
    [(20, 1.0, True), (20, 0.99, False), (100, 5.0, True), (100, 4.99, False), (2, 0.99, False)],
)
def test_a_cost_counts_from_5_percent_and_from_1_ms(step_ms, late_ms, is_named):
    steps = [step(step_ms)] * NUM_RECORDS, [step(step_ms, waited=late_ms)] * NUM_RECORDS
    assert bool(Comparison(windows(*steps)).slow()) == is_named


@pytest.mark.parametrize(("num_late", "is_named"), [(23, True), (22, False)])
def test_it_takes_nearly_all_steps_of_a_window(num_late, is_named):
    # In the other steps the other process is late.
    first = [step()] * num_late + [step(waited=4.0)] * (NUM_RECORDS - num_late)
    second = [step(waited=4.0)] * num_late + [step()] * (NUM_RECORDS - num_late)
    assert bool(Comparison(windows(first, second)).slow()) == is_named


def test_nothing_is_said_before_every_process_has_a_full_window():
    one = with_slow(0, 2, 20.0)
    said = lines_of([[each] * 40 for each in one])
    assert [(end, process) for end, process, _ in said] == [(NUM_RECORDS, 0)]
    assert lines_of([[one[0]] * 24, [one[1]] * 24]) == []


def test_a_process_that_becomes_slow_is_named_within_30_steps_and_when_it_is_over():
    even, late = with_slow(0, 2, 0.0), with_slow(1, 2, 4.0, "data")
    steps = [[even[i]] * 100 + [late[i]] * 100 + [even[i]] * 100 for i in range(2)]
    (begin, process, line), (end, again, last) = lines_of(steps)
    assert process == again == 1
    assert begin == 123
    assert 200 < end <= 223
    assert "process 1 is slow" in line
    assert "17% of each step" in line
    assert "(4.0 of 24.0 ms" in line
    assert "input: 4.0 ms of a step, 0.0 ms on the others" in line
    assert "0% of each step" in last


def test_a_cost_or_a_part_that_changes_is_said_once():
    phases = [(4.0, "data"), (5.0, "data"), (12.0, "data"), (12.0, "host")]
    one = [with_slow(1, 3, *phase) for phase in phases]
    steps = [[each[i] for each in one for _ in range(100)] for i in range(3)]
    said = lines_of(steps)
    assert [end // 100 for end, _, _ in said] == [0, 2, 3]
    assert ["17%" in said[0][2], "38%" in said[1][2], "host" in said[2][2]] == [True] * 3


# Late by 4 ms in each step, in its input, on its host and in its computation in turn.
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_process_that_is_late_in_all_parts_in_turn_loses_the_time_in_several(size):
    turns = [with_slow(size - 1, size, 4.0, part) for part in PARTS]
    steps = [[turns[n % 4][i] for n in range(100)] for i in range(size)]
    ((end, process, line),) = lines_of(steps)
    assert (end, process) == (NUM_RECORDS, size - 1)
    assert "several" in line and "24.0 ms of a step, 20.0 ms on the others" in line
    slow = Comparison(windows(*steps)).slow()[process]
    assert (slow.part, slow.cost_us, slow.own_us, slow.usual_us) == (SEVERAL, 4000, 24000, 20000)


def test_of_several_parts_the_one_that_begins_to_dominate_is_said_once():
    turns = [with_slow(1, 2, 4.0, part) for part in PARTS]
    steps = [
        [turns[n % 4][i] for n in range(100)]
        + [turns[0][i] for n in range(100)]
        + [turns[n % 4][i] for n in range(100)]
        for i in range(2)
    ]
    first, second = lines_of(steps)
    assert ("several" in first[2], "input" in second[2], second[0] // 100) == (True, True, 1)


# By threes: the last processes of a step take turns, as on a machine with equal noise on all.
@pytest.mark.parametrize("turn", [1, 3, 10])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_processes_that_are_late_in_turns_are_not_named(size, turn):
    steps = [
        [step(24.0, waited=0.0 if n // turn % size == i else 4.0) for n in range(1000)]
        for i in range(size)
    ]
    assert lines_of(steps, every=7) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [2, 3, 8])
def test_1000_steps_with_heavy_tails_and_no_slow_process_give_no_alarm(size, seed):
    rng = random.Random(seed)
    steps = [[] for _ in range(size)]
    for _ in range(1000):
        late = [min(0.5 * rng.paretovariate(1.1), 2000) for _ in range(size)]
        for i, each in enumerate(late):
            # Of odd seeds: late in their input, and also in collectives of XLA's.
            one = step(20 + max(late), waited=max(late) - each, data=each * (seed % 2))
            steps[i].append(one._replace(num_in_xla=seed % 2))
    assert lines_of(steps, every=3) == []


@pytest.mark.parametrize("in_xla", [0, 1])
def test_what_was_recorded_on_a_busy_machine_gives_no_alarm(in_xla):
    steps = [
        [recorded(i, n)._replace(num_in_xla=in_xla) for n in range(len(NOISE[0]))] for i in range(3)
    ]
    assert len(steps[0]) > 2 * NUM_RECORDS
    assert lines_of(steps) == []


# In each record of the slow process, a half of what the others take; the others wait for it.
def test_a_slow_process_is_found_in_what_was_recorded_on_a_busy_machine():
    steps = [[recorded(i, n) for n in range(len(NOISE[0]))] for i in range(3)]
    for i in (0, 2):
        steps[i] = [
            it._replace(step_ns=it.step_ns * 2, waited_ns=it.waited_ns + it.step_ns)
            for it in steps[i]
        ]
    steps[1] = [it._replace(step_ns=it.step_ns * 2) for it in steps[1]]
    said = lines_of(steps)
    assert {process for _, process, _ in said} == {1}
    assert "computation" in said[0][2]


def test_windows_are_compared_once_all_processes_have_sent_one():
    said, written = [], []
    watch = ProgressWatch(
        2, 600.0, said.append, lambda event, **facts: written.append((event, facts))
    )
    one = windows(*[[each] * NUM_RECORDS for each in with_slow(1, 2, 20.0)])
    for process in (1, 0):
        assert said == []
        watch.record_windows({str(process): [*one[process]]})
        watch.poll(0.0, {})
    watch.poll(0.0, {})
    assert len(said) == 1
    ((event, facts),) = written
    assert (event, facts["process_id"], facts["part"]) == ("slow", 1, "compute")
    assert facts["share"] == pytest.approx(0.5)
