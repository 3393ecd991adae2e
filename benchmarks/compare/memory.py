"""The largest memory of this process in a while. Needs the standard library alone."""

import ctypes
import gc
import re
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """The most resident memory since this object was made, above that of then."""

    def __init__(self):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")  # proc(5): resets the peak of the resident set
        self._before = _kilobytes("VmRSS")

    def megabytes(self) -> float:
        """Return the peak so far, in MB of 10**6 bytes."""
        return (_kilobytes("VmHWM") - self._before) * 1024 / 1e6


def _kilobytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert found, f"{_STATUS} has no {name}"
    return int(found[1])
