"""A process's status: phase, steps, counts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class RunCounts(NamedTuple):
    """A process's counts since it began; plain values.

    Attributes:
      rows: of all ranks in the called steps, as far as jdp supplied the batches.
      data_s: seconds of waiting for data.
      commit, checkpoint: step of the last; -1 for none.
      logged: last step in `jdp.log` with one of these; -1 for none.
      loss, learning_rate, gradient_norm: latest value, or None.
      target: step at which the loop over `jdp.batches` ends; -1 if unknown.
      is_evaluating: whether `jdp.evaluate` runs.
    """

    rows: int = 0
    data_s: float = 0.0
    commit: int = -1
    checkpoint: int = -1
    logged: int = -1
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    target: int = -1
    is_evaluating: bool = False


# Indices of 8-byte words. Steps are stored plus one; 0 means none.
_ROWS, _DATA_NS, _COMMIT, _CHECKPOINT, _LOGGED = range(5)
_METRICS = ("loss", "learning_rate", "gradient_norm")
_VALUES, _HAS = range(5, 8), 8  # one bit per value
_TARGET, _EVALUATING = 9, 10
COUNTS_BYTES = 88


class Counter:
    """Writes the counts of this process into COUNTS_BYTES of its slot, by word stores.

    Attributes:
      next_rows: rows of the last batch, 0 once a step has counted them.
      num_left: batches after it; -1 if unknown.
    """

    def __init__(self, memory: memoryview):
        self.next_rows, self.num_left = 0, -1
        self._memory = memory
        self._words, self._floats = memory.cast("q"), memory.cast("d")

    def reset(self) -> None:
        """Clear all counts."""
        self.next_rows, self.num_left = 0, -1
        self._memory[:] = bytes(COUNTS_BYTES)

    def count_rows(self, steps: int) -> None:
        """Count the last batch's rows for step `steps`."""
        if self.next_rows:
            self._words[_ROWS] += self.next_rows
            # Not the batches left, which a reader could see before the step.
            self._words[_TARGET] = 1 + steps + self.num_left if self.num_left >= 0 else 0
            self.next_rows, self.num_left = 0, -1

    def add_data_wait(self, ns: int) -> None:
        """Add a wait for data."""
        self._words[_DATA_NS] += ns

    def write_commit(self, step: int) -> None:
        """Write a commit's step."""
        self._words[_COMMIT] = step + 1

    def write_checkpoint(self, step: int) -> None:
        """Write a checkpoint's step."""
        self._words[_CHECKPOINT] = step + 1

    def write_evaluating(self, is_evaluating: bool) -> None:
        """Write whether `jdp.evaluate` runs."""
        self._words[_EVALUATING] = is_evaluating

    def write_metrics(self, step: int, **metrics: float) -> None:
        """Write a step's loss, learning_rate or gradient_norm."""
        for i, name in enumerate(_METRICS):
            if name in metrics:
                self._floats[_VALUES[i]] = metrics[name]
                self._words[_HAS] |= 1 << i
        self._words[_LOGGED] = step + 1


def counts_in(memory: bytes) -> RunCounts:
    """Return the counts in a slot's COUNTS_BYTES."""
    view = memoryview(memory)
    words, floats = view.cast("q"), view.cast("d")
    return RunCounts(
        rows=words[_ROWS],
        data_s=words[_DATA_NS] / 1e9,
        commit=words[_COMMIT] - 1,
        checkpoint=words[_CHECKPOINT] - 1,
        logged=words[_LOGGED] - 1,
        **{
            name: floats[word]
            for i, (name, word) in enumerate(zip(_METRICS, _VALUES, strict=True))
            if words[_HAS] >> i & 1
        },
        target=words[_TARGET] - 1,
        is_evaluating=bool(words[_EVALUATING]),
    )


# The default of `jdp.init`.
TIMEOUT_S = 600.0

# Written by the launcher until `jdp.init()`.
BEFORE = "before jdp.init()"
ENDED = "the script has ended"


class ProcessStatus(NamedTuple):
    """A process's status; plain values, which a host can send.

    Attributes:
      pid: 0 if the slot is free.
      steps: training steps called; a few may still run.
      progress_s, since_s: time.monotonic() of the last progress, and the phase's start.
      limit_s: for the phase without progress: inf for no limit, 0 for its default.
      timeout_s: of `jdp.init`.
      entered, done: the native library's all-reduces, entered and left by its ranks.
      bucket: of the last one entered.
      is_running: whether its devices still run its last step; valid without progress.
      state: "stopped" (by a signal), "debugged", "gone" or "".
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
        """Return a status from JSON."""
        return cls(*values)._replace(counts=RunCounts(*values[-1]))

    def moved(self, seconds: float) -> "ProcessStatus":
        """Return it on a clock `seconds` ahead."""
        return self._replace(progress_s=self.progress_s + seconds, since_s=self.since_s + seconds)


# A healthy run leaves these within `timeout_s`.
STEP, BETWEEN, DATA = "running a step", "between steps", "waiting for data"
BRIEF = frozenset([STEP, BETWEEN, DATA])
# Other phases may take PATIENCE times as long: XLA compiles large programs for tens of minutes;
# data and checkpoints come over networks.
PATIENCE = 6.0
JOINING = "waiting in jdp.init() for the others"
STARTING, FIRST = "starting", "waiting for the first step"
UNSTEPPED = "before the first step"
WAITING = "waiting for the other processes"
COMPILING, SAVING, RESTORING = "compiling", "saving", "restoring"
EVALUATING = "evaluating"
# Other words of the report tell these.
QUIET = frozenset([STEP, BETWEEN, JOINING, STARTING, FIRST, UNSTEPPED, WAITING, BEFORE, ENDED, ""])
_LONG_S = 2.0

# Waits for another process or for devices.
_WAITING = frozenset([JOINING, WAITING, STEP, FIRST])


def waits(status: ProcessStatus) -> bool:
    """Whether a process waits in a step, while its script may go on."""
    if status.phase == BETWEEN:
        return status.is_running or status.entered > status.done
    return status.phase in _WAITING


def activity(now: float, statuses: Iterable[ProcessStatus]) -> str | None:
    """Return the longest current phase of over two seconds."""
    since_s, phase = min(
        ((each.since_s, each.phase) for each in statuses if each.phase not in QUIET),
        default=(now, ""),
    )
    return f"{phase} for {now - since_s:.0f} s" if now - since_s >= _LONG_S else None
