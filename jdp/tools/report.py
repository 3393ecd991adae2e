"""`explain`'s report: values, text and JSON."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdp.tools import results
from jdp.tools.calibration import CollectiveLaw
from jdp.tools.memory import Memory
from jdp.tools.rate import Rate, time_interval
from jdp.tools.timeline import MORE_ITERATIONS

_MEMORY = (
    ("parameters", "parameters"),
    ("optimizer_state", "optimizer state"),
    ("other_state", "other state"),
    ("batch", "rows of the batch"),
    ("other_arguments", "further arguments"),
    ("activations", "activations"),
    ("gradients", "gradients"),
    ("temporaries", "other temporaries"),
    ("outputs", "new results"),
    ("code", "program"),
)


@dataclass(frozen=True)
class Bucket:
    """A collective of the compiled step: a bucket of gradients, or gathered shards.

    Attributes:
      kind: such as `all-reduce`.
      algorithm: `native`, `split` or `xla`, see `jdp.collectives`.
      leaves: names of its arrays, or shapes where XLA has hidden the name.
      dtype: of the sent arrays.
      num_bytes: of its whole arrays on one rank, in one run.
      runs: number of runs in a step.
      begins: predicted start of its first run, as a share of the step's time, 0 to 1.
      ends: end of that run.
      meanwhile: predicted seconds of computations during that run, by name.
      hidden_bytes: bytes of all runs beside a matmul.
      exposed_bytes: bytes of the other runs.
      took_s: predicted seconds of all runs.
      hidden_s: of them, beside computation.
      exposed_s: of them, while the computation waits.
      num_merged: planned buckets that XLA merged into it; 0 if unknown.
      line: the author's line.
      is_of_author: whether the author's code requested it, or XLA made it for the author's line.
      axes: mesh axes along which devices exchange; empty if unknown.
    """

    kind: str
    algorithm: str
    leaves: tuple[str, ...]
    dtype: str
    num_bytes: int
    runs: int
    begins: float
    ends: float
    meanwhile: dict[str, float]
    hidden_bytes: int
    exposed_bytes: int
    took_s: float
    hidden_s: float
    exposed_s: float
    num_merged: int
    line: str
    is_of_author: bool
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something that costs memory or time, and what to write instead.

    Attributes:
      kind: a stable name, such as `replicated-optimizer-state`.
      text: the finding, with numbers.
      advice: what to change.
      saved_bytes: memory of one rank that the change would save, or 0.
    """

    kind: str
    text: str
    advice: str
    saved_bytes: int = 0


@dataclass(frozen=True)
class StepTime:
    """A step's predicted time.

    Attributes:
      likely_s: seconds at the likely rates.
      low_s: at the best expected rates.
      high_s: at the worst.
      computing_s: of `likely_s`, with computation.
      exposed_s: of `likely_s`, waiting for collectives.
      matmul_flops: operations of its matmuls on one rank.
    """

    likely_s: float
    low_s: float
    high_s: float
    computing_s: float
    exposed_s: float
    matmul_flops: float


@dataclass(frozen=True)
class StepReport:
    """Memory, collectives and predicted time of a compiled step, without measurement.

    Attributes:
      on: name of the devices.
      memory: of one rank.
      buckets: its collectives, in the order of their start.
      rates: of the prediction, by name.
      laws: of collectives measured on this host, in place of `reduction_start_s` and
        `link_bytes_per_s`.
      findings: what to change.
      unknown: parts that the prediction could not count, in words.
    """

    step: str
    on: str
    num_ranks: int
    memory: Memory
    buckets: tuple[Bucket, ...]
    time: StepTime
    rates: dict[str, Rate]
    findings: tuple[Finding, ...]
    laws: tuple[CollectiveLaw, ...] = ()
    unknown: tuple[str, ...] = ()
    spans: tuple[tuple[str, float, float, str], ...] = dataclasses.field(default=(), repr=False)

    def to_json(self) -> str:
        """Return the report as JSON: attributes by name, bytes and seconds as numbers.

        A nonfinite number is null: `bytes_per_s` of a law of constant time.
        """
        values = dataclasses.asdict(self)
        del values["spans"]
        values["memory"]["total"] = self.memory.total
        return results.to_json(values)

    def __str__(self) -> str:
        sections = [self._head(), self._memory(), self._buckets(), self._time(), self._findings()]
        return "\n\n".join(section for section in sections if section)

    def _head(self) -> str:
        ranks = f"{self.num_ranks} rank" + "s" * (self.num_ranks > 1)
        return f"{self.step} on {self.on} ({ranks}), compiled and not run"

    def _memory(self) -> str:
        lines = ["memory of one rank"]
        for name, label in _MEMORY:
            num_bytes = getattr(self.memory, name)
            if num_bytes:
                lines.append(f"  {label:<20}{of_bytes(num_bytes):>12}")
        limit = f" of {of_bytes(self.memory.limit)}" if self.memory.limit else ""
        lines.append(f"  {'in all':<20}{of_bytes(self.memory.total):>12}{limit}")
        saved = of_bytes(self.memory.saved_by_donation)
        return "\n".join([*lines, f"  donating the state saves {saved}"])

    def _buckets(self) -> str:
        if not self.buckets:
            return "no collectives"
        lines = ["collectives, in the order in which they begin (times are predicted)"]
        axes = {each for bucket in self.buckets for each in bucket.axes}
        for i, bucket in enumerate(self.buckets):
            runs = f"{bucket.runs} x " if bucket.runs > 1 else ""
            along = f" along {', '.join(bucket.axes)}" if len(axes) > 1 and bucket.axes else ""
            size = f"{runs}{of_bytes(bucket.num_bytes)} {bucket.dtype}"
            lines.append(
                f"  {i}: {bucket.kind}{along} ({bucket.algorithm}), {size}: {_named(bucket.leaves)}"
            )
            meanwhile = sorted(bucket.meanwhile.items(), key=lambda item: -item[1])
            beside = ", ".join(f"{name} {of_s(s)}" for name, s in meanwhile[:3]) or "nothing"
            lines.append(
                f"     {'the first ' * (bucket.runs > 1)}{bucket.begins:.0%} to {bucket.ends:.0%} "
                f"of the step, meanwhile {beside}; "
                f"hidden {of_s(bucket.hidden_s)} and {of_bytes(bucket.hidden_bytes)}, "
                f"exposed {of_s(bucket.exposed_s)} and {of_bytes(bucket.exposed_bytes)}"
            )
        return "\n".join(lines)

    def _time(self) -> str:
        time = self.time
        lines = [
            f"step time, predicted: {of_s(time.likely_s)} ({of_s(time.low_s)} to "
            f"{of_s(time.high_s)}); computes {of_s(time.computing_s)}, waits for collectives "
            f"{of_s(time.exposed_s)}",
            *(f"  {name} = {rate}" for name, rate in self.rates.items()),
            *(
                f"  {law.operation} ({law.algorithm}, {law.num_ranks} ranks): measured here, "
                f"{of_s(law.alpha_s)} and {law.bytes_per_s:.3g} B/s, {_interval(law)}"
                for law in self.laws
            ),
            *(f"  not counted: {text}" for text in self.unknown),
        ]
        return "\n".join(lines)

    def _findings(self) -> str:
        if not self.findings:
            return "findings: none"
        lines = ["findings"]
        for i, finding in enumerate(self.findings, 1):
            lines += [f"  {i}. {finding.kind}: {finding.text}", f"     {finding.advice}"]
        return "\n".join(lines)


def _interval(law: CollectiveLaw) -> str:
    between, beyond = time_interval(0.0), time_interval(law.largest_error)
    text = "{:.2g} to {:.2g} times as long".format(*between)
    if beyond == between:
        return text
    sizes = [of_bytes(num_bytes) for num_bytes, _ in (law.points[0], law.points[-1])]
    return f"{text} for {sizes[0]} to {sizes[1]}, else {'{:.2g} to {:.2g}'.format(*beyond)}"


def _named(leaves: tuple[str, ...]) -> str:
    shown = ", ".join(leaves[:4])
    return shown + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")


def of_bytes(num: float) -> str:
    """Return bytes as text.

    >>> of_bytes(512), of_bytes(3 * 2**20)
    ('512 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num) < 1024 or unit == "GiB":
            return f"{num:.0f} B" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    raise AssertionError


def of_s(seconds: float) -> str:
    """Return seconds as text.

    >>> of_s(0.0123), of_s(4e-6)
    ('12.3 ms', '4.0 us')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.{0 if not seconds else 1}f} {unit}"
    raise AssertionError


_WAITS = "waits for collectives"
_STYLES: dict[str, Any] = {
    "forward matmul": {"facecolor": "#3b6fb6"},
    "backward matmul": {"facecolor": "#2a9d8f"},
    "forward": {"facecolor": "#a9c4e6"},
    "backward": {"facecolor": "#a8dcd5"},
    "update": {"facecolor": "#d9b44a"},
    "other": {"facecolor": "#c8c8c8"},
    "further iterations": {"facecolor": "white", "edgecolor": "#9a9a9a", "hatch": "////"},
    "collective": {"facecolor": "#8e7cc3"},
    _WAITS: {"facecolor": "#d1495b"},
}


def draw_schedule(report: StepReport, path: str | Path) -> None:
    """Draw a step's schedule, on two lanes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    axes = figure.subplots()
    unit, drawn = 1e3, set()
    computing = [(begin, end) for lane, begin, end, _ in report.spans if lane == "computation"]
    for lane, begin, end, name in report.spans:
        is_sent = lane == "communication"
        if is_sent:
            name = "collective"
        elif name.endswith(MORE_ITERATIONS):
            name = "further iterations"
        name = name if name in _STYLES else "other"
        drawn.add(name)
        axes.broken_barh([(begin * unit, (end - begin) * unit)], (0 if is_sent else 1, 0.8),
                         **_STYLES[name])  # fmt: skip
    for begin, end in _gaps(computing, report.time.likely_s):
        axes.broken_barh([(begin * unit, (end - begin) * unit)], (1, 0.8), **_STYLES[_WAITS])
        drawn.add(_WAITS)
    axes.set_yticks([0.4, 1.4], ["communication", "computation"])
    axes.set_xlim(0, report.time.likely_s * unit)
    axes.set_xlabel("ms, predicted")
    axes.set_title(
        f"{report.step} on {report.on}: {of_s(report.time.likely_s)} predicted, "
        f"{of_s(report.time.exposed_s)} of it waits for collectives",
        loc="left",
    )
    handles = [Patch(**style, label=name) for name, style in _STYLES.items() if name in drawn]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False,
                  fontsize="small", columnspacing=1.2, handlelength=1.5)  # fmt: skip
    results.write_picture(figure, path, dpi=150)


def _gaps(computing: list[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    gaps, now = [], 0.0
    for begin, end in computing:
        if begin > now + 1e-12:
            gaps.append((now, begin))
        now = max(now, end)
    return [*gaps, (now, end_s)] if end_s > now + 1e-12 else gaps
