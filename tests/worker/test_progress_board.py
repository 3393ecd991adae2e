import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from support.threads import wait_until

from jdp.worker.hang_detector import HangDetector
from jdp.worker.process_status import BEFORE, STEP, ProcessStatus
from jdp.worker.progress_board import Board, record


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
def test_a_board_has_the_slots_that_it_was_made_for_all_empty(num_slots):
    board = Board.create(num_slots)
    assert board.num_slots == num_slots
    for i in range(num_slots):
        assert board.slot(i).read() == ProcessStatus(pid=0, timeout_s=0.0)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_slot_that_does_not_exist_is_an_error(index):
    with pytest.raises(IndexError, match=f"{index}.*2"):
        Board.create(2).slot(index)


def test_what_was_written_last_is_read():
    slot = Board.create(3).slot(1)
    slot.claim(generation=4, timeout_s=20.0)
    since_ns = slot.enter(record("saving", 12.5))
    slot.write_step(7, time.monotonic_ns(), since_ns, record("saving", 12.5))
    where = slot.read()
    assert where._replace(progress_s=0.0) == ProcessStatus(
        pid=os.getpid(),
        generation=4,
        steps=7,
        phase="saving",
        since_s=since_ns / 1e9,
        limit_s=12.5,
        timeout_s=20.0,
    )
    assert where.since_s <= where.progress_s <= time.monotonic()


def test_neighbours_do_not_touch_each_other():
    board = Board.create(3)
    for i in range(3):
        board.slot(i).claim(generation=i, timeout_s=1.0)
        board.slot(i).enter(record("x" * 100))
        board.slot(i).write_seen(is_running=True, is_debugged=True)
    assert [board.slot(i).read().generation for i in range(3)] == [0, 1, 2]
    board.slot(1).clear()
    assert [board.slot(i).read().pid for i in range(3)] == [os.getpid(), 0, os.getpid()]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("", ""), ("a" * 65, "a" * 64), ("é" * 33, "é" * 32), ("x" + "é" * 33, "x" + "é" * 31)],
)
def test_a_name_is_cut_to_64_bytes_between_characters(name, kept):
    slot = Board.create(1).slot(0)
    slot.enter(record(name))
    assert slot.read().phase == kept


def test_an_outer_phase_goes_on_since_it_began():
    slot = Board.create(1).slot(0)
    since_ns = slot.enter(record("evaluating"))
    slot.enter(record("compiling"))
    slot.enter(record("evaluating"), since_ns)
    where = slot.read()
    assert (where.phase, where.since_s) == ("evaluating", since_ns / 1e9)
    assert where.progress_s > where.since_s


def test_a_process_is_expected_until_it_begins():
    slot = Board.create(1).slot(0)
    slot.expect(pid=os.getpid(), generation=2)
    where = slot.read()
    assert (where.pid, where.generation, where.phase) == (os.getpid(), 2, BEFORE)
    assert 0 < where.progress_s == where.since_s and where.timeout_s == 600.0
    slot.claim(generation=2, timeout_s=7.0)
    slot.enter(record("starting"))
    assert (slot.read().phase, slot.read().timeout_s) == ("starting", 7.0)


def test_a_process_that_begins_in_a_slot_forgets_who_had_it():
    slot = Board.create(1).slot(0)
    slot.write_step(7, 1, 1, record("x"))
    slot.write_seen(is_running=True, is_debugged=True)
    slot.claim(generation=1, timeout_s=1.0)
    where = slot.read()
    assert (where.steps, where.is_running, where.state) == (0, False, "")


CHILD = """
import sys, time
from jdp.worker.progress_board import Board, record
slot = Board.attach(int(sys.argv[1])).slot(1)
slot.claim(generation=2, timeout_s=3.0)
for step in range(1, 5001):
    slot.write_step(step, step, step, record("odd" if step % 2 else "even", float(step % 2)))
print("written", flush=True)
time.sleep(60)
"""


@pytest.fixture
def child():
    board = Board.create(2)
    arguments = [sys.executable, "-c", CHILD, str(board.fd)]
    process = subprocess.Popen(
        arguments,
        pass_fds=[board.fd],
        stdout=subprocess.PIPE,
        cwd=pathlib.Path(__file__).parents[2],
    )
    yield process, board.slot(1)
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_process_is_read_while_it_writes_and_nothing_is_half_written(child):
    process, slot = child
    while (where := slot.read()).steps < 5000:
        if where.phase:
            assert (where.phase, where.limit_s) in [("odd", 1.0), ("even", 0.0)]
    assert (where.pid, where.generation) == (process.pid, 2)


def test_what_is_written_while_it_is_read_is_read_again():
    slot = Board.create(1).slot(0)
    slot.enter(record("before"))
    before = bytes(slot.memory)
    slot.enter(record("after"))
    after = bytes(slot.memory)

    class Changing:
        reads = iter([before, after[:60] + before[60:], after, after])

        def __bytes__(self):
            return next(self.reads)

    slot.memory = Changing()
    assert slot.read().phase == "after"


# As struct does it, and in any pieces.
@pytest.mark.parametrize("num_cleared", range(0, 97, 8))
def test_a_process_that_is_stopped_while_it_writes_is_not_taken_for_one_that_hangs(num_cleared):
    slot = Board.create(1).slot(0)
    slot.claim(generation=0, timeout_s=600.0)
    slot.enter(record(STEP))
    slot.memory[24 : 24 + num_cleared] = bytes(num_cleared)
    assert HangDetector().poll(time.monotonic(), {0: slot.read()}) is None


def test_the_state_of_a_process_is_seen_and_its_words_outlive_it(child):
    process, slot = child
    assert process.stdout.readline() == b"written\n"
    assert slot.read().state == ""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: slot.read().state == "stopped")
    process.kill()
    process.wait()
    where = slot.read()
    assert (where.state, where.steps, where.phase) == ("gone", 5000, "even")


def test_a_debugger_is_a_state_whatever_the_system_says():
    slot = Board.create(1).slot(0)
    slot.claim(generation=0, timeout_s=1.0)
    slot.write_seen(is_running=False, is_debugged=True)
    assert slot.read().state == "debugged"


def test_numbers_lie_where_the_native_library_writes_them():
    board = Board.create(2)
    board.slot(1).memory[128:160] = b"".join(
        number.to_bytes(8, sys.byteorder) for number in (1284, 1283, 3, 55)
    )
    assert board.slot(1).read()[8:11] == (1284, 1283, 3)
    assert board.slot(1).waited_ns() == 55
    assert board.slot(0).waited_ns() == 0


def test_a_host_can_put_times_on_its_own_clock():
    there = ProcessStatus(1, progress_s=10.0, since_s=9.0)
    assert there.moved(5.0) == ProcessStatus(1, progress_s=15.0, since_s=14.0)
