"""The status of a process, as its slot tells it to its host and the leader."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jdp.worker.run_counts import RunCounts

# The default of `jdp.init`, in seconds.
TIMEOUT_S = 600.0

# The phase that the launcher writes for a process until it reaches `jdp.init()`.
BEFORE = "before jdp.init()"
# The last phase of a process that ends by itself.
ENDED = "the script has ended"


class ProcessStatus(NamedTuple):
    """The status of a process; plain values, so that a host can send them to another.

    Attributes:
      pid: of the process; 0 while the slot is free.
      generation: of the process.
      steps: training steps that it has called, of which a few may still be running.
      progress_s: time of its last progress, on the clock of `time.monotonic`.
      phase: such as "compiling".
      since_s: time when the phase began, on the same clock.
      limit_s: seconds that the phase may last without progress: inf for no limit, 0 for the
        default of its name.
      timeout_s: the timeout passed to `jdp.init`.
      entered: number of all-reduces of the native library that its ranks have entered.
      done: number of these all-reduces that they have left.
      bucket: of the last one entered.
      is_running: whether its devices have not finished its last step, if there is no progress.
      state: "stopped" (by a signal), "debugged", "gone" or "".
      counts: for people who watch the run.
    """

    pid: int
    generation: int = 0
    steps: int = 0
    progress_s: float = 0.0
    phase: str = ""
    since_s: float = 0.0
    limit_s: float = 0.0
    timeout_s: float = TIMEOUT_S
    entered: int = 0
    done: int = 0
    bucket: int = 0
    is_running: bool = False
    state: str = ""
    counts: RunCounts = RunCounts()

    @classmethod
    def of_json(cls, values: Sequence[Any]) -> "ProcessStatus":
        """Return the status that was sent as JSON."""
        return cls(*values)._replace(counts=RunCounts(*values[-1]))

    def moved(self, seconds: float) -> "ProcessStatus":
        """Return the same on another host's clock, which is `seconds` ahead."""
        return self._replace(progress_s=self.progress_s + seconds, since_s=self.since_s + seconds)
