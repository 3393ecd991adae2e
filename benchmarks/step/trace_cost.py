"""Measures the cost of tracing, proving and lowering a step, beside a hand-written one; and of
planning."""

import contextlib
import functools
import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from benchmarks.harness import exact, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle
from benchmarks.harness.report import Section
from benchmarks.step import lineup
from jdp.analysis import step_refusals
from jdp.collectives import buckets
from jdp.reduction import gradients

MOST_LEAVES = 100


def measure(*, budget_s: float, problems: Sequence[Problem]) -> Section:
    """Time tracing and lowering on 4 ranks.

    Args:
      budget_s: seconds for each pair; at least one round of two each.
      problems: models to trace.
    """
    return Section(
        "Trace and lower",
        "Milliseconds from a function to its lowered program, on 4 ranks, with empty caches; the "
        "hand-written step is `jit(shard_map)`. Goals: at most 1.2 times as long, and the "
        "uniformity analysis, `jdp.analysis.step_refusals.check`, at most 5 % of it. All rounds "
        f"lower the same program, and one step of it, of at most {MOST_LEAVES} leaves (XLA takes "
        "long to compile more), trains as one device does on every rank.",
        [_row(problem, budget_s) for problem in problems],
        {
            "model": "{model}",
            "leaves": "{leaves}",
            "jdp, ms": "{jdp_ms:.0f}",
            "by hand, ms": "{hand_ms:.0f}",
            "jdp / by hand": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
            "analysis, ms": "{analysis_ms:.1f}",
            "of trace and lower": "{share:.1%}",
            "met": "{met}",
        },
    )


def measure_plan(*, num_leaves: int, rounds: int) -> Section:
    """Time the planning of buckets."""
    shapes = [jax.ShapeDtypeStruct((i % 100, 100), np.float32) for i in range(num_leaves)]
    plan = functools.partial(buckets.plan, shapes, gradients.BUCKET_BYTES)
    plan_ms = float(np.median([timing.until_returned(plan) for _ in range(rounds)])) * 1e3
    if sorted(i for bucket in plan() for i in bucket) != list(range(num_leaves)):
        raise exact.WrongResultError("a plan must hold each leaf once.")
    row = {"section": "plan", "leaves": num_leaves, "plan_ms": plan_ms}
    return Section(
        "Planning buckets",
        "At trace time. Goal: under 200 ms. The plan holds each leaf once.",
        [{**row, "met": "yes" if plan_ms < 200 else "no"}],
        {"leaves": "{leaves}", "ms": "{plan_ms:.1f}", "met": "{met}"},
    )


def _row(problem: Problem, budget_s: float) -> dict[str, Any]:
    mesh = jdp.init(devices=jax.devices()[:4])
    ours, by_hand = (Lowering(label, problem, mesh) for label in ("jdp", "shard_map"))
    with _analysis_timed() as analysis_s:
        found = timing.compare(ours, by_hand, budget_s=budget_s, min_rounds=1, warm_up=0)
    oracle = Oracle(problem, num_steps=1, num_runs=1)
    ours.check(oracle)
    by_hand.check(oracle)
    share = float(np.median(analysis_s)) / found.first_s
    return {
        "section": "trace",
        "model": problem.name,
        "leaves": len(jax.tree.leaves(problem.params)),
        "jdp_ms": found.first_s * 1e3,
        "hand_ms": found.second_s * 1e3,
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "rounds": found.num_rounds,
        "analysis_ms": float(np.median(analysis_s)) * 1e3,
        "share": share,
        "met": "yes" if found.ratio <= 1.2 and share <= 0.05 else "no",
    }


class Lowering:
    """The clock of a contestant that is traced and lowered again in each call."""

    def __init__(self, label: str, problem: Problem, mesh: Mesh):
        self._label, self._problem, self._mesh = label, problem, mesh
        self._state = lineup.start(label, problem, mesh)
        self._batch = jax.device_put(problem.batch, NamedSharding(mesh, P("data")))
        self._step: Any = None
        self._programs: set[str] = set()

    def __call__(self) -> float:
        self._step = lineup.makers(1)[self._label](self._problem.loss_fn, self._mesh, 1)
        jax.clear_caches()
        gc.collect()
        start = time.perf_counter()
        lowered = self._step.lower(self._state, self._batch)
        seconds = time.perf_counter() - start
        self._programs.add(hashlib.sha256(lowered.as_text().encode()).hexdigest())
        return seconds

    def check(self, oracle: Oracle) -> None:
        """Compare the programs of all calls, and one step of the last on every rank.

        Raises:
          exact.WrongResultError: if calls gave different programs, or the step trains wrongly.
        """
        if len(self._programs) != 1:
            raise exact.WrongResultError(
                f"{self._label!r} lowered {self._problem.name} to {len(self._programs)} different "
                "programs, so its times are not comparable."
            )
        if len(jax.tree.leaves(self._problem.params)) <= MOST_LEAVES:
            one = lineup.training(self._label, self._step, self._problem, self._mesh, oracle)
            exact.checked(one, timing.until_ready)()


@contextlib.contextmanager
def _analysis_timed() -> Iterator[list[float]]:
    seconds = []
    check = step_refusals.check

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        proved = check(*args)
        seconds.append(time.perf_counter() - start)
        return proved

    with mock.patch.object(step_refusals, "check", timed):
        yield seconds
