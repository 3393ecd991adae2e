"""How far a run is, in a few numbers, and in words."""

from typing import NamedTuple


class RunSummary(NamedTuple):
    """How far a run is, as the leader sees it.

    Attributes:
      step: the last step that all processes have called, counted over all lives of the run; None
        before the first.
      loss: the last one that `jdp.log` has written; None if there is none.
      steps_per_s: lately; None until two steps were seen.
      rows_per_s: examples in these steps; None if jdp did not hand out their batches.
      data_share: of the same time, that the process waits for data which waits longest; None
        likewise.
      commit: step of the last commit that all hosts have; None if there is none.
      checkpoint: step of the last checkpoint; None if there is none.
      recoveries: from failures.
      ettr: effective training time ratio: the share of the time since the first step of the run in
        which it came further. Recoveries do not count, nor do steps that are made again. None
        without a launcher.
      learning_rate, gradient_norm: likewise.
      activity: what a process has been doing for more than two seconds, such as "compiling for
        7 s"; None if it trains.
      target: step at which the loop over `jdp.batches` ends; None if it is not known.

    >>> summary = RunSummary(340, 3.4375, 10.0, 2500.0, 0.03, 340, 300, 1, 0.972)
    >>> print(summary)
    step 340, loss 3.438, 2,500 examples/s, data wait 3 %, ETTR 97.2 %, 1 recovery, \
commit 340, checkpoint 300
    """

    step: int | None
    loss: float | None
    steps_per_s: float | None
    rows_per_s: float | None
    data_share: float | None
    commit: int | None
    checkpoint: int | None
    recoveries: int
    ettr: float | None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    activity: str | None = None
    target: int | None = None

    def parts(self) -> list[str]:
        """Return the numbers that are known, each in words, the least important ones last."""
        found = [] if self.step is None else [f"step {self.step}"]
        if found and self.target is not None and self.target > 0:
            found = [f"step {self.step} of {self.target}"]
        if self.activity is not None:
            found.append(self.activity)
        if self.loss is not None:
            found.append(f"loss {self.loss:.4g}")
        if self.rows_per_s is not None:
            found.append(f"{_rate(self.rows_per_s)} examples/s")
        elif self.steps_per_s is not None:
            found.append(f"{_rate(self.steps_per_s)} steps/s")
        if self.data_share is not None:
            found.append(f"data wait {100 * self.data_share:.0f} %")
        if self.learning_rate is not None:
            found.append(f"lr {self.learning_rate:.3g}")
        if self.gradient_norm is not None:
            found.append(f"grad norm {self.gradient_norm:.3g}")
        if self.ettr is not None:
            found.append(f"ETTR {100 * self.ettr:.1f} %")
        if self.recoveries:
            found.append(f"{self.recoveries} recover{'y' if self.recoveries == 1 else 'ies'}")
        if self.commit is not None:
            found.append(f"commit {self.commit}")
        if self.checkpoint is not None:
            found.append(f"checkpoint {self.checkpoint}")
        return found

    def __str__(self) -> str:
        return ", ".join(self.parts())


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
