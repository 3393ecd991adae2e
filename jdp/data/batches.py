"""From a dataset or a loader to batches on the devices: what users call."""

from collections.abc import Generator, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.axis import AxisName
from jdp.data.dataset import reader
from jdp.data.loops import Batches, Target, place
from jdp.data.run import Run
from jdp.data.sampler import Sampler
from jdp.data.sharding import num_blocks
from jdp.validation import int_at_least


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
) -> Batches:
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
    target = Target(axis_name, mesh, int_at_least("prefetch", prefetch, least=0))
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
    target = Target(axis_name, mesh, int_at_least("prefetch", prefetch, least=0))
    return place(_copies(loader), target)


# JAX may use the memory of a NumPy array as a CPU device's, without a copy and whatever `may_alias`
# says, and a loader that fills the same buffer for each batch would change those read ahead.
def _copies(loader: Iterable[Any]) -> Iterator[Any]:
    for batch in loader:
        yield jax.tree.map(lambda leaf: np.array(np.asarray(leaf), order="C"), batch)
