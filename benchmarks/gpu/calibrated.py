"""The rates that `jdp bench --calibrate` measures on one GPU, as parts of its data sheet's peaks.

    python -m benchmarks.gpu.calibrated

Each result is compared with the exact one, and each row printed when it is measured. A part far
from those of published programs means that something else was timed: a clock that had not risen,
copies, or the start of kernels. `--quick` measures memory alone, also on CPUs, without peaks.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

import jdp
from benchmarks.gpu.measure import gpu
from benchmarks.harness import exact, report
from benchmarks.harness.report import Section
from jdp.tools.bench import calibrate
from jdp.tools.rate import GPUS, kind_of

_NAN = float("nan")


def main() -> None:
    options = report.parser(
        "The rates of jdp bench --calibrate, one GPU.", quick="memory alone, also on CPUs"
    ).parse_args()
    is_gpu = jax.default_backend() == "gpu"
    if not is_gpu and not options.quick:
        sys.exit(f"benchmarks.gpu.calibrated needs a GPU; JAX found {jax.default_backend()}.")
    hardware = gpu() if is_gpu else report.this_machine()
    mesh = jdp.init(devices=jax.devices()[:1])
    rows = []
    for row in measured(mesh, _peaks(jax.devices()[0].device_kind), options.quick):
        rows.append({**row, "gpu": hardware})
        print(report.table(_section(rows[-1:])), flush=True)
    name = hardware.split(",")[0]
    report.publish("calibrated", [_section(rows)], quick=options.quick, hardware=name, shows=False)


def measured(mesh: Mesh, peaks: Mapping[str, float], is_quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each rate, once it is measured.

    Args:
      mesh: of one device.
      peaks: by the names of rows, as far as they are known.
      is_quick: whether to measure memory alone.

    Raises:
      exact.WrongResultError: if a result is wrong.
    """
    for name, (rate, unit) in _rates(mesh, is_quick).items():
        began = time.perf_counter()
        value = rate()
        yield {
            "rate": name,
            "value": value,
            "unit": unit,
            "part": value / peaks[name] if name in peaks else _NAN,
            "took_s": time.perf_counter() - began,
        }


def _rates(mesh: Mesh, is_quick: bool) -> dict[str, tuple[Callable[[], float], str]]:
    memory = {"memory": (lambda: calibrate.memory_bytes_per_s(mesh), "B/s")}
    if is_quick:
        return memory
    return {
        **memory,
        "matmuls in bfloat16": (lambda: calibrate.matmul_flops_per_s(mesh, "bfloat16"), "FLOP/s"),
        "matmuls in float32": (lambda: calibrate.matmul_flops_per_s(mesh, "float32"), "FLOP/s"),
    }


def _peaks(kind: str) -> dict[str, float]:
    """Return the peaks of a GPU's data sheet, none for another device."""
    found = GPUS.get(kind_of(kind))
    if found is None:
        return {}
    # TensorFloat-32, in which XLA multiplies float32, has half the rate of bfloat16.
    matmuls = {"matmuls in bfloat16": found.flops, "matmuls in float32": found.flops / 2}
    return {"memory": found.memory_bytes_per_s, **matmuls}


def _section(rows: list[dict[str, Any]]) -> Section:
    return Section(
        "Rates that jdp bench --calibrate measures",
        f"{rows[0]['gpu']}. Medians of 7 rounds, each after 0.1 s without a clock, and the part of "
        "the data sheet's peak. " + exact.CHECKED,
        rows,
        {
            "rate": "{rate}",
            "measured": "{value:.4g} {unit}",
            "of the peak": "{part:.2f}",
            "took, s": "{took_s:.1f}",
        },
    )


if __name__ == "__main__":
    main()
