"""From rows to batches on the devices: read, split and placed ahead of time."""

import inspect
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jdp.axis import AxisName
from jdp.data.dataset import Read, reader, record_mask, with_mask
from jdp.data.first_batch_check import first_batch
from jdp.data.prefetch import prefetch as prefetched
from jdp.data.sampler import Run, Sampler
from jdp.data.sharding import batch_sharding, num_blocks, process_rows
from jdp.data.uneven_loops import hand_out_equally, raise_pending
from jdp.distributed.mesh import current_mesh
from jdp.validation import int_at_least
from jdp.worker import progress


def batches(
    dataset: Any,
    batch_size: int,
    *,
    num_steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    tail: str = "pad",
    mask: bool | None = None,
    position: int = 0,
    axis_name: AxisName = "data",
    mesh: Mesh | None = None,
    prefetch: int = 2,
    read_threads: int = 1,
    allow: str | None = None,
) -> "Batches":
    """Read a dataset in batches that lie split over all ranks.

    Every row comes once per epoch, in the order of `Sampler`, which does not depend on the number
    of ranks. With `num_steps` all batches are full and run across the ends of epochs. With `epochs`
    only the very last batch of the run may be short: it is padded with rows that do not count, and
    a mask in every batch says which do. All batches of a run have the same leaves and shapes.

    Where batches have a mask they have the same rows on any number of ranks: what does not divide
    is padded to a multiple of the ranks. 12 rows on 5 ranks are 15, of which the last 3, all of
    rank 4, do not count. Without a mask that is an error.

    The mask, [rows] bool, True for a row that counts, is the key "mask" of a dict, the last
    element of a tuple, and makes any other batch x the tuple (x, mask). Write
    `@jdp.train_step(weight=lambda batch: batch["mask"].sum())` to leave the padding out: gradients
    are then those of the rows that count, also where a rank has none.

    Args:
      dataset: an array with rows as its first dim; a dict, mapping or tuple of such arrays, equally
        long (NumPy, memory-mapped, JAX, h5py, columns of pandas, or any other that takes an array
        of increasing row numbers); a DataFrame, as the dict of its columns; or anything with
        `__len__` and `__getitem__` that returns one row, a tree of numbers and arrays of equal
        shapes. Rows are read in a background thread, and copied: their memory may be used again.
        Transform them in `__getitem__`.
      batch_size: rows of one batch over all ranks, of all processes, at least 1; without a mask a
        multiple of the number of ranks. Each process reads its own rows only.
      num_steps: number of batches, at least 1. Give this or `epochs`.
      epochs: how often every row comes, at least 1.
      seed: of the order, non-negative; the same on all processes.
      shuffle: False keeps the dataset's own order.
      tail: what becomes of a short last batch of a run by `epochs`. "pad": it is padded, and every
        batch has a mask, whether or not the last is short. "drop": it is left out.
      mask: True: every batch has a mask, so that any `batch_size` does on any number of ranks.
        Default: only in a run by `epochs` with `tail="pad"`.
      position: where to begin, in rows of the whole run: a saved `Batches.position`.
      axis_name: the mesh axis or axes that split the batch.
      mesh: default: that of `jdp.init`, looked up when a loop begins.
      prefetch: number of batches to place ahead; 0 reads in the caller's thread.
      read_threads: how many threads call the `__getitem__` that returns one row, at least 1. More
        than 1 is for reading that waits (disk, network) or decodes outside of the GIL, and for a
        `__getitem__` that several threads may call at once. The order stays the same.
      allow: "new data" lets a run go on with another number of rows, `seed` or `shuffle` than it
        began with, from the same position of the new stream. Default: that is an error.

    Returns:
      The batches, trees of `jax.Array`, for a `for` loop. See `Batches`.

    Raises:
      ValueError: if not exactly one of `num_steps` and `epochs` is given, a number is out of its
        range, arrays have different numbers of rows, or batches without a mask do not divide by
        the number of ranks (here if `mesh` is given, else when a loop begins).
      TypeError: if the dataset is none of the above.

    >>> mesh = Mesh(jax.devices()[:1], "data")
    >>> data = {"x": np.arange(5)}
    >>> for batch in batches(data, 3, epochs=1, shuffle=False, mesh=mesh):
    ...     print(batch["x"], batch["mask"])
    [0 1 2] [ True  True  True]
    [3 4 4] [ True  True False]
    """
    num_rows, read = reader(dataset, int_at_least("read_threads", read_threads, least=1))
    sampler = Sampler(num_rows, batch_size, seed=seed, shuffle=shuffle)
    run = Run.planned(num_rows, sampler.batch_size, num_steps, epochs, tail, mask)
    target = _Target(axis_name, mesh, int_at_least("prefetch", prefetch, least=0))
    if allow not in (None, "new data"):
        raise ValueError(f'allow={allow!r}: write "new data", or leave it out.')
    if mesh is not None:
        run.padded_size(num_blocks(target.sharding()))
    result = Batches(read, sampler, run, target, allow)
    result.position = position
    return result


def shard_batches(
    loader: Iterable[Any],
    *,
    axis_name: AxisName = "data",
    mesh: Mesh | None = None,
    prefetch: int = 2,
) -> Generator[Any, None, None]:
    """Place the batches of any loader, each process its own part of the global batch.

    For what reads and shuffles by itself: a PyTorch DataLoader, grain, a generator. The loader must
    know which rows are this process's, and give every process equally many batches; where one ends
    or leaves its loop after another number, all are told. The first batches of all processes are
    compared, once; every later one must look like the first. Values are copied, so that the loader
    may use its memory again.

    Args:
      loader: this process's host batches: trees of arrays, or of what converts to NumPy (a tensor
        in the host's memory), with equal first dims. The rows are split over the process's ranks.
      axis_name: the mesh axis or axes that split the batch.
      mesh: default: that of `jdp.init`, looked up when the loop begins.
      prefetch: number of batches to place ahead; 0 asks the loader in the caller's thread.

    Returns:
      An iterator over the global batches, once through; call again for the next epoch. Leaving the
      loop, or `close`, ends the background thread; batches that it has read ahead are lost.

    Raises:
      TypeError, ValueError: in the loop, before the batch is placed: a leaf is not of numbers or is
        a scalar; rows differ between leaves or processes, or do not divide by the process's ranks;
        a later batch differs from the first; processes hand out different numbers of batches.
      RuntimeError: the loader of another process raised an error, or does not get on.

    >>> loader = ({"x": np.full(2, i)} for i in range(2))
    >>> placed = shard_batches(loader, mesh=Mesh(jax.devices()[:1], "data"))
    >>> [batch["x"].tolist() for batch in placed]
    [[0, 0], [1, 1]]
    """
    target = _Target(axis_name, mesh, int_at_least("prefetch", prefetch, least=0))
    return _place(_copies(loader), target)


class Batches:
    """The batches of one run, from `position` to its end.

    A `for` loop goes on at `position`: after a `break` the next loop continues with the next batch.
    Once the end was reached another loop is an error, unless `position` is set: to 0 for the same
    batches again. Only one loop runs at a time; a new one ends the one before.

    `close`, also by `with`, ends a loop and its background thread.
    """

    def __init__(
        self, read: Read, sampler: Sampler, run: Run, target: "_Target", allow: str | None
    ) -> None:
        self._read, self._sampler, self._run, self._target = read, sampler, run, target
        self._allow = allow
        self._position = 0
        self._handed_out = False  # something, since the position was set
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
        return {"position": self._position} | self._sampler.facts()

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
        facts = self._sampler.facts()
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
            self._sampler.order = order

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

    # A weak reference only: leaving a `for` loop must be what ends its generator.
    def _loop(self) -> Generator[Any, None, None] | None:
        loop = None if self._current is None else self._current()
        return loop if loop and inspect.getgeneratorstate(loop) != inspect.GEN_CLOSED else None

    def _hand_out(self) -> Generator[Any, None, None]:
        sharding = self._target.sharding()
        size = self._run.padded_size(num_blocks(sharding))
        mine = process_rows(sharding, size)
        host_batches = _read(self._read, self._sampler, self._run, self._position, mine)
        facts = f"{self._sampler}, {self._run}, position={self._position}"
        with closing(_place(host_batches, self._target, facts)) as placed:
            for batch in placed:
                self._position += self._run.next_rows(self._position)
                self._handed_out = True
                if self._run.has_mask:
                    record_mask(batch)
                yield batch


class _Target(NamedTuple):
    axis_name: AxisName
    mesh: Mesh | None
    prefetch: int

    def sharding(self) -> NamedSharding:
        mesh = current_mesh() if self.mesh is None else self.mesh
        return batch_sharding(mesh, self.axis_name)


def _read(read: Read, sampler: Sampler, run: Run, position: int, mine: np.ndarray) -> Iterator[Any]:
    while run.next_rows(position):
        count = run.next_rows(position)
        # The last row that counts is repeated, so that the last ranks may hold nothing else.
        batch = read(sampler.rows_at(position + np.minimum(mine, count - 1)))
        yield with_mask(batch, mine < count) if run.has_mask else batch
        position += count


_END = object()


def _place(
    host_batches: Iterator[Any], target: _Target, facts: str = ""
) -> Generator[Any, None, None]:
    sharding = target.sharding()
    # The hang detector sees by the phase that this process waits for data, not for another process.
    with progress.DATA:
        raise_pending()
        begin = first_batch(host_batches, sharding, facts)
    if begin is None:
        return
    first, layout = begin
    placed = prefetched(map(layout.place, chain([first], host_batches)), target.prefetch)
    with closing(hand_out_equally(placed, sharding)) as batches:
        while True:
            with progress.DATA:
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


# JAX may use the memory of a NumPy array as a CPU device's, without a copy and whatever `may_alias`
# says, and a loader that fills the same buffer for each batch would change those read ahead.
def _copies(loader: Iterable[Any]) -> Iterator[Any]:
    for batch in loader:
        yield jax.tree.map(lambda leaf: np.array(np.asarray(leaf), order="C"), batch)
