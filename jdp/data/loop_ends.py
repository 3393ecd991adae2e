"""Compare how the processes ended their loops over batches."""

from typing import NamedTuple

from jdp.error_codes import with_code


class LoopEnd(NamedTuple):
    """How a process ended its loop. If it is "on", it requested that batch instead.

    >>> print(LoopEnd(1, 9, "end"))
    process 1 ended its loop after 9 batches
    """

    process: int
    num_batches: int  # number of batches that the loop got
    how: str  # "end", "left", "error" or "on"
    text: str = ""

    def __str__(self) -> str:
        how = {
            "end": "ended its loop after {} batches",
            "left": "left its loop (break or an error) after {} batches",
            "on": "continued to batch {}",
            "error": "could not make batch {}",
        }[self.how]
        number = self.num_batches + (self.how == "error")
        return f"process {self.process} {how.format(number)}"


class Problem(NamedTuple):
    """The reason why no process can continue."""

    is_failure: bool  # whether the loader of a process failed
    text: str


def problem_of(first: LoopEnd, mine: LoopEnd) -> Problem | None:
    """Return the problem of a loop that ended in `first`, for the process with the end `mine`.

    None if both got equally many batches, or if `mine` may still get as many.

    >>> print(problem_of(LoopEnd(0, 9, "end"), LoopEnd(1, 10, "on")).text)  # doctest: +ELLIPSIS
    process 0 ended its loop after 9 batches, but process 1 continued to batch 10: each step ...
    """
    for end in (mine, first):
        if end.how == "error":
            text = f"{end}, so no process can continue: {end.text}"
            return Problem(True, with_code("JDP208", text))
    is_behind = mine.how == "on" and mine.num_batches < first.num_batches
    if is_behind or mine.num_batches == first.num_batches:
        return None
    text = (
        f"{first}, but {mine}: each step needs the rows of all ranks. Give every process equally "
        "many batches, such as itertools.islice(loader, n) with the smallest number of all, and "
        "leave a loop early on all processes or on none."
    )
    return Problem(False, with_code("JDP210", text))
