"""jdp.sharded at each stage beside jdp.replicated, and beside plain jit with NamedSharding.

    python -m benchmarks.step.sharded             in 20 to 40 minutes on 2 cores
    python -m benchmarks.step.sharded --quick     one short run, to see that it works

Every setup is measured several times, in processes of its own, and the table shows the median and
the range of their ratios. Prints its table and writes it to benchmarks/results/, that of a quick
run to out/benchmarks/.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import jdp
from benchmarks.all_reduce import peers
from benchmarks.harness import exact, report, timing
from benchmarks.harness.report import Section
from benchmarks.harness.timing import Clock
from benchmarks.step import sharded_contestants
from benchmarks.step.sharded_contestants import (
    AGAIN,
    LABELS,
    NUM_STEPS,
    OPTIMIZERS,
    PEER,
    REPLICATED,
    ROWS,
    STAGES,
)

NUM_REPEATS, BUDGET_S = 3, 24.0
GOALS = {1: 1.0, 2: 1.0, 3: 1.1}
RANKS = {"2": 2, "4": 4}
TWO_PROCESSES = "2 processes"


def main() -> None:
    options = _options()
    if options.one:
        print(json.dumps(list(measure(options))))
        return
    command = [sys.executable, "-m", "benchmarks.step.sharded", "--one", *sys.argv[1:]]
    found = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(1 if options.quick else NUM_REPEATS)
    ]
    section = _section([_row(runs) for runs in zip(*found, strict=True)])
    report.publish("sharded", [section], quick=options.quick)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the times and the ratio of each stage and rival, of all setups that were asked for."""
    jdp.init(cpu_ranks=max(RANKS.values()))
    budget_s = 0.2 if options.quick else BUDGET_S
    for ranks, model, optimizer in itertools.product(
        options.ranks, options.model, options.optimizer
    ):
        measured = _in_processes if ranks == TWO_PROCESSES else _in_one_process
        found = measured(ranks, model, optimizer, budget_s)
        pairs = (*((label, REPLICATED) for label in (AGAIN, *STAGES)), ("stage 3", PEER))
        for label, rival in pairs:
            yield {
                "model": model,
                "optimizer": optimizer,
                "ranks": ranks,
                "stage": STAGES.get(label, "none"),
                "rival": rival,
                "first_s": float(np.median(found[label])),
                "second_s": float(np.median(found[rival])),
                "ratio": float(np.median(found[label] / found[rival])),
                "num_rounds": len(found[label]),
            }


def _in_one_process(
    ranks: str, model: str, optimizer: str, budget_s: float
) -> Mapping[str, np.ndarray]:
    mesh = jdp.init(devices=jax.devices()[: RANKS[ranks]])

    def clock(label: str) -> Clock:
        made = sharded_contestants.training(label, model, optimizer, mesh)
        timed = exact.checked(made, timing.until_ready)
        return lambda: timed() / NUM_STEPS

    return timing.alternate({x: clock(x) for x in LABELS}, budget_s=budget_s, warm_up=2)


def _in_processes(_: str, model: str, optimizer: str, budget_s: float) -> Mapping[str, np.ndarray]:
    with peers.jax_team(2, 1) as team:
        team.ask("prepare_sharded", model, optimizer)
        clocks = {label: team.slowest("run_step", label, NUM_STEPS) for label in LABELS}
        return timing.alternate(clocks, budget_s=budget_s, warm_up=2)


def _row(runs: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    ratios = [run["ratio"] for run in runs]
    ratio, first = float(np.median(ratios)), runs[0]
    goal = GOALS.get(first["stage"]) if first["rival"] == REPLICATED else None
    return {
        "section": "sharded",
        **{name: first[name] for name in ("model", "optimizer", "ranks", "stage", "rival")},
        "jdp_ms": float(np.median([run["first_s"] for run in runs])) * 1e3,
        "rival_ms": float(np.median([run["second_s"] for run in runs])) * 1e3,
        "ratio": ratio,
        "low": min(ratios),
        "high": max(ratios),
        "repeats": len(runs),
        "rounds": sum(run["num_rounds"] for run in runs),
        "goal": "" if goal is None else f"{goal:.2f}",
        "met": "" if goal is None else "yes" if ratio <= goal else "no",
    }


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "`jdp.sharded` beside `jdp.replicated`, and beside jit with NamedSharding",
        "An MLP of 4 layers of 512, and a transformer of 4 layers of 128 over 32 bytes a row; "
        f"{ROWS['mlp']} and {ROWS['transformer']} rows in a batch of all ranks. SGD with momentum "
        "updates a parameter with 2 numbers of state and gradient, Adam with 3. The time of the "
        "stage over the rival's: below 1, the stage is faster. Stage none is `replicated` a second "
        "time: what differs from 1 there is the machine. A round has two runs of "
        f"{NUM_STEPS} steps of each, in both orders; each repeat, in processes of its own, gives "
        "the median of its rounds, and the table the median, least and most of the repeats. Loss, "
        "parameters and state of the optimizer after each run are those of the same training on "
        f"one device, to 1e-4 of the largest element. {exact.CHECKED}",
        rows,
        {
            "model": "{model}",
            "optimizer": "{optimizer}",
            "ranks": "{ranks}",
            "stage": "{stage}",
            "rival": "{rival}",
            "stage, ms": "{jdp_ms:.2f}",
            "rival, ms": "{rival_ms:.2f}",
            "stage / rival": "{ratio:.3f}",
            "least to most": "{low:.3f} to {high:.3f}",
            "repeats": "{repeats}",
            "rounds": "{rounds}",
            "goal": "{goal}",
            "met": "{met}",
        },
    )


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    ranks = [*RANKS, TWO_PROCESSES]
    parser.add_argument("--model", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--optimizer", nargs="*", choices=list(OPTIMIZERS), default=[*OPTIMIZERS])
    parser.add_argument("--ranks", nargs="*", choices=ranks, default=ranks)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
