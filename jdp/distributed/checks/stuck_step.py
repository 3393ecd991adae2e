"""Check whether all processes made the calls of steps that do not end with equal arguments."""

import threading
import time
from collections.abc import Sequence

from jdp.distributed import fail_fast
from jdp.distributed.step_call import StepCall

# After this many seconds without any step that ends, the processes compare their calls.
PATIENCE_S = 5.0


class Overdue:
    """Check the calls in flight periodically, and end this process if an overdue one differs.

    Args:
      patience_s: seconds until the processes compare the calls, once.
    """

    def __init__(self, patience_s: float = PATIENCE_S):
        self._patience_s = patience_s
        self._oldest: str | None = None
        self._since = 0.0
        self._is_explained = False

    def poll(self, calls: Sequence[StepCall]) -> threading.Thread | None:
        """Check the unfinished calls, ordered from the oldest, without waiting."""
        oldest = str(calls[0]) if calls else None
        if oldest != self._oldest:
            self._oldest, self._since, self._is_explained = oldest, time.monotonic(), False
        late_s = time.monotonic() - self._since
        if not calls or late_s < self._patience_s or self._is_explained:
            return None
        self._is_explained = True
        thread = threading.Thread(target=_explain, args=(calls,), daemon=True)
        thread.start()
        return thread


def _explain(calls: Sequence[StepCall]) -> None:
    for call in calls:
        if call.difference(PATIENCE_S):
            assert call.arguments is not None and call.given is not None
            text = call.arguments.explained(call.given, str(call))
            return fail_fast.end_process(RuntimeError(text))
