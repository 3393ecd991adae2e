"""Measures a step with `virtual_ranks`, beside the same step without it.

    python -m benchmarks.step.virtual_ranks          three models, in 3 minutes on 2 cores
    python -m benchmarks.step.virtual_ranks --quick  few rounds, to see that it works

After the timed steps the states of one number of virtual ranks must have equal bits on every number
of ranks. Prints its table and writes it to benchmarks/results/, that of a quick run to
out/benchmarks/.
"""

import time
from typing import Any

import jax
import numpy as np
import optax

import jdp
from benchmarks.harness import models, report
from benchmarks.harness.report import Section
from jdp.tools.models import SmallModel
from jdp.tools.paired_timing import interval

NUM_STEPS = 5
# (ranks, virtual ranks)
POINTS = ((1, 1), (2, 2), (4, 4), (2, 4), (1, 4), (2, 8), (1, 8))
REPLICATED, SHARDED = "replicated", "sharded, stage 2"


def problems() -> list[SmallModel]:
    """Return the models; 8 virtual ranks divide their rows."""
    return [
        models.mlp(width=512, num_layers=6, num_rows=256),
        models.conv_net(channels=16, num_layers=4, num_rows=32, size=16),
        models.transformer(dim=64, num_layers=4, num_rows=16, length=64),
    ]


def main() -> None:
    quick = report.parser(__doc__).parse_args().quick
    jdp.init(cpu_ranks=4)  # JAX fixes the number of devices at its first use
    report.publish("virtual_ranks", [measure(num_rounds=2 if quick else 8)], quick=quick)


def measure(*, num_rounds: int) -> Section:
    """Time steps in alternation with and without virtual ranks, `num_rounds` times each."""
    rows = []
    contestants = [(problem, REPLICATED) for problem in problems()]
    for problem, optimizer in [*contestants, (contestants[-1][0], SHARDED)]:
        bits: dict[int, set[str]] = {}
        for num_ranks, number in POINTS:
            row, digest = _row(problem, optimizer, num_ranks, number, num_rounds)
            rows.append(row)
            bits.setdefault(number, set()).add(digest)
        if any(len(digests) > 1 for digests in bits.values()):
            raise SystemExit(f"{problem.name}: bits depend on the number of ranks: {bits}")
    return Section(
        "Steps on virtual ranks",
        f"Rounds of {NUM_STEPS} steps, in alternating order: the median ratio of the time with "
        "`virtual_ranks` to that without, with its 95 % bootstrap interval. States of as many "
        "virtual ranks had equal bits on 1, 2 and 4 ranks. 4 ranks take turns on 2 cores.",
        rows,
        {
            "model": "{model}",
            "optimizer": "{optimizer}",
            "ranks": "{ranks}",
            "virtual ranks": "{virtual}",
            "step without, ms": "{step_ms:.2f}",
            "with / without": "{ratio:.3f}",
            "95 % interval": "{low:.3f} to {high:.3f}",
            "rounds": "{rounds}",
        },
    )


def _row(
    problem: SmallModel, optimizer: str, num_ranks: int, number: int, num_rounds: int
) -> tuple[dict[str, Any], str]:
    jdp.init(cpu_ranks=num_ranks)
    loops = [_Loop(problem, optimizer, virtual) for virtual in (None, number)]
    times: list[list[float]] = [[], []]
    for i in range(num_rounds + 1):  # the first round compiles
        for j in (0, 1) if i % 2 else (1, 0):
            times[j].append(loops[j].run())
    plain, virtual = (np.array(each[1:]) for each in times)
    low, high = interval(virtual / plain)
    row = {
        "section": "virtual_ranks",
        "model": problem.name,
        "optimizer": optimizer,
        "ranks": num_ranks,
        "virtual": number,
        "step_ms": float(np.median(plain)) / NUM_STEPS * 1e3,
        "ratio": float(np.median(virtual / plain)),
        "low": low,
        "high": high,
        "rounds": num_rounds,
    }
    return row, loops[1].digest()


class _Loop:
    def __init__(self, problem: SmallModel, optimizer: str, number: int | None):
        @jdp.train_step(virtual_ranks=number)
        def step(state: Any, batch: Any) -> Any:
            loss, grads = jdp.value_and_grad(problem.loss_fn)(state.params, batch)
            return state.apply_gradients(grads), {"loss": loss}

        self._step, self._batch = step, problem.batch
        tx = optax.adamw(1e-3)
        wrapped = jdp.sharded(tx, stage=2) if optimizer == SHARDED else jdp.replicated(tx)
        self._state = jdp.TrainState.create(problem.params, wrapped)

    def run(self) -> float:
        """Return the seconds of some steps."""
        begin = time.perf_counter()
        for _ in range(NUM_STEPS):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return time.perf_counter() - begin

    def digest(self) -> str:
        """Return the hash of the state, equal on all ranks."""
        return jdp.check_replicas(self._state) or ""


if __name__ == "__main__":
    main()
