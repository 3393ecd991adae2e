"""Commits and checkpoints of several processes, and of processes that are killed."""

import os
import random
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.launched import Launcher, results

import jdp
from jdp.checkpoint.commit_memory import CommitMemory
from jdp.checkpoint.saved_leaves import describe, pack
from jdp.distributed import agree

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

HERE = "test_checkpointer_processes"
ROWS = np.arange(60, dtype=np.float32)
SPECIAL = [1.5, -0.0, np.nan]


def state_at(step):
    """The state after `step` steps of `run`, in numbers that floats hold exactly."""
    w = np.arange(1000, dtype=np.float32) - step
    return {"w": w, "special": np.array(SPECIAL, np.float32), "h": jnp.full(5, step, jnp.bfloat16)}


def state_of(state):
    return {
        "w": np.asarray(state.params["w"]),
        "special": np.asarray(state.model_state["special"]),
        "h": jnp.asarray(state.model_state["h"]),
    }


def is_intact(state, step):
    found, right = state_of(state), state_at(step)
    return all(np.asarray(found[k]).tobytes() == np.asarray(right[k]).tobytes() for k in right)


def fresh():
    first = state_at(0)
    return jdp.TrainState.create(
        {"w": first["w"]},
        jdp.replicated(optax.sign_sgd(1.0)),  # every step subtracts 1
        model_state={"special": first["special"], "h": first["h"]},
    )


@jdp.train_step(weight=lambda batch: batch[1].sum())
def train(state, batch):
    def loss(params):
        losses = params["w"].sum() + 0 * batch[0]
        return (losses * batch[1]).sum() / jnp.maximum(batch[1].sum(), 1)

    state = state.apply_gradients(jax.grad(loss)(state.params))
    return state.replace(model_state={**state.model_state, "h": state.model_state["h"] + 1}), {}


def run(path, stop, end=True, options=None):
    """Train up to `stop` steps of 6 rows; say how it began and whether the state was intact."""
    jdp.init()
    batches = jdp.batches(ROWS, 6, num_steps=100_000, mask=True)
    ckpt = jdp.Checkpointer(path, **(options or {}))
    state = ckpt.restore(fresh(), batches)
    began, intact = ckpt.steps, is_intact(state, ckpt.steps) and batches.position == 6 * ckpt.steps
    with batches:
        for batch in batches if began < stop else ():
            state, _ = train(state, batch)
            ckpt.step(state, batches)
            if ckpt.steps == stop:
                break
    if end:
        ckpt.close()
    ckpt._session._commits.wait()
    return {"began": began, "intact": intact and is_intact(state, ckpt.steps)}


@pytest.mark.thorough
def test_any_number_of_processes_goes_on_from_the_commit_of_any_other(tmp_path):
    began = 0
    with Launcher() as launcher:
        for generation, num in enumerate((4, 2, 3, 5, 1)):
            stop = began + 13
            lives = launcher.processes(
                num, f"{HERE}:run", tmp_path, stop, False, generation=generation
            )
            assert results(lives) == [{"began": began, "intact": True}] * num
            began = stop - stop % 10  # the last commit


# Writes what a host would hold, of a state that can be told from others by its step.
def commit(memory, path, life, step, tag="a"):
    state = {"x": np.array([step, -0.0, np.nan], np.float32)}
    leaves = [list(leaf) for leaf in describe(state)]
    facts = {"life": life, "step": step, "tag": tag, "position": step, "leaves": leaves}
    CommitMemory(memory).write({"directory": str(path), **facts}, pack([state["x"]]))


def restored(path):
    jdp.init()
    ckpt = jdp.Checkpointer(path)
    state = ckpt.restore({"x": jnp.zeros(3)})
    x = np.asarray(state["x"])
    assert x.tobytes() == np.array([ckpt.steps, -0.0, np.nan], np.float32).tobytes()
    return ckpt.steps


# Commits of each host, (life, step, tag); then the step that all processes restore.
@pytest.mark.parametrize(
    ("held", "step"),
    [
        ([(1, 30, "a"), (1, 20, "a")], 30),
        ([(1, 90, "a"), (2, 20, "b")], 20),  # the later life
    ],
)
def test_all_processes_restore_the_latest_that_any_of_them_holds(tmp_path, held, step):
    with Launcher(num_hosts=2) as launcher:
        for memory, holds in zip(launcher.memories, held, strict=True):
            if holds:
                commit(memory, tmp_path, *holds)
        lives = launcher.processes(2, f"{HERE}:restored", tmp_path, hosts=[0, 1], generation=3)
        assert results(lives) == [step, step]


def test_a_process_whose_host_lost_its_commit_goes_on_with_the_others(tmp_path):
    with Launcher(num_hosts=2) as launcher:
        results(launcher.processes(2, f"{HERE}:run", tmp_path, 12, False, hosts=[0, 0]))
        lives = launcher.processes(
            2, f"{HERE}:run", tmp_path, 15, False, hosts=[1, 0], generation=1
        )
        assert results(lives) == [{"began": 10, "intact": True}] * 2
        # The host that had none got one with the first step.
        latest = [CommitMemory(memory).latest().facts for memory in launcher.memories]
        assert [(facts["life"], facts["step"]) for facts in latest] == [(2, 11), (2, 11)]


def split(path, value):
    devices = jax.devices() if jdp.init() else ()
    mesh = jax.make_mesh((1, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert len(devices) == 2
    split = NamedSharding(mesh, PartitionSpec("model"))
    whole = np.arange(8, dtype=np.float32)
    part = jax.make_array_from_callback((8,), split, lambda index: whole[index] * value)
    ckpt = jdp.Checkpointer(path, commit_every=1)
    state = ckpt.restore({"w": part, "n": value})
    mine = np.asarray(state["w"].addressable_data(0)).tolist()
    assert state["w"].sharding == part.sharding
    if not ckpt.steps:
        ckpt.step({"w": part, "n": value})
    ckpt.close()
    return mine


def test_a_state_that_is_split_over_another_axis_is_restored_on_other_hosts(tmp_path):
    with Launcher(num_hosts=2) as launcher:
        results(launcher.processes(2, f"{HERE}:split", tmp_path, 3, hosts=[0, 1]))
        for hosts in ([0, 0], [1, 1]):
            lives = launcher.processes(2, f"{HERE}:split", tmp_path, 0, hosts=hosts, generation=1)
            assert results(lives) == [[0.0, 3.0, 6.0, 9.0], [12.0, 15.0, 18.0, 21.0]]


def failing(path, case):
    jdp.init()
    agree.set_timeout_s(2.0)
    me = jax.process_index()
    ckpt = jdp.Checkpointer(path)
    try:
        if case == "absent" and me == 1:
            time.sleep(4)
            return ""
        wrong = case == "model" and me == 1
        state = ckpt.restore({"x": jnp.zeros(4 if wrong else 3)})
        ckpt.step(state)
        if case == "save" and me == 0:
            os.rename(path, f"{path}-away")
        ckpt.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


FAILURES = {
    "directory": (
        "OSError: checkpoints cannot be written to",
        "OtherFailedError: process 0 failed",
    ),
    "model": ("process 1 failed while it restored the commit of step 5", "`['x']` is float32[3]"),
    "save": ("OSError: step 6 could not be saved", "process 0 failed while it saved step 6"),
    "absent": ("process 1 did not join process 0 within 2 s to compare what there is", ""),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_fails_on_one_process_fails_on_all(tmp_path, case):
    path = tmp_path / "run"
    if case == "directory":
        path.write_text("")
    with Launcher() as launcher:
        if case != "directory":
            commit(launcher.memories[0], path, 1, 5)
        lives = launcher.processes(2, f"{HERE}:failing", path, case, generation=1)
        texts = results(lives)
    assert all(part in text for part, text in zip(FAILURES[case], texts, strict=True)), texts


def drifting(folder):
    agree.set_timeout_s(20.0)
    return {case: drift(folder / case, case) for case in DRIFTING}


def drift(path, case):
    """End a run whose state differs on process 1; return what close raises, and what is saved."""
    mesh = jdp.init()
    me = jax.process_index()
    value = np.arange(5.0, dtype=np.float32) + (me == 1 and case != "equal")
    sharding = NamedSharding(mesh, PartitionSpec())
    state = {"w": jax.make_array_from_callback((5,), sharding, lambda index: value[index])}
    checks = case != "off" and not (case == "off on one" and me == 0)
    ckpt = jdp.Checkpointer(path, check_replicas=checks)
    text = ""
    try:
        with ckpt:
            state = ckpt.restore(state)
            for _ in range(2 if case == "early" and me == 0 else 1):
                ckpt.step(state)
            if case == "donated":
                ckpt.save(state)
                jax.tree.map(lambda x: x.delete(), state)
            if case == "error":
                raise KeyError("of the author")
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    saved = [each.name for each in path.iterdir() if each.name != "lock"]
    return text, ckpt._session.is_over, saved


DRIFTING = {
    "differs": "RanksDifferError: `['w']` float32[5] holds other bits on rank 2 (process 1, ",
    "error": "KeyError: 'of the author'",
    "off": "",
    "off on one": "",
    "early": "",
    "donated": "",
    "equal": "",
}


def test_a_close_tells_all_processes_of_ranks_that_differ(processes, tmp_path):
    one, other = processes(2).run(drifting, tmp_path)
    assert one == other
    for case, (text, is_over, saved) in one.items():
        assert text.startswith(DRIFTING[case]) and bool(text) == bool(DRIFTING[case]), case
        assert is_over
        step = "2-1" if case == "early" else "1-1"
        assert saved == ([] if case == "error" else [step]), case
    assert re.search(rf"Step 1 .*{tmp_path}", one["differs"][0])


def train_scaled(state, batch, scale):
    grads = jax.grad(lambda params: scale * params["w"].sum() + 0 * batch.sum())(state.params)
    return state.apply_gradients(grads), {}


def train_otherwise(path, differs, by_hand=0, **every):
    """Train 20 steps, of which process 1 does the third otherwise; return what is kept."""
    batch = next(iter(jdp.batches(ROWS, 6, num_steps=1)))
    step, ckpt = jdp.train_step(train_scaled), jdp.Checkpointer(path, **every)
    optimizer = jdp.replicated(optax.sgd(1.0))
    state, error = ckpt.restore(jdp.TrainState.create({"w": ROWS}, optimizer)), ""
    try:
        try:
            for n in range(1, 21):
                odd = float(n == 3 and jax.process_index() == 1)
                if n == 3 and differs == "state":
                    state = state.replace(params={"w": state.params["w"] * (1 + odd)})
                state, _ = step(state, batch, 1 + odd * (differs == "argument"))
                ckpt.step(state)
                if n == by_hand:
                    ckpt.save(state)
        finally:  # as in a script that closes whatever happens
            ckpt.close()
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    commit = ckpt._session._host_commits.shared.latest().facts
    assert commit["directory"] == str(path)
    saved = [int(each.name.partition("-")[0]) for each in path.glob("*-*")]
    return error, commit["step"], max(saved, default=0), ckpt.steps


def all_otherwise(folder):
    jdp.init()
    return {name: train_otherwise(folder / name, **case) for name, (case, _) in OTHERWISE.items()}


# What differs in step 3, and what is written how often; then the latest commit and checkpoint, and
# in which step the error comes.
OTHERWISE = {
    "argument": ({"differs": "argument", "commit_every": 1}, (2, 0, 4)),
    "state": ({"differs": "state", "commit_every": 1}, (2, 0, 4)),
    "saves": ({"differs": "argument", "commit_every": 2, "save_every": 2}, (2, 2, 6)),
    # The first step is committed always.
    "rare saves": ({"differs": "state", "commit_every": 100, "save_every": 4}, (1, 0, 8)),
    "by hand": ({"differs": "argument", "commit_every": 4, "by_hand": 3}, (1, 0, 3)),
    # The ninth call waits for four of the eight in flight.
    "later": ({"differs": "argument", "commit_every": 20}, (1, 0, 8)),
    "nothing": ({"differs": "", "commit_every": 1, "save_every": 3}, (20, 20, 20)),
}
DIFFERENCES = {
    "state": r"`state\.params\['w'\]` .*process 1 .*process 0",
    "argument": r"`scale` .*process 1 .*process 0: 2\.0 .*1\.0",
}


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]], ids=["one host", "two hosts"])
def test_what_differs_between_processes_is_neither_committed_nor_saved(tmp_path, hosts):
    with Launcher(num_hosts=2) as launcher:
        lives = launcher.processes(2, f"{HERE}:all_otherwise", tmp_path, hosts=hosts)
        one, other = results(lives)
    assert one == other
    for name, (error, *kept) in one.items():
        case, right = OTHERWISE[name]
        assert tuple(kept) == right, name
        if difference := DIFFERENCES.get(case["differs"]):
            assert error.startswith("RuntimeError: call 3 of `train_scaled` ") and "JDP211" in error
            assert re.search(difference, error), name
        else:
            assert not error


DRIFTING_SCRIPT = """
import pathlib, sys
import jax, numpy as np, jdp
mesh = jdp.init()
value = np.arange(5.0, dtype=np.float32) + (jax.process_index() == 1)
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
state = {"w": jax.make_array_from_callback((5,), sharding, lambda index: value[index])}
with jdp.Checkpointer(pathlib.Path(__file__).parent / "run") as ckpt:
    state = ckpt.restore(state)
    ckpt.step(state)
"""


def test_jdp_run_fails_when_ranks_differ_at_the_end(jdp_run):
    run = jdp_run(
        *("--nproc-per-node=2", "--standbys=0"),
        **{"script": DRIFTING_SCRIPT, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert run.wait() != 0
    assert re.search(r"`\['w'\]` float32\[5\] .*rank 1 \(process 1, .*JDP213", run.output)
    assert (run.folder / "run" / "1-1").exists()


def until_told(path, mark):
    jdp.init()
    batches = jdp.batches(ROWS, 6, num_steps=100_000, mask=True)
    with batches, jdp.Checkpointer(path) as ckpt:
        state = ckpt.restore(fresh(), batches)
        for batch in batches:
            state, _ = train(state, batch)
            ckpt.step(state, batches)
            mark.with_name(f"{mark.name}{jax.process_index()}").touch()
            time.sleep(0.005)


def test_sigterm_on_any_process_saves_on_all_after_the_same_step(tmp_path):
    with Launcher() as launcher:
        lives = launcher.processes(2, f"{HERE}:until_told", tmp_path / "run", tmp_path / "mark")
        marks = [tmp_path / "mark0", tmp_path / "mark1"]
        assert wait_for(lambda: all(mark.exists() for mark in marks)), lives[0].output()
        lives[1].popen.send_signal(signal.SIGTERM)
        assert [process.wait() for process in lives] == [75, 75], lives[0].output()
        (saved,) = [each.name for each in (tmp_path / "run").iterdir() if each.name != "lock"]
        step = int(saved.partition("-")[0])
        assert f"step {step} " in lives[0].output()
    # Only process 0 reads it; the others get it from there.
    with Launcher() as launcher:
        lives = launcher.processes(3, f"{HERE}:run", tmp_path / "run", step + 1, resumes=True)
        assert results(lives) == [{"began": step, "intact": True}] * 3


def forever(path):
    jdp.init()
    batches = jdp.batches(ROWS, 6, num_steps=10_000_000, mask=True)
    with batches, jdp.Checkpointer(path, commit_every=1, save_every=3) as ckpt:
        state = ckpt.restore(fresh(), batches)
        assert is_intact(state, ckpt.steps) and batches.position == 6 * ckpt.steps
        for batch in batches:
            state, _ = train(state, batch)
            ckpt.step(state, batches)


@pytest.mark.parametrize("tier", ["commit", pytest.param("checkpoint", marks=pytest.mark.thorough)])
def test_a_process_killed_at_any_time_is_followed_by_one_with_an_intact_state(tmp_path, tier):
    rng, last, num_lives = random.Random(2), 0, 7
    # Without the memory of the one before only the disk is left.
    hosts = [0 if tier == "commit" else i for i in range(num_lives + 1)]
    with Launcher(num_hosts=num_lives + 1) as launcher:
        waiting = launcher.process(f"{HERE}:forever", tmp_path, host=hosts[0], parked=True)
        for i in range(num_lives):
            process = waiting
            process.go(generation=i)
            # The next one starts meanwhile, as a standby would.
            waiting = launcher.process(f"{HERE}:forever", tmp_path, host=hosts[i + 1], parked=True)
            began = process.told("restored")
            assert began["step"] >= last and began["tier"] == (tier if i else "none")
            last = began["step"]
            assert wait_for(lambda life=i + 1: any(tmp_path.glob(f"*-{life}"))), process.output()
            time.sleep(rng.uniform(0.0, 0.05))
            process.kill()
            assert "Error" not in process.output()
    assert last >= 3 * (num_lives - 1)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()
