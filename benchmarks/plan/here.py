"""Steps of 2, 3 and 4 ranks and a run with faults on this machine, measured and predicted.

A prediction knows: the step of as many ranks as there are cores, without reductions, which more
ranks make longer in proportion; all-reduces of each number of ranks alone; the leaves of the model.
It does not know any step with reductions. Of the run with faults it knows how often they came and
the median recovery.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdp.collectives import auto
from jdp.tools.bench import collectives, faults, step
from jdp.tools.bench.faults import FaultSetting
from jdp.tools.bench.step import found_model
from jdp.tools.calibration import fit_alpha_beta
from jdp.tools.plan.prediction import Failures
from jdp.tools.plan.schedule import (
    REPLICATED,
    Deployment,
    Fabric,
    ModelLeaf,
    Workload,
    program_of,
)
from jdp.worker.local_devices import num_cpus

MODELS = {"mlp": 64, "transformer": 8}  # rows of a rank
RANKS = (2, 3, 4)
GOAL = 0.15
_BYTES = (2**16, 2**18, 2**20, 2**22)


def rows(*, num_rounds: int) -> list[dict[str, Any]]:
    """Measure and predict all models and numbers of ranks.

    Args:
      num_rounds: of each measurement.
    """
    cores = min(num_cpus(), max(RANKS))
    fabrics = {num_ranks: _fabric(num_ranks, num_rounds) for num_ranks in RANKS}
    found = []
    for name, num_rows in MODELS.items():
        setting = step.StepSetting(num_rows, num_steps=5, num_rounds=num_rounds)
        make = found_model(name)
        measured = {
            row["ranks"]: row for row in step.measure(make, sorted({cores, *RANKS}), setting)
        }
        alone_s = measured[cores]["step_ms"] / 1e3 * (1 - measured[cores]["exposed"])
        for num_ranks in RANKS:
            compute_s = alone_s * max(1.0, num_ranks / cores)
            predicted = _predicted_s(
                _leaves(make, num_rows), compute_s, fabrics[num_ranks], num_ranks
            )
            row = measured[num_ranks]
            found.append({
                "model": name, "ranks": num_ranks, "measured_ms": row["step_ms"],
                "predicted_ms": predicted * 1e3, "exposed": row["exposed"],
                "error": predicted * 1e3 / row["step_ms"] - 1, "difference": row["difference"],
            })  # fmt: skip
    return found


def faulty_row(*, num_faults: int, mtbf_s: float = 10.0) -> dict[str, Any]:
    """Train with faults under `jdp run`, and predict the effective training time.

    Args:
      num_faults: number of faults.
      mtbf_s: mean seconds between them.
    """
    setting = FaultSetting(mtbf_s, num_faults, num_processes=2, step_s=0.1)
    with tempfile.TemporaryDirectory() as folder:
        row = faults.measure(Path(folder), 2**20, setting, lambda text: None)
    found = Failures(per_s=row["faults"] / row["wall_s"], recovery_s=row["recovery_s"])
    predicted = found.effective(setting.commit_every * row["step_s"])
    return {**row, "predicted": predicted, "points": 100 * (predicted - row["ettr"])}


def _fabric(num_ranks: int, num_rounds: int) -> Fabric:
    """Return the law of the all-reduce that a step takes, as a ring of equal hops."""
    devices = np.array(jax.devices()[:num_ranks])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    elements = [num_bytes // 4 // num_ranks * num_ranks for num_bytes in _BYTES]
    setting = collectives.Setting(num_rounds=num_rounds, in_place=True)
    measured = collectives.measure(
        mesh, "all-reduce", ["auto"], elements, setting, lambda name, why: None
    )
    alpha, beta, _ = fit_alpha_beta([(row["bytes"], row["median_s"]) for row in measured])
    bus = 2 * (num_ranks - 1) / num_ranks * beta
    return Fabric(bus, alpha / (2 * (num_ranks - 1)), math.inf, 0.0, algorithm="ring")


def _leaves(make: Any, num_rows: int) -> tuple[ModelLeaf, ...]:
    _, state, _ = make(num_rows, auto)
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    return tuple(ModelLeaf(size, size / sum(sizes)) for size in sizes)


def _predicted_s(
    leaves: tuple[ModelLeaf, ...], compute_s: float, fabric: Fabric, num_ranks: int
) -> float:
    workload = Workload(leaves, compute_s / 3, 2 / 3 * compute_s)
    setting = Deployment(REPLICATED, 1, num_ranks, fabric, overlaps=False)
    return program_of(workload, setting).step_s()
