"""Calls of steps that do not end: did all processes make them with the same arguments?"""

import logging
import threading
import time
from collections.abc import Sequence

from jdp.distributed.step_call import StepCall

_log = logging.getLogger("jdp")

# After so long without any step that ends, the processes compare their calls.
PATIENCE_S = 5.0


class Overdue:
    """Looks now and then at the calls in flight, and logs a difference if none of them ends.

    Args:
      patience_s: seconds until they are compared, once.
    """

    def __init__(self, patience_s: float = PATIENCE_S):
        self._patience_s = patience_s
        self._oldest: str | None = None
        self._since = 0.0
        self._is_explained = False

    def look(self, calls: Sequence[StepCall]) -> threading.Thread | None:
        """Check the unfinished calls, given oldest first, without waiting.

        Returns:
          The thread that explains them, if they are overdue.
        """
        oldest = str(calls[0]) if calls else None
        if oldest != self._oldest:
            self._oldest, self._since, self._is_explained = oldest, time.monotonic(), False
        late_s = time.monotonic() - self._since
        if not calls or late_s < self._patience_s or self._is_explained:
            return None
        self._is_explained = True
        thread = threading.Thread(target=_explain, args=(calls, late_s), daemon=True)
        thread.start()
        return thread


def _explain(calls: Sequence[StepCall], late_s: float) -> None:
    for call in calls:
        if difference := call.difference(PATIENCE_S):
            _log.error(
                "jdp: no step has ended for %.0f s. A likely cause: %s was not the same on all "
                "processes, so they may wait for each other: %s",
                late_s,
                call,
                difference,
            )
            return
