"""What the leader knows of the generation that lives."""

import time
from typing import Any

from jdp.launch import cause
from jdp.launch.board import Where
from jdp.launch.cause import Cause
from jdp.launch.guest import Guest
from jdp.launch.plan import Plan, size
from jdp.launch.watch import Stall, Watch, waits


class Generation:
    """One life of the run: processes that start together and end together.

    Args:
      number: 0 for the first.
      plan: the hosts in the order of their processes, with the slots that are used of each.
      timeout_s: of the watch.
      resumes: there is something to go on from.
      run_id: name of the run.
      coordinator: "address:port" of process 0.

    Attributes:
      size: number of processes.
      guests: hosts that have processes of it.
      told: facts by what was told, and by process.
      returncodes: of processes that ended by themselves.
      cause: why it ends; the first one.
      stepped: each process has finished its first step.
      step: the last step that all processes made, as far as hosts know.
    """

    def __init__(
        self,
        number: int,
        plan: Plan,
        timeout_s: float | None,
        resumes: bool,
        run_id: str,
        coordinator: str,
    ) -> None:
        self.number = number
        self.size = size(plan)
        self.guests = [guest for guest, _ in plan]
        self.told: dict[str, dict[int, dict[str, Any]]] = {}
        self.returncodes: dict[int, int] = {}
        self.cause: Cause | None = None
        self.stepped = False
        self.step: int | None = None
        self._blamed: tuple[Guest, int] | None = None  # with the slot
        self._early: float | None = None  # since when one has ended and others have not
        self._watch = Watch(timeout_s)
        first = 0
        for host_id, (guest, slots) in enumerate(plan):
            guest.used, guest.first, guest.where = slots, first, {}
            guest.is_ready, guest.generation = False, number
            guest.channel.send(
                "go",
                first=first,
                slots=slots,
                generation=number,
                num_processes=self.size,
                coordinator=coordinator,
                resumes=resumes,
                run_id=run_id,
                host_id=host_id,
            )
            first += len(slots)

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message to all hosts that have processes of it."""
        for guest in self.guests:
            guest.channel.send(kind, **facts)

    @property
    def is_done(self) -> bool:
        """All processes have ended with code 0."""
        return [*self.returncodes.values()] == [0] * self.size

    @property
    def may_grow(self) -> bool:
        """It is worth the while: each process has made a step, and none has ended.

        And nothing is lost: each has asked where to go on, or all would begin at step 0.
        """
        goes_on = len(self.told.get("restored", {})) == self.size
        return self.stepped and goes_on and self._early is None

    def note(self, process_id: int, what: str, facts: dict[str, Any]) -> bool:
        """Note what a process told; says whether it was the last one to tell that."""
        told = self.told.setdefault(what, {})
        is_news = process_id not in told
        told[process_id] = facts
        if what == "ended":
            self._note_end()
        return is_news and len(told) == self.size

    def note_exit(self, process_id: int, returncode: int) -> None:
        """Note how a process ended."""
        self.returncodes[process_id] = returncode
        if returncode == 0:
            self._note_end()

    def fail(self, why: Cause, guest: Guest | None = None, process_id: int = 0) -> None:
        """Note why it ends, and whose process is to blame, if any.

        The first cause counts, unless a later one is sure.
        """
        if self.cause is None or (why.is_sure and not self.cause.is_sure):
            self.cause = why
            self._blamed = (guest, guest.slot_of(process_id)) if guest is not None else None

    def blame(self, now: float) -> None:
        """Have the slot of the process that failed rest, should it fail often."""
        if self._blamed is not None:
            guest, slot = self._blamed
            guest.slots[slot].fail(now, can_rest=len(guest.free(now)) > guest.least)

    def end(self, guest: Guest, step: int | None) -> None:
        """Note that a host has no more processes of it, and the last step that all of them made."""
        self.step = min((each for each in (self.step, step) if each is not None), default=None)
        if guest in self.guests:
            self.guests.remove(guest)

    def find(self, process_id: int) -> tuple[Guest, Where]:
        """Give the host that a process is on, and where the process is."""
        guest = next(guest for guest in self.guests if process_id in guest.where)
        return guest, guest.where[process_id]

    def look(self, now: float) -> Stall | None:
        """Look whether it gets on."""
        return self._watch.look(now, {i: it for g in self.guests for i, it in g.where.items()})

    def look_for_early_ends(self, now: float, grace_s: float) -> None:
        """Fail if a process waits in a step that others, which came to their end, do not make.

        What it does alone at the end may take as long as the watch says.

        Args:
          now: seconds.
          grace_s: how long it may wait, since they ended.
        """
        if self._early is None or now - self._early < grace_s:
            return
        ended = self.came_to_end()
        for guest in self.guests:
            for i, where in guest.where.items():
                if i not in ended and waits(where) and now - where.progress_s >= grace_s:
                    return self.fail(cause.early_end(min(ended), i, grace_s))

    def came_to_end(self) -> set[int]:
        """Give the processes that came to the end of the script."""
        exited = {i for i, code in self.returncodes.items() if code == 0}
        return exited | self.told.get("ended", {}).keys()

    def _note_end(self) -> None:
        if self._early is None:
            self._early = time.monotonic()
