"""`--json` and `--png`: output files, checked before a command measures."""

import argparse
import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

STDOUT = "-"


class NotWrittenError(OSError):
    """A file could not be written, as on a full disk."""


def add_json(
    parser: argparse.ArgumentParser,
    text: str = "print JSON in place of a table, or write it to FILE",
    *,
    takes_file: bool = True,
) -> None:
    """Add `--json`: None without it, else `STDOUT` or the file."""
    if takes_file:
        parser.add_argument("--json", nargs="?", const=STDOUT, metavar="FILE", help=text)
    else:
        parser.add_argument("--json", action="store_true", help=text)


def add_png(
    parser: argparse.ArgumentParser, text: str = "draw a picture (needs matplotlib)"
) -> None:
    """Add `--png`."""
    parser.add_argument("--png", metavar="FILE", help=text)


def require_writable(flag: str, path: str | None) -> None:
    """Raise a ValueError if a file cannot be written.

    >>> require_writable("--json", "missing/plan.json")
    Traceback (most recent call last):
    ValueError: --json=missing/plan.json cannot be written, because the folder missing does not \
exist. Create it, or name a file in another folder.
    """
    if path is None or path == STDOUT:
        return
    file = Path(path)
    if file.is_dir() or path.endswith(os.sep):
        raise ValueError(f"{flag}={path} is a folder. Name a file in it.")
    if not file.parent.is_dir():
        raise ValueError(
            f"{flag}={path} cannot be written, because the folder {file.parent} does not exist. "
            "Create it, or name a file in another folder."
        )
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(
            f"{flag}={path} cannot be written: this user has no permission, or the file system "
            "is read-only. Name a file in another folder."
        )


def _require_picture(path: str | None) -> None:
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--png needs matplotlib: pip install matplotlib.") from None
    suffix = _suffix(path)
    known = set(FigureCanvasBase.get_supported_filetypes()) - {"pgf"}  # which TeX would draw
    if suffix and suffix not in known:
        raise ValueError(
            f"--png={path}: matplotlib draws no .{suffix} files. Write a suffix such as .png, or "
            f"one of {', '.join(sorted(known))}."
        )
    require_writable("--png", path)


def _suffix(path: str | Path) -> str:
    return Path(path).suffix.lower().removeprefix(".")


def require_outputs(inputs: Sequence[str | Path | None] = (), **paths: str | None) -> None:
    """Raise an error if a command's files cannot be written, or would replace another."""
    flags: dict[Path, str] = {}
    for flag, path in paths.items():
        if flag == "png":
            _require_picture(path)
        else:
            require_writable(f"--{flag}", path)
        if path is None or path == STDOUT or (Path(path).exists() and not Path(path).is_file()):
            continue  # a device such as /dev/null takes both
        if any(_is_file(path, each) for each in inputs if each is not None):
            raise ValueError(
                f"--{flag}={path} would replace a file of this command's input. Name another file."
            )
        first = flags.setdefault(Path(path).resolve(), flag)
        if first != flag:
            raise ValueError(
                f"--{first} and --{flag} both name {path}, so one would replace the other. Name "
                "two files."
            )


def _is_file(path: str, other: str | Path) -> bool:
    return Path(path).is_file() and Path(other).is_file() and os.path.samefile(path, other)


def to_json(values: Any) -> str:
    """Return values as portable JSON: a nonfinite number is null.

    >>> print(to_json({"alpha_s": 2e-06, "bytes_per_s": float("inf")}))
    {
     "alpha_s": 2e-06,
     "bytes_per_s": null
    }
    """
    return json.dumps(_finite(values), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def why_unreadable(error: Exception) -> str:
    """Return in words why a jdp file could not be read.

    >>> why_unreadable(FileNotFoundError(2, "No such file or directory", "plan.json"))
    'No such file or directory'
    """
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "it is not JSON"
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert an `OSError` to a `NotWrittenError` with the file's name."""
    try:
        yield
    except BrokenPipeError:  # the reader of a pipe or of /dev/stdout has closed it
        raise
    except OSError as error:
        raise NotWrittenError(f"{path} was not written: {error.strerror or error}.") from error


def write(text: str, where: str) -> None:
    """Print a text, or write it to a file."""
    if where == STDOUT:
        print(text)
    else:
        with writing(where):
            Path(where).write_text(text + "\n")


def write_picture(figure: Any, path: str | Path, **options: Any) -> None:
    """Write a matplotlib figure to a file of exactly this name."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=_suffix(path) or "png", **options)
    with writing(path):
        Path(path).write_bytes(drawn.getvalue())
