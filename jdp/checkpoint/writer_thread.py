"""What is written while training goes on."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_log = logging.getLogger("jdp")


class Background:
    """A thread that does one thing at a time; an error of it comes out at the next call.

    An interpreter that ends waits for what was begun.

    Args:
      name: of the thread.

    >>> background = Background("example")
    >>> written = []
    >>> background.begin(written.append, "step 10")
    >>> background.wait()
    >>> written
    ['step 10']
    >>> background.end()
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._job: Future[None] | None = None

    def begin(self, action: Callable[..., None], *arguments: Any) -> None:
        """Begin an action, when the one before is done."""
        self.wait()
        self._job = self._pool.submit(action, *arguments)

    def is_idle(self) -> bool:
        """Tell whether there is nothing to wait for."""
        return self._job is None or self._job.done()

    def check(self) -> None:
        """Raise the error of an action that failed; wait for nothing."""
        if self.is_idle():
            self.wait()

    def wait(self) -> None:
        """Wait until the action is done; raise its error, once."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def end(self) -> None:
        """Wait, and end the thread; an error that nobody asked for is logged."""
        try:
            self.wait()
        except Exception as error:
            _log.error("jdp: %s", error)
        self._pool.shutdown()
