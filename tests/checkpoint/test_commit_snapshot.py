"""A commit holds the bits of the state at its step, though later steps take the state's memory."""

import os
import random
import resource
import signal
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.launched import Launcher
from support.states import bits, committed, mixed_state, needs_library, random_bits

import jdp
from jdp.checkpoint import snapshot
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.saved_leaves import describe, leaves_of, padded_bytes, unpack
from jdp.checkpoint.snapshot import CommitSnapshots
from jdp.checkpoint.state_writer import commit_writer
from jdp.checkpoint.write_plan import Finder, Share, on_devices

HERE = "test_commit_snapshot"


@pytest.fixture
def commits(file):
    return HostCommits(file, Share(0, 1))


@pytest.fixture
def memory(commits):
    return commits.shared


def commit(memory, snapshots, state):
    taken = snapshots.take_snapshot(state)
    memory.finish(taken.fetch(), {"leaves": taken.leaves})


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_a_commit_has_the_bits_of_every_leaf(mesh, memory, commits, monkeypatch, is_native):
    if not is_native:
        monkeypatch.setattr(snapshot, "takes", lambda x: False)
    state, snapshots = mixed_state(NamedSharding(mesh, PartitionSpec())), CommitSnapshots(commits)
    expected = bits(state)
    for _ in range(3):  # into either half of the memory
        commit(memory, snapshots, state)
        assert committed(memory) == expected


SPECS = [("model",), (None, "model"), ("data", "model"), (("data", "model"),), (None, None, "data")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_of_one_process_are_put_together(spec, memory, commits):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    where = NamedSharding(mesh, PartitionSpec(*spec))
    state = {
        str(dtype): jax.device_put(random_bits((8, 16, 6), dtype), where)
        for dtype in (np.float32, jnp.bfloat16, np.uint8)
    }
    narrow = (np.arange(768) % 16 - 8).astype(ml_dtypes.int4).reshape(8, 16, 6)
    state["int4"] = jax.device_put(narrow, where)
    commit(memory, CommitSnapshots(commits), state)
    assert committed(memory) == bits(state)


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_a_commit_is_taken_under_the_mesh_of_the_script(
    make_mesh, memory, commits, monkeypatch, is_native
):
    if not is_native:
        monkeypatch.setattr(snapshot, "takes", lambda x: False)
    mesh, snapshots = make_mesh(4), CommitSnapshots(commits)
    split = jax.device_put(
        np.arange(16, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data"))
    )
    state = {**mixed_state(NamedSharding(mesh, PartitionSpec())), "split": split}
    expected = bits(state)
    with jax.set_mesh(mesh), jax.transfer_guard_host_to_device("disallow"):
        assert bits(state) == expected  # a checkpoint
        for _ in range(2):
            commit(memory, snapshots, state)
            assert committed(memory) == expected


def test_commits_outlive_the_donation_of_their_states(mesh, memory, commits):
    @jax.jit
    def pattern(n):
        return [jnp.arange(size, dtype=jnp.float32) + n for size in (1_300_021, 30_011, 1)]

    def advance(state):  # long enough to be still running when its result is committed
        return jax.lax.fori_loop(0, 50, lambda i, s: [x + 1 / 64 - 1 / 64 for x in s], state)

    step = jax.jit(lambda s: [x + 1 for x in advance(s)], donate_argnums=0)
    state = jax.device_put(pattern(0), NamedSharding(mesh, PartitionSpec()))
    snapshots = CommitSnapshots(commits)
    for n in range(6):
        taken = snapshots.take_snapshot(state)
        state = step(step(state))
        memory.finish(taken.fetch(), {"leaves": taken.leaves})
        expected = {f"[{i}]": np.asarray(x).tobytes() for i, x in enumerate(pattern(2 * n))}
        assert committed(memory) == expected


def test_a_commit_waits_for_a_state_that_is_still_being_computed(memory, commits, make_mesh):
    def advance(state):
        return jax.lax.fori_loop(0, 200, lambda i, s: [x + 1 for x in s], state)

    where = NamedSharding(make_mesh(2), PartitionSpec())
    step = jax.jit(advance, donate_argnums=0)
    state = jax.device_put([np.zeros(1_000_003, np.float32)], where)
    snapshots = CommitSnapshots(commits)
    for n in range(1, 4):
        state = step(state)
        commit(memory, snapshots, state)
        found = np.frombuffer(committed(memory)["[0]"], np.float32)
        np.testing.assert_array_equal(found, 200 * n)


@needs_library
def test_nothing_is_copied_on_cpu_devices_but_narrow_integers(mesh, memory, commits):
    state, snapshots = mixed_state(NamedSharding(mesh, PartitionSpec())), CommitSnapshots(commits)
    snapshots.reservation(state, (), here=True)()
    for _ in range(2):
        commit(memory, snapshots, state)
        spare = [x for copies in snapshots._copies._spare.values() for x in copies]
        assert sorted((str(x.dtype), x.size) for x in spare) == [("int4", 15), ("uint2", 3)]


def test_memory_is_reserved_for_both_commits_before_the_first(mesh, memory, commits):
    state, snapshots = mixed_state(NamedSharding(mesh, PartitionSpec())), CommitSnapshots(commits)
    snapshots.reservation(state, (), here=True)()
    reserved = memory._mapped
    assert reserved.size >= 2 * sum(map(padded_bytes, describe(state)))
    for _ in range(3):
        commit(memory, snapshots, state)
        assert memory._mapped is reserved


def test_memory_of_device_copies_is_used_again(memory, commits, monkeypatch):
    monkeypatch.setattr(snapshot, "takes", lambda x: False)
    snapshots = CommitSnapshots(commits)
    state = {"w": jnp.zeros(50_000), "n": 3}
    reserve = snapshots.reservation(state, (), here=True)
    state["w"] = jax.jit(lambda x: x + 1, donate_argnums=0)(state["w"])
    reserve()

    def pointers():
        spare = snapshots._copies._spare.values()
        return {x.unsafe_buffer_pointer() for copies in spare for x in copies}

    reserved = pointers()
    assert len(reserved) == 1
    for _ in range(3):
        commit(memory, snapshots, state)
        assert pointers() == reserved
    assert committed(memory) == bits(state)


def test_states_of_other_shapes_may_follow(memory, commits):
    snapshots = CommitSnapshots(commits)
    snapshots.reservation([jnp.zeros(3), jnp.zeros(2)], (), here=True)()
    for size in (3, 4, 4, 1000, 2):
        state = [jnp.arange(size)]
        commit(memory, snapshots, state)
        assert committed(memory) == bits(state)


@needs_library
def test_more_arrays_than_a_call_takes_are_copied(memory, commits):
    state = [jnp.full(1 + i % 5, i) for i in range(1100)]
    commit(memory, CommitSnapshots(commits), state)
    assert committed(memory) == bits(state)


@needs_library
def test_a_program_that_copies_holds_no_address():
    def text(target):
        words = snapshot.CopyOut([snapshot.TargetBox(0, x.nbytes, ())])._calls
        moved = [np.where(is_offset, w + target, w).view(np.uint32) for _, w, is_offset in words]
        return snapshot._copy_out.lower(moved, [[x]]).as_text()

    x = jnp.ones(5)
    assert text(1 << 40) == text(3 << 40)


def test_a_state_that_failed_leaves_the_commit_before(memory, commits):
    def fail(x):
        raise ValueError("broken")

    snapshots, good = CommitSnapshots(commits), [jnp.arange(1000.0), jnp.ones(3)]
    commit(memory, snapshots, good)
    failing = jax.jit(lambda x: jax.pure_callback(fail, x, x))
    with pytest.raises(jax.errors.JaxRuntimeError):  # at once on one device, or where it is read
        taken = snapshots.take_snapshot([failing(good[0]), good[1]])
        taken.fetch()
    assert committed(memory) == bits(good)
    commit(memory, snapshots, good[::-1])
    assert committed(memory) == bits(good[::-1])


def test_a_host_without_memory_is_an_error_of_the_next_write(memory, commits, make_mesh):
    where = NamedSharding(make_mesh(2), PartitionSpec())
    state = [jax.device_put(np.zeros(size, np.float32), where) for size in (100_003, 11)]
    writer = commit_writer(commits)
    writer.prepare_for(state[1:], ())
    for step in (1, 2):
        writer.begin_write(state[1:], {"step": step})
    writer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(memory._file).st_size, hard))
    try:
        for attempt in (writer.prepare_for, writer.begin_write):
            with pytest.raises(OSError):
                attempt(state, {"step": 3} if attempt == writer.begin_write else ())
                writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        writer.end_thread()
    assert sorted(each.facts["step"] for each in memory.intact()) == [1, 2]


def test_pieces_are_read_from_one_device_each(mesh):
    state = mixed_state(NamedSharding(mesh, PartitionSpec()))
    found = Finder().find(state, here=True)
    assert len(on_devices(found.pieces)) == 1


SIZES = (7_499_981, 25_013, 3)


def values_at(step):
    return [np.arange(size, dtype=np.float32) % 251 + step for size in SIZES]


def train(path):
    """Restore a state that is known at each step, then make steps that donate it, without end."""
    mesh = jdp.init()
    where = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(lambda state: [x + 1 for x in state], donate_argnums=0)
    ckpt = jdp.Checkpointer(path, commit_every=1)
    state = [
        jax.make_array_from_callback(x.shape, where, lambda index, x=x: x[index])
        for x in values_at(0)
    ]
    state = ckpt.restore(state)
    for x, expected in zip(state, values_at(ckpt.steps), strict=True):
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected)
    while True:
        state = step(state)
        ckpt.step(state)


def step_of(memory):
    latest = memory.latest()
    step = latest.facts["step"]
    values = unpack(memory.read(latest), leaves_of(latest.facts))
    for x, expected in zip(values, values_at(step), strict=True):
        np.testing.assert_array_equal(x, expected)
    return step


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_processes_that_are_killed_at_any_time_leave_an_intact_commit(tmp_path):
    rng, last = random.Random(5), 0
    with Launcher() as launcher:
        memory = CommitMemory(launcher.memories[0])
        for generation, num in enumerate((1, 2, 1)):
            started = launcher.processes(num, f"{HERE}:train", tmp_path, generation=generation)
            deadline = time.monotonic() + 120
            while (latest := memory.latest()) is None or latest.facts["step"] <= last + 2:
                assert all(each.popen.poll() is None for each in started), started[-1].output()
                assert time.monotonic() < deadline, started[0].output()
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.1))
            for each in started:
                each.popen.send_signal(signal.SIGKILL)
            for each in started:
                each.wait()
            assert (step := step_of(memory)) > last + 2
            last = step
