"""Devices, links, native libraries, and the algorithm of `auto`."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.collectives import call_order
from jdp.collectives.auto import auto, choice
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.gpu import runtime as gpu_runtime
from jdp.tools import known_values
from jdp.tools.bench.collectives import AUTO, Case, Trial
from jdp.tools.doctor.diagnosis import ERROR, OK, WARNING, Diagnosis
from jdp.tools.known_values import WrongResultError

# One, few, an odd number, and more than a piece sent by the CPU library.
_NUMBERS = (1, 3, 1001, 300_007)
_DTYPES = ("float32", "bfloat16", "float16", "int32", "int8")
_SIZE_OF_OTHERS = 1001
_NUM_ROUNDS = 2


def self_test(mesh: Mesh, where: str) -> list[Diagnosis]:
    """Return a diagnosis per collective, by `auto` and XLA, even after a wrong result."""
    return [_tested(mesh, where, operation) for operation in known_values.OPERATIONS]


def _tested(mesh: Mesh, where: str, operation: str) -> Diagnosis:
    wrong, num_results = [], 0
    least = 1 if operation == "all-reduce" else mesh.size
    dtypes = [dtype for dtype in _DTYPES if _fits(mesh.size, dtype)]
    pairs = [("float32", size) for size in _NUMBERS]
    pairs += [(dtype, _SIZE_OF_OTHERS) for dtype in dtypes if dtype != "float32"]
    for algorithm in (AUTO, "xla"):
        cases = [Case(operation, algorithm, dtype, least * size) for dtype, size in pairs]
        trial = Trial(cases, mesh)
        for _ in range(_NUM_ROUNDS):
            trial.prepare()
            trial()
            num_results += len(cases)
            try:
                trial.check()
            except WrongResultError as error:
                wrong.append(str(error))
    facts = {"ranks": mesh.size, "results": num_results, "wrong": wrong}
    name = f"{operation}, {where}"
    if not wrong:
        text = f"{num_results} exact results on each of {mesh.size} ranks ({', '.join(dtypes)})."
        return Diagnosis(name, OK, text, facts=facts)
    first = wrong[0].partition(" Its times")[0]
    return Diagnosis(
        name,
        ERROR,
        f"{len(wrong)} of {2 * _NUM_ROUNDS} programs gave wrong results: {first}",
        "Training here would give wrong parameters without an error.",
        "Do not train on these devices. Try all_reduce=jdp.collectives.xla if only `auto` is "
        "wrong, other devices if both are, and report it with `jdp doctor --json`.",
        facts,
    )


def _fits(num_ranks: int, dtype: str) -> bool:
    try:
        known_values.modulus(num_ranks, dtype)
    except ValueError:
        return False
    return True


_SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "64 MiB": 2**26}
_NAMES = {"jdp_all_reduce": "native", "psum": "xla"}


def devices(mesh: Mesh) -> Diagnosis:
    """Return the run's devices, by kind and process."""
    found = list(mesh.devices.flat)
    kinds = Counter(device.device_kind for device in found)
    processes = {device.process_index for device in found}
    text = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    facts = {"kinds": dict(kinds), "processes": len(processes), "platform": found[0].platform}
    facts["memory_bytes"] = _memory(jax.local_devices()[0])
    where = f" in {len(processes)} process{'es' if len(processes) > 1 else ''}"
    return Diagnosis("devices", OK, f"{text}{where}.", facts=facts)


def links(mesh: Mesh) -> Diagnosis:
    """Return the devices' links."""
    here = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    coordinates = {str(d.id): list(d.coords) for d in here if getattr(d, "coords", None)}
    slices = {getattr(device, "slice_index", 0) or 0 for device in mesh.devices.flat}
    facts: dict[str, Any] = {"coords": coordinates, "slices": sorted(slices)}
    platform = here[0].platform
    if platform == "cpu":
        return Diagnosis("links", OK, "the memory of the host (CPU devices).", facts=facts)
    if coordinates:
        text = f"{len(coordinates)} local devices at {list(coordinates.values())}"
        return Diagnosis("links", OK, f"{text}, {len(slices)} slice(s).", facts=facts)
    if platform == "gpu" and gpu_runtime.why_missing() is None and not gpu_runtime.why_no_gpus():
        kind = gpu_runtime.topology(len(here))
        facts["topology"] = "PCIe" if kind == gpu_runtime.PCIE else "NVLink"
        text = f"{facts['topology']} between the {len(here)} GPUs of this process."
        return Diagnosis("links", OK, text, facts=facts)
    text = "JAX does not tell how the GPUs are connected: nvidia-smi topo -m does."
    return Diagnosis("links", OK, text, facts=facts)


def libraries(platform: str) -> list[Diagnosis]:
    """Return whether native libraries are loaded, and why not."""
    found = []
    for name, why, wanted in (
        ("CPU library", cpu_runtime.why_missing(), "cpu"),
        ("CUDA library", gpu_runtime.why_missing(), "gpu"),
    ):
        facts = {"why_missing": why}
        if why is None:
            found.append(Diagnosis(name, OK, "built and loaded.", facts=facts))
        elif wanted != platform:
            text = f"not needed here: {why}"
            found.append(Diagnosis(name, OK, text, facts=facts))
        else:
            found.append(
                Diagnosis(
                    name,
                    WARNING,
                    why,
                    "XLA's collectives replace it: results are the same, and on CPUs sums take 2 "
                    "to 5 times as long (docs/algorithms.md).",
                    "Install a C++ compiler (for GPUs nvcc, too), then jdp again: pip install "
                    "--force-reinstall --no-deps jdp.",
                    facts,
                )
            )
    return found


def algorithms(mesh: Mesh) -> Diagnosis:
    """Return the algorithm of `auto` for some sizes."""
    chosen: dict[str, str] = {}
    reasons: list[str | None] = []
    for name, num_bytes in _SIZES.items():
        chosen[name] = _traced(mesh, num_bytes, reasons)
    text = "; ".join(f"{size}: {name}" for size, name in chosen.items())
    why = reasons[0] or "the ranks are CPU devices of one host, and the CPU library is loaded."
    facts = {"chosen": chosen, "reason": why}
    return Diagnosis("auto", OK, f"{text}, since {why}", facts=facts)


def _traced(mesh: Mesh, num_bytes: int, reasons: list[str | None]) -> str:
    axis = mesh.axis_names[0]

    def on_rank(x: jax.Array) -> Any:
        with call_order.entered():
            reasons.append(choice(axis, mesh)[1])
            return auto([[x]], axis, mesh=mesh)[0][0]

    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((num_bytes // 4,), jnp.float32)))
    return next(name for primitive, name in _NAMES.items() if f" {primitive}" in text)


def _memory(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None
