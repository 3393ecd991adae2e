"""Read the rows of a batch in several threads."""

import threading
from collections.abc import Callable


def in_threads(fn: Callable[[int], None], numbers: range, num_threads: int) -> None:
    """Call `fn` with each number, in this thread and `num_threads - 1` others.

    Args:
      num_threads: number of threads, >= 1.
    """
    # Start threads for each batch: compared with slow reading, starting them costs little, and
    # none is left to stop. As daemons they do not keep a program alive.
    errors: dict[int, BaseException] = {}

    def call(start: int) -> None:
        for number in numbers[start::num_threads]:
            try:
                fn(number)
            except BaseException as error:
                errors[number] = error
            if errors:
                return

    starts = range(1, min(num_threads, len(numbers)))
    threads = [threading.Thread(target=call, args=(start,), daemon=True) for start in starts]
    for thread in threads:
        thread.start()
    call(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
