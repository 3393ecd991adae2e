"""The requests that a process of a contestant answers. Needs NumPy alone."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.compare.checked import ExpectedRun
from benchmarks.compare.memory import PeakMemory
from benchmarks.compare.task import NUM_STEPS
from benchmarks.harness import exact


class Trained(Protocol):
    """A contestant in one process: its training, of which one run after another is timed."""

    def start(self) -> None:
        """Make the initial state."""

    def run(self, num_steps: int) -> None:
        """Train, until the devices have finished."""

    def drop(self) -> None:
        """Free the state, so that others have the memory."""

    def gather(self) -> list[tuple]:
        """Return the arguments of `ExpectedRun.require` for each part of this process's ranks."""


class Worker:
    """The contestants of one process, on all numbers of ranks that it can have."""

    def __init__(self, make: Callable[..., Any], barrier: Callable[[], None]):
        """Take what depends on the framework.

        Args:
          make: `(name, model, k, ranks) -> (Trained, ExpectedRun)`.
          barrier: waits for all processes.
        """
        self._make, self._barrier = make, barrier
        self._made: dict[str, tuple[Trained, ExpectedRun]] = {}

    def functions(self, about: str) -> dict[str, Callable[..., Any]]:
        """Return the requests of a `Team`."""
        requests = {"prepare": self.prepare, "run": self.run, "forget": self._made.clear}
        return {"about": lambda: about, **requests}

    def prepare(self, key: str, name: str, *setup: Any) -> dict[str, Any]:
        """Make a contestant, check it, and measure its memory in a second run.

        Args:
          key: what `run` calls it.
          name: one of `CONTESTANTS`.
          setup: model, number of micro-batches, number of ranks.

        Returns:
          "error", or "memory_mb" and the result of `run`.
        """
        try:
            self._made[key] = self._make(name, *setup)
            first = self.run(key)  # compiles
            memory = PeakMemory()
            # Also after a wrong result: the ranks of other processes may be right, and run it.
            second = self.run(key)
            wrong = [found for found in (first, second) if "error" in found]
            return wrong[0] if wrong else {**second, "memory_mb": memory.megabytes()}
        except Exception as error:
            self._made.pop(key, None)
            return {"error": f"{type(error).__name__}: {error}"[:2000]}

    def run(self, key: str) -> dict[str, Any]:
        """Train from the beginning, and compare the parameters.

        Returns:
          "error" if they are wrong, or the "seconds" of a step and the "difference" from one
          device, as a share of the change of a parameter.
        """
        trained, expected = self._made[key]
        trained.start()
        trained.run(1)
        self._barrier()
        begin = time.perf_counter()
        trained.run(NUM_STEPS - 1)
        seconds = (time.perf_counter() - begin) / (NUM_STEPS - 1)
        parts = trained.gather()
        trained.drop()
        try:
            for part in parts:
                expected.require(*part)
        except exact.WrongResultError as error:
            return {"error": str(error)}
        return {"seconds": seconds, "difference": expected.difference}
