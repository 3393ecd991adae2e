"""Measures how long `jdp run` takes to start processes, by forks and without, beside one `python`.

    python -m benchmarks.elastic.starts           in two minutes on 2 cores
    python -m benchmarks.elastic.starts --quick   one round of few processes, to see that it works

The script imports jax, optax and jdp, and calls `jdp.init()`. Prints its table and writes it to
benchmarks/results/, that of a quick run to out/benchmarks/.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import report
from benchmarks.harness.report import Section

SCRIPT = """
import pathlib, sys
import jax, optax, jdp
jdp.init()
whole = f"{jax.process_index()} of {jax.process_count()}"
(pathlib.Path(sys.argv[1]) / whole).touch()
"""
# The peer imports the same packages in one process, and joins no other one.
ALONE = SCRIPT.replace("jdp.init()\n", "")


class Taken(NamedTuple):
    """Seconds of one start, until all of its processes have ended."""

    wall_s: float
    cpu_s: float


def main() -> None:
    quick = report.parser(__doc__, quick="one round of few processes").parse_args().quick
    section = measure(sizes=[1, 2] if quick else [1, 2, 4, 8], rounds=1 if quick else 5)
    report.publish("starts", [section], quick=quick)


def measure(*, sizes: list[int], rounds: int) -> Section:
    """Start each number of processes in both ways, and one `python`, once in each round."""
    contestants = [("python", 1)]
    contestants += [(f"jdp run, {method}", n) for n in sizes for method in ("fork", "spawn")]
    taken: dict[tuple[str, int], list[Taken]] = {one: [] for one in contestants}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for label, n in contestants if number % 2 == 0 else contestants[::-1]:
                taken[label, n].append(start(label, n, Path(folder)))
    return Section(
        "Starts",
        "Seconds from a command until its processes have imported jax, optax and jdp, joined each "
        "other, and ended: medians. CPU: of all processes, the launcher's included. Each process "
        "leaves its number, and those of each run are compared with the exact ones.",
        [_row(label, n, each, taken["python", 1]) for (label, n), each in taken.items()],
        {
            "command": "{command}",
            "processes": "{processes}",
            "wall, s": "{wall_s:.2f}",
            "CPU, s": "{cpu_s:.2f}",
            "CPU / python": "{ratio:.2f}",
            "rounds": "{rounds}",
        },
    )


def _row(label: str, n: int, taken: list[Taken], alone: list[Taken]) -> dict[str, Any]:
    cpu_s = statistics.median(each.cpu_s for each in taken)
    return {
        "section": "starts",
        "command": label,
        "processes": n,
        "wall_s": statistics.median(each.wall_s for each in taken),
        "cpu_s": cpu_s,
        "ratio": cpu_s / statistics.median(each.cpu_s for each in alone),
        "rounds": len(taken),
    }


def start(label: str, n: int, folder: Path) -> Taken:
    """Run one command, and require that each of its processes has left its number."""
    left = Path(tempfile.mkdtemp(dir=folder))
    is_alone = label == "python"
    script = left.with_suffix(".py")
    script.write_text(ALONE if is_alone else SCRIPT)
    command = [sys.executable, str(script), str(left)]
    if not is_alone:
        method = label.rpartition(" ")[2]
        options = ["--nproc-per-node", str(n), "--standbys", "0", "--start-method", method]
        command = [sys.executable, "-m", "jdp", "run", *options, *command[1:]]
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output = process.stdout.read().decode()  # type: ignore[union-attr]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall_s = time.monotonic() - begun
    found, expected = {path.name for path in left.iterdir()}, {f"{i} of {n}" for i in range(n)}
    if process.returncode or found != expected:
        raise RuntimeError(f"{label}, {n} processes: left {sorted(found)}.\n{output}")
    return Taken(wall_s, usage.ru_utime + usage.ru_stime)


if __name__ == "__main__":
    main()
