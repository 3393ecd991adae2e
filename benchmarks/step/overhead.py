"""Measures the cost of jdp's decorated step beside the same step without jdp: to run, call, trace.

    python -m benchmarks.step.overhead                    all parts, in minutes on 2 cores
    python -m benchmarks.step.overhead --only call,trace  some of step, counts, call, trace
    python -m benchmarks.step.overhead --quick            tiny rounds, to see that it works
    python -m benchmarks.step.overhead --gpu-topology     counts also what is compiled for 8 x H200

Prints its tables and writes them to benchmarks/results/, those of a quick run to out/benchmarks/.
"""

import argparse
from collections.abc import Iterator

import jdp
from benchmarks.gpu import topology
from benchmarks.harness import models, report
from benchmarks.harness.report import Section
from benchmarks.step import call_cost, op_counts, run_time, trace_cost


def main() -> None:
    options = _options()
    jdp.init(cpu_ranks=4)
    sections = [s for part in options.only for s in report.timed(PARTS[part](options.quick))]
    what = report.name_of("step_overhead", options.only, PARTS)
    report.publish(what, sections, quick=options.quick, shows=False)
    if options.gpu_topology:
        try:
            sections = list(report.timed(_gpu_counts()))
        except topology.UnavailableError as reason:
            print(f"8 x H200: skipped, {reason}")
        else:
            report.publish(
                "step_counts",
                sections,
                quick=options.quick,
                hardware="8xh200-compiled",
                shows=False,
            )


def _steps(quick: bool) -> Iterator[Section]:
    yield run_time.measure(budget_s=0.1 if quick else 5.0, min_rounds=1 if quick else 8)


def _counts(quick: bool) -> Iterator[Section]:
    yield op_counts.count()


def _calls(quick: bool) -> Iterator[Section]:
    sizes = [(10, 1), (100, 1), (1_000, 1), (10, 2), (100, 2), (1_000, 2)]
    setups = [("train", *size) for size in sizes]
    for kind in ("eval", "hooks"):
        setups += [(kind, num_leaves, ranks) for ranks in (1, 2) for num_leaves in (10, 100)]
    yield call_cost.measure(budget_s=0.2 if quick else 3.0, setups=setups)


def _traces(quick: bool) -> Iterator[Section]:
    problems = [
        models.mlp(width=512, num_layers=4, num_rows=512),
        models.transformer(dim=128, num_layers=4, num_rows=32, length=32),
        models.transformer(dim=128, num_layers=12, num_rows=32, length=32),
        models.many_leaves(1_000 if quick else 10_000),
    ]
    yield trace_cost.measure(budget_s=0.1 if quick else 8.0, problems=problems)
    yield trace_cost.measure_plan(num_leaves=10_000, rounds=5)


def _gpu_counts() -> Iterator[Section]:
    yield op_counts.count_for_gpus()


# In this order, because "trace" clears JAX's caches, which "step" and "counts" share.
PARTS = {"step": _steps, "counts": _counts, "call": _calls, "trace": _traces}


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, PARTS)
    parser.add_argument("--gpu-topology", action="store_true", help="also compile for 8 x H200")
    return report.parsed(parser, PARTS)


if __name__ == "__main__":
    main()
