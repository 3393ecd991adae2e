"""From one generation to the next: whether the run goes on, and what that took."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from jdp.launch.leader.event_log import Events
from jdp.launch.leader.failure import Cause
from jdp.launch.leader.generation import Generation

# What all processes tell in turn, and what the time up to it is called.
_PARTS = {"joined": "form_s", "restored": "restore_s", "first_step": "step_s"}


class Outage:
    """From a failure until all processes of a next generation made a step: what took how long.

    Failures on the way belong to it.

    Args:
      step: the last step that was made, if known.
    """

    def __init__(self, step: int | None) -> None:
        self._step = step
        self._restored_step: int | None = None
        self._compile_s = 0.0
        self._causes: list[Cause] = []
        self._times: list[tuple[str, float]] = []

    def begin(self, cause: Cause) -> None:
        """Record that a generation has ended, and why."""
        self._causes.append(cause)
        self._times = self._times[:1] or [("", cause.noticed)]
        self._times.append(("end_s", time.monotonic()))

    def mark(self, what: str, told: Iterable[dict[str, Any]]) -> None:
        """Record that all processes have come to some point, and what they told then."""
        if what not in _PARTS:
            return
        self._times.append((_PARTS[what], time.monotonic()))
        if what == "restored":
            self._restored_step = min(facts["step"] for facts in told)
        if what == "first_step":
            self._compile_s = max(facts.get("compile_s") or 0.0 for facts in told)

    @property
    def text(self) -> str:
        """Return what had to be recovered from."""
        return ", then ".join(cause.text for cause in self._causes)

    def record(self) -> dict[str, Any]:
        """Return the seconds of each part, of the whole, and what was lost."""
        silent_s = self._causes[0].silent_s
        parts = {
            name: at - before
            for (_, before), (name, at) in zip(self._times, self._times[1:], strict=False)
        }
        seconds = {
            "detect_s": silent_s,
            **parts,
            "compile_s": self._compile_s,
            "whole_s": self._times[-1][1] - self._times[0][1] + silent_s,
        }
        lost = None
        if self._step is not None and self._restored_step is not None:
            lost = max(self._step - self._restored_step, 0)
        return {
            "cause": self.text,
            **{name: round(value, 4) for name, value in seconds.items()},
            "restored_step": self._restored_step,
            "lost_steps": lost,
        }

    def __str__(self) -> str:
        record = self.record()
        parts = [f"detected {record['detect_s']:.3f}"]
        if "form_s" in record:
            parts.append(f"re-formed {record['end_s'] + record['form_s']:.3f}")
        if "restore_s" in record:
            parts.append(f"restored {record['restore_s']:.3f}")
        compiled = f" (compiled {self._compile_s:.3f})" if self._compile_s else ""
        parts.append(f"first step {record['step_s']:.3f}{compiled}")
        lost = record["lost_steps"]
        words = "" if lost is None else f", {lost} step{'' if lost == 1 else 's'} lost"
        return f"whole after {record['whole_s']:.3f} s ({', '.join(parts)}){words}"


class Recoveries:
    """Decides whether a run goes on after a failure, and tells what it took.

    Args:
      max_restarts: how many failures are recovered from.
      say: prints a line for people who watch the run.
      events: where it is written what happens.

    Attributes:
      stepped: some generation has finished a step, so that the program is sound.
    """

    def __init__(self, max_restarts: int, say: Callable[[str], None], events: Events) -> None:
        self.stepped = False
        self._num_restarts, self._max_restarts = 0, max_restarts
        self._outage: Outage | None = None
        self._say, self._events = say, events

    @property
    def text(self) -> str:
        """Return what is being recovered from, an empty text if all is well."""
        return "" if self._outage is None else self._outage.text

    def why_not(self, why: Cause) -> str:
        """Return why the run does not go on after this, an empty text if it does."""
        if why.grows:
            return ""
        if self._num_restarts >= self._max_restarts:
            return f"It is not started again: --max-restarts {self._max_restarts}."
        if why.is_of_program and not self.stepped:
            return "It is not started again, since its processes have not finished a step so far."
        return ""

    def begin(self, why: Cause, generation: Generation) -> None:
        """Record that the run goes on after this generation, and why that has ended."""
        if not why.grows:
            self._num_restarts += 1
        # Of a process whose output is not shown, this is all there is to see.
        if why.raised:
            self._say(why.full_text)
        if self._outage is None:
            self._outage = Outage(generation.step if generation.stepped else None)
        self._outage.begin(why)

    def mark(self, what: str, generation: Generation) -> None:
        """Record what all processes have told; once they have made a step, return what it took."""
        if self._outage is not None:
            self._outage.mark(what, generation.told[what].values())
        if what != "first_step":
            return
        self.stepped = True
        done, self._outage = self._outage, None
        if done is not None:
            self._events.write("recovered", generation=generation.number, **done.record())
            self._say(
                f"{done.text}. Generation {generation.number} of {generation.size} processes is "
                f"{done}."
            )
