"""A run's progress over all processes and generations, and its line below a terminal's output."""

import io
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jdp.worker import process_status
from jdp.worker.process_status import ProcessStatus, RunCounts


class RunHistory(NamedTuple):
    """A run's failures and lost time, in monotonic seconds.

    Attributes:
      failures: (time, step or None, error) of each in the restart budget.
      began: when all processes had made the first step.
      lost_s: since then, without new progress.
      recoveries: how many, by each first failure's error code.
    """

    failures: list[tuple[float, int | None, str]] = []  # noqa: RUF012
    began: float | None = None
    lost_s: float = 0.0
    recoveries: dict[str, int] = {}  # noqa: RUF012

    def moved(self, by_s: float) -> "RunHistory":
        """Return it on a clock `by_s` ahead; hosts send it on a clock at 0."""
        failures = [(at + by_s, step, error) for at, step, error in self.failures]
        began = None if self.began is None else self.began + by_s
        return self._replace(failures=failures, began=began)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON, for `RunHistory(**facts)`."""
        return self._asdict() | {"failures": [[*each] for each in self.failures]}


class LeaderLoss(NamedTuple):
    """A leader's loss, as a follower saw it.

    Attributes:
      at: time.monotonic() when it was noticed.
      silent_s: before that.
      step: the last called by all of this host's processes.
    """

    why: str
    at: float
    silent_s: float
    step: int | None = None

    def moved(self, by_s: float) -> "LeaderLoss":
        """Return it on a clock `by_s` ahead."""
        return self._replace(at=self.at + by_s)


class RunSummary(NamedTuple):
    """A run's progress; unknown values are None.

    Attributes:
      step: the last called by all processes, counted over all lives of the run.
      loss, learning_rate, gradient_norm: the last in `jdp.log`.
      steps_per_s: lately, from two steps on.
      rows_per_s: examples in these steps, if jdp supplied the batches.
      data_share: fraction of that time with the slowest loader's process waiting for data.
      commit: step of the last commit on all hosts.
      ettr: effective training time ratio: the fraction of the time since the first step with new
        progress, without recoveries and repeated steps. None without a launcher.
      activity: a phase of over two seconds, such as "compiling for 7 s".

    >>> summary = RunSummary(340, 3.4375, 10.0, 2500.0, 0.03, 340, 300, 1, 0.972)
    >>> print(summary)
    step 340, loss 3.438, 2,500 examples/s, data wait 3 %, ETTR 97.2 %, 1 recovery, \
commit 340, checkpoint 300
    """

    step: int | None
    loss: float | None
    steps_per_s: float | None
    rows_per_s: float | None
    data_share: float | None
    commit: int | None
    checkpoint: int | None
    recoveries: int
    ettr: float | None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    activity: str | None = None
    target: int | None = None

    def parts(self) -> list[str]:
        """Return the known numbers in words, the most important first."""
        found = [] if self.step is None else [f"step {self.step}"]
        if found and self.target is not None and self.target > 0:
            found = [f"step {self.step} of {self.target}"]
        steps_per_s = self.steps_per_s if self.rows_per_s is None else None
        recovered = "recovery" if self.recoveries == 1 else "recoveries"
        for value, text in (
            (self.activity, "{}"),
            (self.loss, "loss {:.4g}"),
            (_rate(self.rows_per_s), "{} examples/s"),
            (_rate(steps_per_s), "{} steps/s"),
            (self.data_share, "data wait {:.0%}"),
            (self.learning_rate, "lr {:.3g}"),
            (self.gradient_norm, "grad norm {:.3g}"),
            (self.ettr, "ETTR {:.1%}"),
            (self.recoveries or None, f"{{}} {recovered}"),
            (self.commit, "commit {}"),
            (self.checkpoint, "checkpoint {}"),
        ):
            if value is not None:
                found.append(text.format(value).replace("%", " %"))
        return found

    def __str__(self) -> str:
        return ", ".join(self.parts())


def _rate(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# A rate's seconds, or the last two steps if these took longer.
WINDOW_S = 30.0


class _Sample(NamedTuple):
    at: float
    step: int
    rows: int
    waits_s: dict[int, float]


class RunProgress:
    """Adds up a run's progress; without a launcher no time is lost."""

    def __init__(self, *, has_launcher: bool = True) -> None:
        self._has_launcher = has_launcher
        self._began: float | None = None  # when all processes had made a step
        self._size = 0  # 0 while no generation trains
        self._restored: dict[int, int] = {}  # step at which each process began
        self._statuses: dict[int, ProcessStatus] = {}
        self._ended: dict[int, ProcessStatus] = {}  # last statuses
        self._step = self._furthest = 0
        self._outage: float | None = None  # since when the run makes no new progress
        self._lost_s = 0.0
        self._recoveries: Counter[str] = Counter()  # by the first failure's code
        self._cause = ""
        self._samples: deque[_Sample] = deque()
        self._logged = RunCounts()  # of the process that logged last
        self._activity: str | None = None
        self._evaluates_since: float | None = None
        self._commit: int | None = None
        self._checkpoint: int | None = None
        self._target: int | None = None

    def history(self, now: float) -> RunHistory:
        """Return what the next leader needs; a current outage ends now."""
        return RunHistory([], self._began, self._all_lost_s(now), dict(self._recoveries))

    def take_over(self, history: RunHistory) -> None:
        """Begin with what another leader recorded."""
        self._began, self._lost_s = history.began, history.lost_s
        self._recoveries = Counter(history.recoveries)

    def begin_generation(
        self, now: float, size: int, restored: Mapping[int, dict[str, Any]]
    ) -> None:
        """Record a generation's first step of all processes."""
        self._began = now if self._began is None else self._began
        self._size, self._statuses, self._ended = size, {}, {}
        self._restored = {i: facts["base"] for i, facts in restored.items()}
        self._samples.clear()
        if self._cause:
            self._recoveries[self._cause] += 1
            self._cause = ""
        for facts in restored.values():
            step = facts["step"]
            self._commit = step if facts["tier"] == "commit" else None
            if facts["tier"] == "checkpoint":
                self._checkpoint = step
            elif self._checkpoint is not None and self._checkpoint > step:
                self._checkpoint = None  # of another life, or damaged

    def record_failure(self, at: float, step: int | None, error_code: str) -> None:
        """Record that the generation ends."""
        if self._began is None:
            return
        if self._outage is None:
            self._step = self._furthest = max(self._furthest, step or 0)
            self._outage = at
        self._size = 0
        self._cause = self._cause or error_code

    def record_end(self, now: float, process_id: int, status: ProcessStatus) -> None:
        """Record an ended process's last status."""
        self._ended[process_id] = status
        self.record(now, {})

    def record(self, now: float, statuses: Mapping[int, ProcessStatus]) -> None:
        """Record processes' statuses."""
        self._activity = process_status.activity(
            now, self._with_evaluations(now, statuses.values())
        )
        self._statuses |= {**statuses, **self._ended}
        if not self._size or len(self._statuses) < self._size:
            return
        found = self._statuses
        self._step = min(self._restored.get(i, 0) + it.steps for i, it in found.items())
        if self._outage is not None and self._step >= self._furthest:
            self._lost_s += now - self._outage
            self._outage = None
        if self._outage is None:
            self._furthest = max(self._furthest, self._step)
        if not self._samples or self._samples[-1].step != self._step:
            rows = min(it.counts.rows for it in found.values())
            waits_s = {i: _waited_s(now, it) for i, it in found.items()}
            self._samples.append(_Sample(now, self._step, rows, waits_s))
        while len(self._samples) > 2 and self._samples[1].at <= now - WINDOW_S:
            self._samples.popleft()
        self._record_kept([it.counts for it in found.values()])
        ends = [self._restored.get(i, 0) + it.counts.target for i, it in found.items()]
        self._target = max(ends) if all(it.counts.target >= 0 for it in found.values()) else None

    def _with_evaluations(
        self, now: float, statuses: Iterable[ProcessStatus]
    ) -> list[ProcessStatus]:
        statuses = [*statuses]
        if not any(it.counts.is_evaluating for it in statuses):
            self._evaluates_since = None
            return statuses
        since_s = self._evaluates_since = self._evaluates_since or now
        return [
            it._replace(phase=process_status.EVALUATING, since_s=since_s)
            if it.counts.is_evaluating
            else it
            for it in statuses
        ]

    def summary(self, now: float) -> RunSummary | None:
        """Return the progress; None before the first step or long phase."""
        if self._began is None and self._activity is None:
            return None
        return RunSummary(
            None if self._began is None else self._step,
            self._logged.loss,
            *self._rates(now),
            self._commit,
            self._checkpoint,
            self._recoveries.total(),
            self._ettr(now),
            self._logged.learning_rate,
            self._logged.gradient_norm,
            self._activity,
            self._target,
        )

    def _ettr(self, now: float) -> float | None:
        if self._began is None or not self._has_launcher:
            return None
        lost_s = self._all_lost_s(now)
        return 1 - lost_s / max(now - self._began, lost_s, 1e-9)

    def _all_lost_s(self, now: float) -> float:
        return self._lost_s + (0.0 if self._outage is None else now - self._outage)

    # A commit counts once all its writers have it.
    def _record_kept(self, counts: list[RunCounts]) -> None:
        self._commit = min((it.commit for it in counts if it.commit >= 0), default=self._commit)
        saved = (it.checkpoint for it in counts if it.checkpoint >= 0)
        self._checkpoint = min(saved, default=self._checkpoint)
        latest = max(counts, key=lambda it: it.logged)
        if latest.logged >= 0:
            self._logged = latest

    # Steps and rows a second, fraction of waiting for data.
    def _rates(self, now: float) -> tuple[float | None, float | None, float | None]:
        if not self._samples or self._samples[0].at == self._samples[-1].at:
            return None, None, None
        first, last = self._samples[0], self._samples[-1]
        times = [it.at for it in self._samples]
        longest = max(b - a for a, b in zip(times, times[1:], strict=False))
        # A running step counts once it is the longest.
        seconds = (last.at if now - last.at <= longest else now) - first.at
        if not last.rows:
            return (last.step - first.step) / seconds, None, None
        waited_s = max(last.waits_s[i] - first.waits_s.get(i, 0.0) for i in last.waits_s)
        steps, rows = last.step - first.step, last.rows - first.rows
        return steps / seconds, rows / seconds, min(1.0, waited_s / (last.at - first.at))


def _waited_s(now: float, status: ProcessStatus) -> float:
    lasting_s = max(0.0, now - status.since_s) if status.phase == process_status.DATA else 0.0
    return status.counts.data_s + lasting_s


# Between lines without a terminal.
PLAIN_S = 30.0
# Erase to the row's end; go up one row.
_ERASE, _UP = b"\x1b[K", b"\x1b[A"


class LiveLine:
    """The bytes that draw and erase the line; they set no terminal mode."""

    def __init__(self) -> None:
        self._parts: Sequence[str] = ()
        self._is_drawn = False
        self._is_behind_bar = False  # the output ends with a bar, without \n

    @property
    def is_due(self) -> bool:
        """Whether it has an undrawn text."""
        return bool(self._parts) and not self._is_drawn

    def set_text(self, parts: Sequence[str]) -> None:
        """Set the next text."""
        self._parts = parts

    def above(self, output: bytes) -> bytes:
        """Return the bytes that replace it by output that ends with \\n or \\r."""
        erased = self.erase()
        self._is_behind_bar = output.endswith(b"\r")
        return erased + output

    def erase(self) -> bytes:
        """Return the bytes that erase it."""
        if not self._is_drawn:
            return b""
        self._is_drawn = False
        return b"\r" + _ERASE + (_UP if self._is_behind_bar else b"")

    def draw(self, columns: int) -> bytes:
        """Return the bytes that redraw it."""
        erased = self.erase()
        self._is_drawn = True
        return erased + (b"\n" if self._is_behind_bar else b"") + self._rendered(columns)

    def end(self) -> bytes:
        """Return the bytes that end it in place."""
        is_drawn, self._is_drawn, self._parts = self._is_drawn, False, ()
        return b"\n" if is_drawn else b""

    def _rendered(self, columns: int) -> bytes:
        # Up to a second of imports.
        from rich.console import Console
        from rich.text import Text

        text = Text()
        for i, part in enumerate(self._parts):
            name, _, value = part.rpartition(" ") if part.startswith(_NAMED) else ("", "", part)
            text.append(" · " if i else "", "dim")
            text.append(f"{name} " if name else "", "dim")
            text.append(value, "bold" if i == 0 else "")
        console = Console(
            file=io.StringIO(),
            width=max(columns - 1, 1),
            force_terminal=True,
            highlight=False,
            legacy_windows=False,
        )
        with console.capture() as captured:
            console.print(text, end="", no_wrap=True, overflow="ellipsis")
        return captured.get().encode()


# Prefixes of a name and a number.
_NAMED = ("step ", "loss ", "commit ", "checkpoint ")
