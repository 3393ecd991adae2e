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
        steps_per_s = self.steps_per_s if self.rows_per_s is None else None
        recovered = "recovery" if self.recoveries == 1 else "recoveries"
        for value, text in (
            (self.activity, "{}"),
            (self.loss, "loss {:.4g}"),
            (_rate(self.rows_per_s), "{} examples/s"),
            (_rate(steps_per_s), "{} steps/s"),
            (self.data_share, "data wait {:.0%}"),
            (self.learning_rate, "lr {:.3g}"),
            (self.gradient_norm, "grad norm {:.3g}"),
            (self.ettr, "ETTR {:.1%}"),
            (self.recoveries or None, f"{{}} {recovered}"),
            (self.commit, "commit {}"),
            (self.checkpoint, "checkpoint {}"),
        ):
            if value is not None:
                found.append(text.format(value).replace("%", " %"))
        return found

    def __str__(self) -> str:
        return ", ".join(self.parts())


def _rate(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
