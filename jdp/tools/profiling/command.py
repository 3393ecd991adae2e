"""The command `jdp timeline`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jdp.tools import results
from jdp.tools.profiling import trace_file
from jdp.tools.profiling.summary import CollectiveTimes, RankSteps, Summary, summarize

_MOST_COLLECTIVES = 20
_EPILOG = """\
A step of a rank is waiting for data + computation + exposed communication + host. The rank with
most time of its own, which is all but communication, comes first: the others wait for it.
"""


def main(arguments: Sequence[str]) -> int:
    """Run `jdp timeline`."""
    options = _parser().parse_args(arguments)
    folder = Path(options.folder)
    if not folder.is_dir():
        return _fail(f"the folder {options.folder!r} does not exist.", 2)
    merged = Path(options.trace or folder / trace_file.MERGED)
    if merged.resolve() in [path.resolve() for path in trace_file.found_in(folder).values()]:
        return _fail(
            f"--trace {options.trace} is a file of the profile itself, which it would replace. "
            "Write another name, or remove --trace.",
            2,
        )
    try:
        results.require_outputs(png=options.png, trace=options.trace)
    except ValueError as error:
        return _fail(str(error), 2)
    try:
        found = summarize(folder)
        if options.png:
            from jdp.tools.profiling.summary import draw

            draw(found, options.png)
    except (ValueError, OSError) as error:
        return _fail(str(error), 1)
    print(results.to_json(found.to_json()) if options.json else table(found))
    try:
        trace_file.write(merged, found.traces, found.begins())
    except OSError as error:  # another user's folder, whose profile can be read
        return _fail(
            f"the trace of all ranks was not written to {merged}: {error.strerror or error}. "
            "Write --trace FILE in a writable folder.",
            1,
        )
    if not options.json:
        print(f"\nAll ranks in one trace, for https://ui.perfetto.dev: {merged}")
    return 0


def table(found: Summary) -> str:
    """Return a profile's tables: ranks, collectives, and clocks."""
    numbers = sorted({number for each in found.ranks for number in each.steps})
    lines = [
        f"{len(found.ranks)} ranks, steps {numbers[0]} to {numbers[-1]}: the mean step in ms, the "
        "rank that others wait for first",
        "",
        "rank process      step = data wait + computation + exposed comm +      host  |  own",
        *(_rank_line(each) for each in found.ranks),
        "",
        "    bytes algorithm  runs  ms/step  longest in  shortest in  collective",
        *(_collective_line(each) for each in found.collectives[:_MOST_COLLECTIVES]),
    ]
    left = len(found.collectives) - _MOST_COLLECTIVES
    if left > 0:
        lines.append(f"and {left} more, see --json")
    lines += ["", _clocks(found), *(f"note: {note}" for note in found.notes)]
    return "\n".join(lines)


def _rank_line(each: RankSteps) -> str:
    data, computation, communication, host = (value / 1e6 for value in each.mean())
    step = data + computation + communication + host
    return (
        f"{each.rank:4d} {each.process:7d} {step:9.3f}   {data:9.3f}   {computation:11.3f}   "
        f"{communication:12.3f}   {host:7.3f}  | {each.own_ns() / 1e6:8.3f}"
    )


def _collective_line(each: CollectiveTimes) -> str:
    num_bytes = "?" if each.num_bytes is None else each.num_bytes
    return (
        f"{num_bytes:>9} {each.algorithm:9} {each.runs:5.1f} {each.took_ns / 1e6:8.3f}  "
        f"rank {each.longest_rank:<5d}  rank {each.shortest_rank:<6d}  {each.name}"
    )


def _clocks(found: Summary) -> str:
    if len({trace.facts["clock"] for trace in found.traces}) == 1:
        return "Clocks: of one host, not shifted."
    unlike = [
        f"process {trace.facts['process']} by {shift.ns / 1e6:+.3f} ms, within "
        f"{shift.within / 1e6:.3f} ms"
        for trace, shift in zip(found.traces, found.shifts, strict=True)
        if shift.within is not None and trace.facts["clock"] != found.traces[0].facts["clock"]
    ]
    if not unlike:
        return "Clocks: of several hosts, and none could be compared. See the notes."
    return "Clocks, compared by common collectives: shifted " + "; ".join(unlike) + "."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp timeline",
        description="Show where the time of profiled steps went, on every rank, and write all "
        "ranks into one trace.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER", help="that jdp.profile(folder, ...) wrote")
    results.add_json(parser, "print JSON, times in nanoseconds", takes_file=False)
    results.add_png(parser, "draw the steps of all ranks")
    parser.add_argument(
        "--trace", metavar="FILE", help=f"of all ranks; default: FOLDER/{trace_file.MERGED}"
    )
    return parser


def _fail(text: str, code: int) -> int:
    print(f"jdp timeline: {text}", file=sys.stderr)
    return code
