"""A calibration as `jdp bench --calibrate` would save it, in round numbers."""

import dataclasses

from jdp.tools.calibration import Calibration, CollectiveLaw, ComputeRates

LAW = CollectiveLaw(
    "all-reduce", "direct", 2, 1, "float32", 2e-6, 1e9, 0.25, ((1024, 3e-6), (4096, 6e-6)),
    ((1024, 4e-6), (4096, 8e-6)),
)  # fmt: skip
ALONE = ComputeRates(1, {"float32": 1e11}, 1e10)
TOGETHER = ComputeRates(2, {"float32": 6e10}, 7e9)
FOUND = Calibration(
    host="host0",
    platform="cpu",
    device_kind="cpu",
    num_devices=2,
    num_cores=2,
    date="2026-11-25T12:00:00+00:00",
    versions={"jax": "0.12.0"},
    computation=(ALONE, TOGETHER),
    rates=(LAW, dataclasses.replace(LAW, num_processes=2)),
)
