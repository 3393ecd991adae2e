"""Shows a script's progress without a launcher."""

import builtins
import contextlib
import importlib
import os
import re
import sys
import threading
import time
from typing import Any, Protocol

from jdp.worker import process_status
from jdp.worker.hang_detector import is_debugged
from jdp.worker.progress import own
from jdp.worker.progress_board import phase_name
from jdp.worker.run_progress import PLAIN_S, LiveLine, RunProgress, RunSummary

_TICK_S = 0.5
# A script that writes often must not pay for redraws.
_REDRAW_S = 0.05
# Short runs stay quiet.
_QUIET_S = 2.0
# The script owns the terminal this long after it moved the cursor.
_OWN_BAR_S = 5.0
# A carriage return that restarts a row, or an escape sequence.
_MOVES_CURSOR = re.compile(r"\r(?!\n)|\x1b\[[\d;?]*[A-HJKSTfsu]|\x1b[78M]")


class _Display(Protocol):
    def show(self, summary: RunSummary) -> None: ...

    def close(self) -> None: ...


class ProgressLine:
    """A thread that shows the progress; `is_plain`: as lines."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self._is_plain = is_plain
        self._progress = RunProgress(has_launcher=False)
        self._display: _Display | None = None
        self._num_steps, self._has_shown = 0, False
        self._began: float | None = None  # the first step or long phase
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jdp-progress", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._display = _PlainLines() if self._is_plain else _display()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and the line."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_QUIET_S)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if self._display is not None and self._has_shown:
                self._update(time.monotonic())
        if self._display is not None:
            self._display.close()
            self._display = None

    def _run(self) -> None:
        # A closed output, as under `| head`, ends only the line.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            while not self._stopped.wait(_TICK_S):
                self._update(time.monotonic())

    def _update(self, now: float) -> None:
        status = own.slot.read()
        for phase, since_ns in [*own.phases]:  # an evaluation's steps are phases, too
            if (name := phase_name(phase)) not in process_status.QUIET:
                status = status._replace(phase=name, since_s=since_ns / 1e9)
                break
        has_stepped = status.steps != self._num_steps
        if has_stepped and not self._num_steps:
            self._progress.begin_generation(now, 1, {0: own.restored} if own.restored else {})
        self._num_steps = status.steps
        self._progress.record(now, {0: status})
        summary = self._progress.summary(now)
        # At a prompt, in a debugger, or after its loop the script owns the terminal.
        if summary is None or not (has_stepped or summary.activity) or is_debugged():
            return
        self._began = now if self._began is None else self._began
        is_due = summary.activity is not None or now - self._began >= _QUIET_S
        if is_due and self._display is not None:
            self._has_shown = True
            self._display.show(summary)


def _display() -> _Display:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel"):
        return _Notebook(shell)
    # rich takes these for 80-column terminals without sequences.
    knows_sequences = os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
    is_prompt = shell is not None or hasattr(sys, "ps1") or sys.flags.interactive
    if knows_sequences and not is_prompt:
        # A custom stream may lack methods.
        with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):
            if sys.stderr.isatty():
                return _TerminalLine()
    return _PlainLines()


class _PlainLines:
    def __init__(self) -> None:
        self._due: float | None = None

    def show(self, summary: RunSummary) -> None:
        now = time.monotonic()
        if self._due is None:
            self._due = now + PLAIN_S
        if now >= self._due:
            self._due = now + PLAIN_S
            if sys.stderr is not None:
                sys.stderr.write(f"jdp: {summary}\n")
                sys.stderr.flush()

    def close(self) -> None: ...


class _Notebook:
    """The running cell's updated output."""

    def __init__(self, shell: Any) -> None:
        self._shell, self._new = shell, importlib.import_module("IPython.display").DisplayHandle
        self._cell, self._handle = -1, None

    def show(self, summary: RunSummary) -> None:
        """Update the text, or begin one in a new cell."""
        data = {"text/plain": str(summary)}
        if self._handle is None or self._cell != self._shell.execution_count:
            self._cell, self._handle = self._shell.execution_count, self._new()
            self._handle.display(data, raw=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None: ...


class _TerminalLine:
    """A line below the script's output to the terminal, erased before output and `input`."""

    def __init__(self) -> None:
        self._line = LiveLine()
        self._lock = threading.RLock()
        self._is_at_start = True  # of a row
        self._is_shown = False  # redrawn after output
        self._is_asking = False
        self._own_bar_until = self._drawn_at = 0.0
        self._taken: list[tuple[Any, str, Any, Any]] = []  # owner, name, original, ours
        self._terminal = os.dup(sys.stderr.fileno())  # the script may close its own
        device = os.fstat(self._terminal).st_rdev
        for stream in {id(each): each for each in (sys.stdout, sys.stderr)}.values():
            with contextlib.suppress(AttributeError, OSError, ValueError):  # not of a terminal
                if stream.isatty() and os.fstat(stream.fileno()).st_rdev == device:
                    stream.flush()
                    self._take_over(stream, "write", self._writer(stream))
        self._take_over(builtins, "input", self._reader(builtins.input))
        os.register_at_fork(after_in_child=self._forked)

    def show(self, summary: RunSummary) -> None:
        """Draw the line, unless the script's last row is unfinished."""
        self._line.set_text(summary.parts())
        with self._lock:
            self._is_shown = not self._is_asking and time.monotonic() >= self._own_bar_until
            self._draw()

    def close(self) -> None:
        with self._lock:
            self._draw()
            self._put(self._line.end())
            self._give_back()
            os.close(self._terminal)
            self._terminal = -1

    def _take_over(self, owner: Any, name: str, ours: Any) -> None:
        with contextlib.suppress(AttributeError):  # read-only methods
            before = vars(owner).get(name)
            setattr(owner, name, ours)
            self._taken.append((owner, name, before, ours))

    def _reader(self, ask: Any) -> Any:
        def input(prompt: object = "", /) -> str:
            with self._lock:
                self._put(self._line.erase())
                self._is_shown, self._is_asking = False, True
            try:
                return ask(prompt)
            finally:
                self._is_asking, self._is_at_start = False, True

        return input

    def _writer(self, stream: Any) -> Any:
        write = stream.write

        def write_above(text: str) -> int:
            with self._lock:
                self._put(self._line.erase())
                count = write(text)
                self._redraw_after(stream, text)
                return count

        return write_above

    def _redraw_after(self, stream: Any, text: str) -> None:
        if not text:
            return
        self._is_at_start = text.endswith("\n")
        if _MOVES_CURSOR.search(text):
            self._is_shown, self._own_bar_until = False, time.monotonic() + _OWN_BAR_S
        elif time.monotonic() - self._drawn_at >= _REDRAW_S:  # later output waits for the thread
            stream.flush()
            self._draw()

    def _draw(self) -> None:
        # A failed script's traceback comes last.
        if not (self._is_shown and self._is_at_start) or hasattr(sys, "last_value"):
            return
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(self._terminal) != os.getpgrp():
                return  # another program's terminal, as after `python train.py &`
        try:
            columns = os.get_terminal_size(self._terminal).columns
        except OSError:
            columns = 0
        self._drawn_at = time.monotonic()
        self._put(self._line.draw(columns or 80))

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone
            while data and self._terminal >= 0:
                with contextlib.suppress(BlockingIOError):
                    data = data[os.write(self._terminal, data) :]

    def _give_back(self) -> None:
        taken, self._taken = self._taken, []
        for owner, name, before, ours in taken:
            if vars(owner).get(name) is not ours:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # perhaps held by another thread
        self._terminal = -1  # it is the parent's
        self._give_back()
