"""What the processes of this host write: to the console, to files, and kept for the end.

One thread reads all of it, so that a console that is stopped holds up the processes, as it would
without a launcher, and never the launcher's own work. Only that thread touches a `WorkerOutput`.
"""

import os
import re
import selectors
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

from jdp.launch.options.flag_types import STDERR, STDOUT
from jdp.launch.options.options import Options

# What is kept for the end: as many lines, and so much of each.
TAIL_LINES = 50
TAIL_LINE_CHARS = 1000

# What is longer is shown in parts.
MAX_LINE_BYTES = 2**20

# In so many a pipe is read that was as full as Linux lets it be, and its end.
_READ_BYTES = 2**16
_MAX_READS = 2**20 // _READ_BYTES + 1

# A progress bar ends its lines with a carriage return, and is shown while it moves. One at the very
# end may be half of \r\n, so it waits for what comes.
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")


class WorkerOutput:
    """What one process writes. Made by `Logs.add`."""

    def __init__(self, logs: "Logs", process: subprocess.Popen[bytes], local_rank: int) -> None:
        self.local_rank = local_rank
        self.prefix = b""
        self.is_standby = False
        self.is_revealed = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._file: IO[bytes] | None = None
        self._path: Path | None = None
        assert process.stdout is not None and process.stderr is not None
        self.pipes = {process.stdout: STDOUT, process.stderr: STDERR}
        self._partial = {STDOUT: b"", STDERR: b""}
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
            # A line without an end is a process's last word, too.
            partial = [text for text in self._partial.values() if text]
            done.set_result([*self.tail, *(_text(line) for line in partial)][-TAIL_LINES:])

        self._logs.post(collect)
        try:
            return done.result(timeout_s)
        except TimeoutError:  # the console is stopped
            return list(self.tail)

    def open(self, name: str) -> None:
        """Write to this file of the log folder, if there is one."""
        self._file, self._path = self._logs.open(name)

    def take(self, stream: int, data: bytes) -> None:
        """Take what was read from `stream`; nothing is its end."""
        if data:
            data = self._partial[stream] + data
            end = 0
            for found in _END_OF_LINE.finditer(data):
                self._show(stream, data[end : found.end()])
                end = found.end()
            self._partial[stream] = data[end:]
        if self._partial[stream] and (not data or len(self._partial[stream]) > MAX_LINE_BYTES):
            self._show(stream, self._partial[stream].rstrip(b"\r") + b"\n")
            self._partial[stream] = b""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _show(self, stream: int, line: bytes) -> None:
        self._save(line)
        if not line.endswith(b"\r"):
            self.tail.append(_text(line))
        if not self.is_standby:
            self._logs.show(self, stream, line)

    def _assign(self, process_id: int, local_rank: int, generation: int) -> None:
        self._logs.drain(self)
        self.local_rank, self.is_standby = local_rank, False
        self.prefix = self._logs.prefix(f"process {process_id}", process_id)
        before = self._path
        if before is not None:
            self.close()
            # Not renamed: a run that was resumed may have written to the new file before.
            self.open(f"generation_{generation}/process_{process_id}.log")
            if self._file is not None:
                try:
                    self._save(before.read_bytes())
                    before.unlink()
                except OSError as error:
                    self._logs.say(f"{before} can't be moved to {self._path}: {error.strerror}")
            if not self.pipes:
                self.close()

    def _save(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(data)
        except OSError as error:
            self._logs.say(f"{self._path} can't be written: {error.strerror}")
            self._file = self._path = None


class Logs:
    """Reads the processes of this host, shows their lines, and writes their files.

    Args:
      options: which lines are shown, and where files go.
      out: console for standard output; None: ours.
      err: console for standard error; None: ours.
    """

    def __init__(
        self, options: Options, out: IO[bytes] | None = None, err: IO[bytes] | None = None
    ) -> None:
        self._options = options
        self._consoles = {STDOUT: out or sys.stdout.buffer, STDERR: err or sys.stderr.buffer}
        self._gone: set[int] = set()  # consoles that nobody reads any more
        self._told_of_filter = False
        self._alone = options.nnodes[1] * options.nproc_per_node[1] == 1
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._outputs: set[WorkerOutput] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="jdp logs", daemon=True)
        self._thread.start()

    def add(
        self, process: subprocess.Popen[bytes], local_rank: int, *, standby: bool = False
    ) -> WorkerOutput:
        """Read a process that `spawn` started, until it closes its pipes.

        Args:
          process: its `stdout` and `stderr` belong to us from now on.
          local_rank: the one that it will probably have; what it writes before it is given one is
            shown under that.
          standby: show nothing before it is given a number.
        """
        output = WorkerOutput(self, process, local_rank)
        output.is_standby = standby
        output.prefix = self.prefix(f"local process {local_rank}", local_rank)
        output.open(f"before_init/{socket.gethostname()}_{process.pid}.log")
        self.post(lambda: self._add(output))
        return output

    def close(self, timeout_s: float = 2.0) -> None:
        """Show and write what ended processes have left, and stop.

        Args:
          timeout_s: for how long, if a process or a stopped console holds us up.
        """
        self.post(self._finish)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._waker.close()

    def post(self, call: Callable[[], None]) -> None:
        """Have the thread call this, after what was posted before."""
        self._calls.append(call)
        with suppress(OSError):  # full, so that it will wake up anyway; or closed
            self._waker.send(b"x")

    def drain(self, output: WorkerOutput) -> None:
        """Read what lies in the pipes of a process. In the thread."""
        for pipe in [*output.pipes]:
            # Not for ever: it may write faster than anybody reads.
            for _ in range(_MAX_READS):
                if not self._read_once(output, pipe):
                    break

    def show(self, output: WorkerOutput, stream: int, line: bytes) -> None:
        """Write a line to the console if it is for it. In the thread."""
        if output.is_revealed or self._options.is_shown(output.local_rank, stream):
            self._write(stream, output.prefix + line)
        elif not self._told_of_filter and not self._options.redirects:
            self._told_of_filter = True
            shown = ", ".join(map(str, sorted(self._options.local_ranks_filter or ())))
            self.say(f"output of local rank {shown} is shown; --local-ranks-filter all shows all")

    def say(self, text: str) -> None:
        """Write a line of our own to the console. In the thread."""
        self._write(STDERR, f"jdp run: {text}\n".encode())

    def prefix(self, name: str, number: int) -> bytes:
        """Return what stands before each line of a process: nothing if there is only one."""
        if self._alone:
            return b""
        if not self._consoles[STDOUT].isatty():
            return f"[{name}] ".encode()
        from rich.console import Console  # slow to import, and only for people who watch
        from rich.text import Text

        colours = ("cyan", "magenta", "green", "yellow", "blue", "red")
        console = Console()
        with console.capture() as captured:
            console.print(Text(f"[{name}] ", style=colours[number % len(colours)]), end="")
        return captured.get().encode()

    def open(self, name: str) -> tuple[IO[bytes], Path] | tuple[None, None]:
        """Open a file of the log folder, to append to it; (None, None) if there is none."""
        if self._options.log_dir is None:
            return None, None
        path = self._options.log_dir / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered, so that what a killed run has written is there.
            return path.open("ab", buffering=0), path
        except OSError as error:
            why = f"{path} can't be written: {error.strerror}"
            self.post(lambda: self.say(why))
            return None, None

    def _add(self, output: WorkerOutput) -> None:
        self._outputs.add(output)
        for pipe in output.pipes:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (output, pipe))

    def _read(self) -> None:
        while not (self._is_closing and not self._outputs):
            ready = [key for key, _ in self._selector.select()]
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            for key in ready:
                if key.data is not None:
                    self._read_once(*key.data)
            while self._calls:
                call = self._calls.popleft()
                try:
                    call()
                except Exception as error:  # or nobody would read what the processes write
                    self.say(f"the logs go on after {error!r}")
        self._selector.close()
        self._woken.close()

    # Says whether there may be more.
    def _read_once(self, output: WorkerOutput, pipe: IO[bytes]) -> bool:
        data = _read_now(pipe)
        if data is None:
            return False
        output.take(output.pipes[pipe], data)
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            del output.pipes[pipe]
        if not output.pipes:
            output.close()
            self._outputs.discard(output)
        return bool(data)

    def _finish(self) -> None:
        self._is_closing = True
        for output in [*self._outputs]:
            self.drain(output)

    def _write(self, stream: int, line: bytes) -> None:
        if stream in self._gone:
            return
        try:
            self._consoles[stream].write(line)
            self._consoles[stream].flush()
        except OSError:  # as under `| head`
            self._gone.add(stream)


# None: there is nothing now; b"": there will be nothing more.
def _read_now(pipe: IO[bytes]) -> bytes | None:
    try:
        return os.read(pipe.fileno(), _READ_BYTES)
    except BlockingIOError:
        return None


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2][:TAIL_LINE_CHARS]
