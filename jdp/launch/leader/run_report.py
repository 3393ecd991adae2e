"""Reports a run's progress, to the console and as events."""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jdp.launch.host.output import AppendFile
from jdp.worker.process_status import ProcessStatus
from jdp.worker.run_progress import RunHistory, RunProgress, RunSummary


class Events:
    """Writes events as JSON lines."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._file = AppendFile(path, say)
        self.close_file = self._file.close_file

    def write(self, event: str, **facts: Any) -> None:
        """Write an event with `time.time()`; NaN and infinities become strings."""
        record = {"event": event, "at": time.time()} | {k: _in_json(v) for k, v in facts.items()}
        self._file.write(json.dumps(record).encode() + b"\n")


def _in_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# Between summaries on the console, and among the events.
SHOW_S = 0.5
EVENT_S = 30.0


class RunReport:
    """Reports summaries by `show`, and as events, also at the end."""

    def __init__(self, show: Callable[[RunSummary], None], events: Events) -> None:
        self._show, self._events = show, events
        self._progress = RunProgress()
        self._show_at, self._event_at = -math.inf, math.inf

    def history(self) -> RunHistory:
        """Return the run's past, without failures."""
        return self._progress.history(time.monotonic())

    def summary(self) -> RunSummary | None:
        """Return the progress; None before the first step."""
        return self._progress.summary(time.monotonic())

    def take_over(self, history: RunHistory) -> None:
        """Begin with the past under another leader."""
        self._progress.take_over(history)

    def begin_generation(self, size: int, restored: Mapping[int, dict[str, Any]]) -> None:
        """Record a generation's first step."""
        now = time.monotonic()
        self._progress.begin_generation(now, size, restored)
        self._event_at = min(self._event_at, now + EVENT_S)

    def record_failure(self, at: float, step: int | None, error_code: str) -> None:
        """Record that the generation ends."""
        self._progress.record_failure(at, step, error_code)

    def record(self, statuses: Mapping[int, ProcessStatus]) -> None:
        """Record statuses; report if due."""
        now = time.monotonic()
        self._progress.record(now, statuses)
        if now >= min(self._show_at, self._event_at):
            self._report(now)

    def record_end(self, process_id: int, status: ProcessStatus) -> None:
        """Record an ended process's last status."""
        self._progress.record_end(time.monotonic(), process_id, status)

    def end_run(self) -> None:
        """Report for the last time."""
        self._show_at = self._event_at = -math.inf
        self._report(time.monotonic())

    def _report(self, now: float) -> None:
        summary = self._progress.summary(now)
        if summary is None:
            return
        if now >= self._show_at:
            self._show_at = now + SHOW_S
            self._show(summary)
        if now >= self._event_at:
            self._event_at = now + EVENT_S
            self._events.write("progress", **summary._asdict())
