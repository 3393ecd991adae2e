"""Find the argument of a step that differs between processes, and say why that matters."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdp import pytrees
from jdp.distributed import agree

PART = " part "  # separates a leaf's name from its part's position along further axes

WHY = "Ranks that get other arguments train different models, or wait for each other forever."
ADVICE_FOR_STATE = (
    "A program changed the state after the step that returned it: do so on all processes and with "
    "equal values, outside of `if jax.process_index() == 0` and of what one process alone has read "
    "or drawn; or change it inside the step. State of one rank goes into jdp.per_rank(x)."
)
ADVICE = (
    "Give every process the same: a key from the same seed, the same numbers. Random numbers of a "
    "rank's own come from state.key, and what is meant to differ goes into the batch."
)


def first_difference(gathered: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return a sentence that names the first leaf that differs and its process, None if none does.

    >>> first_difference({0: {"key": "a"}, 1: {"key": "a"}, 2: {"key": "b"}})
    '`key` has other values on process 2 than on process 0.'
    """
    if len(gathered) < 2:
        return None
    for name in dict.fromkeys(name for each in gathered.values() for name in each):
        found = {process: each[name] for process, each in gathered.items() if name in each}
        name, part, _ = name.partition(PART)
        if pair := agree.odd_one(found):
            odd, usual = pair
            values = [found[process].partition(" = ")[2] for process in (odd, usual)]
            shown = f": {values[0]} instead of {values[1]}" if all(values) else ""
            return f"`{name}` has other values on process {odd} than on process {usual}{shown}."
        lacking = next((process for process in gathered if process not in found), None)
        if lacking is not None and not part:  # a process need not hold every part
            return (
                f"`{name}` was replaced between steps on process {next(iter(found))}, and not on "
                f"process {lacking}."
            )
    return None


def described(leaf: Any) -> str:
    """Return dtype, shape and digest of a leaf, and its values if there are at most four."""
    leaf = pytrees.without_key(leaf)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = leaf.addressable_data(0)
    value = np.asarray(leaf)
    shown = f" = {value.tolist()}" if value.size <= 4 else ""
    return f"{value.dtype}{[*value.shape]} {agree.digest(value)}{shown}"
