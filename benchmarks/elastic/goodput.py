"""Measures the goodput of local steps beside synchronous ones, over a slow link and with faults.

Two hosts with one process each train under `jdp run`, and random processes are killed. The hosts
are network namespaces of this machine, so it needs root, `ip` and `tc`. The gradients are those of
`jdp bench faults`, whole numbers, and the final parameters must be exact. With plain SGD inside and
outside, `diloco` has the parameters of `replicated` after each round.

    python -m benchmarks.elastic.goodput
    python -m benchmarks.elastic.goodput --quick   one fault, to see that it works
"""

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jdp
from benchmarks.harness import report
from jdp.tools.bench import faulty_run
from jdp.tools.bench.injector import FaultyRun, LineLog, read_lines, strike, write_whole
from tests.support.launcher import free_port
from tests.support.namespaces import two_hosts

RATE, LINK_BYTES_PER_S = "100mbit", 12.5e6
MTBF_S, STEP_S = 15.0, 0.5
PLAN = faulty_run.TrainingPlan(state_bytes=20_000_000, step_s=STEP_S)
_DEADLINE_S = 300.0


class Method(NamedTuple):
    """An optimizer, its steps in a round, and steps between commits."""

    name: str
    tx: Any
    every: int
    commit_every: int


@functools.cache
def methods() -> list[Method]:
    sgd = optax.sgd(1.0)
    return [
        Method("replicated, commit_every=1", jdp.replicated(sgd), 1, 1),
        *(
            Method(f"diloco, every={h}, commit_every=1", jdp.diloco(sgd, sgd, every=h), h, 1)
            for h in (20, 100)
        ),
    ]


@jdp.train_step
def step(state: Any, batch: Any) -> Any:
    grads = jax.grad(faulty_run.loss_fn)(state.params, batch)
    return state.apply_gradients(grads), {}


def train(folder: Path, method: Method) -> None:
    """Train on one rank until the last step, and compare the parameters with exact ones."""
    jdp.init()
    rank = jax.process_index()
    log = LineLog(folder / f"steps.{os.getpid()}", rank=rank)
    batches = jdp.batches(
        {"x": faulty_run.data()}, faulty_run.BATCH_SIZE, num_steps=faulty_run.MOST_STEPS
    )
    options = {"commit_every": method.commit_every, "save_every": 10**9}
    with jdp.Checkpointer(folder / "run", **options) as ckpt:
        first = {"w": faulty_run.initial(PLAN)}
        state = ckpt.restore(lambda: jdp.TrainState.create(first, method.tx), batches)
        for batch in batches:
            begin = time.time()
            time.sleep(STEP_S)  # in place of a larger model
            state, _ = step(state, batch)
            jax.block_until_ready(state)
            ckpt.step(state, batches)
            log.write(step=ckpt.steps, begin=begin, end=time.time())
            stop = folder / faulty_run.STOP
            if stop.exists() and ckpt.steps == int(stop.read_text()):
                break
        right = faulty_run.final(PLAN, ckpt.steps)
        found = np.asarray(state.params["w"].addressable_data(0))
        write_whole(folder / f"final.{rank}", json.dumps(int((found != right).sum())))


def measure(index: int, num_faults: int) -> dict[str, Any]:
    """Run one method, kill processes, and return its shares of time and its bytes."""
    method, chosen = methods()[index], random.Random(0)
    with (
        tempfile.TemporaryDirectory() as name,
        two_hosts() as hosts,
        contextlib.ExitStack() as all_,
    ):
        folder = Path(name)
        for i, host in enumerate(hosts):
            limit = ["tc", "qdisc", "replace", "dev", f"wire{i}", "root", "tbf", "rate", RATE]
            subprocess.run([*host, *limit, "burst", "256kb", "latency", "50ms"], check=True)
        endpoint = f"--rdzv-endpoint=10.83.0.1:{free_port()}"
        runs = [_started(folder, host, i, endpoint, index) for i, host in enumerate(hosts)]
        for run in runs:
            all_.callback(run.process.kill)
        pids = runs[0].pids(0, 2)
        sent = _sent(hosts[0])
        for number in range(num_faults):
            time.sleep(chosen.expovariate(1 / MTBF_S))
            strike([chosen.choice(pids)])
            recovered = runs[0].until_recovered(number + 1)
            pids = runs[0].pids(recovered["generation"], 2)
        time.sleep(chosen.expovariate(1 / MTBF_S))
        newest = max(each["step"] for each in read_lines(folder.glob("steps.*")))
        write_whole(folder / faulty_run.STOP, str((newest // method.every + 2) * method.every))
        codes = [run.wait() for run in runs]
        sent = _sent(hosts[0]) - sent
        wrong = [json.loads((folder / f"final.{i}").read_text()) for i in range(2)]
        if codes != [0, 0] or wrong != [0, 0]:
            raise RuntimeError(f"{method.name}: exit codes {codes}, {wrong} wrong numbers.")
        steps = [each for each in read_lines(folder.glob("steps.*")) if each["rank"] == 0]
    wall = max(each["end"] for each in steps) - min(each["begin"] for each in steps)
    num_steps = len({each["step"] for each in steps})
    return {
        "method": method.name,
        "faults": num_faults,
        "steps": num_steps,
        "repeated": len(steps) - num_steps,
        "wall_s": wall,
        "goodput": num_steps * STEP_S / wall,
        "sent_mb": sent / num_steps / 1e6,
    }


def _started(folder: Path, host: Any, i: int, endpoint: str, index: int) -> FaultyRun:
    logs = folder / f"logs{i}"
    command = [*host, sys.executable, "-m", "jdp", "run", "--nnodes=2", f"--node-rank={i}"]
    command += [endpoint, "--max-restarts=1000000", f"--log-dir={logs}", "--timeout-s=120"]
    command += ["-m", "benchmarks.elastic.goodput", str(folder)]
    own = {"JAX_NUM_CPU_DEVICES": "1", "JDP_TOKEN": "goodput", "JDP_GOODPUT": str(index)}
    run = FaultyRun(command, logs, folder / f"output{i}", env={**os.environ, **own})
    run.deadline_s = _DEADLINE_S
    return run


def _sent(host: Any) -> int:
    command = [*host, "cat", "/sys/class/net/wire0/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    if "JDP_GOODPUT" in os.environ:
        train(Path(sys.argv[1]), methods()[int(os.environ["JDP_GOODPUT"])])
        return
    quick = report.parser(__doc__).parse_args().quick
    section = report.Section(
        "Goodput",
        f"Two processes on hosts with a link of 0.1 Gbit/s, {PLAN.state_bytes / 1e6:.0f} MB of "
        f"parameters. A step computes for {STEP_S:g} s. A process is killed every {MTBF_S:g} s on "
        "average. Goodput: the computation of steps that count, over all time. Sent: bytes of the "
        "first host, all connections, for each step that counts. All final parameters are exact. "
        f"Load of the machine at the end: {os.getloadavg()[0]:.0f}.",
        [measure(i, 1 if quick else 6) for i in range(len(methods()))],
        {
            "method": "{method}",
            "goodput": "{goodput:.1%}",
            "sent, MB": "{sent_mb:.2f}",
            "faults": "{faults}",
            "steps": "{steps}",
            "repeated": "{repeated}",
            "seconds": "{wall_s:.0f}",
        },
    )
    report.publish("goodput", [section], quick=quick)


if __name__ == "__main__":
    main()
