"""How fast jdp's all-reduce is on CPUs of one host, beside those of others, and what a step pays.

    python benchmarks/all_reduce.py                     all parts, in minutes on 2 cores
    python benchmarks/all_reduce.py --only processes    some of process, processes, training
    python benchmarks/all_reduce.py --quick             tiny, to see that it works
    python benchmarks/all_reduce.py --torch-python PYTHON --mpi-python PYTHON
                                                        peers that have environments of their own

PyTorch (`pip install torch`, of any version) and Open MPI (Debian's openmpi-bin, and `pip install
mpi4py`) are looked for in this Python, or in the one that is given; what is not found is called
missing. Prints its tables and writes them, with a plot, to benchmarks/results/, those of a quick
run to out/benchmarks/.
"""

import argparse
import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator

import peers
import reduce_one_process
import reduce_plot
import reduce_processes
import reduce_training
import report
from peers import Peers
from report import Section

import jdp
from jdp.collectives import library

KiB, MiB = 2**10, 2**20
# Of several rounds through shared memory, of which the last is short.
ODD = 7 * MiB // 4 + 4


def main() -> None:
    options = _options()
    faulthandler.dump_traceback_later(options.timeout_s, exit=True)
    if library.why_missing():
        sys.exit(f"nothing to measure: {library.why_missing()}")
    jdp.init(cpu_ranks=4)
    at = peers.find(options.torch_python, options.mpi_python)
    load = os.getloadavg()[0]
    sections = [s for part in options.only for s in _timed(PARTS[part], at, options.quick)]
    before = f"The machine's load before the first measurement was {load:.1f}. "
    sections[0] = sections[0]._replace(text=before + sections[0].text)
    # Where the peers lie on this machine is nobody's business.
    _hide(options.torch_python, options.mpi_python)
    folder = report.SCRATCH if options.quick else report.RESULTS
    some = "" if options.only == list(PARTS) else "_" + "_".join(options.only)
    page = report.write(folder, "all_reduce" + some, report.hardware(), sections)
    print("wrote", page)
    print(reduce_plot.draw(page.with_suffix(".svg"), sections))


def _one_process(at: Peers, quick: bool) -> Iterator[Section]:
    sizes = [64 * KiB] if quick else [4 * KiB, 64 * KiB, MiB, 16 * MiB, 64 * MiB]
    tree = reduce_one_process.TREE[: 5 if quick else None]
    yield from reduce_one_process.measure(sizes=sizes, tree=tree, **_effort(quick))


def _processes(at: Peers, quick: bool) -> Iterator[Section]:
    sizes = [64 * KiB, ODD] if quick else [64 * KiB, MiB, ODD, 16 * MiB, 64 * MiB]
    yield from reduce_processes.measure(at=at, sizes=sizes, **_effort(quick))


def _training(at: Peers, quick: bool) -> Iterator[Section]:
    widths = (420,) if quick else reduce_training.WIDTHS
    yield reduce_training.measure(at=at, widths=widths, **_effort(quick))


def _effort(quick: bool) -> dict:
    if quick:
        return {"budget_s": 0.1, "min_rounds": 1}
    return {"budget_s": 6.0, "min_rounds": 8}


PARTS = {"process": _one_process, "processes": _processes, "training": _training}


def _timed(
    part: Callable[[Peers, bool], Iterator[Section]], at: Peers, quick: bool
) -> Iterator[Section]:
    start = time.perf_counter()
    for section in part(at, quick):
        print(f"\n{section.title} ({time.perf_counter() - start:.0f} s)\n\n{report.table(section)}")
        yield section


def _hide(*paths: str | None) -> None:
    sys.argv = ["PYTHON" if argument in paths else argument for argument in sys.argv]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny, not for results")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--torch-python", help="a Python that has torch")
    parser.add_argument("--mpi-python", help="a Python that has mpi4py")
    parser.add_argument("--timeout-s", type=float, default=1800, help="end then, whatever runs")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    options.only = [part for part in PARTS if part in wanted]
    return options


if __name__ == "__main__":
    main()
