"""`--json` and `--png`: where the results of a command go."""

import argparse
import importlib.util
from pathlib import Path

STDOUT = "-"


def add_json(
    parser: argparse.ArgumentParser,
    text: str = "print JSON in place of a table, or write it to FILE",
    *,
    takes_file: bool = True,
) -> None:
    """Add `--json`: None if it is not given, else `STDOUT` or the file.

    Args:
      parser: of the command.
      text: help.
      takes_file: whether a file may be named. False for a command with a positional argument,
        which `--json` would take for its file: then the option is a bool.
    """
    if takes_file:
        parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help=text)
    else:
        parser.add_argument("--json", action="store_true", help=text)


def add_png(
    parser: argparse.ArgumentParser, text: str = "draw a picture (needs matplotlib)"
) -> None:
    """Add `--png`, with the file of the picture or None.

    Args:
      parser: of the command.
      text: help.
    """
    parser.add_argument("--png", metavar="FILE", help=text)


def require_matplotlib(png: str | None) -> None:
    """Refuse `--png` where pictures cannot be drawn, before anything is measured.

    Args:
      png: value of `--png`; None needs no matplotlib.

    Raises:
      ValueError: if matplotlib is not installed.
    """
    if png and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: pip install matplotlib.")


def write(text: str, where: str) -> None:
    """Print a text, or write it to a file.

    Args:
      text: without the last newline.
      where: value of `--json`: `STDOUT`, or a path.
    """
    if where == STDOUT:
        print(text)
    else:
        Path(where).write_text(text + "\n")
