"""A launcher's console: output lines, and below them the progress."""

import os
import select
import sys
import time
from typing import IO

from jdp.launch.flags import STDERR, STDOUT
from jdp.launch.options import Options
from jdp.worker.run_progress import PLAIN_S, LiveLine, RunSummary


class Console:
    """A launcher's stdout and stderr, written by the thread of `OutputMux` alone."""

    def __init__(
        self, options: Options, out: IO[bytes] | None = None, err: IO[bytes] | None = None
    ) -> None:
        self.streams = {STDOUT: out or sys.stdout.buffer, STDERR: err or sys.stderr.buffer}
        self._closed: set[int] = set()  # broken streams
        self._is_alone = options.nnodes[1] * options.nproc_per_node[1] == 1
        self._wanted = options.progress
        self._live: LiveLine | None = None
        self._on_its_terminal: set[int] = set()  # on the line's terminal
        self._plain_at: float | None = None  # when the next plain line is due
        self._has_plain = False
        self._last = ""

    def write(self, stream: int, line: bytes) -> None:
        """Write a line above the live line."""
        if self._live is not None and stream in self._on_its_terminal:
            line = self._live.above(line)
        self._put(stream, line)

    def say(self, text: str) -> None:
        """Write the launcher's own line."""
        # Paths may have bytes other than text.
        self.write(STDERR, f"jdp run: {text}\n".encode(errors="backslashreplace"))

    def prefix(self, name: str, number: int) -> bytes:
        """Return the prefix of a process's lines; b"" for a single process."""
        if self._is_alone:
            return b""
        if os.environ.get("NO_COLOR") or not _is_terminal(self.streams[STDOUT]):
            return f"[{name}] ".encode()
        return f"\x1b[{36 - number % 6}m[{name}]\x1b[0m ".encode()

    def show_summary(self, summary: RunSummary) -> None:
        """Show the progress, without a terminal every PLAIN_S."""
        if self._wanted == "off":
            return
        now = time.monotonic()
        if self._plain_at is None and self._live is None:
            self._begin(now)
        if self._live is not None:
            self._live.set_text(summary.parts())
            self._draw()
        elif self._plain_at is not None:
            self._last = str(summary)
            if now >= self._plain_at:
                self._plain_at, self._has_plain = now + PLAIN_S, True
                self._say_last()

    def refresh(self) -> None:
        """Redraw the live line if output erased it."""
        if self._live is not None and self._live.is_due:
            self._draw()

    def end(self) -> None:
        """End the live line, or show the last summary."""
        if self._live is not None:
            self.refresh()  # the last output may have erased it
            self._put(STDERR, self._live.end())
            self._live = None
        elif self._has_plain:
            self._say_last()
        self._wanted = "off"

    def _begin(self, now: float) -> None:
        if self._wanted == "auto" and _is_terminal(self.streams[STDERR]):
            self._live = LiveLine()
            self._on_its_terminal = _same_terminal(self.streams)
            return
        self._plain_at = now + PLAIN_S

    def _say_last(self) -> None:
        if self._last:
            self.say(self._last)
            self._last = ""

    def _draw(self) -> None:
        assert self._live is not None
        try:
            columns = os.get_terminal_size(self.streams[STDERR].fileno()).columns
        except OSError:
            columns = 0
        self._put(STDERR, self._live.draw(columns or 80))

    def _put(self, stream: int, data: bytes) -> None:
        if stream in self._closed:
            return
        try:
            write_all(self.streams[stream], data)
        except OSError:  # as under `| head`
            self._closed.add(stream)


def write_all(stream: IO[bytes], data: bytes) -> None:
    """Write and flush, also to a non-blocking stream."""
    while True:
        try:
            data = data[stream.write(data) or 0 :]  # a full raw stream returns None
            stream.flush()
            if not data:
                return
        except BlockingIOError as error:
            data = data[error.characters_written :]
        select.select([], [stream], [])


def _is_terminal(stream: IO[bytes]) -> bool:
    # rich takes both for 80-column terminals without sequences.
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _same_terminal(streams: dict[int, IO[bytes]]) -> set[int]:
    device = os.fstat(streams[STDERR].fileno()).st_rdev
    return {
        each
        for each, stream in streams.items()
        if stream.isatty() and os.fstat(stream.fileno()).st_rdev == device
    }
