"""Versions of JAX, its plugins and the driver, and bad combinations."""

import dataclasses
import platform as python_platform
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from jdp.tools.doctor.diagnosis import ERROR, OK, WARNING, Diagnosis
from jdp.worker import bytecode as modules


def bytecode() -> Diagnosis:
    """Check that the imported packages have bytecode."""
    found = modules.imports()
    facts = {"modules": found.modules, "without": found.without}
    text = f"{found.without} of {found.modules} imported modules of packages have no bytecode."
    if not found.are_slow():
        return Diagnosis("bytecode", OK, text, facts=facts)
    why = "Each start of a process compiles them again."
    if sys.dont_write_bytecode:
        why += " Python runs with PYTHONDONTWRITEBYTECODE or -B, so it writes none."
    do = (
        f"Run `{found.command}` once, for example when the image is built. uv writes bytecode with "
        "`uv pip install --compile-bytecode`."
    )
    return Diagnosis("bytecode", WARNING, text, why, do, facts)


_PACKAGES = ("jdp", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "libtpu")
_PLUGIN = re.compile(r"jax[-_](cuda\d+|rocm\d+)[-_](plugin|pjrt)")

# Oldest NVIDIA driver for each CUDA release.
_DRIVERS = {"cuda12": 525, "cuda13": 580}


@dataclasses.dataclass(frozen=True)
class Installed:
    """Installed versions, by package; the driver is NVIDIA's."""

    versions: Mapping[str, str]
    driver: str | None
    platform: str
    num_processes: int

    def release(self, package: str) -> tuple[int, ...]:
        """Return a package's first three numbers; () if not installed."""
        return tuple(map(int, re.findall(r"\d+", self.versions.get(package, ""))[:3]))

    def plugins(self) -> list[str]:
        """Return JAX's GPU plugins' names."""
        return [name for name in self.versions if _PLUGIN.fullmatch(name)]


class KnownBad(NamedTuple):
    """A bad combination; `found` returns the problem, or None."""

    level: str
    found: Callable[[Installed], str | None]
    why: str
    do: str
    source: str


def installed(platform: str, num_processes: int, driver: str = "/proc/driver") -> Installed:
    """Return the installed versions."""
    names = {str(it.metadata["Name"]).lower() for it in metadata.distributions()}
    wanted = [*_PACKAGES, *sorted(name for name in names if _PLUGIN.fullmatch(name))]
    versions = {name: metadata.version(name) for name in wanted if name in names}
    path = Path(driver, "nvidia", "version")
    found = re.search(r"Module\s.*?(\d+\.\d+(\.\d+)?)", path.read_text()) if path.exists() else None
    versions["python"] = python_platform.python_version()
    return Installed(versions, found[1] if found else None, platform, num_processes)


def versions(here: Installed) -> Diagnosis:
    """Return all versions."""
    facts: dict[str, Any] = {"versions": dict(here.versions), "driver": here.driver}
    text = ", ".join(f"{name} {version}" for name, version in here.versions.items())
    driver = f"; NVIDIA driver {here.driver}" if here.driver else ""
    return Diagnosis("versions", OK, f"{text}{driver}.", facts=facts)


def known_bad(here: Installed) -> list[Diagnosis]:
    """Return a diagnosis per bad combination, or one without any."""
    made = [
        Diagnosis("known problems", bad.level, found, bad.why, f"{bad.do} ({bad.source})")
        for bad in KNOWN_BAD
        if (found := bad.found(here))
    ]
    none = f"none of the {len(KNOWN_BAD)} known bad combinations of versions."
    return made or [Diagnosis("known problems", OK, none)]


def _other_plugin(here: Installed) -> str | None:
    jaxlib = here.release("jaxlib")
    wrong = [f"{n} {here.versions[n]}" for n in here.plugins() if here.release(n) != jaxlib]
    return f"{', '.join(wrong)} with jaxlib {here.versions['jaxlib']}." if wrong else None


def _old_driver(here: Installed) -> str | None:
    if here.driver is None:
        return None
    major = int(here.driver.partition(".")[0])
    for name in here.plugins():
        cuda = re.split("[-_]", name)[1]
        if major < _DRIVERS.get(cuda, 0):
            return (
                f"NVIDIA driver {here.driver} with {name}, which needs {_DRIVERS[cuda]} or newer."
            )
    return None


def _many_steps(here: Installed) -> str | None:
    is_old = here.platform == "cpu" and here.release("jax") < (0, 11, 0)
    return f"JAX {here.versions['jax']} on CPUs with many steps in flight." if is_old else None


def _impatient_scatter(here: Installed) -> str | None:
    is_on_cpus = here.platform == "cpu" and here.num_processes > 1
    if is_on_cpus and here.release("jax") < (0, 12, 0):
        return f"reduce-scatter of JAX {here.versions['jax']} between processes on CPUs."
    return None


def _old_jax(here: Installed) -> str | None:
    is_old = here.release("jax") < (0, 10, 2)
    return f"JAX {here.versions['jax']}, but jdp needs 0.10.2 or newer." if is_old else None


KNOWN_BAD = (
    KnownBad(
        ERROR,
        _other_plugin,
        "A plugin of another release registers other functions than JAX calls ('No FFI handler "
        "registered'), or crashes at the first array, also with JAX_PLATFORMS=cpu.",
        "Install the release of jaxlib: pip install -U 'jax[cuda13]', or pin plugin and pjrt.",
        "github.com/jax-ml/jax/issues/24901, github.com/ma-gilles/recovar/issues/64",
    ),
    KnownBad(
        ERROR,
        _old_driver,
        "JAX then finds no GPU and trains on the CPU, or fails to load kernels.",
        "Update the driver, or install the plugin of an older CUDA: 'jax[cuda12]'.",
        "docs.nvidia.com/deploy/cuda-compatibility",
    ),
    KnownBad(
        ERROR,
        _old_jax,
        "jdp uses functions missing in it.",
        "pip install -U jax.",
        "requirements/oldest.txt of jdp",
    ),
    KnownBad(
        WARNING,
        _many_steps,
        "More than about 30 pending steps hang. Steps of jdp wait for the one 8 before; a loop "
        "over your own jitted function does not.",
        "In such a loop, call jax.block_until_ready every few steps, or install JAX 0.11.",
        "ARCHITECTURE.md of jdp: why at most 8 steps in flight",
    ),
    KnownBad(
        WARNING,
        _impatient_scatter,
        "It ends the run if one process is 30 s late, despite any timeout. jdp sends an "
        "all-to-all instead; your own lax.psum_scatter does not.",
        "Install JAX 0.12, or avoid lax.psum_scatter.",
        "github.com/jax-ml/jax/issues/40831",
    ),
)
