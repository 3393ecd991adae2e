"""The events of a run, as a record for programs to read."""

import json
import math
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
        """Write the name of an event, `time.time()`, and its facts.

        NaN and infinities, which JSON lacks, become strings, as in the lines of `jdp.log`.
        """
        record = {"event": event, "at": time.time()} | {k: _in_json(v) for k, v in facts.items()}
        self._file.write(json.dumps(record).encode() + b"\n")


def _in_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
