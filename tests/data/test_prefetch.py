"""Items are made ahead of time, at most so many, and the thread always ends."""

import gc
import itertools
import threading
import traceback

import pytest
from support.threads import running, wait_until, wait_until_none_runs

from jdp.data import prefetcher
from jdp.data.prefetcher import prefetch


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_until_none_runs()


class Counter:
    """0, 1, 2, ...; `made` of them so far, never more than `most_ahead` before `taken`."""

    def __init__(self):
        self.made = self.taken = self.most_ahead = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.made += 1
        self.most_ahead = max(self.most_ahead, self.made - self.taken)
        return self.made - 1


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_gives_all_items_in_order(depth):
    assert list(prefetch(range(7), depth)) == list(range(7))
    assert list(prefetch([], depth)) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_makes_depth_items_ahead_and_no_more(depth):
    items = Counter()
    loop = prefetch(items, depth)
    for _ in range(50):
        items.taken += 1
        next(loop)
        wait_until(lambda: items.made >= items.taken + depth)
    loop.close()
    assert items.most_ahead == depth


def test_depth_0_makes_each_item_in_the_callers_thread_when_it_is_asked_for():
    made_in = []
    loop = prefetch((made_in.append(threading.current_thread()) for _ in range(3)), 0)
    next(loop)
    assert made_in == [threading.current_thread()]
    assert not running()


def test_the_thread_starts_with_the_loop():
    loop = prefetch(Counter(), 1)
    assert not running()
    next(loop)
    assert len(running()) == 1
    loop.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_comes_after_the_items_before_it_with_its_own_traceback(depth):
    def items():
        yield 0
        yield 1
        broken_disk()

    def broken_disk():
        raise OSError("row 7 cannot be read")

    got = []
    with pytest.raises(OSError, match="row 7") as caught:
        for item in prefetch(items(), depth):
            got.append(item)
    assert got == [0, 1]
    assert "broken_disk" in [
        frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
    ]


def test_leaving_the_loop_ends_the_thread():
    for item in prefetch(Counter(), 2):
        if item == 3:
            break
    assert not running()


def test_an_exception_in_the_loop_ends_the_thread():
    def loop():
        for _ in prefetch(Counter(), 2):
            raise KeyError("in the step")

    with pytest.raises(KeyError):
        loop()
    assert not running()


def test_close_ends_the_thread_and_the_loop():
    loop = prefetch(Counter(), 2)
    next(loop)
    loop.close()
    assert not running()
    assert list(loop) == []


def test_dropping_the_loop_ends_the_thread():
    loop = prefetch(Counter(), 2)
    next(loop)
    del loop
    assert not running()


def test_garbage_collection_ends_the_thread():
    class Holder:
        pass

    holder = Holder()
    holder.me = holder  # only the garbage collector frees a cycle
    holder.loop = prefetch(Counter(), 2)
    next(holder.loop)
    del holder
    gc.collect()
    wait_until_none_runs()


def test_garbage_collection_in_its_own_thread_ends_it():
    holder = {"me": None}
    holder["me"] = holder
    collect, done = threading.Event(), threading.Event()

    def items():
        yield 0
        collect.wait()
        gc.collect()
        done.set()
        yield from itertools.count()

    holder["loop"] = prefetch(items(), 1)
    next(holder["loop"])
    gc.disable()
    try:
        del holder
        collect.set()
        wait_until(done.is_set)
    finally:
        gc.enable()
    wait_until_none_runs()


def test_close_does_not_wait_for_ever_for_an_item(monkeypatch):
    monkeypatch.setattr(prefetcher, "JOIN_TIMEOUT_S", 0.01)
    asked, answer = threading.Event(), threading.Event()

    def items():
        yield 0
        asked.set()
        answer.wait()

    loop = prefetch(items(), 1)
    next(loop)
    wait_until(asked.is_set)
    loop.close()  # returns
    assert len(running()) == 1
    answer.set()


def test_all_loops_are_asked_to_end_before_the_program_waits_for_one():
    found, began = [], threading.Barrier(3)

    def items():
        yield 0
        began.wait(10)
        found.append(
            all(producer._is_asked.wait(2) for producer in list(prefetcher.active_loops.readers))
        )

    loops = [prefetch(items(), 1) for _ in range(2)]
    for loop in loops:
        next(loop)
    began.wait(10)
    prefetcher.active_loops.end_readers()
    assert found == [True, True] and not running()


def test_items_handed_out_are_not_kept():
    class Item:
        alive = 0

        def __init__(self):
            Item.alive += 1

        def __del__(self):
            Item.alive -= 1

    loop = prefetch((Item() for _ in range(3)), 2)
    for _ in range(3):
        next(loop)
    wait_until(lambda: Item.alive == 0)
    loop.close()
