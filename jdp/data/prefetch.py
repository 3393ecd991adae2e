"""Compute items ahead of time in a background thread, and stop the thread."""

import sys
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

from jdp.data import active_iterator

T = TypeVar("T")

_NUM_FRAMES = 4


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Iterate over `items`, computing at most `depth` of them ahead of the consumer.

    An exception in `items` reaches the consumer after the items before it, with its own traceback.
    The thread ends with the items, when the generator is closed or deleted, or with the program.

    >>> list(prefetch(range(3), depth=2))
    [0, 1, 2]
    """
    if depth == 0:
        yield from items
        return
    # The thread must not reference this generator, or it would keep it alive forever.
    producer = _Producer(iter(items), depth)
    producer.start()
    loops = active_iterator.current  # at interpreter exit the module may already be cleared
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
            # Take a slot before computing the item, so that at most `depth` items exist at any
            # time: each may be a batch in device memory.
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
            error.add_note(f"jdp: while it waited for the loader, which was here:\n{self._place()}")
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
            del ready, error  # this frame is in the traceback of `error` and would hold it

    def _place(self) -> str:
        frame = sys._current_frames().get(self.ident or 0)
        stack = traceback.extract_stack(frame)[-_NUM_FRAMES:] if frame else []
        return "".join(traceback.format_list(stack)).rstrip()

    def ask_to_end(self) -> bool:
        """Request the thread to end after its item, and return whether a caller should wait."""
        if self._is_asked.is_set():  # at interpreter exit `threading` may already be cleared
            return False
        self._is_asked.set()
        self._free.release()
        return self is not threading.current_thread()  # garbage collection may run in any thread
