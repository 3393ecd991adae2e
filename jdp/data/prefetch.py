"""Making items ahead of time in a background thread, and stopping it."""

import atexit
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How long close() waits for the item that the thread is making. A loader that hangs must not hang
# whoever leaves the loop; the thread then ends by itself after that item, if ever.
JOIN_TIMEOUT_S = 5.0


def prefetch(items: Iterable[T], depth: int) -> Generator[T, None, None]:
    """Iterate over `items`, made at most `depth` ahead of the one that was last handed out.

    An exception of `items` reaches the consumer after the items before it, with its own traceback.
    The thread ends with the items, or when the generator is closed or dropped or the program ends.

    Args:
      items: what to iterate over, in the background thread only.
      depth: how many items may be ready and not handed out; 0 makes each when it is asked for, in
        the consumer's thread.

    >>> list(prefetch(range(3), depth=2))
    [0, 1, 2]
    """
    if depth == 0:
        yield from items
        return
    ahead = _Ahead(iter(items), depth)
    try:
        yield from ahead
    finally:
        ahead.close()


class _Ahead(Iterator[T], Generic[T]):
    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: SimpleQueue[tuple[Any, BaseException | None] | None] = SimpleQueue()
        self._free = threading.Semaphore(depth)
        self._stop = threading.Event()
        # The thread must not know this object: a thread that waits would keep it alive for ever.
        self._thread = threading.Thread(
            target=_produce,
            args=(items, self._ready, self._free, self._stop),
            name="jdp-prefetch",
            daemon=True,
        )
        self._thread.start()
        _running.add(self)

    def __next__(self) -> T:
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

    def close(self) -> None:
        if self._stop.is_set():  # while the interpreter ends, `threading` may be gone already
            return
        self._stop.set()
        self._free.release()
        if self._thread is not threading.current_thread():  # the garbage collector runs anywhere
            self._thread.join(JOIN_TIMEOUT_S)


# Takes the slot before it makes the item, so that no more than `depth` exist at any time: each may
# be a batch in device memory.
def _produce(
    items: Iterator[Any],
    ready: "SimpleQueue[tuple[Any, BaseException | None] | None]",
    free: threading.Semaphore,
    stop: threading.Event,
) -> None:
    try:
        while free.acquire() and not stop.is_set():
            ready.put((next(items), None))
    except StopIteration:
        pass
    except BaseException as error:
        ready.put((None, error))
    ready.put(None)


_running: "weakref.WeakSet[_Ahead[Any]]" = weakref.WeakSet()


# A thread that still puts batches on devices while the interpreter shuts down makes it abort.
@atexit.register
def _close_all() -> None:
    for ahead in list(_running):
        ahead.close()
