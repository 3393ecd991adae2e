"""A plan's assumptions, each with interval, source and setting."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from jdp.tools import calibration
from jdp.tools.calibration import BYTES_PER_S
from jdp.tools.rate import (
    ASSUMED,
    GPUS,
    LEAST_GIVEN,
    MOST_GIVEN,
    PUBLISHED,
    Rate,
    given_rate,
    nvlink,
    part_of,
)
from jdp.tools.results import AMOUNT, COUNT, LIST, OBJECT, TEXT, Field, checked, why_unreadable

_NCCL = f"{PUBLISHED} (NCCL's tuning model, src/graph/tuning.cc: ring, simple and LL128)"
_FAULTS = "measured on 3 CPU processes (benchmarks/results, faults); a larger program takes longer"
_COMMITS = "measured on CPUs (benchmarks/results, commit_cost)"
STRAGGLER = "straggler_scale"
_DEFAULTS = {
    "forward_share": Rate(1 / 3, 0.3, 0.36, "", f"{ASSUMED}: a backward pass takes twice as long"),
    "link_hop_s": Rate(3.4e-6, 1.9e-6, 5e-6, "s", _NCCL),
    "network_hop_s": Rate(14e-6, 4e-6, 20e-6, "s", _NCCL),
    "collective_start_s": Rate(8.4e-6, 6.6e-6, 20e-6, "s", _NCCL),
    STRAGGLER: Rate(
        0.0154, 0.01, 0.03, "", "fitted to Horovod's Inception V3 on 512 GPUs (docs/plan.md)"
    ),
    "mtbf_gpu_s": Rate(
        1.82e8, 2.9e7, 3.6e8, "s",
        f"{PUBLISHED} (Llama 3, arXiv 2407.21783: 419 failures of 16,384 GPUs in 54 days)",
    ),
    "detection_s": Rate(0.0, 0.0, 30.0, "s", _FAULTS),
    "re_forming_s": Rate(0.035, 0.035, 20.0, "s", _FAULTS),
    "compiling_s": Rate(0.142, 0.142, 60.0, "s", f"tracing and the cache: {_FAULTS}"),
    "restoring_s": Rate(0.091, 0.09, 2.0, "s", f"of a small state: {_FAULTS}"),
    "restore_bytes_per_s": Rate(3.6e9, 1e9, 25e9, "B/s", f"of a host: {_COMMITS}"),
    "first_step_s": Rate(0.076, 0.076, 10.0, "s", _FAULTS),
    "commit_bytes_per_s": Rate(2.9e9, 1e9, 25e9, "B/s", f"of a host: {_COMMITS}"),
}  # fmt: skip
# Larger values of these are faster.
_FASTER = ("_per_s", "mtbf_gpu_s", "matmul_flops", "memory_bytes")
COMPUTATION = ("matmul_flops", "memory_bytes_per_s")
_OF_PEAK, _OF_MEMORY, _OF_NETWORK = (0.33, 0.4, 0.57), (0.7, 0.85, 0.95), (0.7, 0.9, 1.0)
NAMES = (
    "matmul_flops", "memory_bytes_per_s", "memory_bytes", "link_bytes_per_s",
    "network_bytes_per_s", *_DEFAULTS,
)  # fmt: skip

_RECOVERY = {
    "rows": LIST, "host": TEXT, "date": TEXT,
    "restoring": Field("an object or null", lambda it: it is None or OBJECT.holds(it)),
}  # fmt: skip
_SIZE = {"state_bytes": COUNT}
_ROW: dict[str, Field] = dict.fromkeys(
    "detection_s re_forming_s tracing_s loading_s restoring_s first_step_s".split(), AMOUNT
)
_LAW = {"alpha_s": AMOUNT, "bytes_per_s": BYTES_PER_S}

Assumptions = dict[str, Rate]


def assumed(gpu: str, link: str | None = None) -> Assumptions:
    """Return assumptions for GPU hosts."""
    if gpu not in GPUS:
        raise ValueError(f"the GPU {gpu!r} is unknown. Write one of {', '.join(GPUS)}.")
    link = f"{GPUS[gpu].per_host}x400" if link is None else link
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", link)
    line = float(found[1]) * float(found[2]) * 1e9 / 8 if found else 0.0
    if found is None or not LEAST_GIVEN <= line <= MOST_GIVEN:
        raise ValueError(
            f"--link {link} must be the network cards of a host and the Gbit/s of each. Write "
            "8x400 for eight cards of 400 Gbit/s, or 1x25 for one of 25."
        )
    peaks, source = GPUS[gpu], "{:.0%} of {:.4g}, NVIDIA's data sheet"
    return {
        "matmul_flops": part_of(
            peaks.flops, _OF_PEAK, "FLOP/s",
            source.format(_OF_PEAK[1], peaks.flops) + "; torchtitan reaches 33 to 58 %",
        ),
        "memory_bytes_per_s": part_of(
            peaks.memory_bytes_per_s, _OF_MEMORY, "B/s",
            source.format(_OF_MEMORY[1], peaks.memory_bytes_per_s),
        ),
        "memory_bytes": part_of(peaks.memory_bytes, (1, 1, 1), "B", "NVIDIA's data sheet"),
        "link_bytes_per_s": nvlink(gpu),
        "network_bytes_per_s": part_of(
            line, _OF_NETWORK, "B/s", f"{ASSUMED}: {_OF_NETWORK[1]:.0%} of {link} Gbit/s of a host"
        ),
        **_DEFAULTS,
    }  # fmt: skip


def with_calibration(known: Assumptions, found: calibration.Calibration) -> Assumptions:
    """Return assumptions with this host's measured link and computation.

    The law t = alpha + bytes / beta of an all-reduce on m ranks becomes alpha / (2 (m - 1)) for
    each hop of a ring and 2 (m - 1) / m * beta, which reproduces the time on m ranks.
    """
    laws = [law for law in found.rates if law.operation == "all-reduce"]
    if not laws:
        raise ValueError(
            f"the calibration of {found.host} has no all-reduce, so the speed of its links is "
            "unknown. Measure again with at least 2 ranks: jdp bench --calibrate --cpu-ranks 2."
        )
    law = min(laws, key=lambda it: (-it.num_ranks, it.seconds(2**20)))
    m, when = law.num_ranks, found.date[:10]
    source = (
        f"measured here, {law.algorithm} on {m} ranks of {law.num_processes} process(es) "
        f"(jdp bench --calibrate, {when})"
    )
    hop, bus = law.alpha_s / (2 * (m - 1)), 2 * (m - 1) / m * law.bytes_per_s
    together = found.computation[-1]
    flops = max(together.matmul_flops_per_s.values())
    here = f"measured here (jdp bench --calibrate, {when})"
    return known | {
        "matmul_flops": part_of(flops, (0.75, 1, 1.25), "FLOP/s", here),
        "memory_bytes_per_s": part_of(together.memory_bytes_per_s, (0.75, 1, 1.25), "B/s", here),
        "link_bytes_per_s": part_of(bus, (0.75, 1, 1.25), "B/s", source),
        "link_hop_s": part_of(hop, (0.75, 1, 1.25), "s", source),
        "collective_start_s": Rate(0.0, 0.0, 0.0, "s", f"in link_hop_s: {source}"),
    }


def with_recovery(known: Assumptions, path: Path) -> Assumptions:
    """Return assumptions with the recovery of `jdp bench faults --json=FILE`."""
    try:
        found = checked(json.loads(path.read_bytes()), _RECOVERY)
        if not found["rows"]:
            raise ValueError("it has no row")
        largest = max(found["rows"], key=lambda it: checked(it, _SIZE)["state_bytes"])
        row = checked(largest, _ROW)
        parts = {
            "detection_s": row["detection_s"],
            "re_forming_s": row["re_forming_s"],
            "compiling_s": row["tracing_s"] + row["loading_s"],
            "restoring_s": row["restoring_s"],
            "first_step_s": row["first_step_s"],
        }
        if found["restoring"]:
            law = checked(found["restoring"], _LAW)
            parts |= {
                "restoring_s": law["alpha_s"],
                "restore_bytes_per_s": calibration.read_bytes_per_s(law["bytes_per_s"]),
            }
        parts = {name: float(value) for name, value in parts.items()}
        where = f"measured on {found['host']} (jdp bench faults, {found['date'][:10]})"
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"--recovery {path} is not a measurement of recoveries: {why_unreadable(error)}. "
            "Make one: jdp bench faults --state 1M,100M --json=recovery.json."
        ) from error
    return known | {
        name: part_of(
            value, (0.75, 1, 1.5), "s" if name.endswith("ing_s") else known[name].unit, where
        )
        for name, value in parts.items()
    }


def with_given(known: Assumptions, values: Mapping[str, float]) -> Assumptions:
    """Return assumptions with the user's values."""
    for name, value in values.items():
        if name not in NAMES:
            raise ValueError(
                f"the assumption {name!r} does not exist. Assumptions are {', '.join(NAMES)}."
            )
        may_be_zero = name.endswith("_s") and not name.endswith(("_per_s", "mtbf_gpu_s"))
        may_be_zero |= name == STRAGGLER
        if not (LEAST_GIVEN <= value <= MOST_GIVEN or (value == 0 and may_be_zero)):
            zero = "0, or " if may_be_zero else ""
            raise ValueError(
                f"--set {name}={value:g} must be {zero}from {LEAST_GIVEN:g} to {MOST_GIVEN:g}, in "
                f"{known[name].unit or 'parts of 1'}. It is {known[name].value:.3g} by default."
            )
        if name in ("forward_share", STRAGGLER) and value >= 1:
            raise ValueError(
                f"--set {name}={value:g} must be below 1, because it is a part of a step."
            )
    return known | {name: given_rate(value, known[name].unit) for name, value in values.items()}


def values(
    known: Assumptions, rest: str = "value", computation: str | None = None
) -> dict[str, float]:
    """Return the numbers of the likely, fastest or slowest run."""
    picked = {}
    for name, rate in known.items():
        which = (computation or rest) if name in COMPUTATION else rest
        if which == "value" or name == "forward_share":  # whose ends are not faster or slower
            picked[name] = rate.value
        else:
            is_high = name.endswith(_FASTER) == (which == "fast")
            picked[name] = rate.high if is_high else rate.low
    return picked
