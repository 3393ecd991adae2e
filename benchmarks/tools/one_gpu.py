"""The step times that `jdp explain` predicts on one GPU, beside the measured ones.

    python -m benchmarks.tools.one_gpu [--only mlp llama2-7b-2 ...]

Needs one GPU with 80 GB. Each step is explained with the rates that are known of such GPUs, and
then run. Where `jdp bench --calibrate` has measured the GPU, it is explained with those rates too.
The decoders are those of `benchmarks.tools.published` with 2 and 4 layers, so that the difference
is the time of two layers. Prints its table and writes it to benchmarks/results/, and the time of
each kernel to out/benchmarks/.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdp
from benchmarks.gpu.measure import gpu
from benchmarks.harness import models, report
from benchmarks.harness.report import Section
from benchmarks.tools import decoder, published
from jdp.tools import calibration
from jdp.tools.explain import explain
from jdp.tools.profiling import device_operations

_ROUNDS, _STEPS = 7, 5


class Made(NamedTuple):
    """A step, its state, its rows, and what states the costs of its Pallas kernels."""

    step: Any
    state: Any
    batch: Any
    costs: Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=list(_CASES), default=list(_CASES))
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU; JAX found {jax.default_backend()}.")
    jdp.init(devices=jax.devices()[:1])
    rows, kernels = [], {}
    for name in options.only:
        made = _CASES[name]()
        row, kernels[name] = _row(name, made)
        rows.append(row)
        print(report.table(_section(rows[-1:])), flush=True)
        del made
    report.SCRATCH.mkdir(parents=True, exist_ok=True)
    (report.SCRATCH / "one_gpu_kernels.json").write_text(json.dumps(kernels, indent=1))
    hardware = gpu().split(",")[0]
    report.publish("one_gpu", [_section(rows)], hardware=hardware, shows=False)


def _problem(problem: models.Problem) -> Made:
    @jdp.train_step
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jdp.value_and_grad(problem.loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    tx = jdp.replicated(optax.sgd(1e-4, momentum=0.9))
    state = jdp.TrainState.create(problem.params, tx)
    return Made(step, state, jax.device_put(problem.batch), contextmanager(lambda: iter([None])))


def _decoder(run: published.Run, layers: int) -> Made:
    sizes = run.sizes._replace(layers=layers)
    step, make = decoder.training(sizes, stage=0)

    # Not zeros, which GPUs multiply faster.
    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.random.normal(jax.random.key(0), shape.shape, shape.dtype) * 0.02

    params = jax.jit(lambda: jax.tree.map(drawn, decoder.shapes(sizes)))()
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (run.rows, sizes.length))
    batch = jax.device_put(tokens.astype(np.int32))
    return Made(step, make(params), batch, lambda: decoder.stated_costs(sizes, run.rows))


_CASES: dict[str, Callable[[], Made]] = {
    "mlp": lambda: _problem(models.mlp(width=4096, num_layers=4, num_rows=8192)),
    "mlp, bfloat16": lambda: _problem(
        models.mlp(width=4096, num_layers=4, num_rows=8192, dtype=jnp.bfloat16)
    ),
    "transformer": lambda: _problem(
        models.transformer(dim=1024, num_layers=6, num_rows=16, length=512)
    ),
    **{
        f"{name}, {layers} layers": lambda run=run, layers=layers: _decoder(run, layers)
        for name, run in (
            ("llama2-7b", published.RUNS["llama2-7b-8"]),
            ("gpt-5b", published.RUNS["gpt-5b-16"]),
        )
        for layers in (2, 4)
    },
}


def _row(name: str, made: Made) -> tuple[dict[str, Any], Any]:
    step, state, batch, costs = made
    is_calibrated = calibration.load("gpu") is not None
    with costs():
        with _uncalibrated():
            known = explain(step, state, batch)
        measured = explain(step, state, batch) if is_calibrated else None
        for _ in range(2):
            state, metrics = step(state, batch)
        jax.block_until_ready(state)
        times = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            for _ in range(_STEPS):
                state, metrics = step(state, batch)
            jax.block_until_ready(state)
            times.append((time.perf_counter() - begin) / _STEPS)
        kernels = _kernels(lambda state: step(state, batch)[0], state)
    measured_s = statistics.median(times)
    assert np.isfinite(float(metrics["loss"]))
    row = {
        "section": "explained_one_gpu",
        "step": name,
        "gpu": gpu(),
        "measured_s": measured_s,
        "kernels_s": sum(kernels.values()) / 1e9,
        "teraflops": known.time.matmul_flops / 1e12,
        "unknown": list(map(str, known.unknown)),
    }
    for of, found in (("known", known), ("calibrated", measured)):
        time_of = found.time if found else None
        row |= {
            f"{of}_s": time_of.likely_s if time_of else float("nan"),
            f"{of}_low_s": time_of.low_s if time_of else float("nan"),
            f"{of}_high_s": time_of.high_s if time_of else float("nan"),
            f"{of}_error": time_of.likely_s / measured_s - 1 if time_of else float("nan"),
        }
    memory = jax.devices()[0].memory_stats() or {}
    row |= {"stated_gib": known.memory.total / 2**30}
    row |= {"peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30}
    return row, kernels


@contextmanager
def _uncalibrated() -> Iterator[None]:
    name = "XDG_CACHE_HOME"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _kernels(step: Callable[[Any], Any], state: Any) -> dict[str, int]:
    """Return the nanoseconds of each operation of one step."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(state))
        found: Counter[str] = Counter()
        for path in Path(folder).rglob("*.xplane.pb"):
            for ran in device_operations.read(path).values():
                for each in ran:
                    found[f"{each.name} | {each.kernel}"] += each.end - each.begin
    return dict(found.most_common())


def _section(rows: list[dict[str, Any]]) -> Section:
    calibrated = {"calibrated": "{calibrated_s:.5f}", "its error": "{calibrated_error:+.0%}"}
    is_calibrated = all(np.isfinite(row["calibrated_s"]) for row in rows)
    return Section(
        "Predicted and measured times of a step on one GPU",
        f"{rows[0]['gpu']}. Median of {_ROUNDS} rounds of {_STEPS} steps in a row, in seconds. SGD "
        "with momentum, the decoders Adam. The MLP has 4 layers of 4,096 and 8,192 rows, the "
        "transformer 6 layers of 1,024 and 16 rows of 512 bytes; the decoders have the published "
        "widths, 2 or 4 of their layers, bfloat16, and JAX's Pallas kernel for attention. The "
        "memory of the allocator is its peak since the process began.",
        rows,
        {
            "step": "{step}",
            "TFLOP": "{teraflops:.2f}",
            "measured": "{measured_s:.5f}",
            "of it kernels": "{kernels_s:.5f}",
            "predicted": "{known_s:.5f}",
            "interval": "{known_low_s:.5f} to {known_high_s:.5f}",
            "error": "{known_error:+.0%}",
            **(calibrated if is_calibrated else {}),
            "stated, GiB": "{stated_gib:.2f}",
            "peak, GiB": "{peak_gib:.2f}",
        },
    )


if __name__ == "__main__":
    main()
