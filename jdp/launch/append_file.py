"""A file that a launcher appends to, and can do without."""

from collections.abc import Callable
from pathlib import Path
from typing import IO


class AppendFile:
    """A file that is appended to. After the first error, which is reported, nothing is written.

    Args:
      path: of the file, whose folder is made; None: nothing is written.
      say: prints a line for people who watch the run.

    Attributes:
      path: of the file; None once nothing is written.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._file: IO[bytes] | None = None
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                # Unbuffered, so that the lines of a killed run are in the file.
                self._file = path.open("ab", buffering=0)
            except OSError as error:
                self._fail(error)

    def write(self, data: bytes) -> None:
        """Append to the file, unless writing to it has failed before."""
        if self._file is not None:
            try:
                self._file.write(data)
            except OSError as error:
                self._fail(error)

    def append_contents(self, path: Path) -> None:
        """Append the text of another file, and remove that file."""
        if self._file is not None:
            try:
                self.write(path.read_bytes())
                path.unlink()
            except OSError as error:
                self._say(f"{path} cannot be moved to {self.path}: {error.strerror}")

    def close_file(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _fail(self, error: OSError) -> None:
        self._say(f"{self.path} cannot be written: {error.strerror}")
        self.close_file()
        self.path = None
