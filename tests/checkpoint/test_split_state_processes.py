"""A state that is split over processes survives them, whatever their number and placement."""

import contextlib
import os
import random
import re
import time

import jax
import numpy as np
import pytest
from support.launched import Launcher, results
from support.sharded_state import differences, state_at, values_at
from support.threads import wait_until

import jdp
from jdp.checkpoint.last_commit import save_last_commit

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

HERE = "test_split_state_processes"


def live(path, stage, num_steps, end=True, has_rule=True):
    """Restore, make some steps, and return where it began and which leaves were wrong then."""
    mesh = jdp.init()
    ckpt = jdp.Checkpointer(path, commit_every=2)
    state = ckpt.restore(state_at(0, mesh, stage, has_rule=has_rule))
    began = ckpt.steps
    wrong = differences(state, state_at(began, mesh, stage, has_rule=has_rule))
    for step in range(began + 1, began + num_steps + 1):
        ckpt.step(state_at(step, mesh, stage, has_rule=has_rule))
    if end:
        ckpt.close()
    ckpt._session._commits.wait()
    if "['ruled'].value" in wrong:
        wrong[-1] += f" {np.asarray(state['ruled'].value.addressable_data(0))}"
    return {"began": began, "wrong": wrong}


# Number of processes and stage of each generation.
GENERATIONS = [(3, "all"), (1, "replicated"), (2, "optimizer"), (2, "replicated")]


@pytest.mark.parametrize("tier", ["commit", pytest.param("checkpoint", marks=pytest.mark.thorough)])
def test_any_number_of_processes_goes_on_from_the_shards_of_any_other(tmp_path, tier):
    began = 0
    with Launcher(num_hosts=len(GENERATIONS)) as launcher:
        for generation, (num, stage) in enumerate(GENERATIONS):
            host = 0 if tier == "commit" else generation
            lives = launcher.processes(
                num,
                f"{HERE}:live",
                tmp_path,
                stage,
                4,
                tier == "checkpoint",
                hosts=[host] * num,
                generation=generation,
            )
            assert results(lives) == [{"began": began, "wrong": []}] * num
            began += 4
    if tier == "commit":
        assert not [*tmp_path.glob("*-*")]


def forever(path, stage):
    mesh = jdp.init()
    with jdp.Checkpointer(path, commit_every=1, save_every=3) as ckpt:
        state = ckpt.restore(state_at(0, mesh, stage))
        assert differences(state, state_at(ckpt.steps, mesh, stage)) == []
        while True:
            ckpt.step(state_at(ckpt.steps + 1, mesh, stage))


@pytest.mark.parametrize("tier", ["commit", pytest.param("checkpoint", marks=pytest.mark.thorough)])
def test_shards_of_processes_that_are_killed_at_any_time_are_intact(tmp_path, tier):
    rng, last, numbers = random.Random(3), 0, (2, 3, 1)
    with Launcher(num_hosts=len(numbers)) as launcher:
        for generation, num in enumerate(numbers):
            host = 0 if tier == "commit" else generation
            lives = launcher.processes(
                num, f"{HERE}:forever", tmp_path, "all", hosts=[host] * num, generation=generation
            )
            began = [process.told("restored") for process in lives]
            assert len({told["step"] for told in began}) == 1
            assert began[0]["step"] >= last
            assert began[0]["tier"] == (tier if generation else "none"), lives[0].output()
            last = began[0]["step"]
            wait_until(lambda mark=f"*-{generation + 1}": any(tmp_path.glob(mark)), 60)
            time.sleep(rng.uniform(0.0, 0.3))
            lives[-1].kill()
            time.sleep(rng.uniform(0.0, 0.05))
            for process in lives:
                process.kill()
    assert last >= 3


def refused(path):
    mesh = jdp.init()
    own = path / str(jax.process_index())
    with contextlib.suppress(FileExistsError):
        own.mkdir(parents=True)
    try:
        jdp.Checkpointer(own).restore(state_at(0, mesh, "all"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_directory_that_a_process_does_not_see_is_refused_on_all(processes, tmp_path):
    one, other = processes(2).run(refused, tmp_path)
    assert re.match(f"OSError: process 1 .*{tmp_path}/1 .*Checkpointer", other)
    assert one.startswith("OtherFailedError: process 1 ") and "JDP208" in one


def lost(launcher, host):
    """The host is gone: its memory is empty."""
    os.ftruncate(launcher.memories[host], 0)


@pytest.mark.parametrize("num_lost", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_parts_of_any_one_lost_host_are_on_the_next_host(tmp_path, num_lost):
    with Launcher(num_hosts=3) as launcher:
        first = launcher.processes(
            3, f"{HERE}:live", tmp_path, "all", 4, num_lost == 2, hosts=[0, 1, 2]
        )
        assert results(first) == [{"began": 0, "wrong": []}] * 3
        for host in range(1, 1 + num_lost):
            lost(launcher, host)
        lives = launcher.processes(
            2, f"{HERE}:live", tmp_path, "all", 2, False, hosts=[0, 2], generation=1
        )
        # The rows 0 to 7 and 16 to 23 of step 4 remain; a copy of 8 to 15 would be another total.
        rule = f"['ruled'].value {np.full(12, 8 * (3.5 + 19.5) + 64, 'f')}"
        assert results(lives) == [{"began": 4, "wrong": [rule] if num_lost == 1 else []}] * 2
        line = "the commit of step 4 lacks 5 of its parts"
        tiers = [process.told("restored")["tier"] for process in lives]
        assert tiers == ["commit" if num_lost == 1 else "checkpoint"] * 2
        assert (line in lives[0].output()) == (num_lost == 2)


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1, 2]])
def test_the_last_commit_in_parts_is_gathered_from_all_hosts(tmp_path, make_mesh, hosts):
    num_hosts = len({*hosts})
    with Launcher(num_hosts=num_hosts) as launcher:
        results(
            launcher.processes(
                len(hosts), f"{HERE}:live", tmp_path, "all", 4, False, num_hosts == 1, hosts=hosts
            )
        )
        if num_hosts > 1:
            lost(launcher, 1)
        answers = [save_last_commit(memory) for memory in launcher.memories]
    done = {"life": 1, "step": 4, "directory": str(tmp_path)}
    assert answers[-1] == done
    if num_hosts > 1:
        assert re.search(r"\b4 .*\b4\b", answers[0]["error"]) and answers[1] == {}
    loaded, right = jdp.load(tmp_path), values_at(4)
    assert {name: loaded[name].tobytes() for name in right} == {
        name: value.tobytes() for name, value in right.items()
    }
    like = state_at(0, make_mesh(8), "all", has_rule=num_hosts == 1)
    right = state_at(4, make_mesh(8), "all", has_rule=num_hosts == 1)
    assert differences(jdp.load(tmp_path, like=like), right) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["4-1"]


def half(path, num_right):
    """Commit some steps; then process 1 does not get to write its parts."""
    mesh = jdp.init()
    ckpt = jdp.Checkpointer(path / "run", commit_every=1)
    state = ckpt.restore(state_at(0, mesh, "all"))
    first, session = ckpt.steps, ckpt._session
    if num_right is None:
        return first, differences(state, state_at(first, mesh, "all"))
    for step in range(first + 1, first + num_right + 1):
        ckpt.step(state_at(step, mesh, "all"))
    session._commits.wait()
    if jax.process_index() == 1:
        session._host_commits.own.finish = lambda *_: time.sleep(600)
    ckpt.step(state_at(first + num_right + 1, mesh, "all"))
    (path / f"half {num_right} {jax.process_index()}").touch()
    ckpt.step(state_at(first + num_right + 2, mesh, "all"))
    session._commits.wait()


def killed_halfway(launcher, path, num_right, generation, hosts):
    lives = launcher.processes(
        2, f"{HERE}:half", path, num_right, generation=generation, hosts=hosts
    )
    marks = [path / f"half {num_right} {i}" for i in (0, 1)]
    wait_until(lambda: all(mark.exists() for mark in marks), 60)
    time.sleep(1.0)  # in which process 0 would write over it
    for process in lives:
        process.kill()


def test_a_commit_stays_until_the_next_one_is_complete_on_all_processes(tmp_path):
    with Launcher() as launcher:
        for generation, num_right in enumerate((1, 0)):
            killed_halfway(launcher, tmp_path, num_right, generation, [0, 0])
        lives = launcher.processes(2, f"{HERE}:half", tmp_path, None, generation=2)
        assert results(lives) == [[1, []]] * 2


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_a_first_commit_that_a_process_did_not_write_is_none(tmp_path, hosts):
    with Launcher(num_hosts=2) as launcher:
        killed_halfway(launcher, tmp_path, 0, 0, hosts)
        lives = launcher.processes(2, f"{HERE}:half", tmp_path, None, generation=1, hosts=hosts)
        assert results(lives) == [[0, []]] * 2
        if hosts == [0, 0]:
            assert "not written" in save_last_commit(launcher.memories[0])["error"]
