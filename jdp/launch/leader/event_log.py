"""The events of a run, as a record for programs to read."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jdp.launch.append_file import AppendFile


class Events:
    """Writes events to a file of JSON lines, with the time; the arguments are of `AppendFile`."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._file = AppendFile(path, say)
        self.close_file = self._file.close_file

    def write(self, event: str, **facts: Any) -> None:
        """Write the name of an event, `time.time()`, and its facts."""
        record = json.dumps({"event": event, "at": time.time(), **facts})
        self._file.write(record.encode() + b"\n")
