"""Counts of a process for people who watch the run: rows, waiting, commits, its last metrics."""

from typing import NamedTuple


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
NUM_BYTES = 88


class Counter:
    """Writes the counts of this process into its slot of the board, with stores of words.

    Args:
      memory: NUM_BYTES of the slot.

    Attributes:
      next_rows: rows of the batch that was handed out last, 0 once a step has counted them.
      num_left: batches that follow it; -1 if that is not known.

    >>> memory = bytearray(NUM_BYTES)
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
        self._memory[:] = bytes(NUM_BYTES)

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
