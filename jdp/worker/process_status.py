"""The status of a process, as its slot tells it to others: its phase, its steps, its counts."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class RunCounts(NamedTuple):
    """The counts of a process since it began; plain values, as in `ProcessStatus`.

    Attributes:
      rows: of all ranks in the batches of the steps called, as far as jdp handed them out.
      data_s: seconds that the process waited for data.
      commit: step of the last commit that it wrote; -1 for none.
      checkpoint: step of the last checkpoint that it wrote; -1 for none.
      logged: last step for which `jdp.log` wrote one of the following; -1 for none.
      loss, learning_rate, gradient_norm: the latest of each; None for none.
      target: steps at which the loop over `jdp.batches` ends; -1 if unknown.
      is_evaluating: whether `jdp.evaluate` runs, whose steps are phases of their own.
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


# Words of 8 bytes. Of steps they hold one more, so that 0 is none.
_ROWS, _DATA_NS, _COMMIT, _CHECKPOINT, _LOGGED = range(5)
_METRICS = ("loss", "learning_rate", "gradient_norm")
_VALUES, _HAS = range(5, 8), 8  # one bit for each value
_TARGET, _EVALUATING = 9, 10
COUNTS_BYTES = 88


class Counter:
    """Writes the counts of this process into its slot of the board, with stores of words.

    Args:
      memory: NUM_BYTES of the slot.

    Attributes:
      next_rows: rows of the batch that was handed out last, 0 once a step has counted them.
      num_left: batches that follow it; -1 if that is not known.

    >>> memory = bytearray(COUNTS_BYTES)
    >>> counter = Counter(memoryview(memory))
    >>> counter.next_rows, counter.num_left = 250, 3
    >>> counter.count_rows(steps=7)
    >>> counter.write_metrics(7, loss=0.5, learning_rate=0.1)
    >>> counts_in(memory)[4:]
    (7, 0.5, 0.1, None, 10, False)
    """

    def __init__(self, memory: memoryview):
        self.next_rows, self.num_left = 0, -1
        self._memory = memory
        self._words, self._floats = memory.cast("q"), memory.cast("d")

    def reset(self) -> None:
        """Begin to count anew."""
        self.next_rows, self.num_left = 0, -1
        self._memory[:] = bytes(COUNTS_BYTES)

    def count_rows(self, steps: int) -> None:
        """Count the rows of the batch that was handed out last: step number `steps` was called."""
        if self.next_rows:
            self._words[_ROWS] += self.next_rows
            # Not the batches that are left, which a reader could see before the step.
            self._words[_TARGET] = 1 + steps + self.num_left if self.num_left >= 0 else 0
            self.next_rows, self.num_left = 0, -1

    def add_data_wait(self, ns: int) -> None:
        """Add a time for which the process waited for data."""
        self._words[_DATA_NS] += ns

    def write_commit(self, step: int) -> None:
        """Write the step of a commit."""
        self._words[_COMMIT] = step + 1

    def write_checkpoint(self, step: int) -> None:
        """Write the step of a checkpoint."""
        self._words[_CHECKPOINT] = step + 1

    def write_evaluating(self, is_evaluating: bool) -> None:
        """Write whether `jdp.evaluate` runs."""
        self._words[_EVALUATING] = is_evaluating

    def write_metrics(self, step: int, **metrics: float) -> None:
        """Write the loss, learning_rate and gradient_norm of a step, as far as it has them."""
        for i, name in enumerate(_METRICS):
            if name in metrics:
                self._floats[_VALUES[i]] = metrics[name]
                self._words[_HAS] |= 1 << i
        self._words[_LOGGED] = step + 1


def counts_in(memory: bytes) -> RunCounts:
    """Return the counts in the NUM_BYTES of a slot."""
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


# Phases that a sound run leaves within `timeout_s`.
STEP, BETWEEN, DATA = "running a step", "between steps", "waiting for data"
BRIEF = frozenset([STEP, BETWEEN, DATA])
# All others (compiling, evaluating, saving, what comes before the first step is done, an author's
# own) may take PATIENCE times as long without anything being wrong: XLA compiles large programs for
# tens of minutes, and data and checkpoints come over networks. Six times 600 s is an hour.
PATIENCE = 6.0
JOINING = "waiting in jdp.init() for the others"
STARTING, FIRST = "starting", "waiting for the first step"
UNSTEPPED = "before the first step"
WAITING = "waiting for the other processes"
COMPILING, SAVING, RESTORING = "compiling", "saving", "restoring"
EVALUATING = "evaluating"
# Phases that people who watch the run are not told of: other words say the same.
QUIET = frozenset([STEP, BETWEEN, JOINING, STARTING, FIRST, UNSTEPPED, WAITING, BEFORE, ENDED, ""])
_LONG_S = 2.0

# In these a process waits for another, or for its devices, and these perhaps for another process.
_WAITING = frozenset([JOINING, WAITING, STEP, FIRST])


def waits(status: ProcessStatus) -> bool:
    """Whether a process waits in a step: for its devices, and these perhaps for others.

    Its script may wait for its devices, too, or do something else meanwhile.
    """
    if status.phase == BETWEEN:
        return status.is_running or status.entered > status.done
    return status.phase in _WAITING


def activity(now: float, statuses: Iterable[ProcessStatus]) -> str | None:
    """Return what the process does that has been longest in a phase of more than two seconds.

    >>> activity(107.0, [ProcessStatus(7, phase="compiling", since_s=100.0)])
    'compiling for 7 s'
    """
    since_s, phase = min(
        ((each.since_s, each.phase) for each in statuses if each.phase not in QUIET),
        default=(now, ""),
    )
    return f"{phase} for {now - since_s:.0f} s" if now - since_s >= _LONG_S else None
