"""Processes in reserve: they ran the script up to `jdp.init()`, and wait there.

A standby that can be forked stays in reserve while it is forked for the processes that are needed.
"""

import signal
from collections.abc import Callable

from jdp.launch.host.worker_process import Process
from jdp.worker.exit_codes import in_words


class Standbys:
    """The standbys of this host.

    They are forked from a process that waits in `jdp.init()`. Where none can be forked, they are
    started when every process of a generation has finished its first step, or when the host joins
    a run in progress. They are killed by `stop` and at the end.

    Args:
      number: of standbys to keep.
      start: starts one, given the local id that it will probably have, and the process to fork.
      can_fork: whether processes of this host can be forked, as far as is known.
      ready: is called when all of them wait, or when there will be none.
      say: prints a line for people who watch the run.
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
        self._dropped: list[Process] = []  # killed, and not waited for yet
        self._wanted = 0  # now
        self._one_parked = False
        self._gave_up = False

    def __contains__(self, process: Process) -> bool:
        return process in self._processes or process in self._dropped

    def __bool__(self) -> bool:
        return bool(self._processes or self._dropped)

    @property
    def num_parked(self) -> int:
        """How many of them wait in `jdp.init()`."""
        return sum(process.parked for process in self._processes)

    def fill(self, parent: Process | None = None) -> None:
        """Start the missing standbys, also to replace stopped or dying ones."""
        for process in [each for each in self._processes if not each.can_run()]:
            self._processes.remove(process)
            self._dropped.append(process)
            process.kill()
        self._wanted = 0 if self._gave_up else self._number
        # A dropped one keeps its slot of the board until it was waited for.
        while len(self._processes) + len(self._dropped) < self._wanted:
            parent = self._parent() or parent
            self._processes.append(self._start(len(self._processes), parent))
            if parent is None and self._can_fork():
                break  # The others are forks of this one.
        self._say_ready()

    def take_standby(self) -> Process | None:
        """Return one that waits, or that soon will because others have; None if there is none."""
        # The cause of the death that it is to replace may have killed or stopped it, too.
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
        """Return a standby that can be forked, None if there is none."""
        return next((p for p in self._processes if p.can_fork and p.can_run()), None)

    def record_parked(self) -> None:
        """Record that one of them waits in `jdp.init()` now."""
        self._one_parked = True
        if self._wanted > len(self._processes) + len(self._dropped):
            self.fill()
        self._say_ready()

    def record_exit(self, process: Process) -> None:
        """Forget one that has ended, and report it if it was needed."""
        if process in self._dropped:
            self._dropped.remove(process)
            if self._wanted:
                self.fill()
            return
        self._processes.remove(process)
        if not self._wanted:
            return
        # Not replaced now: the next one may end for the same reason.
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
        """Kill all of them."""
        self._wanted = 0
        for process in self._processes:
            process.kill()

    def _say_ready(self) -> None:
        if self.num_parked >= self._wanted:
            self._ready()
