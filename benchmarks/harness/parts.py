"""The parts of a benchmark: selects them by `--only`, and prints each table when it is ready."""

import argparse
import time
from collections.abc import Iterable, Iterator

from benchmarks.harness import report
from benchmarks.harness.report import Section


def parser(description: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with `--quick` and `--only`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    made.add_argument("--only", default=",".join(parts), help="parts to run, separated by commas")
    return made


def parsed(made: argparse.ArgumentParser, parts: Iterable[str]) -> argparse.Namespace:
    """Return the options, with `only` as a list in the order of the parts."""
    options, known = made.parse_args(), list(parts)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(known):
        made.error(f"--only knows {', '.join(known)}, not {', '.join(sorted(unknown))}")
    options.only = [part for part in known if part in wanted]
    return options


def name(what: str, only: list[str], parts: Iterable[str]) -> str:
    """Return the name of a page with these parts: `what` if all parts are in it."""
    return what if only == list(parts) else "_".join([what, *only])


def timed(sections: Iterator[Section]) -> Iterator[Section]:
    """Print each table when it is measured, with the seconds since the first began."""
    start = time.perf_counter()
    for section in sections:
        print(f"\n{section.title} ({time.perf_counter() - start:.0f} s)\n\n{report.table(section)}")
        yield section
