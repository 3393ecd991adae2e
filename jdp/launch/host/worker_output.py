"""The output of one process of this host: its pipes, its file, and its last lines."""

import re
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from jdp.launch.append_file import AppendFile
from jdp.launch.host.line_splitter import LineSplitter
from jdp.launch.host.spawn import Started
from jdp.launch.options.flag_types import STDERR, STDOUT

# Number of last lines kept for each process, and the length each line is cut to.
TAIL_LINES = 50
TAIL_LINE_CHARS = 1000

# Number of last lines kept of a standby that waits; most write none.
_HELD_LINES = 1000

# JAX's CPU collectives write such a line for each rank. It goes to the files only, unless the
# script wrote to the same line.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\s*"
)


class OutputReader(Protocol):
    """Reads the pipes of all processes in one thread: `OutputMux`."""

    def prefix(self, name: str, number: int) -> bytes:
        """Return the beginning of each line of a process."""
        ...

    def post(self, call: Callable[[], None]) -> None:
        """Have the thread call this, after all calls posted before."""
        ...

    def drain(self, output: "WorkerOutput") -> None:
        """Read the pipes of a process until they are empty."""
        ...

    def show(self, output: "WorkerOutput", stream: int, line: bytes) -> None:
        """Write a line to the console, unless it is filtered out."""
        ...

    def open_file(self, name: str) -> AppendFile:
        """Open a file of the log folder, if there is one."""
        ...


class WorkerOutput:
    """The output of one process. Made by `Logs.add`.

    `waits`: whether all that it writes is of its assignment, as that of a fork: it is held.
    """

    def __init__(
        self, logs: OutputReader, process: Started, local_rank: int, waits: bool = False
    ) -> None:
        self.local_rank = local_rank
        self.prefix = b""
        self.is_standby = waits
        self._held: deque[tuple[int, bytes]] | None = None  # see `hold`
        if waits:
            self._held = deque(maxlen=_HELD_LINES)
        self.is_revealed = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.pipes = {process.stdout: STDOUT, process.stderr: STDERR}
        self._file = logs.open_file(f"before_init/{socket.gethostname()}_{process.pid}.log")
        self._splitters = {STDOUT: LineSplitter(), STDERR: LineSplitter()}
        self._logs = logs

    def assign(self, process_id: int, local_rank: int, generation: int) -> None:
        """Call the process by its number, and show the output of a standby, from now on."""
        self._logs.post(lambda: self._assign(process_id, local_rank, generation))

    def hold(self) -> None:
        """Keep the lines of a standby that waits from now on, and show them when it is assigned.

        It may write as soon as it hears that it is wanted, before `assign` has taken effect.
        """
        self._logs.post(self._hold)

    def reveal(self) -> None:
        """Show the process on the console from now on, against --local-ranks-filter."""
        self.is_revealed = True  # not posted: its next output may be read before a posted call runs

    def last_lines(self, timeout_s: float = 1.0) -> list[str]:
        """Return the last lines, at most TAIL_LINES, with all that an ended process has written."""
        done: Future[list[str]] = Future()

        def collect() -> None:
            self._logs.drain(self)
            # Include an unterminated line.
            rests = [splitter.rest for splitter in self._splitters.values() if splitter.rest]
            done.set_result([*self.tail, *map(_text, rests)][-TAIL_LINES:])

        self._logs.post(collect)
        try:
            return done.result(timeout_s)
        except TimeoutError:  # the console is stopped
            return list(self.tail)

    def receive(self, stream: int, data: bytes) -> None:
        """Show and write bytes read from `stream`; empty at its end. In the thread."""
        for line in self._splitters[stream].split(data):
            self._file.write(line)
            if _GLOO.fullmatch(line):
                continue
            if not line.endswith(b"\r"):
                self.tail.append(_text(line))
            if not self.is_standby:
                self._logs.show(self, stream, line)
            elif self._held is not None:
                self._held.append((stream, line))

    def close_file(self) -> None:
        """Close the file of the log folder."""
        self._file.close_file()

    def _hold(self) -> None:
        if self._held is None:
            self._logs.drain(self)  # its lines from before it waited
            self._held = deque(maxlen=_HELD_LINES)

    def _assign(self, process_id: int, local_rank: int, generation: int) -> None:
        self._logs.drain(self)
        self.local_rank, self.is_standby = local_rank, False
        self.prefix = self._logs.prefix(f"process {process_id}", process_id)
        held, self._held = self._held or (), None
        for stream, line in held:
            self._logs.show(self, stream, line)
        before = self._file
        if before.path is not None:
            before.close_file()
            # Not renamed: a run that was resumed may have written to the new file before.
            self._file = self._logs.open_file(f"generation_{generation}/process_{process_id}.log")
            self._file.append_contents(before.path)
        if not self.pipes:
            self.close_file()


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2][:TAIL_LINE_CHARS]
