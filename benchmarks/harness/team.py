"""Processes that run for a whole benchmark, and execute requests all at the same moment.

`Team` is the asking side, `serve` the other, which may run in an environment without JAX: this
file needs the standard library alone. They talk over a socket with a name, for `mpirun` hands on
no other file, in lines of JSON.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 90.0
ASK_TIMEOUT_S = 120.0

# After the time limit of a request, its process prints its stack and ends, before the answer is
# given up.
_GRACE_S = 3.0


class TeamError(RuntimeError):
    """A failure of a team, with the last output of its processes."""


class Team:
    """`num_processes` processes, each of which runs `serve`."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        num_processes: int,
        environment: Mapping[str, str] | None = None,
    ):
        """Start the processes, and wait until all are ready.

        Args:
          commands: one for each process, or a single one that starts them all. The variable
          JDP_TEAM holds the settings for `serve`, JDP_INDEX the number of the command.
          num_processes: number of processes that will connect. environment: variables in addition
          to those of this process.

        Raises:
          TeamError: if one of them ends, or is not ready within START_TIMEOUT_S.
        """
        self._log = tempfile.TemporaryFile("ab+")  # appended to, so that all may write
        self._processes: list[subprocess.Popen] = []
        self._members: list[Any] = []
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(Path(folder, "team")))
            listener.listen(num_processes)
            base = {**os.environ, **(environment or {}), "JDP_TEAM": listener.getsockname()}
            try:
                for index, command in enumerate(commands):
                    self._start(command, {**base, "JDP_INDEX": str(index)})
                self._accept(listener, num_processes)
                self.ask("about", timeout_s=START_TIMEOUT_S)
            except BaseException:
                self.close()
                raise

    def ask(self, what: str, *args: Any, timeout_s: float = ASK_TIMEOUT_S) -> list[Any]:
        """Make all processes execute `what` at once, and return their answers by process.

        Raises:
          TeamError: if one fails, ends, or does not answer within `timeout_s`. Then all are ended.
        """
        request = json.dumps([timeout_s, what, args]) + "\n"
        try:
            for member, _ in self._members:
                member.sendall(request.encode())
            return self._answers(timeout_s + _GRACE_S)
        except (OSError, ValueError) as error:
            self.close()
            raise TeamError(f"{what}{args}: {error}\n{self._last_words()}") from error

    def slowest(self, what: str, *args: Any) -> Callable[[], float]:
        """Return a clock that measures how long the slowest process takes for `what`."""
        return lambda: max(self.ask(what, *args))

    def close(self) -> None:
        """End all processes."""
        for member, lines in self._members:
            lines.close()
            member.close()
        for process in self._processes:
            process.terminate()  # mpirun then ends its own processes
        for process in self._processes:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._members, self._processes = [], []

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
        self._log.close()

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # Through `_become`, so that a foreign program ends with this process too.
        start = [sys.executable, __file__, str(os.getpid()), *command]
        self._processes.append(
            subprocess.Popen(
                start, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
            )
        )

    def _accept(self, listener: socket.socket, num_processes: int) -> None:
        listener.settimeout(0.2)
        deadline = time.monotonic() + START_TIMEOUT_S
        found = {}
        while len(found) < num_processes:
            ended = [process for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                what = f"ended with status {ended[0].returncode}" if ended else "did not connect"
                raise TeamError(f"{self._processes[0].args}: {what}\n{self._last_words()}")
            try:
                member, _ = listener.accept()
            except TimeoutError:
                continue
            member.settimeout(ASK_TIMEOUT_S)
            lines = member.makefile("r")
            found[json.loads(lines.readline())] = member, lines
        self._members = [found[index] for index in sorted(found)]

    # In order of arrival: after one has failed, the others may wait for it.
    def _answers(self, timeout_s: float) -> list[Any]:
        waiting = {member: i for i, (member, _) in enumerate(self._members)}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ValueError(f"process {min(waiting.values())} gave no answer")
            for member in ready:
                index = waiting.pop(member)
                line = self._members[index][1].readline()
                good, answers[index] = json.loads(line) if line else (False, "ended")
                if not good:
                    raise ValueError(f"process {index}: {answers[index]}")
        return [answers[index] for index in range(len(answers))]

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]


def serve(index: int, make: Callable[[], Mapping[str, Callable[..., Any]]]) -> None:
    """Answer the requests of a `Team`, until it closes.

    Args:
      index: number of this process in the team.
      make: returns the functions that requests name; one is `about`, which describes the versions.
    """
    end_with(os.getppid())
    # The team may close while an answer is in flight.
    with socket.socket(socket.AF_UNIX) as asked, contextlib.suppress(ConnectionError):
        asked.connect(os.environ["JDP_TEAM"])
        lines = asked.makefile("r")
        asked.sendall(f"{index}\n".encode())
        functions: Mapping[str, Callable[..., Any]] = {}
        for line in lines:
            timeout_s, what, args = json.loads(line)
            faulthandler.dump_traceback_later(timeout_s, exit=True)
            try:
                functions = functions or make()
                answer = [True, functions[what](*args)]
            except Exception:
                answer = [False, traceback.format_exc()]
            faulthandler.cancel_dump_traceback_later()
            asked.sendall((json.dumps(answer) + "\n").encode())


def end_with(parent: int) -> None:
    """Make the kernel end this process when process `parent`, which started it, ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit()


def free_port() -> int:
    """Find a free port of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# The setting of `end_with` survives exec.
def _become(parent: str, *command: str) -> None:
    end_with(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(*sys.argv[1:])
