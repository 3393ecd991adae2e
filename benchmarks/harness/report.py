"""Options of a benchmark, and its results: JSON lines and tables with machine and commit."""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import optax

_ROOT = Path(__file__).resolve().parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
SCRATCH = _ROOT / "out" / "benchmarks"  # not committed


class Section(NamedTuple):
    """One table.

    Attributes:
      title: its heading.
      text: explains the measurement and the columns.
      rows: a dict for each row, written as a JSON line.
      columns: heading -> format string over the row, such as "{ratio:.3f}".
    """

    title: str
    text: str
    rows: Sequence[dict[str, Any]]
    columns: dict[str, str]


def environment() -> dict[str, Any]:
    """Describe the machine, the versions, the commit and the command."""
    script = Path(sys.argv[0]).resolve()
    command = [script.name]
    if script.is_relative_to(_ROOT):
        command = ["-m", ".".join(script.relative_to(_ROOT).with_suffix("").parts)]
    # Nobody else has this machine's folders.
    command += [os.path.relpath(x, _ROOT) if os.path.isabs(x) else x for x in sys.argv[1:]]
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} x {_cpu()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "optax": optax.__version__,
        "commit": _commit(),
        "command": shlex.join(["python", *command]),
    }


def publish(
    what: str,
    sections: Sequence[Section],
    *,
    quick: bool = False,
    hardware: str | None = None,
    shows: bool = True,
) -> Path:
    """Print tables, and write their page and rows: those of a quick run are not committed.

    Returns:
      The path of the Markdown page.
    """
    for section in sections if shows else ():
        print(f"\n{section.title}\n\n{table(section)}")
    page = write(SCRATCH if quick else RESULTS, what, hardware or this_machine(), sections)
    print("wrote", page)
    return page


def picture(path: Path, size: tuple[float, float], draw: Callable[[Any], None]) -> None:
    """Write a picture, if matplotlib is installed.

    Args:
      path: path of the picture; the suffix selects the format.
      size: inches.
      draw: draws into a matplotlib figure.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters, not their outlines
        figure.savefig(path)
    print("wrote", path)


def write(folder: Path, what: str, hardware: str, sections: Sequence[Section]) -> Path:
    """Write `<yyyy-mm>_<hardware>_<what>.jsonl` and `.md`.

    Returns:
      The path of the Markdown page.
    """
    where = environment()
    slug = re.sub(r"[^a-z0-9]+", "-", hardware.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{where['date'][:7]}_{slug}_{what}"
    lines = [{**row, **where} for section in sections for row in section.rows]
    path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.with_suffix(".md").write_text(_page(what, where, sections))
    return path.with_suffix(".md")


def this_machine() -> str:
    """Return a short name of this machine, for a file name."""
    return f"{os.cpu_count()}-core-{_cpu()}"


def table(section: Section) -> str:
    """Format one section in Markdown."""
    rows = [[form.format(**row) for form in section.columns.values()] for row in section.rows]
    rows = [list(section.columns), ["---"] * len(section.columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def parser(
    description: str | None, parts: Iterable[str] = (), *, quick: str = "tiny, not for results"
) -> argparse.ArgumentParser:
    """Return a parser with `--quick`, and `--only` if the benchmark has parts."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help=quick)
    if only := ",".join(parts):
        made.add_argument("--only", default=only, help="parts to run, separated by commas")
    return made


def parsed(made: argparse.ArgumentParser, parts: Iterable[str]) -> argparse.Namespace:
    """Return the options, with `only` as a list in the order of the parts."""
    options, known = made.parse_args(), list(parts)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(known):
        made.error(f"--only knows {', '.join(known)}, not {', '.join(sorted(unknown))}")
    options.only = [part for part in known if part in wanted]
    return options


def name_of(what: str, only: list[str], parts: Iterable[str]) -> str:
    """Return the name of a page with these parts: `what` if all parts are in it."""
    return what if only == list(parts) else "_".join([what, *only])


def timed(sections: Iterator[Section]) -> Iterator[Section]:
    """Print each table when it is measured, with the seconds since the first began."""
    start = time.perf_counter()
    for section in sections:
        print(f"\n{section.title} ({time.perf_counter() - start:.0f} s)\n\n{table(section)}")
        yield section


def _page(what: str, where: dict[str, Any], sections: Sequence[Section]) -> str:
    facts = ", ".join(f"{key} {where[key]}" for key in ("python", "jax", "jaxlib", "optax"))
    parts = [
        f"# {what}",
        f"{where['hardware']}; {facts}; commit {where['commit']}; {where['date']}",
        f"    {where['command']}",
    ]
    for section in sections:
        parts += [f"## {section.title}", section.text, table(section)]
    return "\n\n".join(parts) + "\n"


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _commit() -> str:
    git = ["git", "-C", str(_ROOT)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with changes" if changed else "")
