"""The command `jdp bench faults`."""

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jdp.inspect import results
from jdp.inspect.alpha_beta_fit import fitted
from jdp.inspect.bench import faults, flags
from jdp.inspect.bench.fault_costs import PARTS
from jdp.inspect.bench.faulty_launch import FaultSetting, FaultyRunError
from jdp.worker.local_devices import num_cpus
from jdp.worker.version import version

_DESCRIPTION = """\
How much of a run's time is training, if processes die? Trains on CPUs under
`jdp run`, kills a random process again and again (SIGKILL), and reports ETTR, the
time of steps that count over all time, and the parts of a recovery. The final
state of every process must have the bits of a run without faults. Takes about
mtbf * (faults + 1) for each state, and half a minute: 13 minutes for two states
with --mtbf 60 --faults 5."""
_SHARES = ("ettr", "repeated", "committing", "down")


def main(arguments: Sequence[str]) -> int:
    """Run `jdp bench faults`."""
    options = _parser().parse_args(arguments)
    results.require_outputs(json=options.json, png=options.png)
    try:
        states = [flags.read_bytes(word) for word in options.state.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--state {options.state}: {error}.") from None
    setting = FaultSetting(
        options.mtbf,
        options.faults,
        options.nproc_per_node,
        options.step_s,
        options.commit_every,
        seed=options.seed,
    )
    quiet = options.json == results.STDOUT
    try:
        rows = _rows(states, setting, quiet=quiet)
    except FaultyRunError as error:
        print(f"jdp bench faults: {error}", file=sys.stderr)
        return 1
    law = _law(rows)
    if law and not quiet:
        print(f"restoring: {law['alpha_s']:.3f} s + bytes / {law['bytes_per_s']:.3g}")
    if options.json:
        _write_json(rows, law, options.json)
    if options.png:
        _draw(options.png, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp bench faults",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "mean seconds from one fault to the next (default 60)"
    parser.add_argument("--mtbf", type=_seconds, default=60.0, metavar="S", help=text)
    text = "faults in each run (default 5)"
    parser.add_argument("--faults", type=flags.read_positive, default=5, metavar="N", help=text)
    text = "bytes of the parameters (default 1M,100M; 1G needs it several times in memory)"
    parser.add_argument("--state", default="1M,100M", metavar="BYTES,...", help=text)
    text = "processes of the run (default 2)"
    parser.add_argument(
        "--nproc-per-node", type=flags.read_positive, default=2, metavar="N", help=text
    )
    text = "seconds that a step takes at least (default 0.1)"
    parser.add_argument("--step-s", type=_seconds, default=0.1, metavar="S", help=text)
    text = "steps between commits (default 10)"
    parser.add_argument(
        "--commit-every", type=flags.read_positive, default=10, metavar="N", help=text
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default 0)")
    results.add_json(parser)
    results.add_png(parser)
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _rows(states: Sequence[int], setting: FaultSetting, *, quiet: bool) -> list[dict[str, Any]]:
    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    rows = []
    for state_bytes in states:
        say(f"state of {state_bytes} bytes:")
        with tempfile.TemporaryDirectory(prefix="jdp-bench-") as folder:
            rows.append(faults.measure(Path(folder), state_bytes, setting, say))
        if not quiet:
            _show(rows[-1])
    return rows


def _show(row: dict[str, Any]) -> None:
    shares = ", ".join(f"{name} {row[name]:.1%}" for name in _SHARES)
    print(
        f"{row['state_bytes']} bytes, {row['processes']} processes, {row['faults']} faults in "
        f"{row['wall_s']:.0f} s: {shares}; bits equal"
    )
    split = ", ".join(f"{name} {row[f'{name}_s']:.3f}" for name in PARTS)
    print(f"recovery {row['recovery_s']:.3f} s (median): {split}", flush=True)


def _write_json(rows: Sequence[dict[str, Any]], law: dict[str, float] | None, to: str) -> None:
    facts = {
        "host": socket.gethostname(),
        "num_cores": num_cpus(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"jdp": version()},
    }
    results.write(results.to_json({**facts, "rows": rows, "restoring": law}), to)


def _law(rows: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Return the law of the time to restore, from states of two sizes or more."""
    points = [(row["state_bytes"], row["restoring_s"]) for row in rows]
    if len({num_bytes for num_bytes, _ in points}) < 2:
        return None
    alpha, beta, error = fitted(points)
    return {"alpha_s": alpha, "bytes_per_s": beta, "largest_error": error}


def _draw(path: str, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + len(rows)), layout="constrained")
    panel = figure.subplots()
    left = [0.0] * len(rows)
    for part in PARTS:
        widths = [row[f"{part}_s"] or 0.0 for row in rows]
        panel.barh(range(len(rows)), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    names = [f"{row['state_bytes'] / 1e6:.0f} MB, ETTR {row['ettr']:.1%}" for row in rows]
    panel.set_yticks(range(len(rows)), names)
    panel.set(xlabel="seconds from a SIGKILL to a step of all processes (medians)")
    panel.legend(ncols=3)
    results.write_picture(figure, path)
