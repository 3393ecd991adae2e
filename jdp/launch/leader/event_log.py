"""What happens in a run, as a record for programs to read."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


class Events:
    """Writes what happens to a file of JSON lines, with the time.

    Args:
      path: of the file, which is appended to; None: nowhere.
      say: prints a line for people who watch the run that the file can't be written.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._file: IO[bytes] | None = None
        self._say = say
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("ab", buffering=0)
            except OSError as error:  # the run goes on without its record
                say(f"{path} can't be written: {error.strerror}")

    def write(self, event: str, **facts: Any) -> None:
        """Write one event: what, `time.time()`, and its facts."""
        if self._file is not None:
            record = json.dumps({"event": event, "at": time.time(), **facts})
            try:
                self._file.write(record.encode() + b"\n")
            except OSError as error:
                self._say(f"{self._file.name} can't be written: {error.strerror}")
                self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
