"""What the launcher itself says."""

import contextlib
import sys


def say(text: str) -> None:
    """Say something to whoever watches the run, on standard error."""
    with contextlib.suppress(OSError):
        print(f"jdp run: {text}", file=sys.stderr, flush=True)
