"""Writes measurements with machine, versions and commit: JSON lines and a table in Markdown."""

import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
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


def hardware() -> str:
    """Return a short name of this machine, for a file name."""
    return f"{os.cpu_count()}-core-{_cpu()}"


def table(section: Section) -> str:
    """Format one section in Markdown."""
    rows = [[form.format(**row) for form in section.columns.values()] for row in section.rows]
    rows = [list(section.columns), ["---"] * len(section.columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


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
