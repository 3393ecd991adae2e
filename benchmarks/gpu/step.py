"""Times the decorated step beside plain jit on one GPU: `python -m benchmarks.gpu.step`.

Most of the time is compiling: three programs for each model, whose matmuls XLA would each try in
dozens of kernels of its own compiler. It takes those of cuBLAS here, in all three. Each row is
printed when it is measured; `--quick` takes small models, also on CPUs.
"""

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import jdp
from benchmarks.gpu.measure import gpu
from benchmarks.harness import exact, models, report, timing
from benchmarks.harness.models import Problem
from benchmarks.harness.oracle import Oracle, Training
from benchmarks.harness.report import Section
from benchmarks.step import contestants
from benchmarks.step.lineup import start

_MAKERS = {"jdp": contestants.jdp_step, "jit": contestants.jit_natural}
_NUM_STEPS = 10


def _waited_for(step: Any) -> Any:
    return lambda state, batch: jax.block_until_ready(step(state, batch))


def _kept(step: Any) -> Any:
    """Keep the losses of 8 steps, whose memory later steps then cannot use."""
    kept: deque[Any] = deque(maxlen=8)

    def run(state: Any, batch: Any) -> Any:
        result = step(state, batch)
        kept.append(result[1])
        return result

    return _waited_for(run)


# How the ten steps are called. The two last ones show the host, so the smallest model is enough.
_WAYS: dict[str, Any] = {
    "in a row": lambda step: step,
    "each waited for": _waited_for,
    "each waited for, 8 losses kept": _kept,
}


def main() -> None:
    options = report.parser(
        "The decorated step beside plain jit, one GPU.", quick="small models, also on CPUs"
    ).parse_args()
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false"
    if jax.default_backend() != "gpu" and not options.quick:
        sys.exit(f"benchmarks.gpu.step needs a GPU; JAX found {jax.default_backend()}.")
    hardware = gpu() if jax.default_backend() == "gpu" else report.this_machine()
    rows = []
    for row in measured(_problems(options.quick), budget_s=0.5 if options.quick else 4):
        rows.append({**row, "gpu": hardware})
        print(report.table(_section(rows[-1:])), flush=True)
    name = hardware.split(",")[0]
    report.publish(
        "step_one_gpu", [_section(rows)], quick=options.quick, hardware=name, shows=False
    )


def _problems(is_quick: bool) -> list[Problem]:
    if is_quick:
        return [models.mlp(width=32, num_layers=2, num_rows=16)]
    return [
        # So short that the time of the host shows.
        models.mlp(width=256, num_layers=4, num_rows=256)._replace(name="small mlp"),
        models.mlp(width=2048, num_layers=4, num_rows=4096),
        models.transformer(dim=512, num_layers=1, num_rows=32, length=256),
    ]


def measured(problems: Sequence[Problem], *, budget_s: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, once it is measured.

    Args:
      problems: the models.
      budget_s: seconds for the rounds of each of them.

    Raises:
      exact.WrongResultError: if a step computed a wrong result.
    """
    mesh = jdp.init(devices=jax.devices()[:1])
    for problem in problems:
        began = time.perf_counter()
        batch = jax.device_put(problem.batch)
        steps = {label: make(problem.loss_fn, mesh, 1) for label, make in _MAKERS.items()}
        # Ten steps, then the same ten again: float32 products on a GPU are rounded differently.
        with jax.default_matmul_precision("highest"):
            oracle = Oracle(problem, num_steps=_NUM_STEPS, num_runs=1)
            for way, call in _WAYS.items():
                if way != "in a row" and problem is not problems[0]:
                    break
                clocks = []
                for label, step in steps.items():
                    begin = functools.partial(start, label, problem, mesh)
                    one = Training(label, call(step), begin, batch, oracle)
                    clocks.append(exact.checked(one, timing.until_ready))
                    clocks[-1]()
                ready_s = time.perf_counter() - began
                print(f"{problem.name}, {way}: checked after {ready_s:.1f} s", flush=True)
                compared = timing.compare(*clocks, budget_s=budget_s)
                yield {"model": problem.name, "ten": way, "ready_s": ready_s} | compared._asdict()


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "The decorated step beside plain jit, one GPU",
        f"{rows[0]['gpu']}. jdp / jit, the median of pairs, and its 95 % interval. Ten steps "
        "with matmuls of cuBLAS in full float32. " + exact.CHECKED,
        rows,
        {
            "model": "{model}",
            "ten steps": "{ten}",
            "jit, s for ten": "{second_s:.6f}",
            "jdp / jit": "{ratio:.3f}",
            "interval": "{low:.3f} to {high:.3f}",
            "rounds": "{num_rounds}",
        },
    )


if __name__ == "__main__":
    main()
