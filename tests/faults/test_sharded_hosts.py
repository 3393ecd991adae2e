"""A host with parts of a split state is lost: the run goes on from the commits of the others."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.launcher import PatientLauncher, free_port
from support.namespaces import several_hosts, why_no_namespaces
from support.sharded_state import differences, state_at

import jdp

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

ROOT = Path(__file__).parents[2]

# The first generation trains until a host is killed, the next ones make three steps.
SCRIPT = """
import json, os, sys
from pathlib import Path
import jax, jdp
from support.sharded_state import differences, state_at

folder = Path(sys.argv[1])
mesh = jdp.init()
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with jdp.Checkpointer(folder / "run", commit_every=1) as ckpt:
    state = ckpt.restore(state_at(0, mesh, "all"))
    wrong = differences(state, state_at(ckpt.steps, mesh, "all"))
    answer = folder / f"{generation} {jax.process_index()}"
    answer.write_text(json.dumps([ckpt.steps, wrong, jax.process_count()]))
    stop = ckpt.steps + 3
    while generation == 0 or ckpt.steps < stop:
        ckpt.step(state_at(ckpt.steps + 1, mesh, "all"))
        if ckpt.steps == 6:
            (folder / f"trained {generation}").touch()
"""


def start(folder, name, *flags, **more):
    own = folder / name
    own.mkdir()
    return PatientLauncher(
        own,
        *("--standbys=0", "--timeout-s=120", "--heartbeat-timeout-s=5", *flags),
        script=SCRIPT,
        before=str(folder),
        JAX_NUM_CPU_DEVICES="1",
        JDP_TOKEN="a secret",
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}",
        **more,
    )


@contextlib.contextmanager
def closing(hosts):
    try:
        yield
    finally:
        for host in hosts:
            host.close()


def require_intact(folder, num_processes, but=()):
    """What the last generation restored: a commit that was complete when the process died."""
    last = max(int(path.name.split()[0]) for path in folder.glob("[0-9]* *"))
    assert last
    for process in range(num_processes):
        steps, wrong, num = json.loads((folder / f"{last} {process}").read_text())
        assert steps >= 5 and wrong == [*but] and num == num_processes


def test_a_lost_host_loses_nothing_of_a_split_state(tmp_path):
    if reason := why_no_namespaces():
        pytest.skip(reason)
    hosts = []
    with several_hosts(3) as within, closing(hosts):
        endpoint = "--nnodes=2:3", f"--rdzv-endpoint=10.83.0.1:{free_port()}"
        for i in range(3):
            flags = *endpoint, f"--node-rank={i}"
            hosts.append(start(tmp_path, f"host{i}", *flags, within=within[i]))
        hosts[0].until_true((tmp_path / "trained 0").exists, "step 6 of all hosts")
        hosts[1].process.kill()
        assert [hosts[0].wait(), hosts[2].wait()] == [0, 0], hosts[0].output
    require_intact(tmp_path, 2, but=["['ruled'].value"])  # whose rule replaces lost rows


def test_a_killed_process_is_followed_by_one_with_its_parts(tmp_path):
    host = start(tmp_path, "host", "--nproc-per-node=2")
    with closing([host]):
        host.until_true((tmp_path / "trained 0").exists, "step 6")
        os.kill(host.pids(0, 2)[1], signal.SIGKILL)
        assert host.wait() == 0, host.output
    require_intact(tmp_path, 2)


def test_hosts_that_give_up_gather_the_last_commit_of_a_split_state(tmp_path, make_mesh):
    hosts, endpoint = [], ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    with closing(hosts):
        for i in range(2):
            hosts.append(start(tmp_path, f"host{i}", *endpoint, f"--node-rank={i}"))
        hosts[0].until_true((tmp_path / "trained 0").exists, "step 6 of all hosts")
        hosts[0].process.send_signal(signal.SIGINT)
        assert [host.wait() for host in hosts] == [130, 130], hosts[0].output
        step = int(re.search(r"--resume .*step (\d+), ", hosts[0].output)[1])
    assert step >= 5
    like = state_at(0, make_mesh(3), "all")
    state = jdp.load(tmp_path / "run", step, like=like)
    assert differences(state, state_at(step, make_mesh(3), "all")) == []
