"""Ctrl-C never leaves a caller with nothing but a donated state, whenever it comes."""

import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.training import ranks

import jdp
from jdp import pytrees
from jdp.distributed import in_flight
from jdp.training import step
from jdp.training.step import Step
from jdp.worker import progress

BATCH = np.ones((4, 3), np.float32)


def counting(callback=None):
    @jdp.train_step
    def step(state, batch):
        more = jdp.mean_over_ranks(batch.mean())
        if callback is not None:
            more += jax.pure_callback(callback, jax.ShapeDtypeStruct((), "float32"))
        return {"n": state["n"] + more}, {"loss": batch.mean()}

    return step


def interrupt():
    signal.raise_signal(signal.SIGINT)  # of this thread, which has it before the next line


class InterruptAt:
    """Sends a signal when the k-th function of Python is called inside of a step."""

    def __init__(self, k):
        self.left, self.is_inside = k, False

    def __call__(self, frame, event, arg):
        if event != "call":
            return
        if frame.f_code in (Step.run.__code__, step.Shield.end.__code__):
            self.is_inside = frame.f_code is Step.run.__code__
        if self.is_inside:
            self.left -= 1
            if self.left == 0:
                interrupt()


@pytest.fixture
def ignored(monkeypatch):
    """The interrupts that Python ignored, as it does what a callback of a weak reference raises."""
    ignored, report = [], sys.unraisablehook

    def look(unraisable):
        if unraisable.exc_type is KeyboardInterrupt:
            ignored.append(unraisable.object)
        else:
            report(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", look)
    return ignored


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_interrupt_at_any_call_of_python_leaves_a_state(num_ranks, ignored):
    ranks(num_ranks)
    step, state = counting(), {"n": jnp.zeros(())}
    for _ in range(3):
        state, _ = step(state, BATCH)
    ends = {"raises": 0, "returns": 0}
    for k in range(1, 10_000):
        # A copy is read: JAX 0.11.2 does not donate what NumPy looks at.
        before, look, end = float(jnp.copy(state["n"])), InterruptAt(k), "raises"
        try:
            sys.setprofile(look)
            state, _ = step(state, BATCH)
            sys.setprofile(None)
            end = "returns"
            if look.left > 0:
                break
            if not ignored:
                time.sleep(10)  # the interrupt ends it
                raise AssertionError("the interrupt was lost")
            ignored.clear()
        except KeyboardInterrupt:
            sys.setprofile(None)
        assert not pytrees.any_deleted(state), f"call {k}"
        assert float(jnp.copy(state["n"])) == before + (end == "returns")
        ends[end] += 1
    assert min(ends.values()) > 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_state_that_was_read_before_it_was_donated_counts_as_donated():
    ranks(2)
    step, state = counting(), {"n": jnp.zeros(())}
    for _ in range(2):
        old = state
        state, _ = step(state, BATCH)
        assert float(state["n"]) > 0
    assert pytrees.any_deleted(old)
    with pytest.raises(ValueError, match="donated to an earlier step"):
        step(old, BATCH)


def test_an_interrupt_that_was_put_off_comes_before_the_next_step_donates(monkeypatch):
    ranks(2)
    count, state = counting(), {"n": jnp.zeros(())}
    state, _ = count(state, BATCH)
    add = in_flight.add
    monkeypatch.setattr(in_flight, "add", lambda call: (interrupt(), add(call)))
    monkeypatch.setattr(step, "_DELAY_S", 60)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(2):
            state, _ = count(state, BATCH)
    assert float(state["n"]) == 2


def test_an_interrupt_in_the_wait_for_the_first_step_comes_behind_it(monkeypatch):
    ranks(2)
    is_running, may_end = threading.Event(), threading.Event()

    def slow():
        is_running.set()
        return np.float32(may_end.wait(30))

    def press():
        is_running.wait(30)
        interrupt()
        may_end.set()

    step, state = counting(slow), {"n": jnp.zeros(())}
    monkeypatch.setattr(progress.own, "is_first_step", True)
    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt):
        state, _ = step(state, BATCH)
        time.sleep(10)
    assert float(state["n"]) == 2


def test_without_donation_an_interrupt_comes_at_once():
    ranks(2)
    step = counting().without_donation()
    state = {"n": jnp.zeros(())}
    state, _ = step(state, BATCH)
    old = state
    sys.setprofile(InterruptAt(5))
    with pytest.raises(KeyboardInterrupt):
        state, _ = step(state, BATCH)
    sys.setprofile(None)
    assert state is old and float(state["n"]) == 1
