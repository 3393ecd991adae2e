"""The running loops over batches of this process, and how they end with the program."""

import atexit
import contextlib
import os
import sys
import time
from typing import Any, Protocol

from jdp.distributed.fail_fast import leave_if_failed
from jdp.worker import watching

# How long the end of a loop waits for the item in progress. A loader that hangs must not block the
# program after the loop. Its thread ends after that item, if the item is ever complete.
JOIN_TIMEOUT_S = 5.0


class Reader(Protocol):
    """A thread that reads batches ahead."""

    def ask_to_end(self) -> bool:
        """Request the thread to end after its item, and return whether a caller should wait."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most `timeout` seconds."""
        ...


class Compared(Protocol):
    """A loop whose end is compared with those of the other processes."""

    def stop(self) -> None:
        """End the loop because the program ends, and wait for the ends of the other processes."""
        ...

    def raise_problem(self) -> None:
        """Raise the problem of the loop if it has one that was not raised before."""
        ...


class Loops:
    """The threads and checks of all running loops. `current` is the only instance.

    Attributes:
      readers: the threads that read batches ahead.
      compared: loops whose equal end on all processes is not yet confirmed.
    """

    def __init__(self) -> None:
        self.readers: set[Reader] = set()
        self.compared: set[Compared] = set()
        self._is_registered = False

    def add_reader(self, reader: Reader) -> None:
        """Record a thread that reads ahead, until `end_reader` ends it."""
        self._register()
        self.readers.add(reader)

    def end_reader(self, reader: Reader) -> None:
        """End a thread that reads ahead."""
        self.readers.discard(reader)
        if reader.ask_to_end():
            reader.join(JOIN_TIMEOUT_S)

    def add_compared(self, loop: Compared) -> None:
        """Record a loop that is compared with those of other processes."""
        self._register()
        self.compared.add(loop)

    def raise_pending(self) -> None:
        """Raise the problem of a loop that this process left before the problem was found."""
        for loop in list(self.compared):
            loop.raise_problem()

    def end_all(self) -> None:
        """End all loops. Exit with code 1 if one of them ended differently on other processes."""
        leave_if_failed()
        watching.record_end()
        for loop in list(self.compared):
            loop.stop()
        if self.compared:  # only loops with a problem are left
            with contextlib.suppress(ValueError, RuntimeError):
                self.raise_pending()
            leave()  # JAX's own exit handler would wait minutes for the others
        self.end_readers()

    def end_readers(self) -> None:
        """End all threads that read ahead: one that places batches at shutdown aborts Python."""
        waiting = [reader for reader in list(self.readers) if reader.ask_to_end()]
        end = time.monotonic() + JOIN_TIMEOUT_S
        for reader in waiting:
            reader.join(max(0.0, end - time.monotonic()))

    # Handlers run in reverse order. This one must run before JAX's, which closes its store.
    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self.end_all)


current = Loops()


def leave() -> Any:
    """End this process at once, with code 1."""
    sys.stdout.flush()
    os._exit(1)
