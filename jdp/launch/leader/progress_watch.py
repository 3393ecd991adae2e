"""Watches a generation's progress, and reports hanging or slow processes.

All processes take the same time for a step, since they reduce together: a slow process waits less.
If waits are unknown (see `progress_board`), its devices idle longer before a step.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jdp.worker.hang_detector import HangDetector, Stall
from jdp.worker.process_status import ProcessStatus
from jdp.worker.progress_board import NUM_RECORDS, Window

# A slow process's cost to others: fraction of the median step, and us.
LEAST_SHARE, LEAST_US = 0.05, 1000
# Nearly all steps must show half of it; below half a process is no longer slow.
_HALF = 0.5
_CHANGE = 1.5

# Medians of a `Window` -> where a process is slow.
PARTS = {
    "data": "in its input",
    "compute": "in its computation",
    "host": "on its host, between steps",
    "paused": "in its commits, saves and other phases",
}
SEVERAL = "several"


class Slow(NamedTuple):
    """A slow process.

    Attributes:
      cost_us: wait of the others in each step.
      part: key of PARTS with most of its lost time; SEVERAL if less than half of the cost.
      own_us: its time in that part; for SEVERAL in all.
      usual_us: the same of the others.
    """

    cost_us: int
    step_us: int
    part: str
    own_us: int
    usual_us: int

    @property
    def share(self) -> float:
        """The others' wait, as a fraction of each step."""
        return self.cost_us / max(self.step_us, 1)


class _Medians:
    """Medians of all processes but one."""

    def __init__(self, values: Sequence[int]) -> None:
        self._ordered = sorted(values)

    def without(self, value: int) -> int:
        """Return the lower median without one `value`."""
        middle = (len(self._ordered) - 2) // 2
        return self._ordered[middle + (bisect.bisect_left(self._ordered, value) <= middle)]


class Comparison:
    """Two or more processes' windows over nearly the same steps."""

    def __init__(self, windows: Mapping[int, Window]) -> None:
        self._windows = windows
        self._medians = {
            name: _Medians([getattr(each, name) for each in windows.values()])
            for name in Window._fields
        }
        has_waits = any(each.waited_high for each in windows.values())
        knows_waits = has_waits and all(each.knows_waits for each in windows.values())
        # Numbers of a slow process, awaited by all others.
        self._measures = ["waited"] * has_waits + ["idle"] * (not knows_waits)

    def slow(self) -> dict[int, Slow]:
        """Return the slow processes."""
        if any(each.num_records < NUM_RECORDS for each in self._windows.values()):
            return {}
        return {i: self.slowness(i) for i in self._windows if self._is_slow(i)}

    def _is_slow(self, process: int) -> bool:
        least_us = max(LEAST_US, LEAST_SHARE * self._windows[process].step)
        return any(
            self._cost_us(process, measure) >= least_us
            and self._clear_us(process, measure) >= _HALF * least_us
            for measure in self._measures
        )

    def is_over(self, process: int) -> bool:
        """Whether a process is no longer slow."""
        least_us = max(LEAST_US, LEAST_SHARE * self._windows[process].step)
        return all(self._cost_us(process, it) < _HALF * least_us for it in self._measures)

    def slowness(self, process: int) -> Slow:
        """Return any process's facts."""
        costs_us = {measure: self._cost_us(process, measure) for measure in self._measures}
        measure = max(costs_us, key=costs_us.__getitem__)
        cost_us, step_us = max(0, costs_us[measure]), self._windows[process].step
        part = max(PARTS, key=lambda part: self.excess_us(process, part))
        own_us = getattr(self._windows[process], part)
        usual_us = self._medians[part].without(own_us)
        if own_us - usual_us < _HALF * cost_us:
            times_us = {i: _own_us(each, measure) for i, each in self._windows.items()}
            part, own_us = SEVERAL, times_us[process]
            usual_us = _Medians([*times_us.values()]).without(own_us)
        return Slow(cost_us, step_us, part, own_us, usual_us)

    def excess_us(self, process: int, part: str) -> int:
        """Return how much longer than the others a process takes."""
        own_us = getattr(self._windows[process], part)
        return own_us - self._medians[part].without(own_us)

    def _cost_us(self, process: int, measure: str) -> int:
        excess_us = self.excess_us(process, measure)
        return -excess_us if measure == "waited" else excess_us

    # In nearly all steps, its own and the others'.
    def _clear_us(self, process: int, measure: str) -> int:
        own = self._windows[process]
        if measure == "waited":
            return self._medians["waited_low"].without(own.waited_low) - own.waited_high
        return own.idle_low - self._medians["idle_high"].without(own.idle_high)


# The own time if waits are unknown.
def _own_us(window: Window, measure: str) -> int:
    return window.step - window.waited if measure == "waited" else window.idle


class SlowProcesses:
    """Reports when processes become slow, change, and recover."""

    def __init__(self) -> None:
        self._named: dict[int, Slow] = {}

    @property
    def named(self) -> list[int]:
        """The processes reported as slow."""
        return [*self._named]

    def poll(self, windows: Mapping[int, Window]) -> dict[int, tuple[Slow, str]]:
        """Return each changed process's facts and line."""
        if len(windows) < 2:
            return {}
        compared = Comparison(windows)
        found = compared.slow()
        news = {i: it for i, it in found.items() if self._has_changed(i, it, compared)}
        lines = {i: (it, _line(i, it)) for i, it in news.items()}
        for i in [i for i in self._named if i not in found and compared.is_over(i)]:
            del self._named[i]
            lines[i] = (it := compared.slowness(i)), _end_line(i, it)
        self._named |= news
        return lines

    def _has_changed(self, process: int, now: Slow, compared: Comparison) -> bool:
        before = self._named.get(process)
        if before is None:
            return True
        if max(now.share, before.share) > _CHANGE * min(now.share, before.share):
            return True
        if now.part in (before.part, SEVERAL):
            return False
        before_us = 0 if before.part == SEVERAL else compared.excess_us(process, before.part)
        return now.own_us - now.usual_us > _CHANGE * before_us


def _line(process: int, slow: Slow) -> str:
    where = PARTS.get(slow.part, "in several parts (input, computation, host, commits)")
    return (
        f"process {process} is slow: the others wait {slow.share:.0%} of each step for it "
        f"({_ms(slow.cost_us)} of {_ms(slow.step_us)} ms). It loses the time {where}: "
        f"{_ms(slow.own_us)} ms of a step, {_ms(slow.usual_us)} ms on the others."
    )


def _end_line(process: int, slow: Slow) -> str:
    return (
        f"process {process} is no longer slow: the others wait {slow.share:.0%} of each step for "
        f"it ({_ms(slow.cost_us)} of {_ms(slow.step_us)} ms)."
    )


def _ms(us: int) -> str:
    return f"{us / 1000:.1f}"


class ProgressWatch:
    """Reports to people by `say`, and to events by `write`."""

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
        self._windows: dict[int, Window] = {}  # the latest, by process
        self._has_new_windows = False
        self._has_compiled_imports = False

    def record_told(self, process_id: int, what: str, facts: Mapping[str, Any]) -> None:
        """Record a message; report the first start without bytecode."""
        if what == "compiled_imports" and not self._has_compiled_imports:
            self._has_compiled_imports = True
            self._say(_line_of_imports(process_id, **facts))

    def record_windows(self, windows: Mapping[str, list]) -> None:
        """Record processes' windows."""
        self._windows |= {int(i): Window(*each) for i, each in windows.items()}
        self._has_new_windows = self._has_new_windows or bool(windows)

    def slow(self) -> dict[int, Slow]:
        """Return the slow processes' facts."""
        compared = Comparison(self._windows)
        return {i: compared.slowness(i) for i in self._slow.named}

    def poll(self, now: float, statuses: Mapping[int, ProcessStatus]) -> Stall | None:
        """Report news, and return a new stall."""
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


def _line_of_imports(process_id: int, modules: int, without: int, s: float, command: str) -> str:
    return (
        f"process {process_id} needed {s:.1f} s of a CPU core to start: {without} of {modules} "
        "modules of packages have no bytecode, so each start compiles them again. Write it once, "
        f"for example into the image: {command}"
    )
