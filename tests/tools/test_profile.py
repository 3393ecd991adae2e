"""`jdp.profile`, around loops of which it is known what the ranks do."""

import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import profiled, training
from support.python_calls import python_calls

import jdp
from jdp import jax_compat
from jdp.tools.profiling import trace_file
from jdp.tools.profiling.summary import summarize
from jdp.worker import progress
from jdp.worker.progress import own
from jdp.worker.progress_board import Slot

MS = 1_000_000


def run(step, state, steps=None, num_steps=5, **options):
    """A loop; with `steps`, under a profile of them."""
    options = dict(num_steps=num_steps, prefetch=0) | options
    for batch in jdp.batches(training.batch(), training.NUM_ROWS, **options):
        state, _ = step(state, batch)
    return state


def profile_of(folder, n, step, state, steps=range(2, 4)):
    training.ranks(n)
    with jdp.profile(folder, steps=steps):
        run(step, state())
    return profiled.read(folder)


def layered_state(tx):
    return jdp.TrainState.create({"w": jnp.ones((4, 8, 8)) / 8}, tx)


@jdp.train_step
def layered_step(state, batch):
    def loss_fn(params, batch):
        x = jnp.pad(batch["x"], ((0, 0), (0, 3)))
        x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"], late=True)
        return jnp.mean(x**2)

    loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@jdp.train_step
def accumulating_step(state, batch):
    value_and_grad = jdp.value_and_grad(training.loss_fn, micro_batch_rows=2)
    loss, grads = value_and_grad(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def sharded(stage):
    return jdp.sharded(optax.sgd(0.1), stage=stage, min_size=1)


plain_step = jdp.train_step(training.plain_step)


def small_buckets(**options):
    return training.state(training.sgd(bucket_bytes=32, **options))


# Leaves of float32: w [5, 4], v [4, 1], b [1].
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("all_reduce, algorithm", [("native", "native"), ("xla", "xla")])
def test_each_bucket_is_in_each_step_of_each_rank_with_its_leaves_and_bytes(
    n, all_reduce, algorithm, tmp_path
):
    reduce = getattr(jdp.collectives, all_reduce)
    trace = profile_of(tmp_path, n, plain_step, lambda: small_buckets(all_reduce=reduce))
    assert trace.facts["ranks"] == list(range(n))
    for rank in range(n):
        steps = profiled.of_rank(trace, rank, trace_file.STEP)
        assert [each.facts["step"] for each in steps] == [2, 3]
        assert steps[0].end == steps[1].begin
        for step in steps:
            found = [
                each
                for each in profiled.of_rank(trace, rank, trace_file.COMMUNICATION)
                if step.begin <= each.begin < step.end
            ]
            assert {each.facts["algorithm"] for each in found} == {algorithm}
            leaves = [leaf for each in found for leaf in each.facts["leaves"]]
            assert sorted(leaves) == ["a scalar", "grads['b']", "grads['v']", "grads['w']"]
            assert sum(each.facts["bytes"] for each in found) == 4 * (20 + 4 + 1 + 1)
            if all_reduce == "native":  # XLA may merge buckets
                assert {4 * 20} < {each.facts["bytes"] for each in found}


@pytest.mark.parametrize(
    "step, state, kinds",
    [
        (plain_step, lambda: training.state(sharded(1)),
         {"reduce-scatter", "all-gather"}),
        (accumulating_step, lambda: training.state(sharded(3)),
         {"reduce-scatter", "all-gather"}),
        (accumulating_step, training.state, {"all-reduce"}),
        (layered_step, lambda: layered_state(training.sgd()), {"all-reduce"}),
        (layered_step, lambda: layered_state(sharded(3)),
         {"reduce-scatter", "all-gather"}),
    ],
    ids=["stage 1", "stage 3, accumulated", "accumulated", "layers", "layers, stage 3"],
)  # fmt: skip
def test_all_kinds_of_steps_have_their_collectives_by_name(step, state, kinds, tmp_path):
    trace = profile_of(tmp_path, 2, step, state)
    assert trace.facts["notes"] == []
    for rank in range(2):
        found = profiled.of_rank(trace, rank, trace_file.COMMUNICATION)
        assert kinds <= {each.facts["collective"] for each in found}
        sent = [each for each in found if each.name.startswith("bucket")]
        if step is layered_step:
            # Layers of [8, 8] float32: each of 4 rounds reduces what the one before has computed,
            # the first one zeros, and what the last one has computed follows; in three steps.
            assert [each.facts["bytes"] for each in sent] == [4 * 64] * (4 + 1) * 3
        else:
            names = {leaf for each in sent for leaf in each.facts["leaves"]}
            assert names >= {"grads['b']", "grads['v']", "grads['w']"}
        # No loop hides what runs in it.
        assert not any(
            each.name.startswith("while")
            for each in profiled.of_rank(trace, rank, trace_file.COMPUTATION)
        )
    for each in summarize(tmp_path).ranks:
        steps = profiled.of_rank(trace, each.rank, trace_file.STEP)
        assert [sum(parts) for parts in each.steps.values()] == [x.end - x.begin for x in steps]


def test_a_step_without_collectives_has_no_communication(tmp_path):
    trace = profile_of(tmp_path, 1, plain_step, training.state)
    assert not profiled.of_rank(trace, 0, trace_file.COMMUNICATION)
    [rank] = summarize(tmp_path).ranks
    assert all(p.communication == 0 < p.computation for p in rank.steps.values())


def test_time_in_the_input_is_data_wait(tmp_path):
    class Slow:
        def __len__(self):
            return training.NUM_ROWS

        def __getitem__(self, i):
            if i == 0:  # once in each batch, which has all rows
                time.sleep(0.03)
            return {key: value[i] for key, value in training.batch().items()}

    training.ranks(2)
    state = training.state()
    with jdp.profile(tmp_path, steps=range(2, 4)):
        for batch in jdp.batches(Slow(), training.NUM_ROWS, num_steps=5, prefetch=0):
            state, metrics = plain_step(state, batch)
            jax.block_until_ready((state.params, metrics))  # the devices have nothing to do
    for rank in summarize(tmp_path).ranks:
        assert all(parts.data >= 25 * MS for parts in rank.steps.values())


def test_a_rank_with_slow_computation_comes_first_and_the_others_wait_in_communication(tmp_path):
    def slow(rank):
        if rank == 1:
            time.sleep(0.06)
        return np.float32(0)

    @jdp.train_step
    def step(state, batch):
        def loss_fn(params):
            nothing = jax.pure_callback(
                slow, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.axis_index("data")
            )
            return training.loss_fn(params, batch) + jax.lax.stop_gradient(nothing)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    profile_of(tmp_path, 3, step, training.state)
    first, *others = summarize(tmp_path).ranks
    assert first.rank == 1
    assert all(parts.computation >= 60 * MS for parts in first.steps.values())
    for each in others:
        assert each.mean()[2] > 30 * MS


def test_a_loop_without_a_decorated_step_has_the_steps_that_are_counted(tmp_path):
    mesh = training.ranks(2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def own_step(w, x):
        return w - jax.lax.psum(x.sum(0), "data")

    w, x = jnp.zeros(5), jnp.ones((4, 5))
    with jdp.profile(tmp_path, steps=range(1, 4)):
        for _ in range(5):
            w = jax.block_until_ready(own_step(w, x))
            progress.count_step()  # as Checkpointer.step does
    trace = profiled.read(tmp_path)
    for rank in range(2):
        steps = profiled.of_rank(trace, rank, trace_file.STEP)
        assert [each.facts["step"] for each in steps] == [1, 2, 3]
        found = profiled.of_rank(trace, rank, trace_file.COMMUNICATION)
        assert len(found) >= 3 and {each.facts["bytes"] for each in found} == {20}
    assert len(trace.facts["notes"]) == 2  # its steps end with the calls


def test_two_steps_in_turn_are_counted_by_their_calls(tmp_path):
    training.ranks(2)

    @jdp.train_step
    def other_step(state, batch):
        return training.plain_step(state, batch)

    state = training.state()
    with jdp.profile(tmp_path, steps=range(2, 6)):
        for _ in range(3):
            state, _ = plain_step(state, training.batch())
            state, _ = other_step(state, training.batch())
    trace = profiled.read(tmp_path)
    programs = [each.name for each in profiled.of_rank(trace, 0, trace_file.PROGRAM)]
    assert [name for name in programs if name in ("jit_plain_step", "jit_other_step")] == [
        "jit_other_step", "jit_plain_step", "jit_other_step", "jit_plain_step", "jit_other_step"
    ]  # fmt: skip
    assert len(profiled.of_rank(trace, 0, trace_file.STEP)) == 4 and not trace.facts["notes"]


def test_step_0_can_be_profiled_with_its_compiling(tmp_path):
    step = jdp.train_step(lambda state, batch: training.plain_step(state, batch))
    trace = profile_of(tmp_path, 2, step, training.state, steps=range(0, 1))
    assert [each.facts["step"] for each in profiled.of_rank(trace, 1, trace_file.STEP)] == [0]
    assert "compiling" in {each.name for each in profiled.of_rank(trace, None, trace_file.PHASE)}


def test_jax_writes_its_own_profile_beside_it_with_the_steps(tmp_path):
    profile_of(tmp_path, 2, plain_step, training.state)
    [path] = (tmp_path / "process-0").rglob("*.xplane.pb")
    events = [
        event
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    ]
    assert sum(event.name == "step" for event in events) == 3  # one before the first


def test_nothing_of_it_runs_without_a_profile(tmp_path):
    training.ranks(2)
    state = training.state()
    with jdp.profile(tmp_path, steps=range(1, 2)):
        state, _ = plain_step(state, training.batch())
        inside, (state, _) = python_calls(plain_step, state, training.batch())
    outside, _ = python_calls(plain_step, state, training.batch())
    assert inside - outside >= {"phase_and_mark", "step_and_mark", "latest_call", "_look"}
    assert type(own.slot) is Slot


@pytest.mark.parametrize("steps, error", [
    (range(0), ValueError), (range(3, 3), ValueError), (range(-1, 3), ValueError),
    (range(0, 9, 2), ValueError), (range(9, 3, -1), ValueError), ([1, 2], TypeError),
    (3, TypeError),
])  # fmt: skip
def test_wrong_steps_are_refused(steps, error, tmp_path):
    with pytest.raises(error, match="steps"):
        jdp.profile(tmp_path, steps=steps)


@pytest.mark.parametrize("inside", ["", "folder"])
def test_a_file_in_place_of_the_folder_is_refused_before_the_loop_and_kept(inside, tmp_path):
    file = tmp_path / "train.py"
    file.write_text("mine")
    refused = pytest.raises(NotADirectoryError, match=rf"{file / inside},.*is a file")
    with refused, jdp.profile(file / inside, steps=range(1)):
        pytest.fail("the block ran")
    assert file.read_text() == "mine"


def test_a_second_profile_at_the_same_time_is_refused(tmp_path):
    with jdp.profile(tmp_path, steps=range(5, 6)):
        with pytest.raises(RuntimeError, match="one profile"):
            with jdp.profile(tmp_path / "other", steps=range(1)):
                pytest.fail("the block ran")
        assert not (tmp_path / "other").exists()
    jax.profiler.start_trace(tmp_path / "jax")
    try:
        with pytest.raises(RuntimeError, match="jax.profiler"):
            with jdp.profile(tmp_path, steps=range(1)):
                pytest.fail("the block ran")
    finally:
        jax.profiler.stop_trace()


@pytest.mark.parametrize("at", [0, 2, 3])
def test_an_error_in_the_loop_stops_the_profiler_and_goes_on(at, tmp_path):
    training.ranks(2)
    state = training.state()
    with pytest.raises(KeyError, match="mine"), jdp.profile(tmp_path, steps=range(2, 9)):
        for _ in range(at):
            state, _ = plain_step(state, training.batch())
        raise KeyError("mine")
    assert not jax_compat.is_profiling() and type(own.slot) is Slot
    assert not trace_file.found_in(tmp_path)
    profile_of(tmp_path, 2, plain_step, training.state)  # another one can follow


@pytest.mark.parametrize("num_steps, profiled_steps", [(0, []), (2, []), (3, [2]), (4, [2, 3])])
def test_a_loop_that_ends_early_leaves_the_steps_before_and_a_warning(
    num_steps, profiled_steps, tmp_path, caplog
):
    training.ranks(2)
    state = training.state()
    with jdp.profile(tmp_path, steps=range(2, 9)), caplog.at_level(logging.WARNING, "jdp"):
        for i in range(10):
            if i == num_steps:
                break
            state, _ = plain_step(state, training.batch())
    assert not jax_compat.is_profiling()
    [text] = [record.getMessage() for record in caplog.records]
    assert f"after {num_steps} steps" in text and "2 to 8" in text
    assert bool(trace_file.found_in(tmp_path)) == bool(profiled_steps)
    if profiled_steps:
        steps = profiled.of_rank(profiled.read(tmp_path), 0, trace_file.STEP)
        assert [each.facts["step"] for each in steps] == profiled_steps


def test_the_files_of_an_earlier_profile_are_replaced(tmp_path):
    profile_of(tmp_path, 2, plain_step, training.state)
    before = profiled.read(tmp_path).facts["run"]
    profile_of(tmp_path, 2, plain_step, training.state, steps=range(1, 2))
    after = profiled.read(tmp_path).facts
    assert after["run"] != before and after["steps"] == [1, 2]


def test_a_second_block_of_one_profile_is_refused_and_the_first_stays(tmp_path):
    training.ranks(2)
    profile, state = jdp.profile(tmp_path, steps=range(1, 2)), training.state()
    with profile:
        state = run(plain_step, state)
    path = trace_file.path_of(tmp_path, 0)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="was already used"), profile:
        run(plain_step, state)
    assert path.read_bytes() == before


def test_a_loop_that_changes_the_working_directory_has_its_profile_in_one_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    training.ranks(2)
    with jdp.profile("profile", steps=range(2, 4)):
        monkeypatch.chdir("elsewhere")
        run(plain_step, training.state(training.sgd()))
    assert [each.rank for each in summarize(tmp_path / "profile").ranks]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_error_of_writing_is_raised_where_the_block_ends(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left")

    monkeypatch.setattr(trace_file, "write", full)
    training.ranks(2)
    done = []
    with pytest.raises(OSError, match="No space"), jdp.profile(tmp_path, steps=range(1, 2)):
        done.append(run(plain_step, training.state()))
    assert done and not jax_compat.is_profiling()


def several_processes(folder, different):
    me = jax.process_index()
    jdp.init()
    steps = range(2, 4 + (different and me == 1))
    try:
        with jdp.profile(folder, steps=steps):
            run(plain_step, training.state())
    except ValueError as error:
        return str(error)
    finally:
        assert not jax_compat.is_profiling() and type(own.slot) is Slot
    return ""


def test_each_process_writes_the_trace_of_its_ranks(processes, tmp_path):
    assert processes().run(several_processes, str(tmp_path), False) == ["", ""]
    found = summarize(tmp_path)
    assert sorted((each.rank, each.process) for each in found.ranks) == [
        (0, 0), (1, 0), (2, 1), (3, 1)
    ]  # fmt: skip
    assert all([*each.steps] == [2, 3] for each in found.ranks)
    assert [shift.ns for shift in found.shifts] == [0, 0] and not found.notes
    assert any(each.name.startswith("bucket") for each in found.collectives)


def test_different_steps_of_processes_are_refused_on_all_of_them(processes, tmp_path):
    texts = processes().run(several_processes, str(tmp_path), True)
    assert all("(2, 4)" in text and "(2, 5)" in text for text in texts)
    assert not trace_file.found_in(tmp_path)
