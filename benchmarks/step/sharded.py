"""jdp.sharded at each stage beside jdp.replicated, and beside plain jit with NamedSharding.

    python -m benchmarks.step.sharded             in 12 minutes on 2 cores
    python -m benchmarks.step.sharded --quick     one short process, to see that it works

Each process gives one ratio of every row, and the table shows their median and range. Prints its
table and writes it to benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import argparse
import functools
import itertools
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import exact, models, report, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.harness.report import Section
from benchmarks.step.contestants import State

NUM_PROCESSES, BUDGET_S = 4, 6.0
GOALS = {1: 1.0, 2: 1.0, 3: 1.1}
PEER = "jit + NamedSharding"
MIN_SIZE = 4096
# Rows in a batch of all ranks.
ROWS = {"mlp": 64, "transformer": 8}


def main() -> None:
    options = _options()
    if options.one:
        print(json.dumps(list(measure(options))))
        return
    command = [sys.executable, "-m", "benchmarks.step.sharded", "--one", *sys.argv[1:]]
    found = [
        json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(1 if options.quick else NUM_PROCESSES)
    ]
    section = _section([_row(runs) for runs in zip(*found, strict=True)])
    print(f"{section.title}\n\n{report.table(section)}")
    folder = report.SCRATCH if options.quick else report.RESULTS
    print("wrote", report.write(folder, "sharded", report.hardware(), [section]))


def measure(options: argparse.Namespace) -> Any:
    """Measure each setup in this process, and yield the result of `timing.compare` for each."""
    jdp.init(cpu_ranks=4)
    for model, ranks in itertools.product(options.model, options.ranks):
        mesh = jdp.init(devices=jax.devices()[:ranks])
        problem = _problem(model)
        oracle = Oracle(problem, num_steps=1, num_runs=4)
        for stage, rival in itertools.product(options.stage, ("replicated", PEER)):
            if rival == PEER and stage != 3:
                continue
            clocks = [
                exact.checked(_training(label, problem, mesh, oracle), timing.until_ready)
                for label in (f"stage {stage}", rival)
            ]
            compare = functools.partial(timing.compare, *clocks, warm_up=2)
            found = compare(budget_s=0.2 if options.quick else BUDGET_S)
            yield {
                "model": model,
                "ranks": ranks,
                "stage": stage,
                "rival": rival,
                **found._asdict(),
            }


def _problem(model: str) -> Problem:
    if model == "mlp":
        return models.mlp(width=512, num_layers=4, num_rows=ROWS[model])
    return models.transformer(dim=128, num_layers=4, num_rows=ROWS[model], length=32)


def _training(label: str, problem: Problem, mesh: Mesh, oracle: Oracle) -> Training:
    batch = jax.device_put(problem.batch, NamedSharding(mesh, P("data")))
    if label == PEER:
        step, start = _peer(problem, mesh)
        return Training(label, step, start, batch, oracle)
    tx = _optimizer(label)

    @jdp.train_step
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(problem.loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    def start() -> Any:
        return jdp.TrainState.create(jax.tree.map(np.array, problem.params), tx)

    return Training(label, step, start, batch, oracle)


@functools.cache
def _optimizer(label: str) -> Any:
    if label == "replicated":
        return jdp.replicated(models.TX)
    return jdp.sharded(models.TX, stage=int(label.split()[1]), min_size=MIN_SIZE)


def _peer(problem: Problem, mesh: Mesh) -> tuple[Any, Any]:
    """Return the step that XLA partitions: every large leaf split, as Flax's guide has it."""

    def sharding(leaf: Any) -> NamedSharding:
        shape = jnp.shape(leaf)
        dims = [i for i, size in enumerate(shape) if size % mesh.size == 0]
        if not dims or np.prod(shape) < MIN_SIZE:
            return NamedSharding(mesh, P())
        dim = max(dims, key=lambda i: (shape[i], -i))
        return NamedSharding(mesh, P(*[None] * dim, "data"))

    def start() -> State:
        params = jax.tree.map(np.array, problem.params)
        state = State(params, models.TX.init(params))
        return jax.device_put(state, jax.tree.map(sharding, state))

    def step(state: State, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(problem.loss_fn)(state.params, batch)
        updates, opt_state = models.TX.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), {"loss": loss}

    places = jax.tree.map(sharding, start())
    return jax.jit(step, donate_argnums=0, out_shardings=(places, None)), start


def _row(runs: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    ratios = [run["ratio"] for run in runs]
    ratio, first = float(np.median(ratios)), runs[0]
    goal = GOALS[first["stage"]] if first["rival"] == "replicated" else None
    return {
        "section": "sharded",
        **{name: first[name] for name in ("model", "ranks", "stage", "rival")},
        "jdp_ms": float(np.median([run["first_s"] for run in runs])) * 1e3,
        "rival_ms": float(np.median([run["second_s"] for run in runs])) * 1e3,
        "ratio": ratio,
        "low": min(ratios),
        "high": max(ratios),
        "processes": len(runs),
        "rounds": sum(run["num_rounds"] for run in runs),
        "goal": "" if goal is None else f"{goal:.2f}",
        "met": "" if goal is None else "yes" if ratio <= goal else "no",
    }


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "`jdp.sharded` beside `jdp.replicated`, and beside jit with NamedSharding",
        "An MLP of 4 layers of 512, and a transformer of 4 layers of 128 over 32 bytes a row; "
        f"{ROWS['mlp']} and {ROWS['transformer']} rows in a batch of all ranks, SGD with momentum. "
        "The time of the stage over the rival's: below 1, the stage is faster. Each process gives "
        "the median of its rounds of two runs each, in alternating order; the table has the "
        f"median, least and most of the processes. {exact.CHECKED}",
        rows,
        {
            "model": "{model}",
            "ranks": "{ranks}",
            "stage": "{stage}",
            "rival": "{rival}",
            "stage, ms": "{jdp_ms:.2f}",
            "rival, ms": "{rival_ms:.2f}",
            "stage / rival": "{ratio:.3f}",
            "least to most": "{low:.3f} to {high:.3f}",
            "processes": "{processes}",
            "rounds": "{rounds}",
            "goal": "{goal}",
            "met": "{met}",
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny, not for results")
    parser.add_argument("--model", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--stage", type=int, nargs="*", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
