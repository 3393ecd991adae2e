import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.launched import Launcher

import jdp
from jdp.checkpoint import commit_memory, directory
from jdp.worker import progress

ROWS = {"x": np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)}
TX = jdp.replicated(optax.adam(0.1))

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def train(make_mesh, tmp_path):
    """train(num_ranks, steps, ...): the state after a run of `steps` steps of 12 rows each."""

    def train(num_ranks=2, steps=6, *, tx=TX, directory=tmp_path, fail_at=None, **options):
        mesh = jdp.init(make_mesh(num_ranks))
        state = jdp.TrainState.create({"w": jnp.ones((6, 2)), "b": jnp.zeros(2)}, tx, seed=4)
        batches = jdp.batches(ROWS, 12, num_steps=steps, seed=1, mask=True)
        with batches, jdp.Checkpointer(directory, **options) as ckpt:
            state = ckpt.restore(state, batches)
            for batch in batches:
                state, _ = step(state, batch)
                ckpt.step(state, batches)
                if ckpt.steps == fail_at:
                    raise RuntimeError("of the script")
            assert (ckpt.steps, batches.position) == (steps, 12 * steps)
        assert jax.tree.leaves(state)[0].sharding.mesh == mesh
        return state

    return train


@jdp.train_step(weight=lambda batch: batch["mask"].sum())
def step(state, batch):
    def loss(params):
        noise = jax.random.normal(state.shared_key, (2,))
        errors = (batch["x"] @ params["w"] + params["b"] - noise) ** 2
        return (errors.mean(-1) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


def assert_equal(state, other):
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)


def names(path):
    return sorted(each.name for each in path.iterdir())


def counted(path, stop, **options):
    """Count from what is there to `stop`: a run whose state says how many steps it made."""
    with jdp.Checkpointer(path, **options) as ckpt:
        state = ckpt.restore({"n": jnp.int32(0)})
        assert state["n"] == ckpt.steps
        for n in range(ckpt.steps + 1, stop + 1):
            state = {"n": jnp.int32(n)}
            ckpt.step(state)
    return state


@pytest.mark.parametrize("given", [True, False])
def test_a_loop_whose_position_is_not_kept_is_named_once(tmp_path, caplog, given):
    jdp.init(devices=jax.devices()[:1])
    batches = jdp.batches({"x": np.zeros((8, 2), "f")}, 4, num_steps=3)
    position = [batches] if given else []
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"n": jnp.int32(0)}, *position)
        for _ in batches:
            ckpt.step(state, *position)
    told = [each for each in caplog.messages if "ckpt.step got no batches" in each]
    assert len(told) == (not given)


def test_an_interrupted_run_gives_the_bits_of_an_uninterrupted_one(train, tmp_path):
    uninterrupted = train(steps=6, directory=tmp_path / "other")
    train(steps=4)
    assert_equal(train(steps=6, resume=True), uninterrupted)


def test_a_run_that_fails_goes_on_from_its_last_checkpoint(train, tmp_path):
    uninterrupted = train(steps=6, directory=tmp_path / "other")
    with pytest.raises(RuntimeError, match="of the script"):
        train(steps=6, save_every=2, fail_at=5)
    assert names(tmp_path) == ["2-1", "4-1", "lock", "other"]
    assert_equal(train(steps=6, resume=True), uninterrupted)


@pytest.mark.parametrize("before", [2, 3, 4])
def test_a_run_goes_on_with_any_number_of_ranks(train, tmp_path, before):
    tx = jdp.replicated(optax.sgd(0.1, momentum=0.9))
    train(before, steps=3, tx=tx)
    expected = train(1, steps=5, tx=tx, directory=tmp_path / "other")
    for after in (1, 2, 3, 5, 8):
        copy = tmp_path / f"copy{after}"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy*", "other"))
        state = train(after, steps=5, tx=tx, directory=copy, resume=True)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_restored_state_does_not_trace_the_step_again(make_mesh, tmp_path):
    num_traces = 0

    @jdp.train_step
    def step(state, batch):
        nonlocal num_traces
        num_traces += 1
        return state.apply_gradients(jax.tree.map(jnp.ones_like, state.params), synced=True), {}

    mesh = jdp.init(make_mesh(3))
    batch = jax.device_put(np.ones((6, 1)), NamedSharding(mesh, PartitionSpec("data")))
    traces = []
    for resume in (False, True):
        with jdp.Checkpointer(tmp_path, resume=resume) as ckpt:
            state = ckpt.restore(jdp.TrainState.create({"w": jnp.ones(3)}, TX))
            for _ in range(2):
                state, _ = step(state, batch)
                ckpt.step(state)
        traces.append(num_traces)
    assert traces[0] == traces[1]
    assert state.step == 4


def test_a_run_that_began_with_numbers_and_arrays_of_64_bits_goes_on(make_mesh, tmp_path):
    jdp.init(make_mesh(2))
    step = jdp.train_step(lambda state, _: (jax.tree.map(lambda x: 2 * x, state), {}))

    def fresh():
        return {"n": 1, "rate": 0.5, "w": np.ones(3), "i": np.ones(2, int), "s": np.float64(2)}

    for done, resume in enumerate((False, True)):
        with jdp.Checkpointer(tmp_path, resume=resume) as ckpt:
            state = ckpt.restore(fresh())
            assert ckpt.steps == done
            state, _ = step(state, np.ones(2, np.float32))
            ckpt.step(state)
    assert jax.tree.map(np.asarray, state)["w"].tolist() == [4.0] * 3
    assert [int(state["n"]), float(state["rate"]), float(state["s"])] == [4, 2.0, 8.0]


def test_several_states_keys_and_leaves_that_are_no_arrays_are_restored(make_mesh, tmp_path):
    jdp.init(make_mesh(2))
    tx = jdp.replicated(optax.sgd(0.1, momentum=0.9))

    def states(value):
        one = jdp.TrainState.create({"w": jnp.full(3, value, jnp.bfloat16)}, tx, seed=value)
        return one, {"key": jax.random.key(value), "f": jnp.tanh, "n": value, "rate": value / 4}

    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.restore(states(0))
        ckpt.step(states(3))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        one, other = ckpt.restore(states(0))
    assert one.params["w"].dtype == jnp.bfloat16 and one.params["w"][0] == 3 and one.seed == 3
    assert (jax.random.key_data(other["key"]) == jax.random.key_data(jax.random.key(3))).all()
    assert other["f"] is jnp.tanh and other["n"] == 3 and other["rate"] == 0.75
    assert type(other["n"]) is int


@pytest.mark.parametrize(
    "empty",
    [{}, None, {"act": jnp.tanh}, {"e": np.zeros((0, 3))}],
    ids=["tree", "none", "function", "empty"],
)
def test_a_state_without_any_number_is_counted(make_mesh, tmp_path, empty):
    jdp.init(make_mesh(2))
    for life in (1, 2):
        batches = jdp.batches(ROWS, 12, num_steps=2 * life)
        with batches, jdp.Checkpointer(tmp_path, resume=life == 2) as ckpt:
            state = ckpt.restore(empty, batches)
            assert str(state) == str(empty) and ckpt.steps == 2 * life - 2
            for _ in batches:
                ckpt.step(state, batches)
    assert ckpt.steps == 4


def test_checkpoints_are_written_when_asked_at_the_end_and_the_latest_kept(tmp_path):
    counted(tmp_path, 11, save_every=2, keep=3)
    assert names(tmp_path) == ["10-1", "11-1", "8-1", "lock"]
    counted(tmp_path, 13, save_every=2, keep=3, resume=True)
    assert names(tmp_path) == ["11-1", "12-2", "13-2", "lock"]


def test_what_is_saved_is_not_saved_again(tmp_path):
    counted(tmp_path, 4, save_every=2)
    counted(tmp_path, 4, resume=True)
    assert names(tmp_path) == ["2-1", "4-1", "lock"]


def test_save_writes_the_last_step_at_once(tmp_path):
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"n": jnp.int32(0)})
        ckpt.step(state)
        ckpt.save(state)
        assert names(tmp_path) == ["1-1", "lock"]


def test_an_earlier_run_is_not_written_over_by_accident(tmp_path):
    counted(tmp_path, 3)
    with pytest.raises(RuntimeError, match=f"{tmp_path} .*step 3 .*--resume"):
        counted(tmp_path, 5)
    with pytest.raises(RuntimeError, match="step 3 .*--resume"):
        counted(tmp_path, 5, resume=False)


def test_metrics_of_an_earlier_run_are_named_with_its_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counted(tmp_path / "checkpoints", 3)
    with pytest.raises(RuntimeError, match="empty this one\\.$"):
        counted(tmp_path / "checkpoints", 5)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RuntimeError, match="empty this one; and move metrics.jsonl away, too"):
        counted(tmp_path / "checkpoints", 5)


def test_the_environment_may_say_that_this_is_a_resumption(tmp_path, monkeypatch):
    counted(tmp_path, 3)
    monkeypatch.setenv("JDP_RESUME", "1")
    assert counted(tmp_path, 5)["n"] == 5
    with pytest.raises(RuntimeError, match="step 5 .*--resume"):
        counted(tmp_path, 7, resume=False)


@pytest.mark.all_sets
@pytest.mark.parametrize("value", ["0", "", "false", "No"])
def test_a_variable_that_is_switched_off_is_no_resumption(tmp_path, monkeypatch, value):
    counted(tmp_path, 3)
    monkeypatch.setenv("JDP_RESUME", value)
    with pytest.raises(RuntimeError, match="step 3 .*--resume"):
        counted(tmp_path, 5)


def test_a_resumption_of_nothing_begins_anew_and_says_so(tmp_path, caplog):
    assert counted(tmp_path, 2, resume=True)["n"] == 2
    [record] = caplog.records
    assert str(tmp_path) in record.message and record.levelname == "WARNING"


def damage(checkpoint):
    files = [path for path in (checkpoint / "state").rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_a_torn_checkpoint_is_named_and_the_one_before_taken(tmp_path, caplog):
    counted(tmp_path, 6, save_every=2)
    file = damage(tmp_path / "6-1")
    state = counted(tmp_path, 4, resume=True)
    assert state["n"] == 4
    (record,) = caplog.records
    assert "6-1" in record.message and file.name in record.message
    # What comes next is newer than the torn one.
    counted(tmp_path, 5, resume=True)
    # The torn one takes the place of none of the three that are kept.
    assert names(tmp_path) == ["2-1", "4-1", "5-2", "6-1", "lock"]
    assert counted(tmp_path, 5, resume=True)["n"] == 5


def test_a_run_whose_checkpoints_are_all_torn_does_not_begin_anew(tmp_path):
    counted(tmp_path, 4, save_every=2)
    for step in (2, 4):
        damage(tmp_path / f"{step}-1")
    with pytest.raises(RuntimeError, match=r"\b2 checkpoints .*4-1.*2-1"):
        counted(tmp_path, 5, resume=True)


def test_a_state_of_another_model_is_refused_by_name(tmp_path):
    counted(tmp_path, 3)
    ckpt = jdp.Checkpointer(tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"step 3 .*`\['n'\]` is int32\[\] .*float32\[2\]"):
        ckpt.restore({"n": jnp.zeros(2)})
    assert counted(tmp_path, 4, resume=True)["n"] == 4  # the directory is free again


class Rows:
    position = 0


def test_any_object_with_a_position_will_do(tmp_path):
    rows = Rows()
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.restore({"n": 0}, rows)
        rows.position = np.int64(7)
        ckpt.step({"n": 1}, rows)
    rows = Rows()
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        ckpt.restore({"n": 0}, rows)
    assert rows.position == 7 and type(rows.position) is int


def test_other_data_than_the_run_began_with_is_refused(tmp_path, make_mesh):
    jdp.init(make_mesh(2))

    def restored(num_rows, **options):
        rows = jdp.batches(np.arange(num_rows), 4, num_steps=9, **options)
        with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
            ckpt.restore({"n": 0}, rows)
            if ckpt.steps == 0:
                rows.position = 8
                ckpt.step({"n": 1}, rows)
        return rows.position

    assert restored(20) == 8 and restored(20) == 8
    for num_rows, options, named in [
        (21, {}, "num_rows .*20.*21"),
        (20, dict(seed=1), "seed .*0.*1"),
        (20, dict(shuffle=False), "shuffle .*True.*False"),
    ]:
        with pytest.raises(ValueError, match=rf'{named}.*position 8 .*allow="new data"'):
            restored(num_rows, **options)
    assert restored(21, allow="new data") == 8


def test_a_run_of_jdp_0_1_goes_on_in_its_order(tmp_path, make_mesh):
    jdp.init(make_mesh(1))
    rows = Rows()
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.restore({"n": 0}, rows)
        rows.position = 4
        ckpt.step({"n": 1}, rows)  # which writes the position alone, as jdp 0.1 did
    num_rows = 2**16 + 1
    for _ in range(2):
        rows = jdp.batches(np.arange(num_rows), 4, num_steps=9)
        with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
            state = ckpt.restore({"n": 0}, rows)
            old = jdp.Sampler(num_rows, 4, order=1).indices(rows.position, 4)
            assert next(iter(rows)).tolist() == old.tolist()
            ckpt.step(state, rows)
            rows.close()


def test_batches_without_a_position_are_refused(tmp_path):
    with jdp.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(TypeError, match="batches= .* list,.* `position`"):
            ckpt.restore({"n": jnp.int32(0)}, [1, 2])
    assert names(tmp_path) == []


def test_a_position_that_was_not_stored_is_missed(tmp_path):
    counted(tmp_path, 3)
    with pytest.raises(ValueError, match=r"ckpt\.restore\(state\).*batches\.position"):
        jdp.Checkpointer(tmp_path, resume=True).restore({"n": jnp.int32(0)}, Rows())


@pytest.mark.parametrize(("restore", "step"), [((), (Rows(),)), ((Rows(),), ())])
def test_batches_are_given_to_both_calls_or_to_none(tmp_path, restore, step):
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.restore({"n": 0}, *restore)
        calls = ("ckpt.restore", "ckpt.step")[:: 1 if restore else -1]
        with pytest.raises(ValueError, match=" .* ".join(calls)):
            ckpt.step({"n": 1}, *step)


def test_a_step_before_restore_or_after_close_is_refused(tmp_path):
    ckpt = jdp.Checkpointer(tmp_path)
    with pytest.raises(RuntimeError, match="^restore "):
        ckpt.step({"n": 1})
    ckpt.restore({"n": 0})
    ckpt.close()
    with pytest.raises(RuntimeError, match=r"^close\(\) "):
        ckpt.step({"n": 1})
    ckpt.close()


def test_a_second_run_in_the_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("jdp.checkpoint.directory._TIMEOUT_S", 0.1)
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.restore({"n": 0})
        with pytest.raises(RuntimeError, match=f"{tmp_path} .*process {os.getpid()} "):
            jdp.Checkpointer(tmp_path, resume=True).restore({"n": 0})


def test_a_step_that_an_interrupt_kept_from_being_counted_is_named_at_the_end(tmp_path):
    match = r"step 1 is not saved: .* Latest kept: .*\n.*let KeyboardInterrupt"
    with pytest.raises(ValueError, match=match), jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"n": jnp.zeros(3)})
        with contextlib.suppress(KeyboardInterrupt):
            ckpt.step(state)
            jax.jit(lambda state: state["n"] + 1, donate_argnums=0)(state)
            raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["step", "save"])
def test_a_donated_state_is_refused_at_once_and_does_not_count(tmp_path, call):
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"n": jnp.zeros(3), "w": jnp.zeros(2)})
        ckpt.step(state)
        gone = {"n": state["n"], "w": jnp.zeros(2)}
        gone["w"].delete()
        with pytest.raises(ValueError, match=r"`state\['w'\]` .*state, \.\.\. = step"):
            getattr(ckpt, call)(gone)
        assert ckpt.steps == 1
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:  # what was given before is saved
        ckpt.restore(state)
        assert ckpt.steps == 1


@pytest.mark.parametrize(
    "numbers", [{"commit_every": 0}, {"save_every": -1}, {"keep": 0}, {"keep": 2.5}]
)
def test_numbers_out_of_range_are_refused(tmp_path, numbers):
    with pytest.raises((ValueError, TypeError), match=next(iter(numbers))):
        jdp.Checkpointer(tmp_path, **numbers)


def test_what_fails_in_the_background_is_raised_by_a_later_call(tmp_path):
    with pytest.raises(OSError, match=rf"step 2 .*{tmp_path}/run: .*\d bytes"):
        with jdp.Checkpointer(tmp_path / "run", save_every=2) as ckpt:
            state = ckpt.restore({"n": jnp.int32(0)})
            ckpt.step(state)
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "run").write_text("")
            for _ in range(3):
                ckpt.step(state)
                ckpt._session._saves._pool.submit(int).result()
    assert ckpt.steps in (2, 3)  # the call that raises it counts, which may be the same one


def test_what_fails_at_the_end_is_raised_at_the_end(tmp_path):
    with pytest.raises(OSError, match=r"step 1 .*\d bytes"):
        with jdp.Checkpointer(tmp_path / "run") as ckpt:
            state = ckpt.restore({"n": jnp.int32(0)})
            ckpt.step(state)
            shutil.rmtree(tmp_path / "run")


def test_what_could_not_be_saved_is_saved_when_it_is_asked_for_again(tmp_path):
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"n": jnp.int32(0)})
        ckpt.step(state)
        (tmp_path / "1-1").mkdir()
        (tmp_path / "1-1" / "in the way").touch()
        with pytest.raises(OSError, match=r"step 1 .*\d bytes"):
            ckpt.save(state)
        shutil.rmtree(tmp_path / "1-1")
        ckpt.save(state)
        assert (tmp_path / "1-1" / "manifest").exists()


def test_a_leaf_that_becomes_another_shape_is_followed(tmp_path):
    with jdp.Checkpointer(tmp_path, save_every=1) as ckpt:
        ckpt.restore({"w": jnp.zeros(2)})
        for size in (2, 3):
            ckpt.step({"w": jnp.full(size, 7.0)})
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        assert ckpt.restore({"w": jnp.zeros(3)})["w"].tolist() == [7.0] * 3


def test_without_a_launcher_nothing_is_committed(tmp_path):
    with jdp.Checkpointer(tmp_path, commit_every=1) as ckpt:
        state = ckpt.restore({"n": jnp.int32(0)})
        ckpt.step(state)
        assert ckpt._session._host_commits is None


# --- SIGTERM ---


def test_sigterm_saves_the_step_and_gives_the_handler_back(tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"n": jnp.int32(0)})
        for n in range(1, 9):
            if n == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt.step({"n": state["n"] + n})
    assert ended.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    assert names(tmp_path) == ["5-1", "lock"]
    # Without a launcher there is no flag.
    assert re.search(f"step 5 .*{tmp_path}.*JDP_RESUME=1", caplog.text)


FORKS = """
import os, signal, sys, time
import jax, jdp
jax.config.update("jax_platforms", "cpu")
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with jdp.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.restore({"n": jax.numpy.int32(0)})
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("handler", "code"), [([], -signal.SIGTERM), (["own"], 7)])
def test_what_a_process_forks_off_ends_at_sigterm_as_its_author_wants(tmp_path, handler, code):
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path), *handler]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert found.stdout.split() == [str(int(code))]


NEVER_CLOSED = """
import sys
import jax, jdp
jax.config.update("jax_platforms", "cpu")
def train(path, closes):
    ckpt = jdp.Checkpointer(path)
    ckpt.step(ckpt.restore({"n": jax.numpy.int32(0)}))
    if closes:
        ckpt.close()
kept = train(sys.argv[1], closes=True), train(sys.argv[2], closes=False)
"""


def test_a_run_that_ends_without_close_says_what_is_lost(tmp_path):
    paths = [str(tmp_path / name) for name in ("closed", "open")]
    command = [sys.executable, "-W", "ignore", "-c", NEVER_CLOSED, *paths]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert re.search(rf"{paths[1]} .*ckpt\.close\(\)", found.stderr)
    assert paths[0] not in found.stderr
    assert names(tmp_path / "open") == ["lock"]


def test_outside_of_the_main_thread_signals_are_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    failures = []

    def run():
        try:
            counted(tmp_path, 3)
            assert signal.getsignal(signal.SIGTERM) is before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not failures and signal.getsignal(signal.SIGTERM) is before


# --- commits, of one process under a launcher that only owns its memory ---


def test_a_commit_is_restored_without_orbax_and_the_launcher_told(tmp_path):
    with Launcher() as launcher:
        one = launcher.process("test_checkpointer:committed", tmp_path, 25)
        assert one.result()["steps"] == 25
        again = launcher.process("test_checkpointer:recovered", tmp_path, generation=1)
        result = again.result()
        assert result["state"] == [20.0] * 4 and result["steps"] == result["position"] == 20
        assert result["orbax"] is False
        kinds = dict(again.messages())
        assert kinds["restored"]["step"] == 20 and kinds["restored"]["tier"] == "commit"
        assert 0 < kinds["restored"]["s"] < 60
    assert names(tmp_path) == ["lock"]


def test_what_is_only_in_a_commit_is_saved_at_the_end(tmp_path):
    with Launcher() as launcher:
        launcher.process("test_checkpointer:committed", tmp_path, 20).result()
        launcher.process("test_checkpointer:at_its_end", tmp_path, generation=1).result()
    assert names(tmp_path) == ["20-2", "lock"]
    rows = Rows()
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore({"w": jnp.zeros(4)}, rows)
    assert state["w"].tolist() == [20.0] * 4 and ckpt.steps == rows.position == 20
    assert names(tmp_path) == ["20-2", "lock"]  # where it is already


# The run died while it saved its last step.
def at_its_end(path):
    jdp.init()
    with jdp.Checkpointer(path) as ckpt:
        ckpt.restore({"w": jnp.zeros(4)}, Rows())


def waiting(path):
    jdp.init()
    ckpt = jdp.Checkpointer(path)
    ckpt.restore({"w": jnp.zeros(1_000_000), "n": 0})
    ckpt._session._commits.wait()
    return ckpt._session._host_commits.shared._mapped.size


def test_the_memory_of_both_commits_is_taken_before_the_first_step(tmp_path):
    with Launcher() as launcher:
        for process in launcher.processes(2, "test_checkpointer:waiting", tmp_path):
            assert process.result() >= 2 * (1_000_000 * 4 + 8)


# Runs `stop` steps and ends without a word, as if killed, once what was begun is written.
def committed(path, stop):
    jdp.init()
    rows = Rows()
    ckpt = jdp.Checkpointer(path, commit_every=10)
    state = ckpt.restore({"w": jnp.zeros(4)}, rows)
    for n in range(1, stop + 1):
        state, rows.position = {"w": state["w"] + 1}, n
        ckpt.step(state, rows)
    ckpt._session._commits.wait()
    return {"steps": ckpt.steps}


def recovered(path):
    jdp.init()
    rows = Rows()
    ckpt = jdp.Checkpointer(path)
    state = ckpt.restore({"w": jnp.zeros(4)}, rows)
    return {
        "state": state["w"].tolist(),
        "steps": ckpt.steps,
        "position": rows.position,
        "orbax": "orbax" in sys.modules,
    }


def one_after_the_other(path):
    jdp.init()
    found = []
    for name in ("first", "second"):
        with jdp.Checkpointer(path / name, commit_every=1) as ckpt:
            state = ckpt.restore({name: jnp.zeros(2)})
            found.append(ckpt.steps)
            while ckpt.steps < 3:
                ckpt.step(state)
            if name == "first":
                continue
            with pytest.raises(RuntimeError, match=r"ckpt\.restore\(\(state, other\)\)"):
                jdp.Checkpointer(path / "third").restore(state)
    return found


def test_the_commits_of_one_directory_are_not_taken_for_those_of_another(tmp_path):
    with Launcher() as launcher:
        assert launcher.process("test_checkpointer:one_after_the_other", tmp_path).result() == [
            0,
            0,
        ]
        again = launcher.process("test_checkpointer:one_after_the_other", tmp_path, generation=1)
        assert again.result() == [3, 3]


# Leaves of odd sizes of all kinds: 30 MB, a prime number, few bytes; also those on no mesh.
def leaves_of(step, mesh):
    rng = np.random.default_rng(step)
    on_mesh = NamedSharding(mesh, PartitionSpec())
    values = {n: rng.normal(size=n).astype(np.float32) for n in (1, 13, 300_007, 7_500_013)}
    state = {f"mesh {n}": jax.device_put(x.copy(), on_mesh) for n, x in values.items()}
    state |= {
        f"half {n}": jax.device_put(x.astype(jnp.bfloat16), on_mesh) for n, x in values.items()
    }
    state |= {"free": jnp.array(values[300_007]), "numpy": values[300_007].copy()}
    return state | {"number": np.float32(step), "key": jax.random.key(step)}


def restored_and_overwritten(path, shift):
    commit_memory._SHIFT_BYTES = shift
    mesh = jdp.init(cpu_ranks=2)
    with jdp.Checkpointer(path, commit_every=1) as ckpt:
        kept = ckpt.restore(leaves_of(0, mesh))
        assert ckpt.steps == 3
        for n in (4, 5, 6):
            ckpt.step(leaves_of(n, mesh))
        ckpt._session._commits.wait()
    for name, right in leaves_of(3, mesh).items():
        found = [kept[name]]
        if isinstance(right, jax.Array) and name != "key":
            found = [np.asarray(shard.data) for shard in kept[name].addressable_shards]
        for each in found:
            if name == "key":
                each, right = jax.random.key_data(each), jax.random.key_data(right)
            np.testing.assert_array_equal(np.asarray(each), np.asarray(right), name)
    return len(kept)


def committed_leaves(path, shift):
    commit_memory._SHIFT_BYTES = shift
    mesh = jdp.init(cpu_ranks=2)
    ckpt = jdp.Checkpointer(path, commit_every=1)
    ckpt.restore(leaves_of(0, mesh))
    for n in (1, 2, 3):
        ckpt.step(leaves_of(n, mesh))
    ckpt._session._commits.wait()
    return ckpt.steps


# Without the shift JAX would use the memory of the commit itself.
@pytest.mark.parametrize("shift", [0, 16])
def test_a_restored_state_does_not_change_when_its_commit_is_overwritten(tmp_path, shift):
    module = "test_checkpointer"
    with Launcher() as launcher:
        one = launcher.process(f"{module}:committed_leaves", tmp_path, shift)
        assert one.result() == 3
        name = f"{module}:restored_and_overwritten"
        assert launcher.process(name, tmp_path, shift, generation=1).result() == 12


# --- the rule of a state of each rank gets an array of its own ---


def ranks_state(num_ranks, value, rule=None):
    mesh = jdp.init(cpu_ranks=num_ranks)
    part = NamedSharding(mesh, PartitionSpec("data"))
    own = jax.device_put(np.full((num_ranks, 300_007), value, np.float32), part)
    return {"own": jdp.per_rank(own, resize=rule)}


def committed_by_4(path):
    state = ranks_state(4, 0.0)
    ckpt = jdp.Checkpointer(path, commit_every=1)
    ckpt.restore(state)
    for n in (1.0, 2.0, 3.0):
        ckpt.step(ranks_state(4, n))
    ckpt._session._commits.wait()
    return ckpt.steps


def restored_by_2(path):
    kept = []

    def rule(saved, like):
        kept.append(saved)
        saved[0] += saved[2]
        return saved[:2]

    state = ranks_state(2, 0.0, rule)
    ckpt = jdp.Checkpointer(path, commit_every=1)
    found = ckpt.restore(state)["own"].value
    for n in (4.0, 5.0, 6.0):
        ckpt.step(ranks_state(2, n, rule))
    ckpt._session._commits.wait()
    return [np.unique(each, axis=1).tolist() for each in (*kept, np.asarray(found))]


def test_a_rule_for_another_number_of_ranks_may_change_and_keep_what_was_saved(tmp_path):
    with Launcher() as launcher:
        assert launcher.process("test_checkpointer:committed_by_4", tmp_path).result() == 3
        again = launcher.process("test_checkpointer:restored_by_2", tmp_path, generation=1)
        assert again.result() == [[[6.0], [3.0], [3.0], [3.0]], [[6.0], [3.0]]]


# How long a process waits for who holds the directory.
def patience(path):
    jdp.init()
    waits = []
    directory._lock = lambda file, path, timeout_s: waits.append(timeout_s)
    jdp.Checkpointer(path, resume=True).restore({"n": 0})
    return waits


def test_who_takes_over_waits_longer_for_the_directory_than_a_new_run(tmp_path):
    with Launcher() as launcher:
        started = [
            launcher.process("test_checkpointer:patience", tmp_path, generation=i) for i in (0, 1)
        ]
        [new], [taken_over] = [process.result() for process in started]
    assert taken_over > 10 * new


def test_the_newer_of_commit_and_checkpoint_is_taken(tmp_path):
    with Launcher() as launcher:
        launcher.process("test_checkpointer:committed", tmp_path, 12).result()
        # Without a launcher: from the start to step 30, on disk.
        with jdp.Checkpointer(tmp_path) as ckpt:
            ckpt.restore({"w": jnp.zeros(4)}, Rows())
            for _ in range(30):
                ckpt.step({"w": jnp.full(4, 30.0)}, Rows())
        result = launcher.process("test_checkpointer:recovered", tmp_path, generation=1).result()
        assert result["state"] == [30.0] * 4 and result["steps"] == 30


FEW_BITS = "uint2 uint4 int2 int4 float8_e4m3 float8_e4m3fn bool".split()


@pytest.mark.parametrize("dtype", FEW_BITS)
def test_a_leaf_of_few_bits_is_restored_from_the_disk(tmp_path, dtype):
    jdp.init(devices=jax.devices()[:2])
    state = {"a": jnp.asarray([0, 1, 1]).astype(dtype), "b": jnp.asarray(1).astype(dtype)}
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.step(ckpt.restore(state))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        again = ckpt.restore({"a": jnp.zeros(3, dtype), "b": jnp.zeros((), dtype)})
    assert again["a"].dtype == dtype and np.asarray(again["a"] == state["a"]).all()
    assert again["b"] == state["b"]


@pytest.mark.parametrize("dtype", ["M8[s]", "S3", ">f4", "longdouble", "V4", "O"])
def test_a_leaf_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, dtype):
    with pytest.raises(TypeError, match=r"`\['a'\]\[0\]`"):
        jdp.Checkpointer(tmp_path / "run").restore({"a": [np.zeros(2, dtype)]})
    assert not (tmp_path / "run").exists()


def test_steps_of_two_models_in_turn_count_on(tmp_path):
    own = progress.own
    before = own.num_steps, own.closed_steps
    for folder, num_steps in (("first", 3), ("second", 4)):
        with jdp.Checkpointer(tmp_path / folder) as checkpointer:
            state = checkpointer.restore({"n": jnp.int32(0)})
            for _ in range(num_steps):
                checkpointer.step(state)
    with jdp.Checkpointer(tmp_path / "second", resume=True) as checkpointer:
        checkpointer.restore({"n": jnp.int32(0)})
        # As in a process that has trained the first model, and continues with the second one.
        assert own.num_steps - before[0] == own.closed_steps - before[1] == 7
        assert own.restored["step"] == 4
        assert own.restored["base"] + own.num_steps == own.closed_steps + 4
