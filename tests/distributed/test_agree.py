"""Values and errors that processes exchange."""

import contextlib

import jax
import numpy as np
import optax
import pytest

import jdp
from jdp.distributed import agree

GROUP = (0, 1)


def gathered(value):
    return agree.all_gather(GROUP, value, what="a test")


def shown(fn):
    try:
        return fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fail_after_gathering(num_contexts, num_gathered):
    def fail():
        with contextlib.ExitStack() as contexts:
            for i in range(num_contexts):
                contexts.enter_context(agree.propagating_errors(GROUP, f"in context {i}"))
            for i in range(num_gathered):
                assert gathered(i) == {0: i, 1: i}
            if jax.process_index() == 1:
                raise KeyError("only here")
        return gathered("after")

    # The next values must meet: both have reported and gathered equally often.
    return shown(fail), gathered(jax.process_index())


def gather_a_set_in_one_process():
    value = {1} if jax.process_index() == 1 else 1

    def gather():
        with agree.propagating_errors(GROUP, "in a test"):
            return gathered(value)

    return shown(gather), gathered(jax.process_index())


def test_a_value_that_json_cannot_hold_leaves_the_later_values_in_step(processes):
    (waiting, later), (failed, also_later) = processes(2).run(gather_a_set_in_one_process)
    assert failed.startswith("TypeError") and "JDP208" in waiting
    assert later == also_later == {0: 0, 1: 1}


@pytest.mark.parametrize("num_contexts", [1, 2, 3])
@pytest.mark.parametrize("num_gathered", [0, 1, 3])
def test_an_error_is_reported_once_whatever_was_gathered_before_it(
    processes, num_contexts, num_gathered
):
    answers = processes(2).run(fail_after_gathering, num_contexts, num_gathered)
    (waiting, later), (failed, _) = answers
    assert failed == "KeyError: 'only here'"
    assert waiting.startswith("OtherFailedError: process 1 ") and "JDP208" in waiting
    assert "in context" in waiting and failed in waiting
    assert later == {0: 0, 1: 1} == answers[1][1]


def fail_on_both():
    def fail():
        with agree.propagating_errors(GROUP, "while it tried"):
            raise ValueError(gathered("both"))

    return shown(fail), gathered(jax.process_index())


def test_an_error_that_all_have_stays_everyones_own(processes):
    for failed, later in processes(2).run(fail_on_both):
        assert failed == "ValueError: {0: 'both', 1: 'both'}" and later == {0: 0, 1: 1}


def come_late():
    def late():
        with agree.propagating_errors(GROUP, "while it waited"):
            return gathered("first")

    if jax.process_index() == 1:
        agree.kv_store.get("jdp/tests/never", timeout_s=1.0)
        first = shown(late)
        return first, shown(lambda: gathered("second"))
    agree.set_timeout_s(0.2)
    try:
        return shown(late), None
    finally:
        agree.set_timeout_s(300.0)


def test_a_process_that_comes_late_learns_that_the_others_gave_up(processes):
    (gave_up, _), (first, second) = processes(2).run(come_late)
    assert gave_up.startswith("RuntimeError: process 1 ") and "0.2 s" in gave_up
    assert "JDP207" in gave_up
    assert first == {0: "first", 1: "first"}
    assert second.startswith("OtherFailedError: process 0 ") and gave_up in second


def compare_different_things():
    def compare():
        with agree.propagating_errors(GROUP, "while it tried"):
            agree.all_gather(GROUP, 1, what=["a program", "a state"][jax.process_index()])

    return shown(compare), gathered(jax.process_index())


def test_processes_that_compare_different_things_learn_so_at_once(processes):
    for me, (error, later) in enumerate(processes(2).run(compare_different_things)):
        assert f"process {1 - me} " in error and f"process {me} " in error and "JDP207" in error
        assert later == {0: 0, 1: 1}


def come_to_different_places():
    """What process 1 compares: first batches; what process 0 does: a state, then bits of one."""
    mesh = jdp.init()

    def load():
        return next(iter(jdp.shard_batches([np.ones(4)])))

    def check():
        return jdp.check_replicas({"w": np.ones(2)})

    def create():
        return jdp.TrainState.create({"w": np.ones(2)}, jdp.replicated(optax.sgd(0.1)))

    me, group = jax.process_index(), agree.peers(mesh)
    found = [shown(load if me else other) for other in (check, create)]
    return found, agree.all_gather(group, me, what="the end")


def test_processes_at_different_places_name_both_places(processes):
    for errors, later in processes(2).run(come_to_different_places):
        assert all("process 0 " in error and "process 1 " in error for error in errors)
        assert all("JDP207" in error and "first batches" in error for error in errors), errors
        assert later == {0: 0, 1: 1}


def test_an_error_stays_itself_where_the_store_is_gone(monkeypatch):
    def put(key, value):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(agree.kv_store, "put", put)
    with pytest.raises(KeyError), agree.propagating_errors((0, 98), "while it tried"):
        raise KeyError
