"""Are all processes about to run the same program? They compare before anything is sent."""

import functools
import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from jdp.distributed import agree
from jdp.distributed.checks.program import ProgramText, require_program, require_schedule
from jdp.error_codes import with_code
from jdp.worker import launcher_client
from jdp.worker.phases import PATIENCE
from jdp.worker.version import version

_PACKAGE = Path(__file__).parents[2]
# Flags for where a process writes, and for its number of devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


def require_start(mesh: Mesh, timeout_s: float | None) -> None:
    """Refuse to start if the processes of `mesh` differ in versions, devices or the mesh itself.

    Args:
      mesh: if it is of one process, there is nothing to compare.
      timeout_s: deadline of this comparison, in seconds; None: 300. In later ones, other processes
        may still save or compile: without a launcher, they have six times as long (None: for ever).
        Under a launcher there is no deadline, since its watch knows what all of them do.

    Raises:
      ValueError: on every process, naming one that differs, and the difference.
      RuntimeError: if a process does not come in time.
    """
    agree.set_timeout_s(300.0 if timeout_s is None else timeout_s)
    group = agree.peers(mesh)
    if len(group) > 1:
        require_equal_facts(agree.all_gather(group, _facts(mesh), what="versions in jdp.init"))
    is_watched = launcher_client.current() is not None
    agree.set_timeout_s(math.inf if is_watched or timeout_s is None else PATIENCE * timeout_s)


def require_equal_facts(facts: Mapping[int, Mapping[str, str | None]]) -> None:
    """Refuse processes that differ: process -> name of a fact -> fact, or None if unknown.

    >>> require_equal_facts({0: {"JAX": "0.12.0"}, 1: {"JAX": "0.11.2"}})
    Traceback (most recent call last):
    ValueError: process 1 has another JAX than process 0: 0.11.2, and 0.12.0 there. ...
    """
    for name in next(iter(facts.values())):
        known = {process: its.get(name) for process, its in facts.items() if its.get(name)}
        if pair := agree.odd_one(known):
            odd, usual = pair
            text = (
                f"process {odd} has another {name} than process {usual}: {known[odd]}, and "
                f"{known[usual]} there. The processes would run different programs, and wait for "
                "each other or drift apart. Start all of them in the same environment, and with "
                "the same arguments of jdp.init."
            )
            raise ValueError(with_code("JDP201", text))


def _facts(mesh: Mesh) -> dict[str, str | None]:
    flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if not x.startswith(_OWN_FLAGS)]
    return {
        "jdp": f"{version()} (sources {_digest_of_sources()})",
        "JAX": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # A process may lack one: it reports that when gradients are reduced, and all use XLA.
        "native library": _stamp("libjdp_cpu"),
        "CUDA library": _stamp("libjdp_cuda"),
        "kind of device": ", ".join(sorted({d.device_kind for d in jax.local_devices()})),
        "number of devices": str(jax.device_count()),
        "mesh": f"{dict(mesh.shape)} over the devices {[d.id for d in mesh.devices.flat]}",
        "XLA_FLAGS": repr(" ".join(sorted(flags))),
    }


@functools.cache
def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


# setup.py writes the digest of the sources that it built a library from.
def _stamp(name: str) -> str | None:
    path = _PACKAGE / "lib" / f"{name}.json"
    return json.loads(path.read_text())["digest"][:8] if path.exists() else None


class FirstRuns:
    """Compares a step between the processes of its mesh before each new trace runs.

    Args:
      mesh: where it runs.
      name: of the author's function.
    """

    def __init__(self, mesh: Mesh, name: str):
        self._mesh = mesh
        self._name = name
        self._group = agree.peers(mesh)
        self._known: set[Any] = set()  # shapes whose program was compared
        self._equal: list[Any] = []  # jaxprs
        self._is_expected = True

    def run(
        self,
        run: Callable[..., Any],
        trace: Callable[..., Any],
        args: tuple,
        *,
        is_returned: bool,
        first: Callable[[], None],
    ) -> Any:
        """Return `run(*args)`, once all processes have the same program for these shapes.

        Args:
          run: the call of a `jax.jit(...)`.
          trace: its `trace`. JAX then traces, lowers and compiles once for both.
          args: its arguments.
          is_returned: whether the last call returned the first of them.
          first: compares the arguments themselves; called before a new program runs.
        """
        shapes = _shapes(args[1:] if is_returned else args)
        if shapes in self._known:
            self._is_expected = False
            try:
                return run(*args)
            except _NewTrace:
                pass
            finally:
                self._is_expected = True
        # The state that comes out may have other shapes than the one that went in: compare again.
        if not self._compare(trace, args, first) or not is_returned:
            self._known.add(shapes)
        return run(*args)

    def on_trace(self) -> None:
        """Record that the step is being traced. If `run` did not expect that, it compares first."""
        if not self._is_expected:
            raise _NewTrace

    def _compare(self, trace: Callable[..., Any], args: tuple, first: Callable[[], None]) -> bool:
        """Compare the program for these shapes; whether it is a new one."""
        with agree.propagating_errors(self._group, f"while it traced `{self._name}`"):
            traced = trace(*args)
            if any(traced.jaxpr is jaxpr for jaxpr in self._equal):
                return False
            lowered = traced.lower()
            program = ProgramText.of(self._name, traced, lowered)
        require_program(self._group, program)
        if self._mesh.devices.flat[0].platform == "gpu":
            with agree.propagating_errors(self._group, f"while it compiled `{self._name}`"):
                compiled = lowered.compile().as_text()
            require_schedule(self._group, self._name, compiled)
        first()
        self._equal.append(traced.jaxpr)
        return True


class _NewTrace(Exception):  # noqa: N818 - it never leaves this file
    pass


def _shapes(args: tuple) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
