"""Measures what `jdp.profile` costs the steps that it records, beside the same steps without it.

    python -m benchmarks.step.profile_cost          two models, in a minute on 2 cores
    python -m benchmarks.step.profile_cost --quick  few rounds, to see that it works

Prints its table and writes it to benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import tempfile
import time
from typing import Any

import jax
import numpy as np

import jdp
from benchmarks.harness import models, report
from benchmarks.harness.report import Section
from jdp.tools.paired_timing import interval

NUM_STEPS = 10


def main() -> None:
    quick = report.parser(__doc__).parse_args().quick
    jdp.init(cpu_ranks=2)
    section = measure(num_rounds=3 if quick else 20)
    report.publish("profile_cost", [section], quick=quick)


def measure(*, num_rounds: int) -> Section:
    """Time steps in alternation with and without a profile, `num_rounds` times each."""
    rows = [_row(models.problem_of(name), num_rounds) for name in ("mlp", "transformer")]
    return Section(
        "Cost of a profile",
        f"Rounds of {NUM_STEPS} steps on 2 ranks, one without and one with `jdp.profile`, in "
        "alternating order: the median ratio of their times, with its 95 % bootstrap interval. "
        "`begin` and `end` are the pauses in which the profiler starts, and in which it stops and "
        "the files are written.",
        rows,
        {
            "model": "{model}",
            "step, ms": "{step_ms:.2f}",
            "with / without": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "begin, ms": "{begin_ms:.0f}",
            "end, ms": "{end_ms:.0f}",
            "rounds": "{rounds}",
        },
    )


def _row(problem: models.Problem, num_rounds: int) -> dict[str, Any]:
    loop = _Loop(problem)
    plain, profiled, begins, ends = [], [], [], []
    for i in range(num_rounds + 1):
        for with_profile in (True, False) if i % 2 else (False, True):
            if with_profile:
                begin_s, took_s, end_s = loop.profiled()
                begins.append(begin_s)
                profiled.append(took_s)
                ends.append(end_s)
            else:
                plain.append(loop.steps(NUM_STEPS))
    # The first round compiles.
    ratios = np.array(profiled[1:]) / np.array(plain[1:])
    low, high = interval(ratios)
    return {
        "section": "profile",
        "model": problem.name,
        "step_ms": float(np.median(plain[1:])) / NUM_STEPS * 1e3,
        "ratio": float(np.median(ratios)),
        "low": low,
        "high": high,
        "begin_ms": float(np.median(begins[1:])) * 1e3,
        "end_ms": float(np.median(ends[1:])) * 1e3,
        "rounds": num_rounds,
    }


class _Loop:
    def __init__(self, problem: models.Problem):
        @jdp.train_step
        def step(state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(problem.loss_fn)(state.params, batch)
            return state.apply_gradients(grads), {"loss": loss}

        self._step, self._batch = step, problem.batch
        self._state = jdp.TrainState.create(problem.params, jdp.replicated(models.TX))

    def steps(self, num_steps: int) -> float:
        """Return the seconds of some steps."""
        begin = time.perf_counter()
        for _ in range(num_steps):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state.params)
        return time.perf_counter() - begin

    def profiled(self) -> tuple[float, float, float]:
        """Return the seconds in which a profile begins, of its steps, and in which it ends."""
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            # The step after the timed ones ends it.
            with jdp.profile(folder, steps=range(1, NUM_STEPS + 1)):
                begin_s = time.perf_counter() - begin
                took_s = self.steps(NUM_STEPS)
                step_s = took_s / NUM_STEPS
                end_s = self.steps(1) - step_s
        return begin_s, took_s, end_s


if __name__ == "__main__":
    main()
