"""Trains the same models with jdp and with everything else that is installed, side by side.

    make compare                                          in about 13 minutes on 2 idle cores
    python -m benchmarks.compare.side_by_side --quick     tiny, to see that it works
    python -m benchmarks.compare.side_by_side --models mlp --ranks 1 4

PyTorch is looked for in the environment of `--torch-python` or of the variable JDP_TORCH_PYTHON,
in the folder `.venv-torch`, and in this Python; a run without it names the line that installs it.
Writes all rows to benchmarks/results/, and prints a short table for docs/results.md; a quick run
writes to out/benchmarks/.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.all_reduce import peers
from benchmarks.compare import changed_lines, jax_task, measure, tables
from benchmarks.compare.contestants import CONTESTANTS, TORCH
from benchmarks.harness import report
from benchmarks.harness.report import Section
from benchmarks.step import explicit_models

RANKS = ("1", "2", "4", measure.PROCESSES)
# Accumulation matters to where a program communicates.
MICRO_BATCHES = {"mlp": (1,), "conv": (1,), "transformer": (1, 4)}
# Preparing and rounds; each model has an equal share of the seconds that are left when it begins.
TOTAL_S, MIN_ROUNDS = 740.0, 3


def main() -> None:
    options = _options()
    found = peers.find(options.torch_python, None)
    missing = {} if found.torch else {TORCH: peers.INSTALL_TORCH}
    for name, line in missing.items():
        print(f"{name} is not installed and takes no part. To install it: {line}")
    load, begin, sections = os.getloadavg()[0], time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        _write_tasks(Path(folder), options)
        ranks = options.ranks
        with measure.all_teams(Path(folder), found.torch, ranks, is_tiny=options.quick) as started:
            versions = sorted({team.ask("about")[0] for team in started.values()})
            setups = [(model, k) for model in options.models for k in MICRO_BATCHES[model]]
            for number, (model, k) in enumerate(setups):
                now = time.perf_counter()
                end = now + (begin + TOTAL_S - now) / (len(setups) - number)
                sections.append(_section(started, model, k, options, end))
                print(f"\n{sections[-1].title} ({time.perf_counter() - begin:.0f} s)\n")
                print(sections[-1].text + "\n\n" + report.table(sections[-1]), flush=True)
    sections[0] = sections[0]._replace(text=_explained(versions, load) + sections[0].text)
    sys.argv = ["PYTHON" if word == options.torch_python else word for word in sys.argv]
    report.publish("compare", sections, quick=options.quick, shows=False)
    rows = [row for section in sections for row in section.rows]
    print(f"\nFor docs/results.md:\n\n{tables.readme(rows)}\n\nWhere jdp loses:")
    print("\n".join(tables.losses(rows)) or "nowhere beyond the intervals")


def _section(started: measure.Teams, model: str, k: int, options: Any, end: float) -> Section:
    end, min_rounds = (0.0, 1) if options.quick else (end, MIN_ROUNDS)
    found = measure.measure(started, model, k, ranks=options.ranks, end=end, min_rounds=min_rounds)
    problem = jax_task.problem_of(model, options.quick)
    num_rows = jax_task.TINY_ROWS if options.quick else jax_task.NUM_ROWS[model]
    lines = {name: changed_lines.of_program(name) for name in CONTESTANTS}
    lines["explicit sharding"] += changed_lines.of_functions(
        explicit_models.REWRITTEN[problem.loss_fn]
    )
    section = tables.section(model, k, measure.rows_of(found, model, k, num_rows, lines))
    return section._replace(text=_left_out(found.errors))


def _left_out(errors: dict[measure.Run, str]) -> str:
    """Return a sentence for each error that left contestants out."""
    of_error: dict[str, dict[str, list[str]]] = {}
    for run, error in errors.items():
        of_error.setdefault(error, {}).setdefault(run.name, []).append(run.ranks)
    return "\n\n".join(
        "Left out: "
        + "; ".join(f"{name} on {', '.join(ranks)}" for name, ranks in runs.items())
        + f". {error}"
        for error, runs in of_error.items()
    )


def _explained(versions: list[str], load: float) -> str:
    return (
        f"{', '.join(versions)}; load before the first measurement {load:.1f}. All train with SGD "
        "with momentum from the same parameters on the same global batch, whatever the number of "
        "ranks, and share the cores: XLA computes one rank on all of them, PyTorch has cores / "
        "ranks threads in a process. PyTorch's ranks are processes. A round trains with every "
        "contestant in one order and then in reverse; medians over rounds, with 95 % bootstrap "
        "intervals. `scaling`: rows/s over those of the same contestant on 1 rank. "
        "`synchronisation`: the step less that of ranks that train alone on their rows, written "
        "with `shard_map`, or in PyTorch. `memory`: most resident memory of all processes in a run "
        "above that before it. `changed lines`: of the program, beside training on one device, and "
        "for explicit sharding of the model. `difference`: of the parameters of any rank after any "
        "run from float64 on one device, as a share of what training changed. A contestant that "
        "differs by 2e-3 gets no row. "
    )


def _write_tasks(folder: Path, options: Any) -> None:
    numbers = sorted({measure.num_ranks(x) for x in options.ranks} - {1})
    command = [sys.executable, "-m", "benchmarks.compare.write_tasks", str(folder)]
    command += ["--models", *options.models, "--ranks", *map(str, numbers)]
    command += ["--tiny"] if options.quick else []
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, env=environment)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument(
        "--models", nargs="*", choices=list(MICRO_BATCHES), default=list(MICRO_BATCHES)
    )
    parser.add_argument("--ranks", nargs="*", default=list(RANKS), help=", ".join(RANKS))
    parser.add_argument("--torch-python", help="a Python that has torch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
