"""Computes items ahead in a background thread."""

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from jdp.distributed.fail_fast import leave_if_failed
from jdp.worker import watching

# The wait for the item in progress is bounded, since a loader may hang.
JOIN_TIMEOUT_S = 5.0


class Compared(Protocol):
    """A loop to compare with other processes' at its end."""

    def stop(self) -> None:
        """End the loop at program exit, and wait for other processes."""
        ...

    def raise_problem(self) -> None:
        """Raise the loop's problem once."""
        ...


class Loops:
    """All running loops; `active_loops` is the only instance.

    Attributes:
      readers: threads that read ahead.
      compared: loops whose equal end on all processes is unconfirmed.
    """

    def __init__(self) -> None:
        self.readers: set[_Producer] = set()
        self.compared: set[Compared] = set()
        self._is_registered = False

    def add_reader(self, reader: "_Producer") -> None:
        """Record a thread, until `end_reader`."""
        self._register()
        self.readers.add(reader)

    def end_reader(self, reader: "_Producer") -> None:
        """End a thread that reads ahead."""
        self.readers.discard(reader)
        if reader.ask_to_end():
            reader.join(JOIN_TIMEOUT_S)

    def add_compared(self, loop: Compared) -> None:
        """Record a loop that processes compare."""
        self._register()
        self.compared.add(loop)

    def raise_pending(self) -> None:
        """Raise the problem of a loop left by this process."""
        for loop in list(self.compared):
            loop.raise_problem()

    def end_all(self) -> None:
        """End all loops; exit with code 1 if one ended differently elsewhere."""
        leave_if_failed()
        watching.record_end()
        for loop in list(self.compared):
            loop.stop()
        if self.compared:  # only loops with a problem are left
            with contextlib.suppress(ValueError, RuntimeError):
                self.raise_pending()
            leave()  # JAX's exit handler would wait minutes for the others
        self.end_readers()

    def end_readers(self) -> None:
        """End all readers: one that places batches at shutdown aborts Python."""
        waiting = [reader for reader in list(self.readers) if reader.ask_to_end()]
        end = time.monotonic() + JOIN_TIMEOUT_S
        for reader in waiting:
            reader.join(max(0.0, end - time.monotonic()))

    # Handlers run in reverse order; this one must run before JAX's, which closes its store.
    def _register(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self.end_all)


active_loops = Loops()


def leave() -> Any:
    """Exit this process at once, with code 1."""
    sys.stdout.flush()
    os._exit(1)


T = TypeVar("T")

_NUM_FRAMES = 4


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Iterate over `items`, of which a thread computes at most `depth` ahead."""
    if depth == 0:
        yield from items
        return
    # The thread must not keep this generator alive.
    producer = _Producer(iter(items), depth)
    producer.start()
    loops = active_loops  # at interpreter exit the module may be cleared
    loops.add_reader(producer)
    try:
        yield from producer
    finally:
        loops.end_reader(producer)


class _Producer(threading.Thread):
    def __init__(self, items: Iterator[Any], depth: int) -> None:
        super().__init__(name="jdp-prefetch", daemon=True)
        self._items = items
        self._ready: SimpleQueue[tuple[Any, BaseException | None] | None] = SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._is_asked = threading.Event()

    def run(self) -> None:
        try:
            # First, so at most `depth` items exist, each perhaps on a device.
            while self._free.acquire() and not self._is_asked.is_set():
                self._ready.put((next(self._items), None))
        except StopIteration:
            pass
        except BaseException as error:
            self._ready.put((None, error))
        self._ready.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            ready = self._ready.get()
        except KeyboardInterrupt as error:
            error.add_note(f"jdp: while it waited for the loader, which was at:\n{self._place()}")
            raise
        if ready is None:
            raise StopIteration
        self._free.release()
        item, error = ready
        if error is None:
            return item
        try:
            raise error
        finally:
            del ready, error  # `error`'s traceback has this frame

    def _place(self) -> str:
        frame = sys._current_frames().get(self.ident or 0)
        stack = traceback.extract_stack(frame)[-_NUM_FRAMES:] if frame else []
        return "".join(traceback.format_list(stack)).rstrip()

    def ask_to_end(self) -> bool:
        if self._is_asked.is_set():  # at interpreter exit `threading` may be cleared
            return False
        self._is_asked.set()
        self._free.release()
        return self is not threading.current_thread()  # garbage collection may run in any thread
