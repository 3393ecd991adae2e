"""Which share of the time a run trains, if ranks fail: the effective training time, ETTR.

The rules: failures come at random times at a constant rate, whether the run trains or recovers.
Each costs a whole recovery; one that comes during another recovery is recovered from after it. (If
that one only begins anew, the share is higher: `highest`.) The steps since the last commit are lost
and repeated. A commit stops training while it is made. After a recovery the run may go on with
fewer hosts for some time, until a new host joins.
"""

import math
from typing import NamedTuple


class Failures(NamedTuple):
    """Failures of a run, and what they cost.

    Attributes:
      per_s: failures in a second, >= 0.
      recovery_s: seconds in which nobody trains after each of them, >= 0.
      commit_s: seconds of a commit, >= 0.
      degraded_s: seconds after each recovery in which hosts are missing, >= 0.
      missing: share of the hosts that is missing meanwhile, 0 to 1.
    """

    per_s: float
    recovery_s: float
    commit_s: float = 0.0
    degraded_s: float = 0.0
    missing: float = 0.0

    def effective(self, commit_every_s: float) -> float:
        """Return the share of the time in which steps are made that count, with full hosts.

        >>> hourly = Failures(per_s=1 / 3600, recovery_s=360)
        >>> round(hourly.effective(commit_every_s=1.0), 4)  # a tenth of the time is recovery
        0.8999
        """
        lost = self.per_s * (self.recovery_s + self.degraded_s * self.missing)
        return max(0.0, 1 - lost) * self.kept(commit_every_s)

    def highest(self, commit_every_s: float) -> float:
        """Return the same, if a failure during a recovery only lets it begin anew."""
        trains = math.exp(-self.per_s * self.recovery_s)
        degraded = self.per_s * trains * self.degraded_s * self.missing
        return max(0.0, trains - degraded) * self.kept(commit_every_s)

    def kept(self, commit_every_s: float) -> float:
        """Return the share of the training time in which steps are made that are not lost.

        A stretch of training and its commit last w seconds, and are repeated until no failure hits
        them: (exp(rate * w) - 1) / rate seconds on average (Daly 2006,
        https://doi.org/10.1016/j.future.2004.11.016).
        """
        whole = commit_every_s + self.commit_s
        if self.per_s == 0:
            return commit_every_s / whole
        exponent = self.per_s * whole
        if exponent > 700:
            return 0.0
        return self.per_s * commit_every_s / math.expm1(exponent)

    def best_interval_s(self, step_s: float) -> float:
        """Return the seconds between commits that lose least, at least a step.

        Young's rule (1974, https://doi.org/10.1145/361147.361115): the root of 2 * commit_s / rate.

        >>> Failures(per_s=1 / 5000, recovery_s=0, commit_s=1.0).best_interval_s(step_s=1.0)
        100.0
        """
        if self.per_s == 0:
            return math.inf
        return max(step_s, math.sqrt(2 * self.commit_s / self.per_s))
