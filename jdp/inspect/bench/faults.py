"""Injects faults into a training run of `jdp run`, and measures what they cost. Needs no JAX."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdp.inspect.bench.fault_costs import Fault, summary
from jdp.inspect.bench.faulty_launch import (
    FaultSetting,
    FaultyLaunch,
    read_steps,
    require_exact,
)


def measure(
    folder: Path, state_bytes: int, setting: FaultSetting, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train with faults, and return a row with the shares of the time and of the recoveries."""
    with FaultyLaunch(folder / "run", state_bytes, setting) as run:
        faults = _strike(run, setting, say)
        run.stop()
        run.wait(setting.deadline_s)
        require_exact(run.folder, setting.num_processes)
        row = summary(read_steps(run.folder), run.first_steps(), faults)
    return {
        "state_bytes": state_bytes,
        "processes": setting.num_processes,
        "mtbf_s": setting.mtbf_s,
        "commit_every": setting.commit_every,
        **row,
    }


def _strike(run: FaultyLaunch, setting: FaultSetting, say: Callable[[str], None]) -> list[Fault]:
    """Kill a process again and again until the next fault would be one too many."""
    chosen, faults = random.Random(setting.seed), []
    pids = run.until(run.running, "first step", setting.deadline_s)
    while True:
        due = time.monotonic() + chosen.expovariate(1 / setting.mtbf_s)
        if faults:
            at = faults[-1].at
            due -= time.time() - at  # from one fault to the next
        run.until(lambda due=due: time.monotonic() >= due, "time", float("inf"))
        if len(faults) == setting.num_faults:
            return faults
        number, at = len(faults) + 1, time.time()
        os.kill(pids[chosen.choice(sorted(pids))], signal.SIGKILL)
        [record] = run.until(
            lambda number=number: run.events("recovered")[number - 1 : number],
            "recovery",
            setting.deadline_s,
        )
        faults.append(Fault(at, record))
        say(f"fault {number} of {setting.num_faults}: {record['at'] - at:.3f} s")
        pids = run.until(run.running, "step of all processes", setting.deadline_s)
