"""The step times that `jdp explain` predicts for 20 plans, beside the measured ones.

    python -m benchmarks.tools.plans             about 10 minutes on 2 idle cores
    python -m benchmarks.tools.plans --quick     a short run, to see that it works

Measures the rates of this machine first (`jdp bench --calibrate`), predicts every plan, and only
then times the plans, all in alternating rounds. Prints its table and writes it to
benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jdp
from benchmarks.harness import exact, models, report, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.harness.report import Section
from jdp.tools.explain import explain

NUM_STEPS, NUM_RUNS, BUDGET_S = 4, 2, 240.0
MAX_RANKS = 4


class Plan(NamedTuple):
    """How a model is trained.

    Attributes:
      model: "mlp" or "transformer".
      ranks: number of ranks; each has the same number of rows.
      stage: of `jdp.sharded`; 0 is `jdp.replicated`.
      accumulate: number of micro-batches.
      bucket_bytes: None is the default.
    """

    model: str
    ranks: int
    stage: int = 0
    accumulate: int = 1
    bucket_bytes: int | None = None

    def __str__(self) -> str:
        words = [f"stage {self.stage}" if self.stage else "replicated"]
        words += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        words += [f"buckets of {self.bucket_bytes >> 10} KiB"] if self.bucket_bytes else []
        return f"{self.model}, {self.ranks} rank{'s' * (self.ranks > 1)}, {', '.join(words)}"


def plans_of(model: str) -> list[Plan]:
    """Return the plans of a model."""
    return [
        Plan(model, 1),
        Plan(model, 1, accumulate=4),
        Plan(model, 2),
        Plan(model, 2, accumulate=4),
        Plan(model, 2, bucket_bytes=64 << 10),
        Plan(model, 2, stage=1),
        Plan(model, 2, stage=3),
        Plan(model, 4),
        Plan(model, 4, stage=2),
        Plan(model, 4, stage=3, accumulate=4),
    ]


PLANS = [plan for model in ("mlp", "transformer") for plan in plans_of(model)]


def main() -> None:
    parser = report.parser(__doc__, quick="few rounds, not for results")
    parser.add_argument("--calibrated", action="store_true", help="use the rates of an earlier run")
    options = parser.parse_args()
    calibrating_s = 0.0 if options.calibrated else _calibrate()
    jdp.init(cpu_ranks=MAX_RANKS)
    made = {str(plan): _made(plan) for plan in PLANS}
    predictions = {name: predict() for name, (_, predict) in made.items()}
    found = timing.alternate(
        {name: clock for name, (clock, _) in made.items()},
        budget_s=10.0 if options.quick else BUDGET_S,
        min_rounds=2 if options.quick else 5,
        warm_up=2,
    )
    rows = [_row(name, predictions[name], seconds) for name, seconds in found.items()]
    section = _section(rows, calibrating_s)
    print(section.text)
    report.publish("explained_plans", [section], quick=options.quick)


def _calibrate() -> float:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "jdp", "bench", "--calibrate", "--cpu-ranks", str(MAX_RANKS)]
    subprocess.run(command, check=True)
    return time.perf_counter() - begin


def _made(plan: Plan) -> tuple[Callable[[], float], Callable[[], Any]]:
    """Return the clock of a plan, and a function that predicts its time."""
    problem = _problem(plan)
    mesh = jdp.init(devices=jax.devices()[: plan.ranks], timeout_s=None)
    options: Any = {} if plan.bucket_bytes is None else {"bucket_bytes": plan.bucket_bytes}
    if plan.stage:
        tx = jdp.sharded(models.TX, stage=plan.stage, min_size=4096, **options)
    else:
        tx = jdp.replicated(models.TX, **options)

    @jdp.train_step
    def step(state: Any, batch: Any) -> Any:
        value_and_grad = jdp.value_and_grad(problem.loss_fn, accumulate=plan.accumulate)
        loss, grads = value_and_grad(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    state = jdp.TrainState.create(jax.tree.map(np.array, problem.params), tx)
    batch = jax.device_put(problem.batch, NamedSharding(mesh, PartitionSpec("data")))
    oracle = Oracle(problem, num_steps=NUM_STEPS, num_runs=NUM_RUNS)
    training = Training(str(plan), step, lambda: jax.tree.map(jnp.copy, state), batch, oracle)
    timed = exact.checked(training, timing.until_ready)
    return lambda: timed() / NUM_STEPS, lambda: explain(step, state, batch).time


def _problem(plan: Plan) -> Problem:
    if plan.model == "mlp":
        return models.mlp(width=512, num_layers=4, num_rows=128 * plan.ranks)
    return models.transformer(dim=128, num_layers=4, num_rows=16 * plan.ranks, length=32)


def _row(name: str, predicted: Any, seconds: np.ndarray) -> dict[str, Any]:
    measured = float(np.median(seconds))
    return {
        "section": "explained_plans",
        "plan": name,
        "predicted_ms": predicted.likely_s * 1e3,
        "low_ms": predicted.low_s * 1e3,
        "high_ms": predicted.high_s * 1e3,
        "computing_ms": predicted.computing_s * 1e3,
        "exposed_ms": predicted.exposed_s * 1e3,
        "measured_ms": measured * 1e3,
        "error": predicted.likely_s / measured - 1,
        "is_within": predicted.low_s <= measured <= predicted.high_s,
        "rounds": len(seconds),
    }


def kendall_tau(first: np.ndarray, second: np.ndarray) -> float:
    """Return Kendall's tau-b of two rankings: the share of pairs in one order, less the others."""
    pairs = np.triu_indices(len(first), 1)
    signs = [np.sign(np.subtract.outer(x, x))[pairs] for x in (first, second)]
    both = np.sqrt(np.count_nonzero(signs[0]) * np.count_nonzero(signs[1]))
    return float(np.sum(signs[0] * signs[1]) / both)


def _section(rows: list[dict[str, Any]], calibrating_s: float) -> Section:
    predicted, measured = (np.array([row[x] for row in rows]) for x in _TIMES)
    errors = np.abs([row["error"] for row in rows])
    within = sum(row["is_within"] for row in rows)
    load = os.getloadavg()[0]
    return Section(
        "Predicted and measured times of a step",
        f"Kendall's tau of the {len(rows)} plans: {kendall_tau(predicted, measured):.2f}. Errors: "
        f"median {np.median(errors):.0%}, {np.mean(errors <= 0.25):.0%} of the plans within 25 %, "
        f"largest {errors.max():.0%}; {within} measured times lie in the predicted interval. "
        f"Calibration took {calibrating_s:.0f} s; load {load:.1f}. An MLP of 4 layers of 512 with "
        "128 rows for each rank, and a transformer of 4 layers of 128 with 16 rows of 32 bytes; "
        f"SGD with momentum. A round has two runs of {NUM_STEPS} steps of every plan, in both "
        "orders, and the table their median. Loss, parameters and state of the optimizer after "
        f"each run are those of one device, to 1e-4 of the largest element. {exact.CHECKED}",
        rows,
        {
            "plan": "{plan}",
            "predicted, ms": "{predicted_ms:.2f}",
            "interval, ms": "{low_ms:.2f} to {high_ms:.2f}",
            "of it computing": "{computing_ms:.2f}",
            "collectives": "{exposed_ms:.2f}",
            "measured, ms": "{measured_ms:.2f}",
            "error": "{error:+.0%}",
            "rounds": "{rounds}",
        },
    )


_TIMES = ("predicted_ms", "measured_ms")

if __name__ == "__main__":
    main()
