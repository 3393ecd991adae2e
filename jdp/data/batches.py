"""`batches` and `shard_batches`: batches on the devices from a dataset or a loader."""

import base64
import functools
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.axis import AxisName
from jdp.data import host_arrays
from jdp.data.batch_checks import RowCheck
from jdp.data.dataset import has_rows_of_objects, reader
from jdp.data.loops import Batches, EpochPlan, Target, place
from jdp.data.sampler import Sampler
from jdp.validation import allows, int_at_least

# State methods of an iterator, as in grain, and of a loader, as in PyTorch.
_OF_ITERATOR = "get_state", "set_state"
_OF_LOADER = "state_dict", "load_state_dict"
_BYTES = "base64"


class LoaderBatches(Generator[Any, None, None]):
    """The batches of one pass over a loader.

    `close`, or deleting it, ends the loop and its background thread. `loader`: an iterable over
    this process's host batches.
    """

    def __init__(self, loader: Iterable[Any], target: Target) -> None:
        self._source = _Source(loader)
        self._loop = place(self._source, target)
        self._position, self._has_begun = 0, False
        self._state: Any = None  # of the loader, after the loop's last batch

    @property
    def position(self) -> int:
        """The number of batches that the loop got since the run's start."""
        return self._position

    def get_state(self) -> dict[str, Any]:
        """Return the state of this process's loader after the last batch that the loop got.

        `jdp.Checkpointer` saves it for all processes. The first call must come before the loop;
        then the loader's state is read after each batch.
        """
        if self._source.states is None:
            if self._has_begun:
                raise RuntimeError(
                    f"get_state was first called after {self._position} batches, when later ones "
                    "were already prefetched. Call it, or ckpt.restore(state, batches), before "
                    "the loop."
                )
            self._state = self._source.track()
        return {"position": self._position, "loader": self._state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, with an equally created loader."""
        if self._has_begun:
            raise RuntimeError(
                f"set_state was called after {self._position} batches, when later ones were "
                "already prefetched. Call it, or ckpt.restore(state, batches), before the loop."
            )
        self._source.set(state["loader"])
        self._position, self._state = state["position"], state["loader"]

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.close()

    def __enter__(self) -> "LoaderBatches":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def send(self, value: Any, /) -> Any:
        """Return the next batch."""
        self._has_begun = True
        batch = self._loop.send(value)
        self._position += 1
        if self._source.states is not None:
            self._state = self._source.states.popleft()
        return batch

    def throw(self, *error: Any) -> Any:
        """Raise an error inside the loop."""
        return self._loop.throw(*error)


class _Source(Iterator[Any]):
    """A loader's host batches; `states`: after each batch read ahead, or None if unused."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.states: deque[Any] | None = None
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    # JAX may alias the memory for a CPU device, despite `may_alias`, and a loader may refill it.
    def __next__(self) -> Any:
        batch = next(self._opened())
        found, treedef = host_arrays.flattened(batch, "`batch`")
        named = [(f"`batch{jax.tree_util.keystr(path)}`", leaf) for path, leaf in found]
        arrays = [np.array(host_arrays.array(leaf, name), order="C") for name, leaf in named]
        if self.states is not None:
            self.states.append(self._get())
        return treedef.unflatten(arrays)

    def track(self) -> Any:
        """Return the loader's state; record it after each batch from now on."""
        self.states = deque()
        return self._get()

    def set(self, state: Any) -> None:
        self.states = deque()
        owner, (_, name) = self._owner()
        if isinstance(state, dict) and [*state] == [_BYTES]:
            state = base64.b64decode(state[_BYTES])
        if state is not None:
            getattr(owner, name)(state)

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return self._iterator

    def _owner(self) -> tuple[Any, tuple[str, str]]:
        if all(hasattr(self._loader, name) for name in _OF_LOADER):
            return self._loader, _OF_LOADER
        if all(hasattr(self._opened(), name) for name in _OF_ITERATOR):
            return self._opened(), _OF_ITERATOR
        raise TypeError(
            f"a loader of type {type(self._loader).__name__} has neither get_state and set_state "
            "nor state_dict and load_state_dict, so a restart cannot resume its position, and "
            "rows would be duplicated or skipped. Write jdp.batches(dataset, ...), or pass an "
            "iterator of grain or a StatefulDataLoader; or remove batches from ckpt.restore and "
            "ckpt.step, which restarts the data."
        )

    def _get(self) -> Any:
        owner, (name, _) = self._owner()
        state = getattr(owner, name)()
        if isinstance(state, bytes):
            return {_BYTES: base64.b64encode(state).decode()}
        try:
            text = json.dumps(state)
            is_kept = json.loads(text) == state
        except (TypeError, ValueError):
            is_kept, text = False, repr(state)
        if not is_kept:
            raise TypeError(
                f"{type(owner).__name__}.{name} returned {text:.200}, which changes when a "
                "checkpoint stores it as JSON. Return dicts, lists, numbers and text."
            )
        return json.loads(text)


_COMPARED, _OWN = "of all processes", "of this process"

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _of_one_dataset(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Refuse several datasets by position, before Python counts the arguments."""

    @functools.wraps(function)
    def checked(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        second = args[1] if len(args) > 1 else None
        is_text = isinstance(second, str)
        if hasattr(second, "__len__") and getattr(second, "ndim", 1) and not is_text:
            raise TypeError(
                f"jdp.batches got a batch_size of type {type(second).__name__}. Several arrays "
                "with the same rows are one dataset.\n"
                "Write jdp.batches((x, y), batch_size=...), and x, y = batch in the step."
            )
        return function(*args, **options)

    return checked


@_of_one_dataset
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
    rows: str = "of all processes",
    virtual_ranks: int | None = None,
    allow: str | None = None,
) -> Batches:
    """Read a dataset in batches that are sharded over all ranks.

    Every row comes once per epoch, in the order of `Sampler`, for any number of ranks. With
    `num_steps` all batches are full and continue across the ends of epochs. With `epochs` only the
    last batch of the run may be short: it is padded with extra rows, and a mask in every batch
    marks the rows that count. All batches of a run have the same leaves and shapes.

    Batches with a mask have the same rows on any number of ranks, padded to a multiple of that
    number. 12 rows on 5 ranks become 15, of which the last 3, all on rank 4, do not count.

    The mask is [rows] bool, True for a row that counts. It is the key "mask" of a dict, the last
    element of a tuple, or a field `mask` of a named tuple; any other batch x becomes (x, mask).
    Write `@jdp.train_step(weight=lambda batch: batch["mask"].sum())` to exclude the padding, even
    if a rank has nothing else.

    Args:
      dataset: an array with rows as its first dim; a dict, mapping, tuple or registered dataclass
        of such arrays, equally long (NumPy, memory-mapped, JAX, h5py, columns of pandas, or any
        other type that takes an array of increasing row numbers); a DataFrame, as the dict of its
        columns; or an object with `__len__` and a `__getitem__` that returns one row, a tree of
        numbers and arrays of equal shapes. A background thread reads and copies the rows, so a
        dataset may reuse their memory. Transform rows in `__getitem__`.
      batch_size: rows of a global batch, over all ranks, >= 1; without a mask a multiple of the
        number of ranks. Each process reads only its own rows.
      num_steps: number of batches, >= 1. Give this or `epochs`.
      epochs: number of passes over all rows, >= 1.
      seed: of the order, >= 0; the same on all processes.
      shuffle: False keeps the dataset's own order.
      tail: the short last batch of a run by `epochs`. "pad": pad it, with a mask in every batch,
        even if it is full. "drop": leave it out.
      mask: True: every batch has a mask, and any `batch_size` works on any number of ranks.
        Default: only in a run by `epochs` with `tail="pad"`.
      position: where to begin, in rows since the run's start: a saved `Batches.position`.
      axis_name: the mesh axis or axes that shard the batch.
      mesh: default: the mesh of `jdp.init`, looked up when a loop begins.
      prefetch: number of batches to place ahead; 0 reads in the caller's thread.
      read_threads: number of threads that call the `__getitem__` of single rows, >= 1. More than 1
        helps if reading waits (disk, network) or decodes outside the GIL; the order stays the same.
        `__getitem__` must then be thread-safe: with a shared buffer or file position it would
        return wrong rows without an error.
      rows: "of all processes": all processes have the same dataset. They compare a few rows when a
        loop begins, and in later epochs, at most once in 1,000 batches. Rows that change between
        readings are not compared. "of this process": rows may differ by design.
      virtual_ranks: that of the steps (`train_step(virtual_ranks=...)`): batches are padded to a
        multiple of it. A number of ranks that does not divide it gets every row on every rank.
      allow: "new data" lets a run continue with another number of rows, `seed` or `shuffle`, from
        the same position of the new stream. By default that is an error.

    Returns:
      The batches, trees of `jax.Array`, for a `for` loop. See `Batches`.

    Raises:
      ValueError: not exactly one of `num_steps` and `epochs` is given, a number or `rows` is out of
        its range, arrays have different numbers of rows, or the number of ranks does not divide
        batches without a mask (raised here if `mesh` is given, else when a loop begins).
      ValueError: when a loop begins, if rows of one number differ between processes.
      TypeError: the dataset has another type.

    >>> import jax, numpy as np
    >>> mesh = Mesh(jax.devices()[:1], "data")
    >>> data = {"x": np.arange(5)}
    >>> for batch in batches(data, 3, epochs=1, shuffle=False, mesh=mesh):
    ...     print(batch["x"], batch["mask"])
    [0 1 2] [ True  True  True]
    [3 4 4] [ True  True False]
    """
    if rows not in (_COMPARED, _OWN):
        raise ValueError(f'rows must be "{_COMPARED}" or "{_OWN}", got {rows!r}.')
    num_rows, read = reader(dataset, int_at_least("read_threads", read_threads, least=1))
    sampler = Sampler(num_rows, batch_size, seed=seed, shuffle=shuffle)
    run = EpochPlan.planned(num_rows, sampler.batch_size, num_steps, epochs, tail, mask)
    if virtual_ranks is not None:
        virtual_ranks = int_at_least("virtual_ranks", virtual_ranks, least=1)
    depth = int_at_least("prefetch", prefetch, least=0)
    target = Target(axis_name, mesh, depth, virtual_ranks)
    if mesh is not None or virtual_ranks is not None:
        run.padded_size(target.num_blocks())
    check = None
    if rows == _COMPARED:
        check = RowCheck(read, num_rows, sampler.seed, has_rows_of_objects(dataset))
    may_be_new = allows(allow, "new data")
    result = Batches(
        *(read, sampler, run, target, dataset), allows_new_data=may_be_new, check=check
    )
    result.position = position
    return result


def shard_batches(
    loader: Iterable[Any],
    *,
    axis_name: AxisName = "data",
    mesh: Mesh | None = None,
    prefetch: int = 2,
) -> LoaderBatches:
    """Place the batches of any loader, each process its shard of the global batch.

    For loaders that read and shuffle by themselves: a PyTorch DataLoader, grain, a generator. The
    loader must select this process's rows, and return equally many batches on every process. If one
    process ends or leaves its loop after another number, all get an error. Processes compare the
    shapes of their first batches, and again when they change. Values are copied, so the loader may
    reuse its memory.

    Args:
      loader: this process's host batches: trees of arrays, or of values that convert to NumPy (a
        tensor in host memory), with equal first dims. The rows are sharded over the process's
        ranks.
      axis_name: the mesh axis or axes that shard the batch.
      mesh: default: the mesh of `jdp.init`, looked up when the loop begins.
      prefetch: number of batches to place ahead; 0 calls the loader in the caller's thread.

    Returns:
      An iterator over the global batches, for one pass. Call again for the next epoch. `close`, or
      the loop's end, ends the background thread, and drops batches read ahead. A loader may have a
      state: `get_state` and `set_state` of its iterator, as in grain, or `state_dict` and
      `load_state_dict`, as in PyTorch's StatefulDataLoader. `jdp.Checkpointer` then takes the
      iterator as `batches`, and saves each process's state after the loop's last batch. The run
      then resumes at that batch, on the same number of processes.

    Raises:
      TypeError: `loader` is an array or a dict, whose items are not batches.
      TypeError, ValueError: in the loop, before the batch is placed: a leaf is a scalar or does not
        hold numbers; numbers of rows differ between leaves or processes, or the process's ranks do
        not divide them; a later batch has other keys or dtypes; or processes return different
        numbers of batches.
      RuntimeError: the loader of another process raised an error, or hangs.

    >>> import jax, numpy as np
    >>> loader = ({"x": np.full(2, i)} for i in range(2))
    >>> placed = shard_batches(loader, mesh=Mesh(jax.devices()[:1], "data"))
    >>> [batch["x"].tolist() for batch in placed]
    [[0, 0], [1, 1]]
    """
    instead = "jdp.batches(dataset, batch_size, num_steps=...)"
    host_arrays.require_batches("shard_batches", loader, instead)
    target = Target(axis_name, mesh, int_at_least("prefetch", prefetch, least=0))
    return LoaderBatches(loader, target)
