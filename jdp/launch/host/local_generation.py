"""What this host has of a generation: its processes, from `go` until none of them is left.

States, and what ends them:

  RUNNING   they live. Until one fails or `end` (ENDING), one has saved or `stop` (STOPPING)
  STOPPING  they were asked to end. Until `end`, or `shutdown_timeout_s` in which none of them was
            saving (ENDING)
  ENDING    they were killed

In each of them its processes may end, and the last that was waited for ends it.
"""

import asyncio
import enum
import math
import signal
import time
from collections.abc import Callable
from typing import Any

from jdp.launch.host.worker_process import Process
from jdp.launch.options.options import Options
from jdp.worker.exit_codes import SAVED
from jdp.worker.hang_detector import SAVING, Watch
from jdp.worker.progress_board import ProcessStatus

State = enum.Enum("State", "RUNNING STOPPING ENDING")

# Between two looks whether a process still saves.
_LOOK_S = 0.2


class LocalGeneration:
    """The processes of a generation that run on this host.

    Args:
      options: of the command line.
      send: sends a message to the leader.
      ended: is called when no process is left.
      stuck: is called with the reason when processes don't end that were killed long ago.

    Attributes:
      processes: those that were not waited for so far; empty at first.
      step: the last step that all of them made.
      saved: one of them did, and ended.
    """

    def __init__(
        self,
        options: Options,
        send: Callable[..., None],
        ended: Callable[[], None],
        stuck: Callable[[str], None],
    ) -> None:
        self.processes: list[Process] = []
        self.step: int | None = None
        self.saved = False
        self._shutdown_timeout_s = options.shutdown_timeout_s
        self._send, self._ended, self._stuck = send, ended, stuck
        self._state = State.RUNNING
        self._watch = Watch(options.timeout_s)  # knows how long a process may save
        self._deadline: asyncio.TimerHandle | None = None
        self._saving_s = -math.inf  # when one of them was last seen to save

    @property
    def is_stopping(self) -> bool:
        """Its processes were asked to end, and have their time."""
        return self._state is State.STOPPING

    def statuses(self) -> dict[int, ProcessStatus]:
        """Return the statuses of its processes, by process id."""
        return {process.process_id: process.slot.read() for process in self.processes}

    # --- what its processes do ---

    def note(self, process: Process, kind: str, facts: dict[str, Any]) -> None:
        """Record what a process told."""
        if kind == "failed":
            # It is about to exit, and nothing is gained by waiting for that, unless it is alone and
            # has things of its own to do. But if another one dies, what this one raised is that it
            # lost it.
            assert process.assignment is not None
            is_alone = process.assignment.num_processes == 1
            if not is_alone and not any(other.is_dying() for other in self.processes):
                self._fail(process, facts["code"])
        elif kind == "ended" and process.traceback is not None:
            pass  # by failing
        elif kind != "parked":
            who = {"process_id": process.process_id, "pid": process.popen.pid}
            self._send("told", **who, what=kind, facts=facts)

    def note_death(self, process: Process) -> None:
        """Record that a process has ended and was waited for."""
        # What others have told before is to be known before this, which may end them.
        for other in [*self.processes]:
            other.read()
        self._note_step(process)
        self.processes.remove(process)
        code = process.popen.returncode
        if code == SAVED:
            self.saved = True
            # The others are about to: whatever they end with now, nothing has failed.
            self.stop(None)
        if self.is_stopping or code in (0, SAVED) or process.died_first:
            self._tell_exit(process, code)
        else:
            self._fail(process, code)
        if not self.processes:
            self._set_deadline(None)
            self._ended()

    def _fail(self, process: Process, code: int) -> None:
        if self._state is State.RUNNING:
            self.end()
            process.died_first = False  # or it would be told twice
            self._tell_exit(process, code)

    def _tell_exit(self, process: Process, code: int) -> None:
        says_why = code in (0, SAVED) or process.traceback is not None
        self._send(
            "exited",
            process_id=process.process_id,
            pid=process.popen.pid,
            returncode=code,
            traceback=process.traceback,
            last_lines=[] if says_why else process.last_lines(),
        )

    def _note_step(self, process: Process) -> None:
        step = process.restored_step + process.slot.read().steps
        self.step = step if self.step is None else min(self.step, step)

    # --- what is done to them ---

    def stop(self, number: int | None) -> None:
        """Ask its processes to end, and end them when they had their time.

        Args:
          number: of the signal that they get; None: they know already.
        """
        if self._state is State.RUNNING:
            self._state = State.STOPPING
            self._set_deadline(self._end_unless_saving)
        if self.is_stopping and number is not None:
            for process in self.processes:
                process.signal(number)

    def end(self) -> None:
        """Kill its processes; those that were dying before count as ended by themselves."""
        if self._state is State.ENDING:
            return
        for process in self.processes:
            process.died_first = process.is_dying()
        self.kill()
        self._set_deadline(self._still_alive)

    def kill(self) -> None:
        """Kill its processes, and wait for them however long they take."""
        self._state = State.ENDING
        self._set_deadline(None)
        for process in self.processes:
            self._note_step(process)
            process.kill()

    def dump(self, process_ids: list[int]) -> None:
        """Have all show their Python stacks on standard error, and these do so on the console."""
        for process in self.processes:
            if process.process_id in process_ids:
                process.reveal()
            # Also one that never lets go of the GIL shows them. But one that has no handler, since
            # it is before `jdp.init()` or Python has ended in it, would die.
            if _handles(process.popen.pid, signal.SIGQUIT):
                process.signal(signal.SIGQUIT)

    # What is being saved is worth more than the time, and who has saved needs some to end.
    def _end_unless_saving(self) -> None:
        now = time.monotonic()
        if any(
            it.phase == SAVING and self._watch.left_s(now, it) > 0
            for it in self.statuses().values()
        ):
            self._saving_s = now
        if now < self._saving_s + self._shutdown_timeout_s:
            self._set_deadline(self._end_unless_saving, _LOOK_S)
        else:
            self.end()

    def _still_alive(self) -> None:
        pids = [process.popen.pid for process in self.processes]
        self._stuck(
            f"the processes {pids} did not end within {self._shutdown_timeout_s:g} s of SIGKILL. "
            "They wait for a disk or a driver, and others can't have their devices."
        )

    def _set_deadline(self, call: Callable[[], None] | None, after_s: float | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if call is not None:
            after_s = self._shutdown_timeout_s if after_s is None else after_s
            self._deadline = asyncio.get_running_loop().call_later(after_s, call)


def _handles(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        masks = dict(line.split(":", 1) for line in file)
    return bool(int(masks["SigCgt"], 16) & 1 << number - 1)
