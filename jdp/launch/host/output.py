"""This host's processes' output: on the console and in files.

One thread reads all of it, so a stopped console blocks the processes, but never the launcher. That
thread alone touches a `_WorkerOutput`.
"""

import os
import re
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO

from jdp.launch.flags import STDERR, STDOUT
from jdp.launch.host.console import Console
from jdp.launch.host.spawn import Started
from jdp.launch.options import Options
from jdp.worker.run_progress import RunSummary


class AppendFile:
    """A file for appending; the first error is reported and ends it."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._file: IO[bytes] | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered, for a killed run.
                self._file = path.open("ab", buffering=0)
            except OSError as error:
                self._fail(error)

    def write(self, data: bytes) -> None:
        """Append, unless a write failed before."""
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                self._fail(error)

    def append_contents(self, path: Path) -> None:
        """Append another file's text, and remove that file."""
        if self._file is not None:
            try:
                self.write(path.read_bytes())
                path.unlink()
            except OSError as error:
                self._say(f"{path} cannot be moved to {self.path}: {error.strerror}")

    def close_file(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fail(self, error: OSError) -> None:
        self._say(f"{self.path} cannot be written: {error.strerror}")
        self.close_file()
        self.path = None


MAX_LINE_BYTES = 2**20

# A progress bar ends lines with a carriage return. A final one waits: it may be half of \r\n.
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!\Z)")


class _LineSplitter:
    r"""Splits a stream into lines; `rest` is the unfinished one."""

    def __init__(self) -> None:
        self.rest = b""

    def split(self, data: bytes) -> list[bytes]:
        text, end, lines = self.rest + data, 0, []
        for found in _END_OF_LINE.finditer(text) if data else ():
            lines.append(text[end : found.end()])
            end = found.end()
        self.rest = text[end:]
        if self.rest and (not data or len(self.rest) > MAX_LINE_BYTES):
            lines.append(self.rest.rstrip(b"\r") + b"\n")
            self.rest = b""
        return lines


# A process's kept lines, and their length.
TAIL_LINES = 50
TAIL_LINE_CHARS = 1000

# A waiting standby's kept lines.
_HELD_LINES = 1000

# JAX's CPU collectives print this per rank: to the files only.
_GLOO = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    rb"Expected number of connected peer ranks is : \d+\s*"
)


class _WorkerOutput:
    """One process's output; `waits`: hold it until the assignment."""

    def __init__(
        self, logs: "OutputMux", process: Started, local_rank: int, waits: bool = False
    ) -> None:
        self.local_rank = local_rank
        self.prefix = b""
        self.is_standby = waits
        self._held: deque[tuple[int, bytes]] | None = None
        if waits:
            self._held = deque(maxlen=_HELD_LINES)
        self.is_revealed = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.pipes = {process.stdout: STDOUT, process.stderr: STDERR}
        self._file = logs.open_file(f"before_init/{socket.gethostname()}_{process.pid}.log")
        self._splitters = {STDOUT: _LineSplitter(), STDERR: _LineSplitter()}
        self._logs = logs

    def assign(self, process_id: int, local_rank: int, generation: int) -> None:
        self._logs.post(lambda: self._assign(process_id, local_rank, generation))

    def hold(self) -> None:
        """Keep a waiting standby's lines until it is assigned."""
        self._logs.post(self._hold)

    def reveal(self) -> None:
        """Show the process, against --local-ranks-filter."""
        self.is_revealed = True  # not posted: its next output may come first

    def last_lines(self, timeout_s: float = 1.0) -> list[str]:
        done: Future[list[str]] = Future()

        def collect() -> None:
            self._logs.drain(self)
            rests = [splitter.rest for splitter in self._splitters.values() if splitter.rest]
            done.set_result([*self.tail, *map(_text, rests)][-TAIL_LINES:])

        self._logs.post(collect)
        try:
            return done.result(timeout_s)
        except TimeoutError:  # the console is stopped
            return list(self.tail)

    def receive(self, stream: int, data: bytes) -> None:
        """Show and write bytes, b"" at the stream's end; in the thread."""
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
        self._file.close_file()

    def _hold(self) -> None:
        if self._held is None:
            self._logs.drain(self)
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
            # Not renamed: a resumed run may have written the new file.
            self._file = self._logs.open_file(f"generation_{generation}/process_{process_id}.log")
            self._file.append_contents(before.path)
        if not self.pipes:
            self.close_file()


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2][:TAIL_LINE_CHARS]


# A pipe on Linux holds up to 1 MiB.
_READ_BYTES = 2**16
_MAX_READS = 2**20 // _READ_BYTES + 1
_SHOWN_LINES = 1000
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"  [\w.]*(Error|Exception|Exit|Interrupt)\b")


class OutputMux:
    """Reads, shows and writes the output of this host's processes."""

    def __init__(
        self, options: Options, out: IO[bytes] | None = None, err: IO[bytes] | None = None
    ) -> None:
        self.console, self._options = Console(options, out, err), options
        self.prefix = self.console.prefix
        self._has_named_filter = False
        self._summary: RunSummary | None = None
        self._is_summary_due = False
        self._shown: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._outputs: set[_WorkerOutput] = set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, name="jdp logs", daemon=True)
        self._thread.start()

    def add(
        self, process: Started, local_rank: int, *, standby: bool = False, waits: bool = False
    ) -> _WorkerOutput:
        """Read a process's pipes until they close; a standby is hidden until its assignment."""
        output = _WorkerOutput(self, process, local_rank, waits)
        output.is_standby = standby or waits
        output.prefix = self.prefix(f"local process {local_rank}", local_rank)
        self.post(lambda: self._add(output))
        return output

    def finish(self, timeout_s: float = 2.0) -> None:
        """Show and write the remaining output, and end the thread."""
        self.post(self._finish)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._waker.close()

    def post(self, call: Callable[[], None]) -> None:
        """Call this in the thread, in order."""
        self._calls.append(call)
        with suppress(OSError):  # full, so it will wake up; or closed
            self._waker.send(b"x")

    def drain(self, output: _WorkerOutput) -> None:
        """Read a process's pipes until empty; in the thread."""
        for pipe in [*output.pipes]:
            # Bounded: the process may write faster.
            for _ in range(_MAX_READS):
                if not self._read_once(output, pipe):
                    break

    def show(self, output: _WorkerOutput, stream: int, line: bytes) -> None:
        """Write a line to the console, unless filtered; in the thread."""
        if output.is_revealed or self._options.is_shown(output.local_rank, stream):
            self.console.write(stream, output.prefix + line)
            self._shown.append(line.decode(errors="replace").rstrip())
        elif not self._has_named_filter and not self._options.redirects:
            self._has_named_filter = True
            shown = ", ".join(map(str, sorted(self._options.local_ranks_filter or ())))
            self.say(f"only local rank {shown} is shown; --local-ranks-filter all shows all")

    def say(self, text: str) -> None:
        """Write the launcher's own line; in the thread."""
        self.console.say(self.shortened(text))

    def shortened(self, text: str) -> str:
        """Replace an already shown traceback by its error."""
        lines = text.split("\n")
        if f"  {_TRACEBACK}" not in lines:
            return text
        begin = end = lines.index(f"  {_TRACEBACK}")
        while end < len(lines) and (lines[end].startswith("  ") or not lines[end]):
            end += 1
        shown = {"", *self._shown}
        errors = [i for i in range(begin, end) if _ERROR.match(lines[i])]
        if not errors or any(line[2:].rstrip() not in shown for line in lines[begin:end]):
            return text
        return "\n".join([*lines[:begin], *lines[errors[-1] :]])

    def show_summary(self, summary: RunSummary) -> None:
        """Show the progress; only the latest on a stopped console."""
        self._summary = summary
        if not self._is_summary_due:
            self._is_summary_due = True
            self.post(self._show_summary)

    def open_file(self, name: str) -> AppendFile:
        """Open a file of the log folder, if any."""
        folder = self._options.log_dir
        return AppendFile(folder and folder / name, lambda text: self.post(lambda: self.say(text)))

    def _add(self, output: _WorkerOutput) -> None:
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
                except Exception as error:  # the output must still be read
                    self.say(f"a bug in the launcher's log thread, which continues: {error!r}")
            self.console.refresh()
        self._selector.close()
        self._woken.close()

    # Return whether more may follow.
    def _read_once(self, output: _WorkerOutput, pipe: IO[bytes]) -> bool:
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        output.receive(output.pipes[pipe], data)
        if not data:
            self._selector.unregister(pipe)
            pipe.close()
            del output.pipes[pipe]
        if not output.pipes:
            output.close_file()
            self._outputs.discard(output)
        return bool(data)

    def _show_summary(self) -> None:
        self._is_summary_due = False
        assert self._summary is not None
        self.console.show_summary(self._summary)

    def _finish(self) -> None:
        self._is_closing = True
        for output in [*self._outputs]:
            self.drain(output)
        self.console.end()
