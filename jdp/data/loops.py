"""Loops over batches: read, sharded and placed ahead of time."""

import inspect
import itertools
import logging
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdp.axis import AxisName
from jdp.data import batch_checks, prefetcher
from jdp.data.batch_checks import require_equal_layouts
from jdp.data.dataset import Read, record_mask, with_mask
from jdp.data.host_arrays import RowError
from jdp.data.prefetcher import prefetch
from jdp.data.sampler import Sampler, continued, facts_of
from jdp.data.sharding import Layout, batch_sharding, num_blocks, process_rows
from jdp.data.uneven_data import hand_out_equally
from jdp.distributed import agree
from jdp.distributed.mesh import current_mesh
from jdp.validation import int_at_least
from jdp.worker import progress


class EpochPlan(NamedTuple):
    """One run's batches over a stream of rows."""

    batch_size: int
    end: int  # in rows of the stream
    num_steps: int | None  # None for epochs
    tail: str  # "pad" or "drop", for epochs
    # All batches have it or none, or the step would be traced again.
    has_mask: bool

    @classmethod
    def planned(
        cls,
        num_rows: int,
        batch_size: int,
        num_steps: int | None,
        epochs: int | None,
        tail: str,
        mask: bool | None = None,
    ) -> "EpochPlan":
        """Plan `num_steps` full batches, or `epochs` passes over all rows."""
        if tail not in ("pad", "drop"):
            raise ValueError(f'tail must be "pad" or "drop", got {tail!r}.')
        if num_steps is not None and epochs is None:
            end = int_at_least("num_steps", num_steps, least=1) * batch_size
        elif epochs is not None and num_steps is None:
            end = int_at_least("epochs", epochs, least=1) * num_rows
        else:
            raise ValueError(
                f"num_steps={num_steps} and epochs={epochs}: exactly one of them must be set, "
                "because it ends the run. Write num_steps=1000, or epochs=3."
            )
        may_be_short = tail == "pad" and num_steps is None
        if mask is False and may_be_short:
            raise ValueError(
                'mask=False with tail="pad" would count the rows that pad a short last batch. '
                'Remove mask, or drop that batch: tail="drop".'
            )
        run = cls(batch_size, end, num_steps, tail, may_be_short or bool(mask))
        if run.num_batches == 0:
            raise ValueError(
                f'tail="drop" leaves 0 batches: the run has {end} rows, a batch {batch_size}. '
                'Use a smaller batch_size, more epochs, or tail="pad".'
            )
        return run

    @property
    def num_batches(self) -> int:
        """The run's number of batches."""
        if self.num_steps is not None:
            return self.num_steps
        return self.num_left(0)

    def continued(self, position: int, num_done: int) -> "EpochPlan":
        """Return the run continued at a position, after batches of any size.

        A run of `num_steps` ends after so many batches in all, one of epochs at the same row.

        >>> run = EpochPlan.planned(100, 32, num_steps=60, epochs=None, tail="pad")
        >>> run.continued(40 * 64, num_done=40).num_left(40 * 64)
        20
        """
        if self.num_steps is None:
            return self
        return self._replace(end=position + max(0, self.num_steps - num_done) * self.batch_size)

    def num_left(self, position: int) -> int:
        """Count the batches from a position on."""
        full, rest = divmod(max(self.end - position, 0), self.batch_size)
        return full + (rest > 0 and self.tail != "drop")

    def next_rows(self, position: int) -> int:
        """Return the batch's rows at `position`, without padding; 0 after the end."""
        left = max(self.end - position, 0)
        if self.num_steps is not None and left:
            return self.batch_size
        if self.tail == "drop" and left < self.batch_size:
            return 0
        return min(left, self.batch_size)

    def padded_size(self, num_ranks: int) -> int:
        """Return a batch's padded size, a multiple of the number of ranks."""
        rows = -(-self.batch_size // num_ranks) * num_ranks
        if rows > self.batch_size and not self.has_mask:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by the {num_ranks} ranks, but "
                "all ranks need equally many rows. Write mask=True, which pads each batch to "
                f"{rows} rows and masks the padding, so the result is the same on any number of "
                f"ranks. Or use a multiple of {num_ranks}, such as {rows}."
            )
        return rows


_log = logging.getLogger("jdp")
_iterated: "weakref.WeakSet[Batches]" = weakref.WeakSet()


def is_handing_out() -> bool:
    """Whether a loop over `jdp.batches` runs."""
    return any(each._loop() is not None for each in tuple(_iterated))


# Two equal loops may be intended, as a comparison.
_MOST = 2


class RepeatedEpochs:
    """Loops of one epoch each, over the same rows in the same order; a single instance."""

    def __init__(self) -> None:
        self._rows: list[weakref.ref] = []  # of the counted loops
        self._seed, self._number = -1, 0

    def record(self, dataset: Any, seed: int) -> None:
        """Record a training loop of one shuffled epoch."""
        try:
            rows = [weakref.ref(leaf) for leaf in jax.tree.leaves(dataset)]
        except TypeError:  # values without weak references
            return
        before = [ref() for ref in self._rows]  # compared by identity
        is_same = len(before) == len(rows) and all(
            one is other() for one, other in zip(before, rows, strict=True)
        )
        if not is_same or seed != self._seed:
            self._rows, self._seed, self._number = rows, seed, 0
        self._number += 1
        if self._number == _MOST + 1:
            _log.warning(
                "jdp: %d epochs had the same order of rows, because each loop made jdp.batches "
                "anew with seed=%d. Write one jdp.batches(..., epochs=...), or another seed for "
                "each epoch.",
                self._number,
                seed,
            )


repeated_epochs = RepeatedEpochs()


class Target(NamedTuple):
    """Where batches are placed, and how many ahead."""

    axis_name: AxisName
    mesh: Mesh | None
    prefetch: int
    virtual_ranks: int | None = None

    def sharding(self) -> NamedSharding:
        """Return the sharding, by default over the mesh of `init`."""
        mesh = current_mesh() if self.mesh is None else self.mesh
        return batch_sharding(mesh, self.axis_name, self.virtual_ranks)

    def num_blocks(self) -> int:
        """Return the number of blocks of a batch."""
        return num_blocks(self.sharding()) if self.virtual_ranks is None else self.virtual_ranks


class Batches:
    """The batches of one run, from `position` to its end.

    A `for` loop starts at `position`: after a `break` the next loop continues with the next batch.
    After the run's end, another loop is an error unless `position` is set: to 0 for the same
    batches again. A new loop ends the previous one.

    `close`, or the end of a `with` block, ends a loop and its background thread.

    Args:
      read: reads rows of the dataset, given their numbers, [rows] int.
      allows_new_data: whether `set_state` accepts another stream's state.
      check: compares rows between the processes; None if they may differ.
    """

    def __init__(
        self,
        read: Read,
        sampler: Sampler,
        run: EpochPlan,
        target: Target,
        dataset: Any,
        *,
        allows_new_data: bool,
        check: batch_checks.RowCheck | None,
    ) -> None:
        self._read, self._sampler, self._run, self._target = read, sampler, run, target
        self._dataset = dataset
        self._allows_new_data, self._check = allows_new_data, check
        self._num_unchecked = batch_checks.MIN_BATCHES  # since the last comparison of rows
        self._position = self._num_done = 0  # rows and batches since the run began
        self._handed_out = False  # a batch was yielded since the position was set
        self._current: weakref.ref[Generator[Any, None, None]] | None = None

    @property
    def position(self) -> int:
        """The number of rows that loops got since the run began, without rows read ahead.

        Set it, outside a loop, to continue there, also with another batch size or number of ranks.
        To save it, save `get_state()` after the step that used the batch.
        """
        return self._position

    @position.setter
    def position(self, rows: int) -> None:
        if self._loop() is not None:
            raise RuntimeError(
                f"position cannot be set to {rows} while a loop runs over these batches, because "
                "some are already prefetched. End the loop, or call close() first."
            )
        self._handed_out = False
        rows = int_at_least("position", rows, least=0)
        if rows == self._position:
            return  # batches of other sizes may have led there
        self._position = rows
        self._num_done = self._position // self._run.batch_size
        self._run = self._run.continued(self._position, self._num_done)

    def get_state(self) -> dict[str, Any]:
        """Return the position and the facts that determine the stream of rows, for JSON.

        `jdp.Checkpointer` saves this with a run's state.
        """
        own = {"position": self._position, "num_batches": self._num_done}
        return own | facts_of(self._sampler)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, in the same order of the rows.

        A run by `num_steps` has so many batches in all, even after another batch size.
        """
        if not isinstance(state, Mapping) or "position" not in state:
            raise ValueError(
                f"{state!r:.200} has no `position`. Pass a state from get_state of "
                "jdp.batches(...)."
            )
        sampler = continued(self._sampler, state, allows_new_data=self._allows_new_data)
        num_done = int_at_least("num_batches", state.get("num_batches", 0), least=0)
        self.position = state["position"]
        self._sampler, num_full = sampler, self._position // self._run.batch_size
        self._num_done = num_done if "num_batches" in state else num_full
        self._run = self._run.continued(self._position, self._num_done)
        progress.own.is_complete = not self._run.num_left(self._position)
        if self._position and not jax.process_index():
            is_news = num_full != self._num_done or not self._run.num_left(self._position)
            _log.log(logging.WARNING if is_news else logging.INFO, "jdp: %s", self._what_is_left())

    def _what_is_left(self) -> str:
        run = self._run
        if not run.num_left(self._position):
            return (
                f"the run is complete: all {self._num_done} batches are done, so a loop over "
                "them runs 0 steps. To train longer, increase num_steps or epochs"
            )
        return (
            f"{run.num_left(self._position)} of {len(self)} batches of {run.batch_size} rows are "
            f"left, after {self._num_done} with {self._position:,} rows"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0."""
        return self._position // self._sampler.num_rows

    def __repr__(self) -> str:
        sampler, run = self._sampler, self._run
        return (
            f"<jdp.batches of {sampler.num_rows:,} rows: {self._num_done} of {len(self)} batches "
            f"of {run.batch_size} rows handed out, shuffle={sampler.shuffle}, seed={sampler.seed}>"
        )

    def __len__(self) -> int:
        """The whole run's number of batches, for any position."""
        return self._run.num_batches

    def __iter__(self) -> Iterator[Any]:
        self.close()
        if self._handed_out and not self._run.next_rows(self._position):
            raise RuntimeError(
                f"all {len(self)} batches of this run were used, so another loop would get none. "
                "To train longer increase epochs or num_steps, which gives each epoch a new "
                "order. To repeat the same batches set position = 0."
            )
        loop = self._hand_out()
        self._current = weakref.ref(loop)
        _iterated.add(self)
        return loop

    def close(self) -> None:
        """End the running loop over these batches and its thread; the position stays."""
        loop = self._loop()
        if loop is not None:
            loop.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # A weak reference, so a `for` loop's generator ends with the loop.
    def _loop(self) -> Generator[Any, None, None] | None:
        loop = None if self._current is None else self._current()
        return loop if loop and inspect.getgeneratorstate(loop) != inspect.GEN_CLOSED else None

    def _hand_out(self) -> Generator[Any, None, None]:
        sharding = self._target.sharding()
        size = self._run.padded_size(self._target.num_blocks())
        mine = process_rows(sharding, size)
        host_batches = _HostBatches(self._read, self._sampler, self._run, self._position, mine)
        peers = agree.peers(sharding.mesh)  # type: ignore[arg-type]
        if len(peers) > 1:
            host_batches.check, host_batches.num_unchecked = self._check, self._num_unchecked
        facts = f"{self._sampler}, {self._run}, position={self._position}"
        begin, num_steps = self._position, progress.own.num_steps
        with closing(place(host_batches, self._target, facts)) as placed:
            for batch in placed:
                if (sums := host_batches.checksums.pop(self._position, None)) is not None:
                    batch_checks.require_equal(peers, sums)
                    self._num_unchecked = 0
                self._num_unchecked += 1
                num_rows = self._run.next_rows(self._position)
                self._position += num_rows
                self._num_done += 1
                counter = progress.own.slot.counter
                counter.next_rows = num_rows  # without padding
                counter.num_left = self._run.num_left(self._position)
                self._handed_out = True
                if self._run.has_mask:
                    record_mask(batch)
                yield batch
        num_steps = progress.own.num_steps - num_steps
        is_epoch = begin == 0 and self._position == self._sampler.num_rows
        if self._sampler.shuffle and is_epoch and num_steps >= len(self):
            repeated_epochs.record(self._dataset, self._sampler.seed)


def why_repeated(batches: Batches) -> str:
    """Return a sentence about rows that a whole pass reads once more than others, or ""."""
    run, num_rows = batches._run, batches._sampler.num_rows
    num_more = run.end % num_rows
    if run.num_steps is None or run.end <= num_rows or not num_more:
        return ""
    return (
        f"evaluate reads {run.end:,} rows of a dataset of {num_rows:,}: {num_more:,} of them count "
        f"once more than the others.\nWrite epochs=1 in place of num_steps={run.num_steps}."
    )


_NUM_NAMED = 16


class _HostBatches(Iterator[Any]):
    """This process's host batches, from a position of the run.

    `mine` is [rows] int, this process's rows within a batch; `rows` is [rows] int, the dataset's
    rows read last. `checksums`: of rows to compare, by the next batch's position.
    """

    def __init__(
        self, read: Read, sampler: Sampler, run: EpochPlan, position: int, mine: np.ndarray
    ) -> None:
        self.rows = np.empty(0, int)
        self._read, self._sampler, self._run, self._mine = read, sampler, run, mine
        self._position = position
        self._epoch: int | None = None
        self.checksums: dict[int, dict[str, int]] = {}
        self.check: batch_checks.RowCheck | None = None
        self.num_unchecked = 0

    def __next__(self) -> Any:
        count = self._run.next_rows(self._position)
        if not count:
            raise StopIteration
        self._read_to_compare()
        # Pad with the last valid row; the last ranks may have only padding.
        places = np.minimum(self._mine, count - 1)
        self.rows = self._sampler.rows_at(self._position + places)
        batch = self._read(self.rows)
        self._position += count
        return with_mask(batch, self._mine < count) if self._run.has_mask else batch

    def _read_to_compare(self) -> None:
        """Read rows to compare where a loop or epoch begins, unless some just were."""
        before, self._epoch = self._epoch, self._position // self._sampler.num_rows
        if self.check is None:
            return
        # All processes count equally many batches, unlike seconds.
        if self._epoch != before and self.num_unchecked >= batch_checks.MIN_BATCHES:
            self.rows = self.check.drawn(self._epoch)
            self.checksums[self._position] = self.check.checksums(self.rows)
            self.num_unchecked = 0
        self.num_unchecked += 1

    def note_of(self, error: Exception) -> str:
        """Return a sentence with the dataset's rows in an error."""
        if isinstance(error, RowError):
            return f"jdp: that is row {self.rows[error.row]} of the dataset."
        rows = ", ".join(map(str, self.rows[:_NUM_NAMED])) + ", ..." * (len(self.rows) > _NUM_NAMED)
        return f"jdp: in the batch of the rows {rows} of the dataset."


_END = object()


def place(
    host_batches: Iterator[Any], target: Target, facts: str = ""
) -> Generator[Any, None, None]:
    """Place this process's batches in a thread, and yield global batches."""
    sharding = target.sharding()
    assert isinstance(sharding.mesh, Mesh)
    # Hang reports say that this process waits for data.
    with progress.DATA:
        prefetcher.active_loops.raise_pending()
        peers = agree.peers(sharding.mesh)
        with agree.propagating_errors(peers, "while it made its first batch"):
            first = next(host_batches, _END)
            layout = None if first is _END else Layout.of_batch(first, sharding)
        require_equal_layouts(peers, layout, facts, None if facts else first)
    if layout is None:
        return
    placed = prefetch(_placed(layout, first, host_batches), target.prefetch)
    del first  # the thread holds it
    with closing(hand_out_equally(placed, sharding)) as batches:
        for number in itertools.count():
            with progress.DATA:
                item = next(batches, None)
                if item is None:
                    return
                before = layout
                layout, batch = item
                if layout is not before:  # all processes must run the same program
                    name = f"batch {number} of a loop, which has new shapes"
                    require_equal_layouts(peers, layout, facts, what=name)
            progress.own.slot.counter.next_rows = layout.num_rows
            yield batch


def _placed(
    layout: Layout, first: Any, host_batches: Iterator[Any]
) -> Iterator[tuple[Layout, Any]]:
    for batch in chain([first], host_batches):
        try:
            layout = layout.of_later(batch)
            yield layout, layout.place(batch)
        except (TypeError, ValueError) as error:
            if isinstance(host_batches, _HostBatches):
                error.add_note(host_batches.note_of(error))
            raise
