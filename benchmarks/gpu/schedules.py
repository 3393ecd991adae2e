"""Estimates how much of their reductions steps hide, compiled for 8 x H200; runs without a GPU.

    python -m benchmarks.gpu.schedules                     this interpreter's JAX, all steps
    python -m benchmarks.gpu.schedules --also PYTHON ...   and those of other environments
    python -m benchmarks.gpu.schedules --only mlp          steps whose names hold a word

An environment needs JAX's CUDA plugin, and nothing of CUDA: pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt, of its version of JAX. That of JAX 0.12 knows what an H200 is
and tells the others. Prints its table and writes it to benchmarks/results/ (with --only to
out/benchmarks/).
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh

import jdp
from benchmarks.gpu import programs, timeline, topology
from benchmarks.gpu.timeline import MiB
from benchmarks.harness import report
from benchmarks.harness.report import Section
from jdp import collectives

THRESHOLD = "xla_gpu_all_reduce_combine_threshold_bytes"


class Method(NamedTuple):
    """A way to reduce gradients.

    Attributes:
      options: options of `programs.lowered`.
      threshold_mib: size up to which XLA combines all-reduces; None: jdp chooses.
    """

    options: dict[str, Any]
    threshold_mib: float | None = None


PSUM = dict(all_reduce=collectives.xla)
SPLIT = dict(all_reduce=collectives.split)
WHOLE = {
    "psum": Method(PSUM),
    "psum, XLA's default": Method(PSUM, 30),
    "psum, 4 MiB": Method(PSUM, 4),
    "psum, 8 MiB": Method(PSUM, 8),
    "psum, 16 MiB": Method(PSUM, 16),
    "split": Method(SPLIT),
}


def _late(reduction: dict[str, Any]) -> Callable[..., Any]:
    return functools.partial(jdp.scan_layers, **reduction)


SCANNED = {
    "scan, psum": Method(dict(PSUM, scan=lax.scan)),
    "scan_layers, psum": Method(dict(PSUM, scan=_late(PSUM))),
    "scan_layers, split": Method(dict(SPLIT, scan=_late(SPLIT))),
    "scan, psum, remat": Method(dict(PSUM, scan=lax.scan, remat=True)),
    "scan_layers, psum, remat": Method(dict(PSUM, scan=_late(PSUM), remat=True)),
    "scan_layers, split, remat": Method(dict(SPLIT, scan=_late(SPLIT), remat=True)),
}
METHODS = {**WHOLE, **SCANNED}
# (model, optimizer, method). The optimizer runs after a loop of layers, and does not change the
# loop.
STEPS = [
    (model, optimizer, method)
    for model in programs.MODELS
    for optimizer in programs.OPTIMIZERS
    for method in (METHODS if optimizer == "sgd" else WHOLE)
    if not (model == "mlp" and "remat" in method)
]


def measure(model: str, optimizer: str, method: str, mesh: Mesh) -> dict[str, Any]:
    """Compile one step for `mesh`, and simulate its schedule."""
    how = METHODS[method]
    lowered = programs.lowered(model, optimizer, mesh, **how.options)
    mib = how.threshold_mib
    compiled = lowered.compile(None if mib is None else {THRESHOLD: int(mib * MiB)})
    found, made = timeline.run(compiled.as_text()), programs.MODELS[model]
    ceiling = made.ceiling_bytes("scan" in how.options)
    # A loop that reduces one layer late begins with a reduction of zeros, and hides it too.
    zeros = made.layer_bytes() if method.startswith("scan_layers") else 0
    hidden = max(found.hidden_bytes - zeros, 0)
    return {
        "jax": jax.__version__,
        "model": model,
        "optimizer": optimizer,
        "method": method,
        "reductions": found.reductions,
        "sent_mib": found.sent_bytes / MiB,
        "hidden_mib": hidden / MiB,
        "ceiling_mib": ceiling / MiB,
        "of_ceiling": hidden / ceiling,
        "tail_mib": found.tail_bytes / MiB,
        "exposed_us": found.waited_s * 1e6,
        "reducing_us": found.reducing_s * 1e6,
        "exposed_share": found.waited_s / found.reducing_s,
        "step_ms": found.now_s * 1e3,
        "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / MiB,
    }


def main() -> None:
    options = _options()
    described = options.described.read_text() if options.described else None
    rows = list(_rows(options.only, described))
    if options.rows:
        options.rows.write_text(json.dumps(rows))
        return
    for python in options.also:
        rows += _rows_of(python, options.only)
    order = {step: i for i, step in enumerate(STEPS)}
    rows.sort(key=lambda row: order[row["model"], row["optimizer"], row["method"]])
    sections = [_section(model, rows) for model in programs.MODELS]
    sections = [section for section in sections if section.rows]
    quick = bool(options.only)
    report.publish("schedules", sections, quick=quick, hardware="8xh200-compiled")


def _rows(only: str, described: str | None) -> Iterator[dict[str, Any]]:
    try:
        mesh = topology.mesh_of_h200s(described=described)
    except topology.UnavailableError as reason:
        sys.exit(f"8 x H200, JAX {jax.__version__}: {reason}")
    handlers = programs.register_handlers()
    for step in STEPS:
        if only in " ".join(step):
            row = measure(*step, mesh) | {"handlers": handlers}
            told = "{model}, {optimizer}, {method}: {of_ceiling:.0%}, {exposed_us:.0f} us"
            print(f"JAX {row['jax']}", told.format(**row), file=sys.stderr)
            yield row


# A process has one JAX. The newest one's description of an H200 serves all.
def _rows_of(python: str, only: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        described, rows = Path(folder, "h200.txtpb"), Path(folder, "rows.json")
        described.write_text(topology.target_config())
        command = [python, "-m", "benchmarks.gpu.schedules", "--only", only]
        command += ["--described", described, "--rows", rows]
        subprocess.run(command, check=True)
        return json.loads(rows.read_text())


def _section(model: str, rows: list[dict[str, Any]]) -> Section:
    made = programs.MODELS[model]
    return Section(
        f"{model}: {made.num_layers} layers, {made.gradient_bytes() / MiB:.0f} MiB of gradients",
        f"Rows of a batch {list(made.rows)}, bfloat16. Hidden: bytes of gradients that are under "
        "way while a matmul runs. Ceiling: all but those that no matmul follows. Tail: bytes that "
        "start after the last matmul. Exposed: how long the step waits for reductions, over how "
        "long they take; step: matmuls and memory too. XLA itself combines all-reduces up to "
        "30 MiB, `psum, 4 MiB` up to 4. The loss is reduced, too. `scan_layers` sends one layer "
        "of zeros more. " + timeline.ASSUMPTIONS,
        [row for row in rows if row["model"] == model],
        {
            "optimizer": "{optimizer}",
            "method": "{method}",
            "JAX": "{jax}",
            "reductions": "{reductions}",
            "sent, MiB": "{sent_mib:.1f}",
            "hidden": "{hidden_mib:.1f}",
            "ceiling": "{ceiling_mib:.1f}",
            "of ceiling": "{of_ceiling:.0%}",
            "tail, MiB": "{tail_mib:.3f}",
            "exposed, us": "{exposed_us:.0f}",
            "of, us": "{reducing_us:.0f}",
            "exposed": "{exposed_share:.1%}",
            "step, ms": "{step_ms:.2f}",
            "temporary, MiB": "{temporary_mib:.0f}",
        },
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a word of: model optimizer method")
    parser.add_argument("--also", nargs="*", default=[], metavar="PYTHON")
    parser.add_argument("--described", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
