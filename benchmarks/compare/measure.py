"""Times all contestants of one model in the same rounds, on all numbers of ranks."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.all_reduce import peers
from benchmarks.compare.contestants import BASELINE, CONTESTANTS, JAX, TORCH, taking_part
from benchmarks.harness import timing
from benchmarks.harness.team import Team, free_port

PROCESSES = "2 processes"
# Compiling may take long on a loaded machine.
TIMEOUT_S = 300.0


class Run(NamedTuple):
    """A contestant on some ranks.

    Attributes:
      name: of the contestant.
      ranks: "1", "2" or "4" ranks, or PROCESSES: 2 ranks in a process each.
    """

    name: str
    ranks: str


class Measured(NamedTuple):
    """The results of one model.

    Attributes:
      seconds: of a step in each round, `[rounds]`.
      facts: memory and difference from one device.
      errors: why a contestant was left out.
    """

    seconds: dict[Run, np.ndarray]
    facts: dict[Run, dict[str, float]]
    errors: dict[Run, str]


Teams = dict[tuple[str, str], Team]


@contextlib.contextmanager
def all_teams(
    folder: Path, torch_python: str | None, ranks: Sequence[str], *, is_tiny: bool
) -> Iterator[Teams]:
    """Start the processes of all frameworks that are installed, by framework and ranks."""
    numbers = [int(x) for x in ranks if x != PROCESSES]
    with contextlib.ExitStack() as stack:
        found: Teams = {}
        if numbers:
            one = jax_team(folder, is_tiny=is_tiny, num_processes=1, num_devices=max(numbers))
            stack.enter_context(one)
            found = {(JAX, str(number)): one for number in numbers}
        if PROCESSES in ranks:
            two = jax_team(folder, is_tiny=is_tiny, num_processes=2, num_devices=1)
            found[JAX, PROCESSES] = stack.enter_context(two)
        for where in ranks if torch_python else ():
            # Its 2 ranks are 2 processes.
            if not (where == "2" and PROCESSES in ranks):
                assert torch_python
                made = torch_team(torch_python, folder, num_processes=num_ranks(where))
                found[TORCH, where] = stack.enter_context(made)
        yield found


def jax_team(folder: Path, *, is_tiny: bool, num_processes: int, num_devices: int) -> Team:
    """Start processes of `rank_jax.py` with `num_devices` CPU devices each."""
    environment = {
        **peers.ENVIRONMENT,
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "0",
        "XLA_FLAGS": "",  # a number of devices there would take precedence
    }
    arguments = [str(folder), "tiny" if is_tiny else "real"]
    return _team(sys.executable, "rank_jax", arguments, num_processes, environment)


def torch_team(python: str, folder: Path, *, num_processes: int) -> Team:
    """Start processes of `rank_torch.py`, which share the cores."""
    threads = str(max(1, (os.cpu_count() or 1) // num_processes))
    environment = {**peers.ENVIRONMENT, "OMP_NUM_THREADS": threads}
    return _team(python, "rank_torch", [str(folder), threads], num_processes, environment)


def _team(
    python: str, module: str, arguments: list[str], num_processes: int, environment: dict[str, str]
) -> Team:
    program, port = [python, "-m", f"benchmarks.compare.{module}", *arguments], free_port()
    commands = [
        [*program, str(index), str(port), str(num_processes)] for index in range(num_processes)
    ]
    return Team(commands, num_processes, environment)


def num_ranks(ranks: str) -> int:
    """Return the number of ranks."""
    return 2 if ranks == PROCESSES else int(ranks)


def measure(
    started: Teams, model: str, k: int, *, ranks: Sequence[str], end: float, min_rounds: int
) -> Measured:
    """Prepare and time every contestant.

    Args:
      started: result of `all_teams`.
      model: one of the models of jax_task.py.
      k: number of micro-batches.
      ranks: see `Run`.
      end: `time.perf_counter()` at which no new round begins.
      min_rounds: minimum number of rounds, even if they end later.
    """
    runs = [
        (team, Run(name, where))
        for where in ranks
        for (framework, at), team in started.items()
        if at == where
        for name in taking_part(framework, k, num_ranks(where))
    ]
    for team in set(started.values()):
        team.ask("forget")
    errors: dict[Run, str] = {}
    facts = _prepared(runs, model, k, errors)

    def clock(team: Team, run: Run) -> float:
        answers = team.ask("run", _key(run), timeout_s=TIMEOUT_S)
        if run in errors or _record_error(answers, run, errors):
            return math.nan
        worst = max(answer["difference"] for answer in answers)
        facts[run]["difference"] = max(worst, facts[run]["difference"])
        return max(answer["seconds"] for answer in answers)

    clocks = {
        _key(run): (lambda team=team, run=run: clock(team, run))
        for team, run in runs
        if run not in errors
    }
    budget_s = end - time.perf_counter()
    found = timing.alternate(clocks, budget_s=budget_s, min_rounds=min_rounds)
    seconds = {run: found[_key(run)] for _, run in runs if run not in errors}
    return Measured(seconds, facts, errors)


def _prepared(
    runs: list[tuple[Team, Run]], model: str, k: int, errors: dict[Run, str]
) -> dict[Run, dict[str, float]]:
    facts: dict[Run, dict[str, float]] = {}

    def prepare(team: Team) -> None:
        for own, run in runs:
            if own is not team:
                continue
            request = (_key(run), run.name, model, k, num_ranks(run.ranks))
            answers = team.ask("prepare", *request, timeout_s=TIMEOUT_S)
            if not _record_error(answers, run, errors):
                memory = sum(answer["memory_mb"] for answer in answers)
                worst = max(answer["difference"] for answer in answers)
                facts[run] = {"memory_mb": memory, "difference": worst}

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(prepare, {id(team): team for team, _ in runs}.values()))
    return facts


def _record_error(answers: list[Any], run: Run, errors: dict[Run, str]) -> bool:
    wrong = [answer["error"] for answer in answers if "error" in answer]
    if wrong:
        errors[run] = wrong[0].strip().splitlines()[0]
    return bool(wrong)


def _key(run: Run) -> str:
    return f"{run.name} on {run.ranks}"


def rows_of(found: Measured, model: str, k: int, num_rows: int, lines: Mapping[str, Any]) -> list:
    """Return a row for each contestant that reduces, on each number of ranks."""
    rows = []
    for run, seconds in found.seconds.items():
        if not CONTESTANTS[run.name].reduces:
            continue
        alone = found.seconds.get(Run(BASELINE[CONTESTANTS[run.name].framework], run.ranks))
        own = found.seconds.get(Run(run.name, "1"))
        ours = found.seconds.get(Run("jdp.replicated", run.ranks))
        low, high = timing.interval(num_rows / seconds)
        row = {"model": model, "micro_batches": k, "ranks": run.ranks, "contestant": run.name}
        row |= {"rows_per_s": float(np.median(num_rows / seconds)), "low": low, "high": high}
        row |= _ratio("over_jdp", seconds, ours) | _ratio("scaling", own, seconds)
        row |= {"sync_ms": None, "sync_low": None, "sync_high": None}
        if alone is not None:
            row["sync_ms"] = float(np.median(seconds - alone)) * 1e3
            row["sync_low"], row["sync_high"] = (1e3 * x for x in timing.interval(seconds - alone))
        row |= {**found.facts[run], "lines": lines[run.name], "rounds": len(seconds)}
        rows.append(row)
    return rows


def _ratio(name: str, first: Any, second: Any) -> dict[str, float | None]:
    if first is None or second is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    low, high = timing.interval(first / second)
    return {name: float(np.median(first / second)), f"{name}_low": low, f"{name}_high": high}
