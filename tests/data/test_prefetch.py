"""Items are made ahead of time, at most so many, and the thread always ends."""

import gc
import itertools
import threading

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
