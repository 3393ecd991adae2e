"""`jdp bench`'s output."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import jaxlib

from jdp.tools import results
from jdp.worker.build_info import version
from jdp.worker.local_devices import num_cpus

COLUMNS = {
    "bytes": "{bytes}",
    "algorithm": "{algorithm}",
    "median us": "{median_us:.1f}",
    "min us": "{min_us:.1f}",
    "max us": "{max_us:.1f}",
    "algbw GB/s": "{algbw:.3f}",
    "busbw GB/s": "{busbw:.3f}",
    "xla / this": "{peer}",
}


def machine() -> dict[str, Any]:
    """Return host, devices, cores, load and versions."""
    device = jax.local_devices()[0]
    return {
        "host": socket.gethostname(),
        "platform": device.platform,
        "device_kind": device.device_kind,
        "num_devices": jax.local_device_count(),
        "num_cores": num_cpus(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "jdp": version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    }


def heading(facts: Mapping[str, Any]) -> str:
    """Return a line with the facts of `machine`."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return (
        f"{facts['host']}: {facts['num_devices']} x {facts['device_kind']} a process, "
        f"{facts['num_cores']} cores, load {facts['load']}; {versions}; {facts['date']}"
    )


def line(row: Mapping[str, Any]) -> str:
    """Return a line for a row of `collectives.measure`."""
    shown = {
        **row,
        **{f"{name}_us": row[f"{name}_s"] * 1e6 for name in ("median", "min", "max")},
        "algbw": row["algbw_bytes_per_s"] / 1e9,
        "busbw": row["busbw_bytes_per_s"] / 1e9,
        "peer": "-" if row["xla_over_this"] is None else f"{row['xla_over_this']:.2f}",
    }
    return aligned([form.format(**shown) for form in COLUMNS.values()])


def aligned(cells: Sequence[str]) -> str:
    """Return cells in columns of 12 characters."""
    return " ".join(f"{cell:>12}" for cell in cells)


def draw(path: str, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plot time and bus bandwidth over bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == name]
        num_bytes = [row["bytes"] for row in own]
        left.fill_between(
            num_bytes,
            [row["min_s"] * 1e6 for row in own],
            [row["max_s"] * 1e6 for row in own],
            alpha=0.2,
        )
        left.loglog(num_bytes, [row["median_s"] * 1e6 for row in own], marker=".", label=name)
        bandwidths = [row["busbw_bytes_per_s"] / 1e9 for row in own]
        right.semilogx(num_bytes, bandwidths, marker=".", label=name)
    left.set(xlabel="bytes", ylabel="us: median, smallest to largest")
    right.set(xlabel="bytes", ylabel="bus bandwidth, GB/s")
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    results.write_picture(figure, path)
