"""Which processes share a host, and what they reduce through."""

import json
import logging
import os
import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.namespaces import two_hosts, why_no_namespaces
from support.processes import ProcessError, Processes
from support.training import assert_close, batch, loss_fn, state

import jdp
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu import shared_memory

needs_library = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


def mesh_of_all(names=("data",), shape=(4,), in_turn=False):
    """Of two devices of each process; with `in_turn` neighbours are of different processes."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if in_turn:
        devices = [devices[i] for i in (0, 2, 1, 3)]
    return Mesh(np.array(devices).reshape(shape), names)


def sums(mesh, axes, all_reduce):
    """Each rank's sum over `axes` of 10^its position, which tells who is in it."""

    def fn():
        mine = 10.0 ** jax.lax.axis_index(mesh.axis_names)
        [[small, large]] = all_reduce(
            [[mine, np.full(300_001, 1, "float32") * mine]], axes, mesh=mesh
        )
        return (small + 0 * large.max())[None], large.min()[None]

    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=(), out_specs=P(mesh.axis_names), check_vma=False
    )
    return [
        {s.index[0].start or 0: float(s.data[0]) for s in result.addressable_shards}
        for result in jax.jit(mapped)()
    ]


def reduce_over(names, shape, axes, in_turn, algorithm):
    mesh = mesh_of_all(names, shape, in_turn)

    def all_reduce(*args, **kwargs):
        return jdp.collectives.native(*args, algorithm=algorithm, **kwargs)

    return sums(mesh, axes, all_reduce), shared_memory.communicator(mesh, axes)


@needs_library
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize(
    "names, shape, axes, in_turn, groups, is_shared",
    [
        (("data",), (4,), ("data",), False, [1111] * 4, True),
        (("data",), (4,), ("data",), True, [1111] * 4, True),
        # Rows of the mesh are processes, and then its columns.
        (("data", "model"), (2, 2), ("model",), False, [11, 11, 1100, 1100], False),
        (("data", "model"), (2, 2), ("data",), False, [101, 1010, 101, 1010], True),
        (("data", "model"), (2, 2), ("model",), True, [11, 11, 1100, 1100], True),
    ],
)
def test_reduces_within_and_across_processes(
    processes, names, shape, axes, in_turn, groups, is_shared, algorithm
):
    answers = processes(2).run(reduce_over, names, shape, axes, in_turn, algorithm)
    for index in (0, 1):
        found = {}
        for results, communicator in answers:
            found |= results[index]
            assert bool(communicator) == is_shared
        assert [found[rank] for rank in range(4)] == groups


# One step: the parameters, and the log lines about the default reduction.


def global_batch(i=0):
    where = NamedSharding(mesh_of_all(), P("data"))

    def placed(x):
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(placed, batch(i))


def step_with_auto():
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("jdp").addHandler(handler)
    logging.getLogger("jdp").setLevel(logging.INFO)
    jdp.init(mesh_of_all())

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    s, _ = step(state(), global_batch())
    return training.fetched(s.params), told


@pytest.mark.processes
def test_on_two_hosts_auto_takes_xla_and_logs_the_reason_once():
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with two_hosts() as within:
        children = Processes(2, address="10.83.0.1", within=within)
        try:
            answers = children.run(step_with_auto, timeout_s=90)
        finally:
            children.close()
    training.ranks(4)
    want, _ = jdp.train_step(training.plain_step)(state(), batch())
    for params, told in answers:
        assert_close(params, training.fetched(want.params))
        assert len(told) == 1 and re.search("process . .*host.* process .", told[0])


@needs_library
def test_on_one_host_auto_takes_native(processes):
    for _, told in processes(2).run(step_with_auto):
        # Logged once, in the test that came first.
        assert not told or "(collectives.native)" in told[0]


# A rank that is missing


def train_until(what, timeout_s, donate, folder):
    """Train two steps; then process 1 does not come, and process 0 tells how that ends."""
    cpu_runtime.set_timeout_s(timeout_s)
    jdp.init(mesh_of_all())

    @jdp.train_step(donate=donate)
    def step(state, batch):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, batch)), {}

    s = state()
    for i in range(2):
        s, _ = step(s, global_batch(i))
    before, rest = training.fetched(s.params), global_batch(2)
    if jax.process_index() == 1:
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(timeout_s + 2)
        return
    started, error = time.monotonic(), None
    try:
        for _ in range(10):  # more than there may be in flight
            lost, _ = step(s, rest)
            s = lost if donate else s
    except RuntimeError as failure:
        error = f"{failure}; {failure.__cause__}"
    took_s = time.monotonic() - started
    is_whole = donate or all(
        map(np.array_equal, *map(jax.tree.leaves, (before, training.fetched(s.params))))
    )
    (folder / "end.json").write_text(json.dumps([error, took_s, is_whole]))


@needs_library
@pytest.mark.processes
@pytest.mark.parametrize(
    "what, timeout_s, donate", [("sleeps", 2, False), ("dies", 60, False), ("dies", 60, True)]
)
def test_a_rank_that_is_missing_ends_the_wait_by_name(what, timeout_s, donate, tmp_path):
    children = Processes(2)
    try:
        children.run(train_until, what, timeout_s, donate, tmp_path)
    except ProcessError:
        assert what == "dies"
    finally:
        children.close()
    error, took_s, is_whole = json.loads((tmp_path / "end.json").read_text())
    assert "rank 0" in error or "rank 1" in error  # who waited
    assert "2, 3" in error or "rank 2" in error  # for whom
    assert "DEADLINE_EXCEEDED" in error and ("has ended" in error) == (what == "dies")
    assert ("donate=False" in error) == donate and is_whole
    assert took_s < (10 if what == "dies" else timeout_s + 2)
    assert not list(Path("/dev/shm").glob("*jdp*"))


# All must learn what one process lacks, or they would wait for it.


def auto_where_process_1_has(what):
    function = {"no library": "why_missing", "no memory": "create_segment"}[what]
    if jax.process_index() == (1 if what == "no library" else 0):

        def fail(*args):
            raise OSError("no memory left")

        setattr(cpu_runtime, function, fail if what == "no memory" else lambda: "it was not built.")
    return step_with_auto()


@needs_library
@pytest.mark.processes
@pytest.mark.parametrize("what", ["no library", "no memory"])
def test_what_one_process_lacks_is_a_reason_for_all(what):
    children = Processes(2)
    try:
        answers = children.run(auto_where_process_1_has, what)
    finally:
        children.close()
    for _, told in answers:
        [line] = told
        assert "collectives.xla" in line
        assert {"no library": "it was not built", "no memory": "no memory left"}[what] in line


def open_memory_that_cannot_be_looked_for():
    def fail():
        raise FileNotFoundError("no /proc/self/ns here")

    mesh, started, told = mesh_of_all(("data", "unseen"), (4, 1)), time.monotonic(), None
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(shared_memory, "own_host", fail)
        try:
            shared_memory.why_apart(mesh, ("data",))
        except (OSError, RuntimeError) as error:
            told = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - started
    return told, took_s, shared_memory.why_apart(mesh, ("data",))


@needs_library
def test_an_error_while_memory_is_opened_ends_the_wait_of_all_and_it_can_be_opened_later(processes):
    (waiting, took_s, then), (failed, _, _) = processes(2).run(
        open_memory_that_cannot_be_looked_for
    )
    assert failed == "FileNotFoundError: no /proc/self/ns here" and then is None
    assert waiting.startswith("OtherFailedError: process 1 ") and "JDP208" in waiting
    assert failed in waiting and took_s < 10


def train_where_process_1_fails_after_memory_was_opened():
    jdp.init(mesh_of_all())

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        state = state.apply_gradients(grads)
        if jax.process_index() == 1:
            raise KeyError("a name that only process 1 lacks")
        return state, {"loss": loss}

    shared_memory._shared.cache_clear()  # other tests may have opened it
    try:
        step(state(), global_batch())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@needs_library
def test_a_trace_that_fails_after_memory_was_opened_ends_the_wait_of_all(processes):
    waiting, failed = processes(2).run(train_where_process_1_fails_after_memory_was_opened)
    assert failed == "KeyError: 'a name that only process 1 lacks'"
    assert waiting.startswith("OtherFailedError: process 1 ") and "`step`" in waiting
    assert failed in waiting
