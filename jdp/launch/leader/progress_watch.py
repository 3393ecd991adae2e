"""Watches the progress of a generation, and reports processes that hang, or are slow."""

from collections.abc import Callable, Mapping
from typing import Any

from jdp.launch.leader.slow_processes import Comparison, Slow, SlowProcesses
from jdp.worker.hang_detector import HangDetector, Stall
from jdp.worker.process_status import ProcessStatus
from jdp.worker.step_times import Window


class ProgressWatch:
    """Reports to people and to the events of the run.

    Args:
      size: number of processes.
      timeout_s: that of `HangDetector`.
      say: prints a line for people.
      write: writes an event.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float | None,
        say: Callable[[str], None],
        write: Callable[..., None],
    ) -> None:
        self._size, self._say, self._write = size, say, write
        self._watch = HangDetector(timeout_s)
        self._slow = SlowProcesses()
        self._windows: dict[int, Window] = {}  # of the latest steps, by process
        self._has_new_windows = False
        self._has_compiled_imports = False

    def record_told(self, process_id: int, what: str, facts: Mapping[str, Any]) -> None:
        """Record a message of a process, and report the first one of a start without bytecode."""
        if what == "compiled_imports" and not self._has_compiled_imports:
            self._has_compiled_imports = True
            self._say(_line_of_imports(process_id, **facts))

    def record_windows(self, windows: Mapping[str, list]) -> None:
        """Record the windows of processes that have made steps."""
        self._windows |= {int(i): Window(*each) for i, each in windows.items()}
        self._has_new_windows = self._has_new_windows or bool(windows)

    def slow(self) -> dict[int, Slow]:
        """Return the facts of the processes that are named as slow, in their latest steps."""
        compared = Comparison(self._windows)
        return {i: compared.slowness(i) for i in self._slow.named}

    def poll(self, now: float, statuses: Mapping[int, ProcessStatus]) -> Stall | None:
        """Report what is new, and return a stall that was reported now."""
        if self._has_new_windows and len(self._windows) == self._size:
            self._has_new_windows = False
            steps = max((each.steps for each in statuses.values()), default=0)
            for process_id, (slow, line) in self._slow.poll(self._windows).items():
                self._say(line)
                facts: dict[str, Any] = {"share": slow.share, **slow._asdict()}
                self._write("slow", process_id=process_id, steps=steps, **facts)
        stall = self._watch.poll(now, statuses)
        if stall is not None:
            self._say(stall.report)
            self._write(
                "stalled",
                process_ids=stall.processes,
                stalled_s=stall.stalled_s,
                is_over=stall.is_over,
            )
        return stall


def _line_of_imports(
    process_id: int, modules: int, s: float, measured: int, why: str, command: str
) -> str:
    about = "about " * (measured < modules)
    since = f", since {why}" if why else ""
    return (
        f"process {process_id} compiled {modules} Python modules at its start, which took "
        f"{about}{s:.1f} s of a CPU core. They have no bytecode{since}. Each process and standby "
        f"compiles them again. Write the bytecode once, for example into the image: {command}"
    )
