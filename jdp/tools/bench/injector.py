"""Injects faults into runs of `jdp run`, and reads from their events how they recovered."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_POLL_S = 0.005
_TAIL = 9000  # characters


class FaultyRunError(AssertionError):
    """A failed or stalled run, with its last output."""


class FaultyRun:
    """A launcher, with its events and processes."""

    deadline_s = 120.0

    def __init__(self, command: Sequence[str], log_dir: Path, output: Path, **options: Any):
        self._path, self._output = log_dir / "events.jsonl", output
        self._events: list[dict[str, Any]] = []
        self._num_read = 0
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, **options
            )

    @property
    def output(self) -> str:
        """The console output so far."""
        return self._output.read_text(errors="replace")

    def events(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        """Return the events so far with a name and facts."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._num_read)
            while (line := file.readline()).endswith(b"\n"):
                self._events.append(json.loads(line))
                self._num_read += len(line)
        return [it for it in self._events if {"event": event, **facts}.items() <= it.items()]

    def until(self, event: str, number: int = 1, **facts: Any) -> list[dict[str, Any]]:
        """Wait for a number of events, and return all."""
        what = f"{number} x {event} {facts}"
        self.until_true(lambda: len(self.events(event, **facts)) >= number, what)
        return self.events(event, **facts)

    def until_true(
        self, condition: Callable[[], Any], what: str, deadline_s: float | None = None
    ) -> Any:
        """Wait for a condition, and return its value."""
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + deadline_s
        while not (value := condition()):
            if self.process.poll() is not None and not condition():
                code = self.process.returncode
                raise FaultyRunError(f"no {what}: the run ended with {code}.\n{self._tail()}")
            if time.monotonic() > end:
                raise FaultyRunError(f"no {what} within {deadline_s:.0f} s.\n{self._tail()}")
            time.sleep(_POLL_S)
        return value

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(self.deadline_s)
        raise FaultyRunError(f"no end within {self.deadline_s:.0f} s.\n{self._tail()}")

    def generation(self) -> int:
        """Return the newest generation, and wait for the first."""
        return self.until("formed")[-1]["generation"]

    def pids(self, generation: int, size: int) -> list[int]:
        """Wait for a generation's first step, and return its pids by rank."""
        told = self.until("first_step", size, generation=generation)
        return [it["pid"] for it in sorted(told, key=lambda it: it["process_id"])]

    def until_ready(self, num_hosts: int = 1) -> None:
        """Wait until the newest generation trains and its standbys are ready."""
        while True:
            number = self.generation()
            self.until_true(
                lambda number=number: (
                    len(self.events("ready", generation=number)) >= num_hosts
                    or self.generation() > number
                ),
                f"standbys of generation {number}",
            )
            if self.generation() == number:
                return

    def until_recovered(self, number: int) -> dict[str, Any]:
        """Wait for the `number`-th recovery, and return its record."""
        return self.until("recovered", number)[number - 1]

    def _tail(self) -> str:
        return self.output[-_TAIL:]


def strike(pids: Iterable[int], number: int = signal.SIGKILL) -> float:
    """Send a signal to processes, and return the time.time() before."""
    at = time.time()
    for pid in pids:
        os.kill(pid, number)
    return at


class LineLog:
    """A file of JSON lines with common facts; each is one write, so no death tears it."""

    def __init__(self, path: Path, **facts: Any):
        self._facts = facts
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, **facts: Any) -> None:
        """Write one line."""
        os.write(self._file, json.dumps({**self._facts, **facts}).encode() + b"\n")


def read_lines(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the complete lines of files of JSON lines."""
    texts = [path.read_text() for path in sorted(paths)]
    return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so no reader sees a part."""
    part = path.with_name(f"part.{path.name}")
    part.write_text(text)
    part.rename(path)
