"""Output files, checked before a command measures, and fields of read JSON. Needs no JAX."""

import argparse
import contextlib
import io
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jdp.tools.rate import LEAST_GIVEN, MOST_GIVEN

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


class Field(NamedTuple):
    """An object's field; `what` has the allowed values in words."""

    what: str
    holds: Callable[[Any], bool]
    is_required: bool = True


def number_in(least: float, most: float) -> Field:
    """Return a field of a finite number: neither NaN nor a bool."""
    what = f"a number from {least:g} to {most:g}"
    return Field(what, lambda it: type(it) in (int, float) and least <= it <= most)


def one_of(values: Collection[str]) -> Field:
    """Return a field of one of some texts."""
    return Field(f"one of {', '.join(values)}", lambda it: isinstance(it, str) and it in values)


def list_of(field: Field) -> Field:
    """Return a field of lists of a field's values."""
    what = f"a list, each of it {field.what}"
    return Field(what, lambda it: isinstance(it, list) and all(map(field.holds, it)))


def dict_of(field: Field) -> Field:
    """Return a field of objects with any names."""
    what = f"an object, each value of it {field.what}"
    return Field(what, lambda it: isinstance(it, dict) and all(map(field.holds, it.values())))


def optional(field: Field) -> Field:
    """Return an optional field of an object."""
    return field._replace(is_required=False)


_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_text(value: Any) -> bool:
    # JSON may have half of a pair of surrogates, which cannot be printed.
    return isinstance(value, str) and _SURROGATE.search(value) is None


COUNT = Field("a whole number from 0 to 2**63 - 1", lambda it: type(it) is int and 0 <= it < 2**63)
AMOUNT = number_in(0, MOST_GIVEN)
POSITIVE = number_in(LEAST_GIVEN, MOST_GIVEN)
TEXT = Field("a text", _is_text)
OBJECT = Field("an object", lambda it: isinstance(it, dict))
LIST = Field("a list", lambda it: isinstance(it, list))


def checked(found: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return a JSON object's known fields.

    >>> fields = {"process": COUNT, "host": optional(TEXT)}
    >>> checked({"process": 1, "more": [[]]}, fields)
    {'process': 1}
    >>> checked({"process": -1}, fields)
    Traceback (most recent call last):
    ValueError: its process is -1, not a whole number from 0 to 2**63 - 1
    """
    if not isinstance(found, dict):
        raise ValueError(f"{reprlib.repr(found)} is not an object")
    values = {}
    for name, (what, holds, is_required) in fields.items():
        if name in found:
            value = values[name] = found[name]
            if not holds(value):
                raise ValueError(f"its {name} is {reprlib.repr(value)}, not {what}")
        elif is_required:
            raise ValueError(f"it has no {name!r}")
    return values
