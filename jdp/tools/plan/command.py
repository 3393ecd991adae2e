"""The command `jdp plan`."""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jdp.tools import calibration, results
from jdp.tools.bench.flags import read_bytes, read_positive
from jdp.tools.calibration import Calibration
from jdp.tools.plan import assumptions, prediction, question
from jdp.tools.plan.assumptions import Assumptions
from jdp.tools.plan.prediction import KINDS, NONE, Row
from jdp.tools.plan.schedule import METHODS
from jdp.tools.rate import GPUS

_COLUMNS = (
    "method", "hosts", "GPUs", "step s", "of it exposed", "stragglers", "memory GB",
    "efficiency", "ETTR", "steps per commit",
)  # fmt: skip


def table(rows: Sequence[Row], known: Assumptions) -> str:
    """Return the rows as a table, with heading and assumptions."""
    lines = [
        "All times are predicted, not measured; in parentheses at the best and worst of all rates.",
        _aligned(_COLUMNS),
        *(_aligned(_cells(row)) for row in rows),
    ]
    if wrong := sorted({row.method for row in rows if not row.fits}):
        size = known["memory_bytes"].value / 1e9
        lines.append(f"*: more than the {size:.0f} GB of a GPU: {', '.join(wrong)}")
    lines += ["", "Assumed (set any of them: --set NAME=VALUE):"]
    return "\n".join([*lines, *(f"  {name} = {rate}" for name, rate in known.items())])


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        str(row.hosts),
        str(row.gpus),
        f"{row.step_s:.3g} ({row.low_s:.3g} to {row.high_s:.3g})",
        f"{row.exposed_s / row.step_s:z.1%}",
        f"{row.straggler_s / row.step_s:z.1%}",
        f"{row.memory_bytes / 1e9:.1f}{'' if row.fits else '*'}",
        f"{row.efficiency:.1%} ({row.efficiency_low:.0%} to {row.efficiency_high:.0%})",
        f"{row.ettr:.2%} ({row.ettr_low:.1%} to {row.ettr_high:.2%})",
        str(row.commit_every),
    ]


def _aligned(cells: Sequence[str]) -> str:
    widths = (10, 5, 6, 22, 13, 10, 9, 21, 25, 16)
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def to_json(rows: Sequence[Row], known: Assumptions) -> str:
    """Return the rows and assumptions as JSON."""
    found: dict[str, Any] = {
        "predicted": [row._asdict() | {"effective": row.effective} for row in rows],
        "assumed": {name: vars(rate) for name, rate in known.items()},
    }
    return results.to_json(found)


def draw(rows: Sequence[Row], path: str | Path) -> None:
    """Plot efficiency over GPUs, with and without failures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        gpus = [row.gpus for row in own]
        left.semilogx(gpus, [100 * row.efficiency for row in own], marker=".", label=method, base=2)
        right.semilogx(gpus, [100 * row.effective for row in own], marker=".", label=method, base=2)
        low = [100 * row.efficiency_low for row in own]
        left.fill_between(gpus, low, [100 * row.efficiency_high for row in own], alpha=0.12)
    left.set(xlabel="GPUs", ylabel="% of one GPU, predicted", title="without failures")
    right.set(xlabel="GPUs", title="with failures, recoveries and commits")
    # A split update may save more than communication costs.
    highest = max(row.efficiency_high for row in rows)
    for panel in (left, right):
        panel.set_ylim(0, 105 * max(1.0, highest))
        panel.grid(alpha=0.3)
        panel.legend()
    results.write_picture(figure, path)


_DESCRIPTION = """\
How long would a step take on many hosts, how much memory, and how much of the
time would count? Simulates a step: buckets that are ready behind the backward
pass, gathers ahead of the forward pass, links, the slowest of all ranks; and
failures with jdp's recovery. All figures are predicted. What is assumed is
printed with its source and can be set: docs/plan.md says how good it is.

  jdp plan --model params=7e9,layers=32,tokens=16384 --hosts 1:2048
  jdp plan --model params=7e9,layers=32,step_s=1.2 --hosts 4 --methods hsdp"""
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def main(arguments: Sequence[str]) -> int:
    """Run `jdp plan`."""
    chosen = _parser().parse_args(arguments)
    try:
        results.require_outputs(_inputs(chosen), json=chosen.json, png=chosen.png)
        hosts, methods = question.read_hosts(chosen.hosts), question.read_methods(chosen.methods)
        measured = _calibration(chosen.calibration)
        known, options = _known(chosen, measured), _options(chosen, measured)
    except ValueError as error:
        print(f"jdp plan: {error}", file=sys.stderr)
        return 2
    rows = [
        prediction.predict(options, known, method, number) for method in methods for number in hosts
    ]
    if chosen.json != results.STDOUT:
        print(table(rows, known))
    if chosen.json:
        results.write(to_json(rows, known), chosen.json)
    if chosen.png:
        draw(rows, chosen.png)
    return 0


def _inputs(chosen: argparse.Namespace) -> list[str | Path | None]:
    if chosen.calibration == "":
        return [chosen.recovery, *map(calibration.default_path, ("gpu", "cpu"))]
    return [chosen.recovery, chosen.calibration]


def _options(chosen: argparse.Namespace, measured: Calibration | None) -> prediction.PlanOptions:
    return prediction.PlanOptions(
        model=question.read_model(chosen.model),
        per_host=chosen.gpus_per_host or GPUS[chosen.gpu].per_host,
        gather_bytes=_DTYPES[chosen.gather_dtype],
        reduce_bytes=_DTYPES[chosen.reduce_dtype],
        bucket_bytes=chosen.bucket_bytes,
        straggler=chosen.straggler,
        seed=chosen.seed,
        activation_bytes=chosen.activations,
        commit_every=chosen.commit_every or 0,
        degraded_s=chosen.missing_host_s,
        overlaps=measured is None or measured.platform != "cpu",
    )


def _known(chosen: argparse.Namespace, measured: Calibration | None) -> assumptions.Assumptions:
    known = assumptions.assumed(chosen.gpu, chosen.link)
    if measured is not None:
        known = assumptions.with_calibration(known, measured)
    if chosen.recovery is not None:
        known = assumptions.with_recovery(known, Path(chosen.recovery))
    given: dict[str, float] = {}
    for name, value in map(_setting, chosen.set):
        if name in given:
            raise ValueError(f"--set {name} is repeated. Write it once.")
        given[name] = value
    if chosen.straggler == NONE and assumptions.STRAGGLER in given:
        raise ValueError(
            f"--set {assumptions.STRAGGLER}={given[assumptions.STRAGGLER]:g} has no effect with "
            "--straggler none, which assumes equally fast ranks. Remove one of them."
        )
    return assumptions.with_given(known, given)


def _calibration(text: str | None) -> Calibration | None:
    if text is None:
        return None
    path = Path(text) if text else None
    found = calibration.load("gpu", path) or calibration.load("cpu", path)
    if found is None:
        raise ValueError(
            f"the calibration {path or 'of this host'} does not exist. Make one: jdp bench "
            "--calibrate."
        )
    return found


def _setting(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise ValueError(f"--set {text} is not NAME=NUMBER, such as matmul_flops=4e14.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp plan",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = (
        "params, layers, and tokens of a GPU in a step or step_s; micro_batches, leaves of a layer"
    )
    parser.add_argument("--model", required=True, metavar="NAME=N,...", help=text)
    text = "numbers of hosts: 4, 1,2,3, or 1:2048 for powers of two (default 1:64)"
    parser.add_argument("--hosts", default="1:64", metavar="N", help=text)
    text = "default 8, and 4 GB200"
    parser.add_argument("--gpus-per-host", type=read_positive, metavar="N", help=text)
    parser.add_argument("--gpu", default="H100", help=f"one of {', '.join(GPUS)} (default H100)")
    text = "network cards of a host and Gbit/s of each (default one of 400 for each of its GPUs)"
    parser.add_argument("--link", metavar="NxGBITS", help=text)
    text = f"some of {','.join(METHODS)} (default all)"
    parser.add_argument("--methods", default=",".join(METHODS), metavar="NAMES", help=text)
    for flag, what in (("--gather-dtype", "gathered parameters"), ("--reduce-dtype", "gradients")):
        text = f"of {what} (default float32)"
        parser.add_argument(flag, choices=_DTYPES, default="float32", help=text)
    text = "capacity of a bucket: 4M and 4MiB are 4 * 2**20 bytes, 4MB 4e6 (default 4M)"
    size = read_bytes("4M")
    parser.add_argument("--bucket-bytes", type=read_bytes, default=size, metavar="BYTES", help=text)
    text = "bytes of a GPU beside its state: activations and rows (default 0)"
    read = functools.partial(read_bytes, least=0)
    parser.add_argument("--activations", default=0, type=read, metavar="BYTES", help=text)
    _add_assumptions(parser)
    results.add_json(parser)
    results.add_png(parser, "draw efficiency over GPUs (needs matplotlib)")
    return parser


def _add_assumptions(parser: argparse.ArgumentParser) -> None:
    text = "how ranks are slow by chance (default lognormal); set its straggler_scale"
    parser.add_argument("--straggler", choices=KINDS, default="lognormal", help=text)
    parser.add_argument("--seed", type=int, default=0, help="of the stragglers (default 0)")
    text = "steps between commits (default: as many as lose least)"
    parser.add_argument("--commit-every", type=read_positive, metavar="N", help=text)
    text = "seconds from a failure until a new host joins; jdp trains on without it (default 0)"
    parser.add_argument("--missing-host-s", type=_seconds, default=0.0, metavar="S", help=text)
    text = "take links and computation from this host's `jdp bench --calibrate`, or FILE"
    parser.add_argument("--calibration", nargs="?", const="", metavar="FILE", help=text)
    text = "take recoveries from FILE of `jdp bench faults --json=FILE`"
    parser.add_argument("--recovery", metavar="FILE", help=text)
    text = "set an assumption; the output lists them"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from 0 to 1e9, such as 600"
        )
    return value
