from queue import SimpleQueue

import pytest

from jdp.worker import progress_board
from jdp.worker.progress import DispatchedStep, HostWaits, StepClock
from jdp.worker.progress_board import NUM_RECORDS, Board, StepRecord, window_of

MS = 1_000_000


@pytest.mark.parametrize("num_written", [0, 1, 24, 25, 26, 27, 28, 100])
def test_the_latest_records_are_read_in_order(num_written):
    board = Board.create(2)
    for i in range(num_written):
        board.slot(0).times.write(StepRecord(1, i))
    last = range(max(0, num_written - NUM_RECORDS), num_written)
    assert [it.step_ns for it in board.slot(0).times.latest()] == [*last]
    assert board.slot(0).times.num_written == num_written
    assert board.slot(1).times.latest() == []


def test_a_new_process_has_no_records():
    slot = Board.create(1).slot(0)
    slot.times.write(StepRecord(1, 5))
    slot.claim(generation=1, timeout_s=1.0)
    assert slot.times.latest() == []
    slot.times.write(StepRecord(1, 5))
    slot.clear()
    assert slot.times.latest() == []


def test_records_that_are_overwritten_while_they_are_read_are_left_out(monkeypatch):
    times = Board.create(1).slot(0).times
    for i in range(40):
        times.write(StepRecord(1, i))
    place, has_written = progress_board._place, []

    def slow_place(number):
        if not has_written:
            has_written.append(True)
            for i in range(40, 45):
                times.write(StepRecord(1, i))
        return place(number)

    monkeypatch.setattr(progress_board, "_place", slow_place)
    seen = [it.step_ns for it in times.latest()]
    assert seen == [*range(19, 40)]  # 15 to 17 are gone, and 18 may be half written


@pytest.mark.parametrize("num_odd", [0, 2, 3])
def test_few_steps_change_no_number_of_a_window(num_odd):
    usual = StepRecord(2, 40 * MS, data_ns=4 * MS, host_ns=2 * MS, waited_ns=10 * MS)
    odd = StepRecord(1, 5000 * MS, 9 * MS, 1000 * MS, 3000 * MS)
    window = window_of(7, [usual] * (NUM_RECORDS - num_odd) + [odd] * num_odd)
    assert window[:8] == (7, 25, 20000, 2000, 1000, 0, 12000, 5000)
    assert (window.waited_low, window.idle, window.idle_low) == (5000, 3000, 3000)
    assert (window.waited_high, window.idle_high) == (
        (5000, 3000) if num_odd < 3 else (3_000_000, 1_009_000)
    )


@pytest.fixture
def clock():
    clock = StepClock(Board.create(1).slot(0))
    yield clock
    clock.stop_clock()


def records_of(clock, *calls):
    for call, end, waited in calls:
        clock.record_end(call, end * MS, waited * MS)
    return clock._slot.times.latest()


def call(dispatched, *data, others=(), paused=(), is_counted=True, waits_in_xla=False):
    kinds = [[(begin * MS, end * MS) for begin, end in each] for each in (data, others, paused)]
    return DispatchedStep(None, dispatched * MS, HostWaits(*kinds), is_counted, waits_in_xla)


def test_the_time_between_two_ends_is_the_sum_of_its_parts(clock):
    first = call(5), 100, 7
    # Its devices were done at 100; the batch came at 120, and the step was dispatched at 130.
    second = call(130, (90, 120)), 170, 20
    assert records_of(clock, first, second) == [StepRecord(1, 70 * MS, 20 * MS, 10 * MS, 13 * MS)]


def test_what_happens_while_the_devices_run_costs_nothing(clock):
    first, second = (call(5), 100, 0), (call(90, (10, 20), (60, 85)), 140, 0)
    assert records_of(clock, first, second) == [StepRecord(1, 40 * MS, 0, 0, 0)]


def test_several_waits_for_batches_before_a_step_add_up(clock):
    first, second = (call(5), 100, 0), (call(130, (95, 105), (110, 120)), 140, 0)
    assert records_of(clock, first, second) == [StepRecord(1, 40 * MS, 15 * MS, 15 * MS, 0)]


def test_a_step_does_not_wait_longer_than_it_runs(clock):
    # Two collectives of it may wait at the same time.
    first, second = (call(5), 100, 0), (call(90), 140, 70)
    assert records_of(clock, first, second) == [StepRecord(1, 40 * MS, 0, 0, 40 * MS)]


@pytest.mark.parametrize("own, waited", [(0, 38), (15, 25), (39, 1), (60, 0)])
def test_a_process_that_is_ahead_waits_only_for_longer_than_its_host_takes(clock, own, waited):
    second = call(90)._replace(own_ns=own * MS)
    parts = StepRecord(1, 40 * MS, 0, host_ns=(38 - waited) * MS, waited_ns=waited * MS)
    assert records_of(clock, (call(5), 100, 0), (second, 140, 38)) == [parts]


def test_a_process_that_reads_the_metrics_of_the_step_before_waits_for_it(clock):
    steps = [(call(20 * i + 0.1), 20 * (i + 2), 20 * i) for i in range(6)]  # reads until 20 * i
    steps = [(it._replace(own_ns=20 * MS), *rest) for it, *rest in steps]
    records = records_of(clock, *steps)
    assert records[-1].waited_ns == records[-1].step_ns == 40 * MS


def test_the_time_of_a_host_between_dispatches_leaves_out_its_waits_for_steps(clock, monkeypatch):
    now, puts = [100 * MS], []
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    monkeypatch.setattr(clock, "_calls", type("Calls", (), {"put": lambda _, x: puts.append(x)})())
    for blocked in (0, 7):
        clock.begin_dispatch()
        clock.end_dispatch(None)
        since, now[0] = now[0], now[0] + blocked * MS
        clock.add_blocked(since)
        now[0] += 20 * MS
    clock.begin_dispatch()
    clock.end_dispatch(None)
    assert [each.own_ns for each in puts[1:]] == [20 * MS, 20 * MS]


def test_short_steps_share_a_record(clock):
    steps = [(call(10 * i), 10 * i + 5, i) for i in range(6)]
    assert records_of(clock, *steps) == [StepRecord(4, 40 * MS, 0, 20 * MS, 4 * MS)]


def test_steps_after_a_save_or_a_compilation_are_left_out(clock):
    saved = call(400, is_counted=False), 500, 5
    steps = (call(5), 100, 0), saved, (call(450), 540, 5)
    assert records_of(clock, *steps) == [StepRecord(1, 40 * MS, 0, 0, 0)]


def test_pauses_and_waits_between_steps_are_parts_of_their_own(clock):
    first = call(5), 100, 0
    # At 110 the process saved: until 150, and it waited for the others from 120 to 130.
    second = call(160, (90, 105), others=[(120, 130)], paused=[(110, 150)]), 200, 4
    assert records_of(clock, first, second) == [
        StepRecord(1, 100 * MS, 5 * MS, 15 * MS, waited_ns=14 * MS, paused_ns=30 * MS)
    ]


def test_a_copy_of_the_state_before_a_step_is_a_pause(clock):
    records_of(clock, (call(5), 100, 0))
    clock.record_copy(115 * MS)
    # The step after the next does not wait for that copy.
    later = (call(101), 150, 0), (call(102), 190, 0)
    assert records_of(clock, *later) == [
        StepRecord(1, 50 * MS, host_ns=1 * MS, paused_ns=14 * MS),
        StepRecord(1, 40 * MS),
    ]


def test_waits_of_a_loop_without_steps_do_not_pile_up(clock):
    for i in range(2000):
        clock.add_data_wait(i, i + 1)
        clock.add_pause(i, i + 1)
    assert [len(each) for each in clock._waits] == [1000, 0, 1000]
    clock.end_dispatch(Output())
    clock.add_data_wait(0, 1)
    assert [len(each) for each in clock._waits] == [1, 0, 0]


def test_steps_that_wait_in_xla_are_counted(clock):
    steps = [(call(10 * i, waits_in_xla=i > 2), 10 * i, 0) for i in range(1, 6)]
    (record,) = records_of(clock, *steps)
    assert (record.num_steps, record.num_in_xla) == (4, 3)
    assert [window_of(1, [it]).knows_waits for it in (record, StepRecord(1, MS))] == [0, 1]


@pytest.mark.all_sets
@pytest.mark.parametrize(
    ("unusual", "counted"),
    [
        ("0100", [1, 0, 1, 1]),  # as after a checkpoint
        ("1111", [0, 1, 1, 1]),  # with commit_every=1
        ("0101", [1, 0, 1, 0]),
        ("0110", [1, 0, 1, 1]),
    ],
)
def test_steps_after_something_else_count_if_it_comes_before_each(unusual, counted):
    clock = StepClock(Board.create(1).slot(0))
    clock.stop_clock()
    clock._calls, clock.is_usual = SimpleQueue(), True
    for each in unusual:
        if each == "1":
            clock.is_usual = False
        clock.end_dispatch(Output())
    assert [int(clock._calls.get().is_counted) for _ in unusual] == counted


class Output:
    def block_until_ready(self):
        pass


class Deleted:
    def block_until_ready(self):
        raise RuntimeError("Array has been deleted.")


def test_an_output_that_fails_leaves_its_step_and_the_next_out():
    slot = Board.create(1).slot(0)
    clock = StepClock(slot)
    for output in (Output(), Output(), Deleted(), Output()):
        clock.begin_dispatch()
        clock.end_dispatch(output)
        clock.add_copy([output])
    clock.stop_clock(30.0)
    assert clock._sums.num_steps == 1
