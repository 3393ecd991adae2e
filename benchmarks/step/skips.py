"""Steps that skip updates by NaN or infinity, beside the same steps that do not.

    python -m benchmarks.step.skips            in 3 minutes on 2 cores
    python -m benchmarks.step.skips --quick    few rounds, to see that it works

All gradients are finite: in each round, the parameters of both steps must have equal bits. Prints
its table and writes it to benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax

import jdp
from benchmarks.harness import exact, models, report, timing
from benchmarks.harness.report import Section

GOAL, NUM_STEPS, BUDGET_S = 1.01, 5, 20.0
TX = optax.adamw(1e-3)
GUARDS = {
    "skip_nonfinite": jdp.skip_nonfinite(TX),
    "dynamic_loss_scale": jdp.dynamic_loss_scale(TX, initial=8.0),
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "replicated": jdp.replicated,
    "sharded, stage 2": functools.partial(jdp.sharded, stage=2),
}


def main() -> None:
    quick = report.parser(__doc__).parse_args().quick
    jdp.init(cpu_ranks=2)
    rows = []
    for wrapper in WRAPPERS:
        rows += measure(wrapper, 0.1 if quick else BUDGET_S * 3)
    report.publish("skips", [_section(rows)], quick=quick)


def measure(wrapper: str, budget_s: float) -> list[dict[str, Any]]:
    """Time a step with each guard and without, in turns."""
    runs = {guard: _Run(wrapper, tx) for guard, tx in {"none": TX, **GUARDS}.items()}
    found = timing.alternate(runs, budget_s=budget_s, warm_up=2, max_rounds=1000)
    for guard in GUARDS:
        if runs[guard].digests != runs["none"].digests:
            raise exact.WrongResultError(f"{guard}, {wrapper}: the parameters have other bits.")
    return [_row(wrapper, guard, found[guard], found["none"]) for guard in GUARDS]


class _Run:
    """A training, of which each call times a few steps."""

    def __init__(self, wrapper: str, tx: Any):
        problem = models.transformer(dim=64, num_layers=4, num_rows=16, length=64)

        @jdp.train_step
        def step(state: Any, batch: Any) -> Any:
            scale = state.opt_state.scale if tx is GUARDS["dynamic_loss_scale"] else 1.0
            loss_fn = lambda *given: problem.loss_fn(*given) * scale  # noqa: E731
            loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
            return state.apply_gradients(grads), {"loss": loss / scale}

        self._step, self._batch = step, problem.batch
        self._state = jdp.TrainState.create(problem.params, WRAPPERS[wrapper](tx))
        self.digests: list[str | None] = []

    def __call__(self) -> float:
        seconds = timing.until_ready(self._steps)
        self.digests.append(jdp.check_replicas(self._state.params))
        return seconds

    def _steps(self) -> Any:
        for _ in range(NUM_STEPS):
            self._state, _ = self._step(self._state, self._batch)
        return self._state


def _row(wrapper: str, guard: str, with_s: np.ndarray, without_s: np.ndarray) -> dict[str, Any]:
    ratio = float(np.median(with_s / without_s))
    low, high = timing.interval(with_s / without_s)
    return {
        "section": "skips",
        "optimizer": wrapper,
        "guard": guard,
        "step_ms": float(np.median(without_s)) / NUM_STEPS * 1e3,
        "ratio": ratio,
        "low": low,
        "high": high,
        "rounds": len(with_s),
        "goal": GOAL,
        "met": "yes" if ratio <= GOAL else "no",
    }


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "Steps that skip updates by NaN or infinity",
        "A transformer of 4 layers of width 64, 16 rows of 64 tokens, on 2 ranks. A round has two "
        f"runs of {NUM_STEPS} steps with each guard and without, in both orders: the median ratio "
        "of their times, with its 95 % bootstrap interval. After each run, the parameters of all "
        "three have equal bits on all ranks.",
        rows,
        {
            "optimizer": "{optimizer}",
            "guard": "{guard}",
            "step without, ms": "{step_ms:.2f}",
            "with / without": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
            "goal": "{goal:.2f}",
            "met": "{met}",
        },
    )


if __name__ == "__main__":
    main()
