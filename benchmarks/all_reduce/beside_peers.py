"""Measures jdp's all-reduce on CPUs of one host beside other libraries, and its cost in a step.

    python -m benchmarks.all_reduce.beside_peers                    all parts, in minutes on 2 cores
    python -m benchmarks.all_reduce.beside_peers --only processes   some parts
    python -m benchmarks.all_reduce.beside_peers --quick            tiny, to see that it works
    python -m benchmarks.all_reduce.beside_peers --torch-python PYTHON --mpi-python PYTHON
        peers that have their own environments

PyTorch (`pip install torch`, of any version) and Open MPI (Debian's openmpi-bin, and `pip install
mpi4py`) are looked for in this Python, or in the one that is given; what is not found is called
missing. Prints its tables and writes them, with a plot, to benchmarks/results/, those of a quick
run to out/benchmarks/.
"""

import argparse
import faulthandler
import os
import sys
from collections.abc import Iterator

import jdp
from benchmarks.all_reduce import bandwidth, one_process, peers, several_processes, training_step
from benchmarks.all_reduce.peers import Peers
from benchmarks.harness import report
from benchmarks.harness.report import Section
from jdp.collectives.cpu import runtime as cpu_runtime

KiB, MiB = 2**10, 2**20
# Several rounds through shared memory, of which the last is short.
ODD = 7 * MiB // 4 + 4


def main() -> None:
    options = _options()
    faulthandler.dump_traceback_later(options.timeout_s, exit=True)
    if cpu_runtime.why_missing():
        sys.exit(f"nothing to measure: {cpu_runtime.why_missing()}")
    jdp.init(cpu_ranks=4)
    at = peers.find(options.torch_python, options.mpi_python)
    load = os.getloadavg()[0]
    quick = options.quick
    sections = [s for part in options.only for s in report.timed(PARTS[part](at, quick))]
    before = f"The machine's load before the first measurement was {load:.1f}. "
    sections[0] = sections[0]._replace(text=before + sections[0].text)
    # The page must not contain the peers' paths on this machine.
    _hide(options.torch_python, options.mpi_python)
    what = report.name_of("all_reduce", options.only, PARTS)
    page = report.publish(what, sections, quick=quick, shows=False)
    bandwidth.draw(page.with_suffix(".svg"), sections)


def _one_process(at: Peers, quick: bool) -> Iterator[Section]:
    sizes = [64 * KiB] if quick else [4 * KiB, 64 * KiB, MiB, 16 * MiB, 64 * MiB]
    tree = one_process.TREE[: 5 if quick else None]
    yield from one_process.measure(sizes=sizes, tree=tree, **_effort(quick))


def _processes(at: Peers, quick: bool) -> Iterator[Section]:
    sizes = [64 * KiB, ODD] if quick else [64 * KiB, MiB, ODD, 16 * MiB, 64 * MiB]
    yield from several_processes.measure(at=at, sizes=sizes, **_effort(quick))


def _training(at: Peers, quick: bool) -> Iterator[Section]:
    widths = (420,) if quick else training_step.WIDTHS
    yield training_step.measure(at=at, widths=widths, **_effort(quick))


def _effort(quick: bool) -> dict:
    if quick:
        return {"budget_s": 0.1, "min_rounds": 1}
    return {"budget_s": 6.0, "min_rounds": 8}


PARTS = {"process": _one_process, "processes": _processes, "training": _training}


def _hide(*paths: str | None) -> None:
    sys.argv = ["PYTHON" if argument in paths else argument for argument in sys.argv]


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, PARTS)
    parser.add_argument("--torch-python", help="a Python that has torch")
    parser.add_argument("--mpi-python", help="a Python that has mpi4py")
    parser.add_argument(
        "--timeout-s", type=float, default=1800, help="stop after this many seconds"
    )
    return report.parsed(parser, PARTS)


if __name__ == "__main__":
    main()
