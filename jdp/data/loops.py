"""Loops over batches: read, split and placed on the devices ahead of time."""

import inspect
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdp.axis import AxisName
from jdp.data.dataset import Read, record_mask, with_mask
from jdp.data.first_batch_check import first_batch
from jdp.data.prefetch import prefetch
from jdp.data.run import Run
from jdp.data.sampler import Sampler
from jdp.data.sharding import batch_sharding, num_blocks, process_rows
from jdp.data.uneven_loops import hand_out_equally, raise_pending
from jdp.distributed.mesh import current_mesh
from jdp.validation import int_at_least
from jdp.worker import progress


class Target(NamedTuple):
    """The sharding of batches, and the number placed ahead of time."""

    axis_name: AxisName
    mesh: Mesh | None
    prefetch: int

    def sharding(self) -> NamedSharding:
        """Return the sharding of the batches, over the mesh of `init` if none was given."""
        mesh = current_mesh() if self.mesh is None else self.mesh
        return batch_sharding(mesh, self.axis_name)


class Batches:
    """The batches of one run, from `position` to its end.

    A `for` loop goes on at `position`: after a `break` the next loop continues with the next batch.
    Once the end was reached another loop is an error, unless `position` is set: to 0 for the same
    batches again. Only one loop runs at a time; a new one ends the one before.

    `close`, also by `with`, ends a loop and its background thread.
    """

    def __init__(
        self, read: Read, sampler: Sampler, run: Run, target: Target, allow: str | None
    ) -> None:
        self._read, self._sampler, self._run, self._target = read, sampler, run, target
        self._allow = allow
        self._position = 0
        self._handed_out = False  # whether a batch was handed out since the position was set
        self._current: weakref.ref[Generator[Any, None, None]] | None = None

    @property
    def position(self) -> int:
        """Rows that were handed out since the run began; those read ahead do not count.

        Set it, outside a loop, to continue there, also with another batch size or on another number
        of ranks. To save where a run stands, save `get_state()` after the step that used the batch.
        """
        return self._position

    @position.setter
    def position(self, rows: int) -> None:
        if self._loop() is not None:
            raise RuntimeError(
                f"position cannot be set to {rows} while a loop runs over these batches: some are "
                "already read ahead. Leave the loop, or call close() first."
            )
        self._position = int_at_least("position", rows, least=0)
        self._handed_out = False

    def get_state(self) -> dict[str, Any]:
        """Return the position and the facts of the stream that it counts in, as JSON can hold them.

        `jdp.Checkpointer` saves it with the state of a run.
        """
        return {"position": self._position} | self._facts()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, in the same order of the rows.

        Args:
          state: from `get_state`; or `{"position": rows}` of a run that began with jdp 0.1.

        Raises:
          ValueError: if the stream has another number of rows, `seed` or `shuffle`, without
            `allow="new data"`.
          RuntimeError: if a loop runs over these batches.
        """
        saved = {"order": 1} | dict(state)
        position, order = saved.pop("position"), saved.pop("order")
        facts = self._facts()
        other = {name: value for name, value in saved.items() if facts.get(name) != value}
        if other and self._allow is None:
            differences = "; ".join(f"{k} was {v}, is {facts.get(k)}" for k, v in other.items())
            raise ValueError(
                f"the batches are not those that the run began with: {differences}. From position "
                f"{position} on, rows would repeat and others never come. Give jdp.batches the "
                'same dataset, seed and shuffle; or, to go on with others, allow="new data".'
            )
        self.position = position
        if not other:
            facts["order"] = order
            self._sampler = Sampler(batch_size=self._sampler.batch_size, **facts)

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0 on."""
        return self._position // self._sampler.num_rows

    def __len__(self) -> int:
        """The number of batches of the whole run, wherever the position is."""
        return self._run.num_batches

    def __iter__(self) -> Iterator[Any]:
        self.close()
        if self._handed_out and not self._run.next_rows(self._position):
            raise RuntimeError(
                f"all {len(self)} batches of this run were handed out, and another loop would get "
                "none. To train for longer ask for more epochs or num_steps, so that each epoch "
                "has an order of its own. To go through the same batches again set position = 0."
            )
        loop = self._hand_out()
        self._current = weakref.ref(loop)
        return loop

    def close(self) -> None:
        """End the loop over these batches, if there is one, and its thread; the position stays."""
        loop = self._loop()
        if loop is not None:
            loop.close()

    def __enter__(self) -> "Batches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # These determine the stream.
    def _facts(self) -> dict[str, Any]:
        names = "num_rows", "seed", "shuffle", "order"
        return {name: getattr(self._sampler, name) for name in names}

    # A weak reference, so that leaving a `for` loop ends its generator.
    def _loop(self) -> Generator[Any, None, None] | None:
        loop = None if self._current is None else self._current()
        return loop if loop and inspect.getgeneratorstate(loop) != inspect.GEN_CLOSED else None

    def _hand_out(self) -> Generator[Any, None, None]:
        sharding = self._target.sharding()
        size = self._run.padded_size(num_blocks(sharding))
        mine = process_rows(sharding, size)
        host_batches = _read(self._read, self._sampler, self._run, self._position, mine)
        facts = f"{self._sampler}, {self._run}, position={self._position}"
        with closing(place(host_batches, self._target, facts)) as placed:
            for batch in placed:
                self._position += self._run.next_rows(self._position)
                self._handed_out = True
                if self._run.has_mask:
                    record_mask(batch)
                yield batch


def _read(read: Read, sampler: Sampler, run: Run, position: int, mine: np.ndarray) -> Iterator[Any]:
    while count := run.next_rows(position):
        # The last valid row is repeated as padding; the last ranks may hold only padding.
        batch = read(sampler.rows_at(position + np.minimum(mine, count - 1)))
        yield with_mask(batch, mine < count) if run.has_mask else batch
        position += count


_END = object()


def place(
    host_batches: Iterator[Any], target: Target, facts: str = ""
) -> Generator[Any, None, None]:
    """Place the batches of this process, in a thread, and hand them out as global batches."""
    sharding = target.sharding()
    # The phase shows the hang detector that this process waits for data, not for another process.
    with progress.DATA:
        raise_pending()
        begin = first_batch(host_batches, sharding, facts)
    if begin is None:
        return
    first, layout = begin
    placed = prefetch(map(layout.place, chain([first], host_batches)), target.prefetch)
    with closing(hand_out_equally(placed, sharding)) as batches:
        while True:
            with progress.DATA:
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch
