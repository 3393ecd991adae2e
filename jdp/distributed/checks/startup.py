"""Compare programs and environments of all processes before anything is sent."""

import functools
import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from jdp.distributed import agree, call_log, this_process
from jdp.distributed.call_log import Call
from jdp.distributed.checks import call_mismatch
from jdp.distributed.checks.program import ProgramText, require_program, require_schedule
from jdp.distributed.hosts import own_host
from jdp.error_codes import with_code
from jdp.worker import launcher_client, source_digest
from jdp.worker.phases import PATIENCE
from jdp.worker.version import version

# Flags that may differ: where a process writes, and its number of devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


def require_start(mesh: Mesh, timeout_s: float | None) -> None:
    """Raise an error if the processes of `mesh` differ in versions, devices or the mesh itself."""
    agree.set_timeout_s(300.0 if timeout_s is None else timeout_s)
    group = agree.peers(mesh)
    if len(group) > 1:
        mine = _facts(mesh), own_host()
        gathered = agree.all_gather(group, mine, what="versions in jdp.init")
        facts = {process: its for process, (its, _) in gathered.items()}
        this_process.current.hosts = {process: host for process, (_, host) in gathered.items()}
        if len({its["jdp"] for its in facts.values()}) > 1:  # perhaps only in comments
            build = f"{version()} (code {source_digest.of_code()})"
            builds = agree.all_gather(group, build, what="builds of jdp")
            facts = {process: its | {"jdp": builds[process]} for process, its in facts.items()}
        require_equal_facts(facts)
        call_mismatch.current.watch_end()
    is_watched = launcher_client.current() is not None
    agree.set_timeout_s(math.inf if is_watched or timeout_s is None else PATIENCE * timeout_s)


def require_equal_facts(facts: Mapping[int, Mapping[str, str | None]]) -> None:
    """Raise ValueError if processes differ, given process -> name of a fact -> fact or None.

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
        "jdp": f"{version()} (sources {source_digest.of_bytes()})",
        "JAX": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        # A process may lack one. It reports that when gradients are reduced, and all use XLA.
        "native library": _stamp("libjdp_cpu"),
        "CUDA library": _stamp("libjdp_cuda"),
        "kind of device": ", ".join(sorted({d.device_kind for d in jax.local_devices()})),
        "number of devices": str(jax.device_count()),
        "mesh": f"{dict(mesh.shape)} over the devices {[d.id for d in mesh.devices.flat]}",
        "XLA_FLAGS": repr(" ".join(sorted(flags))),
    }


# setup.py records the digest of the sources from which it built a library.
def _stamp(name: str) -> str | None:
    path = source_digest.PACKAGE / "lib" / f"{name}.json"
    return json.loads(path.read_text())["digest"][:8] if path.exists() else None


class FirstRuns:
    """Compare a step between the processes of its mesh before each new trace runs.

    Args:
      mesh: the mesh of the step.
      name: name of the author's function.
    """

    def __init__(self, mesh: Mesh, name: str):
        self._mesh = mesh
        self._name = name
        self._group = agree.peers(mesh)
        self._log, self._num_calls = call_log.log_of(self._group), 0
        self._known: set[Any] = set()  # shapes whose programs were compared
        self._equal: list[Any] = []  # jaxprs that all processes share
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
        """Return `run(*args)`, after all processes agreed on the program for these shapes."""
        shapes = _shapes(args[1:] if is_returned else args)
        self._num_calls += 1
        what = f"call {self._num_calls} of `{self._name}`"
        shown = functools.partial(_shown, shapes, is_returned=is_returned)
        call = self._log.record(Call(what, self._name, shown))
        if shapes in self._known:
            self._is_expected = False
            try:
                return run(*args)
            except _NewTrace:
                pass
            finally:
                self._is_expected = True
        # The returned state may have other shapes than the input state. Then compare again.
        try:
            is_new = self._compare(trace, args, first)
        except Exception:
            call.was_refused = True
            raise
        if not is_new or not is_returned:
            self._known.add(shapes)
        return run(*args)

    def on_trace(self) -> None:
        """Record that the step is being traced. If `run` did not expect this, it compares first."""
        if not self._is_expected:
            raise _NewTrace

    def _compare(self, trace: Callable[..., Any], args: tuple, first: Callable[[], None]) -> bool:
        """Compare the program for these shapes, and return whether it is a new one."""
        with agree.propagating_errors(self._group, f"while it traced `{self._name}`"):
            traced = trace(*args)
            if any(traced.jaxpr is jaxpr for jaxpr in self._equal):
                return False
            lowered = traced.lower()
            program = ProgramText.of_trace(self._name, traced, lowered)
        require_program(self._group, program)
        if self._mesh.devices.flat[0].platform == "gpu":
            with agree.propagating_errors(self._group, f"while it compiled `{self._name}`"):
                compiled = lowered.compile().as_text()
            require_schedule(self._group, self._name, compiled)
        first()
        self._equal.append(traced.jaxpr)
        return True


class _NewTrace(Exception):  # noqa: N818 - only this file catches it
    pass


def _shapes(args: tuple) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)


# The shapes of batch and further arguments: args begin with the state and end with the checksums.
def _shown(shapes: Any, *, is_returned: bool) -> dict[str, str]:
    tree, leaves = shapes
    args = jax.tree.unflatten(tree, [aval for aval, _ in leaves])[0 if is_returned else 1 : -1]
    found = {}
    for i, arg in enumerate(args):
        for path, aval in jax.tree_util.tree_leaves_with_path(arg):
            name = "batch" if i == 0 else f"argument {i + 2}"
            found[name + jax.tree_util.keystr(path)] = aval.str_short()
    return found
