"""The past of a run, as its leader sends it to the hosts, and they to the next leader."""

from typing import Any, NamedTuple


class RunHistory(NamedTuple):
    """The failures and lost time of a run. Times are those of `time.monotonic`, in seconds.

    Attributes:
      failures: time, step if it is known, and error of each one that the restart budget counts.
      began: when all processes had made the first step; None before that.
      lost_s: since then, in which the run did not come further.
      recoveries: number of them, by the error code of the first failure of each.

    >>> RunHistory([(90.0, 7, "")], began=10.0).moved(-100.0).facts()
    {'failures': [[-10.0, 7, '']], 'began': -90.0, 'lost_s': 0.0, 'recoveries': {}}
    """

    failures: list[tuple[float, int | None, str]] = []  # noqa: RUF012
    began: float | None = None
    lost_s: float = 0.0
    recoveries: dict[str, int] = {}  # noqa: RUF012

    @property
    def num_recoveries(self) -> int:
        """The number of recoveries from failures."""
        return sum(self.recoveries.values())

    def moved(self, by_s: float) -> "RunHistory":
        """Return it on another clock, which shows `by_s` more.

        Between hosts it is sent on a clock that shows 0 at that moment.
        """
        failures = [(at + by_s, step, error) for at, step, error in self.failures]
        began = None if self.began is None else self.began + by_s
        return self._replace(failures=failures, began=began)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON; `RunHistory(**facts)` reads it."""
        return self._asdict() | {"failures": [[*each] for each in self.failures]}


class LeaderLoss(NamedTuple):
    """The loss of a leader, as a host that followed it has seen it.

    Attributes:
      why: in words.
      at: time.monotonic() when it was noticed.
      silent_s: seconds for which nothing was heard of it before that.
      step: the last that all processes of this host called; None if it is not known.
    """

    why: str
    at: float
    silent_s: float
    step: int | None = None

    def moved(self, by_s: float) -> "LeaderLoss":
        """Return it on another clock, which shows `by_s` more."""
        return self._replace(at=self.at + by_s)
