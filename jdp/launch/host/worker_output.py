"""The output of one process: its lines, the last of which are kept, and its file."""

import re
import socket
import subprocess
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jdp.launch.host.line_splitter import LineSplitter
from jdp.launch.options.flag_types import STDERR, STDOUT

if TYPE_CHECKING:
    from jdp.launch.host.output import Logs

# The last lines are kept, and so much of each line.
TAIL_LINES = 50
TAIL_LINE_CHARS = 1000

# JAX's CPU collectives write such a line for each rank. Only the files have it, unless the script
# wrote into the same line.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\s*"
)


class WorkerOutput:
    """The output of one process. Made by `Logs.add`."""

    def __init__(self, logs: "Logs", process: subprocess.Popen[bytes], local_rank: int) -> None:
        self.local_rank = local_rank
        self.prefix = b""
        self.is_standby = False
        self.is_revealed = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        assert process.stdout is not None and process.stderr is not None
        self.pipes = {process.stdout: STDOUT, process.stderr: STDERR}
        self._file = logs.open_file(f"before_init/{socket.gethostname()}_{process.pid}.log")
        self._splitters = {STDOUT: LineSplitter(), STDERR: LineSplitter()}
        self._logs = logs

    def assign(self, process_id: int, local_rank: int, generation: int) -> None:
        """Call the process by its number from now on; a standby's output is shown from now on.

        Args:
          process_id: among all processes of the run.
          local_rank: among those of this host, for --local-ranks-filter.
          generation: as `Assignment`.
        """
        self._logs.post(lambda: self._assign(process_id, local_rank, generation))

    def reveal(self) -> None:
        """Show the process on the console from now on, whatever --local-ranks-filter says."""
        self.is_revealed = True  # not posted: what it writes next may be read before

    def last_lines(self, timeout_s: float = 1.0) -> list[str]:
        """Return the last lines, at most TAIL_LINES, with all that an ended process has written."""
        done: Future[list[str]] = Future()

        def collect() -> None:
            self._logs.drain(self)
            # A line without an end counts, too.
            rests = [splitter.rest for splitter in self._splitters.values() if splitter.rest]
            done.set_result([*self.tail, *map(_text, rests)][-TAIL_LINES:])

        self._logs.post(collect)
        try:
            return done.result(timeout_s)
        except TimeoutError:  # the console is stopped
            return list(self.tail)

    def receive(self, stream: int, data: bytes) -> None:
        """Show and write what was read from `stream`; no bytes are its end. In the thread."""
        for line in self._splitters[stream].split(data):
            self._file.write(line)
            if _GLOO.fullmatch(line):
                continue
            if not line.endswith(b"\r"):
                self.tail.append(_text(line))
            if not self.is_standby:
                self._logs.show(self, stream, line)

    def close_file(self) -> None:
        """Close the file of the log folder."""
        self._file.close_file()

    def _assign(self, process_id: int, local_rank: int, generation: int) -> None:
        self._logs.drain(self)
        self.local_rank, self.is_standby = local_rank, False
        self.prefix = self._logs.prefix(f"process {process_id}", process_id)
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
