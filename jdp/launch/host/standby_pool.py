"""Standbys: processes that wait in `jdp.init()`."""

import signal
from collections.abc import Callable

from jdp.launch.host.worker_process import Process
from jdp.worker.exit_codes import in_words


class Standbys:
    """This host's standbys.

    They are forks of a process that waits in `jdp.init()`. Without forks they start after the first
    step of a generation, or when the host joins a running one.

    Args:
      start: starts one, given its likely local id, and the process to fork or None.
      ready: called when all wait, or none will come.
    """

    def __init__(
        self,
        number: int,
        start: Callable[[int, Process | None], Process],
        can_fork: Callable[[], bool],
        ready: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._number, self._start, self._can_fork = number, start, can_fork
        self._ready, self._say = ready, say
        self._processes: list[Process] = []
        self._dropped: list[Process] = []  # killed, not yet waited for
        self._wanted = 0
        self._one_parked = False
        self._gave_up = False

    def __contains__(self, process: Process) -> bool:
        return process in self._processes or process in self._dropped

    def __bool__(self) -> bool:
        return bool(self._processes or self._dropped)

    @property
    def num_parked(self) -> int:
        """How many wait in `jdp.init()`."""
        return sum(process.parked for process in self._processes)

    def fill(self, parent: Process | None = None) -> None:
        """Start missing standbys, and replace stopped or dying ones."""
        for process in [each for each in self._processes if not each.can_run()]:
            self._processes.remove(process)
            self._dropped.append(process)
            process.kill()
        self._wanted = 0 if self._gave_up else self._number
        # A dropped one keeps its slot until it was waited for.
        while len(self._processes) + len(self._dropped) < self._wanted:
            parent = self._parent() or parent
            self._processes.append(self._start(len(self._processes), parent))
            if parent is None and self._can_fork():
                break  # the others are forks of this one
        self._say_ready()

    def take_standby(self) -> Process | None:
        """Return a standby that waits, or soon will, else None."""
        # The failure's cause may have killed or stopped it.
        able = [process for process in self._processes if process.can_run()]
        chosen = min(able, default=None, key=lambda process: not process.parked)
        if chosen is None or not (self._one_parked or chosen.parked):
            return None
        if chosen is self._parent() and not any(p.parked for p in able if p is not chosen):
            fork = self._start(0, chosen)
            if fork.is_fork:
                return fork
            self._processes.append(fork)
        self._processes.remove(chosen)
        return chosen

    def _parent(self) -> Process | None:
        return next((p for p in self._processes if p.can_fork and p.can_run()), None)

    def record_parked(self) -> None:
        """Record that one waits in `jdp.init()`."""
        self._one_parked = True
        if self._wanted > len(self._processes) + len(self._dropped):
            self.fill()
        self._say_ready()

    def record_exit(self, process: Process) -> None:
        """Remove an ended one, and report it if needed."""
        if process in self._dropped:
            self._dropped.remove(process)
            if self._wanted:
                self.fill()
            return
        self._processes.remove(process)
        if not self._wanted:
            return
        # The next one may end for the same reason.
        self._wanted = 0
        who = f"a standby (pid {process.popen.pid}) {in_words(process.popen.returncode)}"
        if process.parked:
            self._say(f"{who}. The next recovery will use the remaining standbys.")
        elif process.popen.returncode == -signal.SIGKILL:
            self._say(f"{who}. The next recovery takes longer, and starts new standbys.")
        else:
            self._gave_up = True
            last = "".join(f"\n  {line}" for line in process.last_lines()[-5:])
            self._say(
                f"{who} before jdp.init(), so this host keeps no standbys and recovers more "
                "slowly. RANK is not set in a standby before jdp.init(): read it afterwards. Its "
                f"last output:{last}"
            )
        self._say_ready()

    def kill_all(self) -> None:
        """Kill all."""
        self._wanted = 0
        for process in self._processes:
            process.kill()

    def _say_ready(self) -> None:
        if self.num_parked >= self._wanted:
            self._ready()
