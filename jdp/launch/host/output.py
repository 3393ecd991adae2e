"""The output of the processes of this host: shown on the console, written to files.

One thread reads all of it, so that a stopped console blocks the processes, as it would without a
launcher, but never the launcher itself. Only that thread touches a `WorkerOutput`.
"""

import os
import re
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from jdp.launch.append_file import AppendFile
from jdp.launch.host.console import Console
from jdp.launch.host.spawn import Started
from jdp.launch.host.worker_output import WorkerOutput
from jdp.launch.options.options import Options
from jdp.worker.run_summary import RunSummary

# Size of a read from a pipe, and the most reads in a drain: a pipe on Linux holds up to 1 MiB.
_READ_BYTES = 2**16
_MAX_READS = 2**20 // _READ_BYTES + 1
# Lines of processes that are compared with a traceback before it is shown.
_SHOWN_LINES = 1000
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"  [\w.]*(Error|Exception|Exit|Interrupt)\b")


class OutputMux:
    """Reads the processes of this host, shows their lines, and writes their files.

    `out` and `err` are the consoles; None: those of the launcher.
    """

    def __init__(
        self, options: Options, out: IO[bytes] | None = None, err: IO[bytes] | None = None
    ) -> None:
        self.console, self._options = Console(options, out, err), options
        self.prefix = self.console.prefix
        self._has_named_filter = False
        self._summary: RunSummary | None = None  # the latest
        self._is_summary_due = False  # whether the thread will show it
        self._shown: deque[str] = deque(maxlen=_SHOWN_LINES)
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
        self, process: Started, local_rank: int, *, standby: bool = False, waits: bool = False
    ) -> WorkerOutput:
        """Read a started process, until it closes its pipes.

        `local_rank` is used until it is assigned one. A standby is not shown before that, and a
        process that `waits` only after that.
        """
        output = WorkerOutput(self, process, local_rank, waits)
        output.is_standby = standby or waits
        output.prefix = self.prefix(f"local process {local_rank}", local_rank)
        self.post(lambda: self._add(output))
        return output

    def finish(self, timeout_s: float = 2.0) -> None:
        """Show and write the rest of the output, and end the thread within `timeout_s`."""
        self.post(self._finish)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._waker.close()

    def post(self, call: Callable[[], None]) -> None:
        """Have the thread call this, after all calls posted before."""
        self._calls.append(call)
        with suppress(OSError):  # full, so that it will wake up anyway; or closed
            self._waker.send(b"x")

    def drain(self, output: WorkerOutput) -> None:
        """Read the pipes of a process until they are empty. In the thread."""
        for pipe in [*output.pipes]:
            # Bounded: the process may write faster than this reads.
            for _ in range(_MAX_READS):
                if not self._read_once(output, pipe):
                    break

    def show(self, output: WorkerOutput, stream: int, line: bytes) -> None:
        """Write a line to the console, unless it is filtered out. In the thread."""
        if output.is_revealed or self._options.is_shown(output.local_rank, stream):
            self.console.write(stream, output.prefix + line)
            self._shown.append(line.decode(errors="replace").rstrip())
        elif not self._has_named_filter and not self._options.redirects:
            self._has_named_filter = True
            shown = ", ".join(map(str, sorted(self._options.local_ranks_filter or ())))
            self.say(f"only local rank {shown} is shown; --local-ranks-filter all shows all")

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to the console. In the thread."""
        self.console.say(self.shortened(text))

    def shortened(self, text: str) -> str:
        """Return a text with the error alone in place of a traceback that a process has shown."""
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
        """Show how far the run is; only the latest one if the console is stopped."""
        self._summary = summary
        if not self._is_summary_due:
            self._is_summary_due = True
            self.post(self._show_summary)

    def open_file(self, name: str) -> AppendFile:
        """Open a file of the log folder, if there is one."""
        folder = self._options.log_dir
        return AppendFile(folder and folder / name, lambda text: self.post(lambda: self.say(text)))

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
                except Exception as error:  # the output must be read all the same
                    self.say(f"a bug in the launcher's log thread, which continues: {error!r}")
            self.console.refresh()
        self._selector.close()
        self._woken.close()

    # Whether there may be more.
    def _read_once(self, output: WorkerOutput, pipe: IO[bytes]) -> bool:
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
