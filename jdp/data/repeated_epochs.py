"""Warns of epochs that repeat one order of rows because each makes `jdp.batches` anew."""

import logging
import weakref
from typing import Any

import jax

_log = logging.getLogger("jdp")
# The third epoch: two loops of equal order may be meant, to compare something.
_MOST = 2


class RepeatedEpochs:
    """Loops of one epoch each, over the same rows in the same order; there is one, `current`."""

    def __init__(self) -> None:
        self._rows: list[weakref.ref] = []  # of the loops that are counted
        self._seed, self._number = -1, 0

    def record(self, dataset: Any, seed: int) -> None:
        """Record a loop of one shuffled epoch, whose batches were trained on."""
        try:
            rows = [weakref.ref(leaf) for leaf in jax.tree.leaves(dataset)]
        except TypeError:  # values that cannot be referred to
            return
        before = [ref() for ref in self._rows]  # arrays are compared by identity, not by value
        is_same = len(before) == len(rows) and all(
            one is other() for one, other in zip(before, rows, strict=True)
        )
        if not is_same or seed != self._seed:
            self._rows, self._seed, self._number = rows, seed, 0
        self._number += 1
        if self._number == _MOST + 1:
            _log.warning(
                "jdp: %d epochs had one order of rows, as each loop made jdp.batches anew with "
                "seed=%d. Write one jdp.batches(..., epochs=...), or another seed for each epoch.",
                self._number,
                seed,
            )


current = RepeatedEpochs()
