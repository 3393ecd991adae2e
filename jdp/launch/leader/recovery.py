"""Decides whether a run continues after a failure, and times recoveries."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jdp.launch.leader.failure import Cause
from jdp.launch.leader.generation import Generation
from jdp.launch.leader.run_report import Events, RunReport
from jdp.launch.options import Options
from jdp.worker.run_progress import RunHistory


class _Failure(NamedTuple):
    at: float
    step: int | None
    error: str


class RestartBudget:
    """Counts failures; one expires after `window_s` seconds if the run has passed its step."""

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._failures: list[_Failure] = []

    def reason_to_end(self, why: Cause, step: int | None, now: float) -> str:
        """Return why the run ends after this failure; "" to continue."""
        if "JDP213" in why.error:
            return "the ranks hold different states, and a restart would hide that"
        self._failures = [each for each in self._failures if not self._is_over(each, step, now)]
        count = len(self._failures)
        if count >= self._max_restarts:
            if not count:
                return "--max-restarts 0 allows no failure"
            failures = "failure" if count == 1 else "failures"
            return (
                f"{count} {failures} within {self._window_s:g} s reached the limit of "
                f"--max-restarts {self._max_restarts}"
            )
        if why.error and any(each[1:] == (step, why.error) for each in self._failures):
            return f"the same error was raised at step {step} before, and would be again"
        return ""

    def record_failure(self, why: Cause, step: int | None, now: float) -> None:
        """Record a failure after which the run continues."""
        self._failures.append(_Failure(now, step, why.error))

    def failures(self) -> list[tuple[float, int | None, str]]:
        """Return (time, step, error) of unexpired failures."""
        return [*self._failures]

    def take_over(self, failures: list[tuple[float, int | None, str]]) -> None:
        """Inherit another leader's failures."""
        self._failures = [_Failure(*each) for each in failures]

    def _is_over(self, failure: _Failure, step: int | None, now: float) -> bool:
        is_past = failure.step is None or step is None or step > failure.step
        return is_past and now - failure.at > self._window_s


# Messages of all processes in turn, and the time before each.
_PARTS = {"joined": "form_s", "restored": "restore_s", "first_step": "step_s"}


_UNCACHED = "not cached: on CPUs XLA forgets the order of collectives in a cached program"


class _Outage:
    """The time from a failure after `step` to the next first step."""

    def __init__(self, step: int | None) -> None:
        self._step = step
        # The step, and the step including models trained before.
        self._restored: tuple[int, int] | None = None
        self._compile_s, self._is_uncached = 0.0, False
        self._causes: list[Cause] = []
        self._times: list[tuple[str, float]] = []

    def record_failure(self, cause: Cause) -> None:
        self._causes.append(cause)
        self._times = self._times[:1] or [("", cause.noticed)]
        self._times.append(("end_s", time.monotonic()))

    def record_told_by_all(self, what: str, told: Iterable[dict[str, Any]]) -> None:
        if what not in _PARTS:
            return
        self._times.append((_PARTS[what], time.monotonic()))
        if what == "first_step":
            told = [*told]
            self._compile_s = max(facts.get("compile_s") or 0.0 for facts in told)
            self._is_uncached = any(facts.get("is_uncached") for facts in told)

    def record_restored(self, told: Iterable[dict[str, Any]]) -> None:
        for facts in told:
            steps = facts["step"], facts["base"]
            self._restored = min(self._restored or steps, steps)

    @property
    def text(self) -> str:
        return ", then ".join(cause.text for cause in self._causes)

    def record(self) -> dict[str, Any]:
        """Return the seconds of each part and in all, and the lost steps."""
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
        if self._step is not None and self._restored is not None:
            lost = max(self._step - self._restored[1], 0)
        return {
            "cause": self.text,
            "error_codes": [cause.error_code for cause in self._causes if cause.error_code],
            **{name: round(value, 4) for name, value in seconds.items()},
            "restored_step": self._restored and self._restored[0],
            "lost_steps": lost,
        }

    def __str__(self) -> str:
        record = self.record()
        parts = [f"detected {record['detect_s']:.3f}"]
        if "form_s" in record:
            parts.append(f"re-formed {record['end_s'] + record['form_s']:.3f}")
        if "restore_s" in record:
            parts.append(f"restored {record['restore_s']:.3f}")
        why = f", {_UNCACHED}" if self._is_uncached else ""
        compiled = f" (compiled {self._compile_s:.3f}{why})" if self._compile_s else ""
        parts.append(f"first step {record['step_s']:.3f}{compiled}")
        lost = record["lost_steps"]
        words = "" if lost is None else f", {lost} step{'' if lost == 1 else 's'} lost"
        return f"training again after {record['whole_s']:.3f} s ({', '.join(parts)}){words}"


class Recoveries:
    """Decides whether a run continues after a failure, and reports each recovery.

    `stepped`: a generation has finished a step, so the program works. `checkpoint_step`: of the
    last restored checkpoint.
    """

    def __init__(
        self, options: Options, say: Callable[[str], None], events: Events, report: RunReport
    ) -> None:
        self.stepped = False
        self.checkpoint_step: int | None = None
        self.last_step: int | None = None
        self._budget = RestartBudget(options.max_restarts, options.restart_window_s)
        self._outage: _Outage | None = None
        self._say, self._events, self._report = say, events, report

    @property
    def text(self) -> str:
        """The current outage's causes, or ""."""
        return "" if self._outage is None else self._outage.text

    def reason_to_end(self, why: Cause, generation: Generation) -> str:
        """Return why the run ends after this failure; "" to continue."""
        if why.grows:
            return ""
        reason = self._budget.reason_to_end(why, _step(why, generation), why.noticed)
        if not reason and why.is_of_program and not self.stepped:
            reason = "its processes have not finished a step yet"
        return reason and f"It is not restarted: {reason}."

    def record_failure(self, why: Cause, generation: Generation) -> None:
        """Record a failed generation after which the run continues."""
        if not why.grows:
            self._budget.record_failure(why, _step(why, generation), why.noticed)
        self._begin_outage(why, generation.step if generation.stepped else None)

    def history(self) -> RunHistory:
        """Return the run's past, for the next leader."""
        return self._report.history()._replace(failures=self._budget.failures())

    def take_over(self, history: RunHistory, why: Cause) -> str:
        """Begin with the past of a run under a lost leader."""
        self._budget.take_over(history.failures)
        self._report.take_over(history)
        if reason := self._budget.reason_to_end(why, why.step, why.noticed):
            return f"{why.full_text}\nIt is not restarted: {reason}."
        self._budget.record_failure(why, why.step, why.noticed)
        self._begin_outage(why, why.step)
        return ""

    def _begin_outage(self, why: Cause, step: int | None) -> None:
        if why.error:  # the process's output may be filtered
            self._say(why.full_text)
        elif not why.grows:
            self._say(f"{why.text}. Restarting all processes.")
        self._report.record_failure(why.noticed - why.silent_s, step, why.error_code)
        if self._outage is None:
            self._outage = _Outage(step)
        self._outage.record_failure(why)

    def record_told_by_all(self, what: str, generation: Generation) -> None:
        """Record a message of all processes; a first step ends the outage."""
        told = [*generation.told[what].values()]
        if what == "restored" and told[-1].get("tier") == "checkpoint":
            self.checkpoint_step = told[-1]["step"]
        if told[-1].get("is_complete"):
            self.last_step = told[-1]["step"]
        if self._outage is not None:
            self._outage.record_told_by_all(what, told)
        if what != "first_step":
            return
        self.stepped = True
        restored = generation.told.get("restored", {})
        self._report.begin_generation(generation.size, restored)
        done, self._outage = self._outage, None
        if done is not None:
            done.record_restored(restored.values())
            self._events.write("recovered", generation=generation.number, **done.record())
            self._say(
                f"{done.text}. Generation {generation.number} of {generation.size} processes is "
                f"{done}."
            )


# It may have called more steps than the others.
def _step(why: Cause, generation: Generation) -> int | None:
    return generation.step if why.step is None else why.step
