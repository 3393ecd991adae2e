"""Decides how many failures a run may have before it is not started again."""

from typing import NamedTuple

from jdp.launch.leader.failure import Cause


class _Failure(NamedTuple):
    at: float
    step: int | None
    error: str


class RestartBudget:
    """Counts the failures of a run.

    A failure is forgotten when it is older than the window and the run has come to a later step: a
    program that fails at one step again and again ends, however long it takes to come there.

    Args:
      max_restarts: number of failures that a run may have within the window.
      window_s: seconds.

    >>> from jdp.launch.leader.failure import loss_of_host
    >>> budget, lost = RestartBudget(1, 600.0), loss_of_host("a", "silent", 5.0)
    >>> for now, step in (0.0, 10), (700.0, 20):
    ...     print(budget.reason_to_end(lost, step, now) or "continues")
    ...     budget.record_failure(lost, step, now)
    continues
    continues
    >>> budget.reason_to_end(lost, step=30, now=800.0)
    '1 failure within 600 s is as many as --max-restarts 1 allows'
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._failures: list[_Failure] = []

    def reason_to_end(self, why: Cause, step: int | None, now: float) -> str:
        """Return the reason to end the run after this failure; "" to continue.

        Args:
          now: seconds on a monotonic clock.
        """
        if "JDP213" in why.error:
            return "the ranks hold different states, and a restart would hide that"
        self._failures = [each for each in self._failures if not self._is_over(each, step, now)]
        count = len(self._failures)
        if count >= self._max_restarts:
            if not count:
                return "--max-restarts 0 allows no failure"
            failures = "failure" if count == 1 else "failures"
            return (
                f"{count} {failures} within {self._window_s:g} s is as many as --max-restarts "
                f"{self._max_restarts} allows"
            )
        if why.error and any(each[1:] == (step, why.error) for each in self._failures):
            return f"the same error was raised at step {step} before, and would be again"
        return ""

    def record_failure(self, why: Cause, step: int | None, now: float) -> None:
        """Record that the run continues after a failure; arguments as for `reason_to_end`."""
        self._failures.append(_Failure(now, step, why.error))

    def failures(self) -> list[tuple[float, int | None, str]]:
        """Return time, step and error of each failure that counts."""
        return [*self._failures]

    def take_over(self, failures: list[tuple[float, int | None, str]]) -> None:
        """Begin with the failures that another leader has recorded."""
        self._failures = [_Failure(*each) for each in failures]

    def _is_over(self, failure: _Failure, step: int | None, now: float) -> bool:
        is_past = failure.step is None or step is None or step > failure.step
        return is_past and now - failure.at > self._window_s
