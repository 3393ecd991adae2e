"""`jdp bench faults`: injects faults into a run, and measures their cost."""

import argparse
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdp.launch.host import spawn
from jdp.tools import results
from jdp.tools.bench import flags
from jdp.tools.bench.injector import FaultyRun, FaultyRunError, read_lines, strike, write_whole
from jdp.tools.calibration import fit_alpha_beta
from jdp.tools.known_values import WrongResultError
from jdp.worker.build_info import version
from jdp.worker.local_devices import num_cpus

PARTS = ("detection", "re_forming", "restoring", "tracing", "loading", "first_step")


class Fault(NamedTuple):
    """The time.time() of a SIGKILL, and the launcher's event "recovered"."""

    at: float
    record: dict[str, Any]


def fault_summary(
    steps: Sequence[dict[str, Any]],
    first_steps: dict[int, list[dict[str, Any]]],
    faults: Sequence[Fault],
) -> dict[str, Any]:
    """Return the shares of the time after the first step, and the medians of a recovery's parts."""
    wall = steps[-1]["end"] - steps[0]["end"]
    typical = statistics.median(it["end"] - it["begin"] for it in steps)
    last = {it["step"]: index for index, it in enumerate(steps)}
    counted = repeated = between = 0.0
    for index, it in enumerate(steps[1:], start=1):
        before, duration = steps[index - 1], it["end"] - it["begin"]
        if it["generation"] == before["generation"]:
            between += it["begin"] - before["end"]
        else:  # the rest of a first step is recovery
            duration = min(duration, typical)
        if last[it["step"]] == index:
            counted += duration
        else:
            repeated += duration
    shares = {"ettr": counted, "repeated": repeated, "committing": between}
    row: dict[str, Any] = {name: seconds / wall for name, seconds in shares.items()}
    row |= {"down": 1 - sum(row.values()), "wall_s": wall, "step_s": typical}
    row |= {"steps": len(last), "faults": len(faults)}
    split = [
        fault_parts(fault, first_steps.get(fault.record["generation"], [])) for fault in faults
    ]
    for name in ("recovery", *PARTS):
        row[f"{name}_s"] = statistics.median(it[name] for it in split) if split else None
    return row


def fault_parts(fault: Fault, first_steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return a recovery's parts, in seconds."""
    record = fault.record
    recovery = record["at"] - fault.at
    told = record["end_s"] + record["form_s"] + record["restore_s"] + record["step_s"]
    tracing = max((it["trace_s"] for it in first_steps), default=0.0)
    loading = max((it["load_s"] for it in first_steps), default=0.0)
    return {
        "recovery": recovery,
        "detection": max(0.0, recovery - told),
        "re_forming": record["end_s"] + record["form_s"],
        "restoring": record["restore_s"],
        "tracing": tracing,
        "loading": loading,
        "first_step": record["step_s"] - tracing - loading,
    }


_PROGRAM = "jdp.tools.bench.faulty_run"
# The most steps of a process ahead of others.
_MARGIN_STEPS = 5


class FaultSetting(NamedTuple):
    """A run's faults, with exponentially distributed times between; `step_s` is the least."""

    mtbf_s: float
    num_faults: int
    num_processes: int = 2
    step_s: float = 0.1
    commit_every: int = 10
    deadline_s: float = 120.0
    seed: int = 0


class FaultyLaunch(FaultyRun):
    """One `jdp run` of `faulty_run`, in a new folder; the context ends it."""

    def __init__(self, folder: Path, state_bytes: int, setting: FaultSetting):
        folder.mkdir(parents=True)
        plan = {
            "state_bytes": state_bytes,
            "step_s": setting.step_s,
            "commit_every": setting.commit_every,
        }
        (folder / "run.json").write_text(json.dumps(plan))
        self.folder, self._num_processes = folder, setting.num_processes
        self.deadline_s = setting.deadline_s
        command = [sys.executable, "-m", "jdp", "run"]
        command += [f"--nproc-per-node={setting.num_processes}", "--max-restarts=1000000"]
        command += [f"--log-dir={folder / 'logs'}", "-m", _PROGRAM, str(folder)]
        super().__init__(
            spawn.ends_with_this(command),  # or it would train without end
            folder / "logs",
            folder / "output",
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
        )

    def __enter__(self) -> "FaultyLaunch":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its processes end with it
                self.process.wait()

    def steps(self) -> list[dict[str, Any]]:
        """Return process 0's steps in all generations, by start."""
        found = [it for it in read_lines(self.folder.glob("steps.*")) if it["rank"] == 0]
        return sorted(found, key=lambda it: it["begin"])

    def first_steps(self) -> dict[int, list[dict[str, Any]]]:
        """Return generation -> its processes' first steps."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in self.folder.glob("steps.*"):
            if steps := read_lines([path]):
                found.setdefault(steps[0]["generation"], []).append(steps[0])
        return found

    def running(self) -> dict[int, int]:
        """Return the newest generation's rank -> pid; {} before all have made a step."""
        told = self.events("first_step")
        newest = max((it["generation"] for it in told), default=0)
        found = {it["process_id"]: it["pid"] for it in told if it["generation"] == newest}
        return found if len(found) == self._num_processes else {}

    def stop(self) -> None:
        """End the run after a step begun by no process."""
        newest = max(it["step"] for it in self.steps())
        write_whole(self.folder / "stop", str(newest + _MARGIN_STEPS))
        if self.wait():
            raise FaultyRunError(
                f"the run ended with exit code {self.process.returncode}.\n{self._tail()}"
            )


def require_exact(folder: Path, num_processes: int) -> None:
    """Compare the processes' reported final states."""
    found = {}
    for path in folder.glob("final.*.json"):
        its = json.loads(path.read_text())
        found[its["rank"]] = its
    missing = sorted(set(range(num_processes)) - set(found))
    wrong = [f"process {rank}: {its['wrong']}" for rank, its in found.items() if its["wrong"]]
    if missing or wrong or len({its["digest"] for its in found.values()}) > 1:
        raise WrongResultError(
            "the final state has other bits than that of the run without faults, so a recovery "
            f"failed. Wrong elements: {'; '.join(wrong) or 'none'}; processes without a state: "
            f"{missing or 'none'}."
        )


def measure(
    folder: Path, state_bytes: int, setting: FaultSetting, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train with faults; return shares of time and recovery."""
    with FaultyLaunch(folder / "run", state_bytes, setting) as run:
        faults = _strike(run, setting, say)
        run.stop()
        require_exact(run.folder, setting.num_processes)
        row = fault_summary(run.steps(), run.first_steps(), faults)
    return {
        "state_bytes": state_bytes,
        "processes": setting.num_processes,
        "mtbf_s": setting.mtbf_s,
        "commit_every": setting.commit_every,
        **row,
    }


def _strike(run: FaultyLaunch, setting: FaultSetting, say: Callable[[str], None]) -> list[Fault]:
    chosen, faults = random.Random(setting.seed), []
    pids = run.until_true(run.running, "first step")
    while True:
        due = time.monotonic() + chosen.expovariate(1 / setting.mtbf_s)
        if faults:
            due -= time.time() - faults[-1].at
        run.until_true(lambda due=due: time.monotonic() >= due, "next fault", math.inf)
        if len(faults) == setting.num_faults:
            return faults
        at = strike([pids[chosen.choice(sorted(pids))]])
        record = run.until_recovered(len(faults) + 1)
        faults.append(Fault(at, record))
        say(f"fault {len(faults)} of {setting.num_faults}: {record['at'] - at:.3f} s")
        pids = run.until_true(run.running, "step of all processes")


_DESCRIPTION = """\
How much of a run's time is training, if processes die? Trains on CPUs under
`jdp run`, kills a random process again and again (SIGKILL), and reports ETTR, the
time of steps that count over all time, and the parts of a recovery. The final
state of every process must have the bits of a run without faults. Takes about
mtbf * (faults + 1) for each state, and half a minute: 13 minutes for two states
with --mtbf 60 --faults 5."""
_SHARES = ("ettr", "repeated", "committing", "down")


def main(arguments: Sequence[str]) -> int:
    """Run `jdp bench faults`."""
    options = _parser().parse_args(arguments)
    results.require_outputs(json=options.json, png=options.png)
    try:
        states = [flags.read_bytes(word) for word in options.state.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--state {options.state}: {error}.") from None
    setting = FaultSetting(
        options.mtbf,
        options.faults,
        options.nproc_per_node,
        options.step_s,
        options.commit_every,
        seed=options.seed,
    )
    quiet = options.json == results.STDOUT
    try:
        rows = _rows(states, setting, quiet=quiet)
    except FaultyRunError as error:
        print(f"jdp bench faults: {error}", file=sys.stderr)
        return 1
    law = _law(rows)
    if law and not quiet:
        print(f"restoring: {law['alpha_s']:.3f} s + bytes / {law['bytes_per_s']:.3g}")
    if options.json:
        _write_json(rows, law, options.json)
    if options.png:
        _draw(options.png, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp bench faults",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "mean seconds from one fault to the next (default 60)"
    parser.add_argument("--mtbf", type=_seconds, default=60.0, metavar="S", help=text)
    text = "faults in each run (default 5)"
    parser.add_argument("--faults", type=flags.read_positive, default=5, metavar="N", help=text)
    text = "bytes of the parameters (default 1M,100M; 1G needs it several times in memory)"
    parser.add_argument("--state", default="1M,100M", metavar="BYTES,...", help=text)
    text = "processes of the run (default 2)"
    parser.add_argument(
        "--nproc-per-node", type=flags.read_positive, default=2, metavar="N", help=text
    )
    text = "seconds that a step takes at least (default 0.1)"
    parser.add_argument("--step-s", type=_seconds, default=0.1, metavar="S", help=text)
    text = "steps between commits (default 10)"
    parser.add_argument(
        "--commit-every", type=flags.read_positive, default=10, metavar="N", help=text
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    results.add_json(parser)
    results.add_png(parser)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _rows(states: Sequence[int], setting: FaultSetting, *, quiet: bool) -> list[dict[str, Any]]:
    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    rows = []
    for state_bytes in states:
        say(f"state of {state_bytes} bytes:")
        with tempfile.TemporaryDirectory(prefix="jdp-bench-") as folder:
            rows.append(measure(Path(folder), state_bytes, setting, say))
        if not quiet:
            _show(rows[-1])
    return rows


def _show(row: dict[str, Any]) -> None:
    shares = ", ".join(f"{name} {row[name]:.1%}" for name in _SHARES)
    print(
        f"{row['state_bytes']} bytes, {row['processes']} processes, {row['faults']} faults in "
        f"{row['wall_s']:.0f} s: {shares}; bits equal"
    )
    split = ", ".join(f"{name} {row[f'{name}_s']:.3f}" for name in PARTS)
    print(f"recovery {row['recovery_s']:.3f} s (median): {split}", flush=True)


def _write_json(rows: Sequence[dict[str, Any]], law: dict[str, float] | None, to: str) -> None:
    facts = {
        "host": socket.gethostname(),
        "num_cores": num_cpus(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"jdp": version()},
    }
    results.write(results.to_json({**facts, "rows": rows, "restoring": law}), to)


def _law(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    points = [(row["state_bytes"], row["restoring_s"]) for row in rows]
    if len({num_bytes for num_bytes, _ in points}) < 2:
        return None
    alpha, beta, error = fit_alpha_beta(points)
    return {"alpha_s": alpha, "bytes_per_s": beta, "largest_error": error}


def _draw(path: str, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + len(rows)), layout="constrained")
    panel = figure.subplots()
    names = [f"{row['state_bytes'] / 1e6:.0f} MB, ETTR {row['ettr']:.1%}" for row in rows]
    widths = {part: [row[f"{part}_s"] or 0.0 for row in rows] for part in PARTS}
    bars_of_parts(panel, names, widths)
    panel.set(xlabel="seconds from a SIGKILL to a step of all processes (medians)")
    panel.legend(ncols=3)
    results.write_picture(figure, path)


def bars_of_parts(
    panel: Any, names: Sequence[str], widths: Mapping[str, Sequence[float]], **options: Any
) -> None:
    """Draw a bar per name, of parts in sequence."""
    left = np.zeros(len(names))
    for part, seconds in widths.items():
        panel.barh(range(len(names)), seconds, left=left, label=part, **options)
        left += seconds
    panel.set_yticks(range(len(names)), names)
