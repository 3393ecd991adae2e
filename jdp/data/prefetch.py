"""Makes items ahead of time in a background thread, and stops the thread."""

import atexit
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

# How long the end of a loop waits for the item in progress. A loader that hangs must not block the
# program that leaves the loop; its thread then ends after that item, if it ever finishes.
JOIN_TIMEOUT_S = 5.0


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Iterate over `items`, made at most `depth` ahead of the one that was last handed out.

    An exception of `items` reaches the consumer after the items before it, with its own traceback.
    The thread ends with the items, or when the generator is closed or dropped or the program ends.

    Args:
      items: what to iterate over, in the background thread only.
      depth: maximum number of items ready and not handed out. 0 makes each item on demand in the
        consumer's thread.

    >>> list(prefetch(range(3), depth=2))
    [0, 1, 2]
    """
    if depth == 0:
        yield from items
        return
    # The thread must not reference this generator, or a waiting thread would keep it alive forever.
    producer = _Producer(iter(items), depth)
    producer.start()
    _running.add(producer)
    try:
        yield from producer
    finally:
        if producer.ask_to_end():
            producer.join(JOIN_TIMEOUT_S)


class _Producer(threading.Thread):
    def __init__(self, items: Iterator[Any], depth: int) -> None:
        super().__init__(name="jdp-prefetch", daemon=True)
        self._items = items
        self._ready: SimpleQueue[tuple[Any, BaseException | None] | None] = SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._is_asked = threading.Event()

    def run(self) -> None:
        try:
            # The slot comes before the item, so that no more than `depth` exist at any time: each
            # may be a batch in device memory.
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
        ready = self._ready.get()
        if ready is None:
            raise StopIteration
        self._free.release()
        item, error = ready
        if error is None:
            return item
        try:
            raise error
        finally:
            del ready, error  # else this frame, in the traceback of `error`, holds `error`

    def ask_to_end(self) -> bool:
        """Request the thread to end after its item, and return whether to wait for it."""
        if self._is_asked.is_set():  # at interpreter exit `threading` may already be cleared
            return False
        self._is_asked.set()
        self._free.release()
        return self is not threading.current_thread()  # garbage collection may run in any thread


_running: "weakref.WeakSet[_Producer]" = weakref.WeakSet()


# The interpreter aborts if a thread places batches on devices during shutdown.
@atexit.register
def _end_all() -> None:
    waiting = [producer for producer in list(_running) if producer.ask_to_end()]
    end = time.monotonic() + JOIN_TIMEOUT_S
    for producer in waiting:
        producer.join(max(0.0, end - time.monotonic()))
