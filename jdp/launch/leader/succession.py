"""The past of a run, which a leader takes over from hosts, and hands on to the next by them."""

import secrets
import time
from typing import Any

from jdp.launch.leader import failure
from jdp.launch.leader.electors import Electors
from jdp.launch.leader.rank_assignment import Plan
from jdp.launch.leader.recovery import Recoveries
from jdp.launch.leader.remote_host import RemoteHost
from jdp.worker.run_history import LeaderLoss, RunHistory


class Succession:
    """Takes the past of a run over, and hands it on.

    The host of the latest generation counts, of several the one that knows of most recoveries.

    Args:
      run_id: of the run, if the options name it.
      electors, recoveries: of the leader, to which the past is given.

    Attributes:
      number: of the last generation that hosts know; -1 for none.
      run_id: of the run; None if nobody knows it.
    """

    def __init__(self, run_id: str | None, electors: Electors, recoveries: Recoveries) -> None:
        self.number, self.run_id = -1, run_id
        self._electors, self._recoveries = electors, recoveries
        self._history = RunHistory()
        self._loss: LeaderLoss | None = None  # of the leader before
        self._leads = False  # whether this leader has formed a generation

    def record_join(self, remote: RemoteHost, facts: dict[str, Any]) -> None:
        """Record what a host knows: the facts of its `join`."""
        self._electors.record_join(facts.get("electorate"))
        self._recoveries.stepped = self._recoveries.stepped or facts["stepped"]
        self.run_id = self.run_id or facts["run_id"]
        now = time.monotonic()
        history = RunHistory(**facts["history"]).moved(now)
        if remote.generation > self.number:
            self.number, self._history, self._loss = remote.generation, history, None
        elif remote.generation == self.number:
            self._history = max(self._history, history, key=lambda each: each.num_recoveries)
        if remote.generation == self.number and facts["loss"]:
            loss = LeaderLoss(**facts["loss"]).moved(now)
            self._loss = min(self._loss or loss, loss, key=lambda each: each.at)

    def take_over(self) -> str:
        """Have the run continue after the last generation of another leader, if there was one."""
        is_first, self._leads = not self._leads, True
        if not is_first or self.number < 0:
            return ""
        loss = self._loss or LeaderLoss("the leader has resigned", time.monotonic(), 0.0)
        return self._recoveries.take_over(self._history, failure.loss_of_leader(loss))

    def begin_generation(self, plan: Plan, home: str) -> dict[str, Any]:
        """Record the next generation, and return the facts for its hosts.

        Args:
          home: the id of the leader's own host.
        """
        self.number += 1
        self.run_id = self.run_id or secrets.token_hex(4)
        electorate = self._electors.form((part.remote for part in plan), home)
        return {"run_id": self.run_id, "known": self._known(electorate)}

    def settle(self) -> dict[str, Any]:
        """Record that all hosts of the generation know its electors, and return the facts."""
        return self._known(self._electors.settle())

    def _known(self, electorate: dict[str, Any] | None) -> dict[str, Any]:
        history = self._recoveries.history().moved(-time.monotonic())
        return {"electorate": electorate, "history": history.facts()}
