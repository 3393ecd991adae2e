"""How well does `jdp plan` predict runs that were published, and steps on this machine?

    python -m benchmarks.plan.validate             in 8 minutes on 2 cores
    python -m benchmarks.plan.validate --quick     a few rounds, to see that it works

Prints its tables and writes them to benchmarks/results/, those of a quick run to out/benchmarks/.
"""

import jax

from benchmarks.harness import report
from benchmarks.harness.report import Section
from benchmarks.plan import here, published


def main() -> None:
    options = report.parser(__doc__).parse_args()
    jax.config.update("jax_num_cpu_devices", max(here.RANKS))
    sections = [
        _published(),
        _here(num_rounds=3 if options.quick else 40),
        _faults(num_faults=2 if options.quick else 20),
    ]
    report.publish("plan", sections, quick=options.quick)


def _published() -> Section:
    scale = published.fitted_scale()
    rows = [
        {
            **it._asdict(),
            "error": it.error,
            "points": 100 * it.error,
            "goal": 100 * published.GOAL,
            "met": "fitted" if it.name == published.FITTED_TO
            else "yes" if abs(it.error) <= published.GOAL else "no",
        }
        for it in published.rows(scale)
    ]  # fmt: skip
    sources = "; ".join(f"{name}: {source}" for name, source in published.SOURCES.items())
    text = (
        f"Efficiency in relation to one GPU (Horovod) or to 8 (torchtitan), and share of effective "
        f"training time. One constant is fitted, to the first row: each rank is slow by chance, "
        f"lognormal with a scale of {scale}. Numbers and sources: {sources}. The memory of "
        f"torchtitan's GPUs falls by 15.4 and 15.0 GiB from 8 to 128 of them, predicted: "
        f"{published.llama_gigabytes_less():.1f}."
    )
    columns = {
        "run": "{name}", "published": "{published:.1%}", "predicted": "{predicted:.1%}",
        "error, points": "{points:+.1f}", "goal": "{goal:.0f}", "met": "{met}",
    }  # fmt: skip
    return Section("Published runs", text, rows, columns)


def _here(*, num_rounds: int) -> Section:
    rows = [
        {**it, "goal": here.GOAL, "met": "yes" if abs(it["error"]) <= here.GOAL else "no"}
        for it in here.rows(num_rounds=num_rounds)
    ]
    text = (
        "Steps of `jdp bench step` on ranks of one process, `replicated`, SGD with momentum. Known "
        "to the prediction: the step of as many ranks as there are cores without reductions, in "
        "proportion to the ranks for more of them; the all-reduce of each number of ranks alone, "
        "as alpha and beta; the leaves. `exposed` is measured. The state after each timed run is "
        "compared with that of one device."
    )
    columns = {
        "model": "{model}", "ranks": "{ranks}", "measured, ms": "{measured_ms:.2f}",
        "predicted, ms": "{predicted_ms:.2f}", "error": "{error:+.1%}", "exposed": "{exposed:.1%}",
        "goal": "{goal:.0%}", "met": "{met}",
    }  # fmt: skip
    return Section("Steps on this machine", text, rows, columns)


def _faults(*, num_faults: int) -> Section:
    row = here.faulty_row(num_faults=num_faults)
    met = "yes" if abs(row["points"]) <= 100 * published.GOAL else "no"
    text = (
        "`jdp bench faults` with 1 MiB on 2 processes: a random one is killed every 10 s "
        "on average, commits every 10 steps of 0.1 s. Known to the prediction: how often, and the "
        "median recovery. The final state has the bits of a run without faults."
    )
    columns = {
        "faults": "{faults}", "recovery, s": "{recovery_s:.2f}", "ETTR": "{ettr:.1%}",
        "predicted": "{predicted:.1%}", "error, points": "{points:+.1f}", "goal": "{goal:.0f}",
        "met": "{met}",
    }  # fmt: skip
    rows = [{**row, "goal": 100 * published.GOAL, "met": met}]
    return Section("Faults on this machine", text, rows, columns)


if __name__ == "__main__":
    main()
