"""jdp's step beside the strongest rival, JAX's explicit sharding, in several processes.

    python -m benchmarks.step.beside_explicit             in 8 minutes on 2 cores
    python -m benchmarks.step.beside_explicit --quick     one short process, to see that it works
    python -m benchmarks.step.beside_explicit --rival shard_map --ranks 2 --micro-batches 8

The addresses of arrays change the ratio of one process by some percent, so each process gives one
ratio, and the table shows their median and range. Prints its table and writes it to
benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import argparse
import functools
import itertools
import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np

import jdp
from benchmarks.harness import exact, models, report, timing
from benchmarks.harness.oracle import Oracle
from benchmarks.harness.report import Section
from benchmarks.step import contestants, lineup

NUM_PROCESSES, BUDGET_S, GOAL = 6, 6.0, 1.02
# Rows in a micro-batch of all ranks.
ROWS = {"mlp": 64, "transformer": 8}


def main() -> None:
    options = _options()
    if options.one:
        print(json.dumps(list(measure(options))))
        return
    num_processes = 1 if options.quick else NUM_PROCESSES
    program = [sys.executable, "-m", "benchmarks.step.beside_explicit"]
    command = [*program, "--one", *sys.argv[1:]]
    found = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(num_processes)
    ]
    section = _section([_row(runs) for runs in zip(*found, strict=True)], options.rival)
    print(f"{section.title}\n\n{report.table(section)}")
    folder = report.SCRATCH if options.quick else report.RESULTS
    print("wrote", report.write(folder, "beside_explicit", report.hardware(), [section]))


def measure(options: argparse.Namespace) -> Any:
    """Measure each setup in this process, and yield the result of `timing.compare` for each."""
    jdp.init(cpu_ranks=4)
    setups = itertools.product(options.model, options.ranks, options.micro_batches)
    for model, ranks, k in setups:
        mesh = jdp.init(devices=jax.devices()[:ranks])
        problem = _problem(model, k)
        oracle = Oracle(problem, num_steps=1, num_runs=4)
        clocks = []
        for label in ("jdp", options.rival):
            step = lineup.makers(k)[label](problem.loss_fn, mesh, k)
            one = lineup.training(label, step, problem, mesh, oracle)
            clocks.append(exact.checked(one, timing.until_ready))
        compare = functools.partial(timing.compare, *clocks, warm_up=2)
        found = compare(budget_s=0.2 if options.quick else BUDGET_S)
        yield {"model": model, "ranks": ranks, "micro_batches": k, **found._asdict()}


def _problem(model: str, k: int) -> models.Problem:
    num_rows = ROWS[model] * k
    if model == "mlp":
        return models.mlp(width=512, num_layers=4, num_rows=num_rows)
    return models.transformer(dim=128, num_layers=4, num_rows=num_rows, length=32)


def _row(runs: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    ratios = [run["ratio"] for run in runs]
    ratio = float(np.median(ratios))
    return {
        "section": "beside explicit",
        "model": runs[0]["model"],
        "ranks": runs[0]["ranks"],
        "micro_batches": runs[0]["micro_batches"],
        "jdp_ms": float(np.median([run["first_s"] for run in runs])) * 1e3,
        "rival_ms": float(np.median([run["second_s"] for run in runs])) * 1e3,
        "ratio": ratio,
        "low": min(ratios),
        "high": max(ratios),
        "processes": len(runs),
        "rounds": sum(run["num_rounds"] for run in runs),
        "goal": GOAL,
        "met": "yes" if ratio <= GOAL else "no",
    }


def _section(rows: list[dict[str, Any]], rival: str) -> Section:
    return Section(
        f"jdp beside `{rival}`",
        f"An MLP of 4 layers of 512, and a transformer of 4 layers of 128 over 32 bytes a row; "
        f"{ROWS['mlp']} and {ROWS['transformer']} rows in a micro-batch of all ranks. jdp's time "
        "over the rival's: below 1, jdp is faster. Each process gives the median of its rounds of "
        "two runs each, in alternating order; the table has the median, least and most of the "
        f"processes. {exact.CHECKED}",
        rows,
        {
            "model": "{model}",
            "ranks": "{ranks}",
            "micro-batches": "{micro_batches}",
            "jdp, ms": "{jdp_ms:.2f}",
            "rival, ms": "{rival_ms:.2f}",
            "jdp / rival": "{ratio:.3f}",
            "least to most": "{low:.3f} to {high:.3f}",
            "processes": "{processes}",
            "rounds": "{rounds}",
            "goal": "{goal:.2f}",
            "met": "{met}",
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny, not for results")
    parser.add_argument("--rival", default=contestants.EXPLICIT, help="a name of contestants.py")
    parser.add_argument("--model", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {options.rival} - set(contestants.rivals(8)):
        parser.error(f"--rival knows {', '.join(contestants.rivals(8))}, not {unknown}")
    return options


if __name__ == "__main__":
    main()
