"""Reading rows of a dataset by number, and marking the rows that count."""

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Read = Callable[[np.ndarray], Any]


def reader(dataset: Any, threads: int = 1) -> tuple[int, Read]:
    """Find how many rows a dataset has and how to read some of them.

    Args:
      dataset: as for `jdp.batches`.
      threads: how many of them read rows of a dataset that returns one at a time.

    Returns:
      The number of rows, and a function from row numbers [rows] int to a tree of NumPy arrays with
      those rows, in that order, in memory that nothing else uses.

    Raises:
      TypeError: if it cannot be read by row number.
      ValueError: if an array is a scalar, or arrays have different first dims.

    >>> num_rows, read = reader([{"x": 10, "y": [0, 1]}, {"x": 11, "y": [2, 3]}])
    >>> read(np.array([1, 0, 1]))
    {'x': array([11, 10, 11]), 'y': [array([2, 0, 2]), array([3, 1, 3])]}
    """
    if _is_array(dataset) or _is_table(dataset) or isinstance(dataset, Mapping | tuple):
        return _array_reader(dataset)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return len(dataset), lambda rows: _stack(rows, dataset, threads)
    raise TypeError(
        f"a dataset of type {type(dataset).__name__} cannot be read by row number. Give an array, "
        "a dict or tuple of arrays, or an object with __len__ and __getitem__. For an iterable of "
        "batches use jdp.shard_batches."
    )


def with_mask(batch: Any, mask: np.ndarray) -> Any:
    """Add a mask, [rows] bool: as key "mask" of a dict, last in a tuple, else `(batch, mask)`.

    Raises:
      ValueError: if the batch has a "mask" already.
      TypeError: if a key of the batch is not a string, since JAX sorts the keys.
    """
    if isinstance(batch, dict):
        if others := [key for key in batch if not isinstance(key, str)]:
            raise TypeError(
                f'the dataset has the keys {others}, and the key of its mask is "mask": JAX sorts '
                "the keys of a dict, and cannot compare them. Rename them to strings, or do "
                'without padding: tail="drop", without mask=True.'
            )
        if "mask" in batch:
            raise ValueError(
                'the dataset has a key "mask", which jdp.batches() needs for its own mask of '
                'padding. Rename the key in the dataset, or do without padding: tail="drop", '
                "without mask=True."
            )
        return {**batch, "mask": mask}
    return (*batch, mask) if isinstance(batch, tuple) else (batch, mask)


# The masks that jdp.batches made and somebody still holds, by identity: arrays have no hash.
_masks: dict[int, weakref.ref] = {}


def record_mask(batch: Any) -> None:
    """Record that the mask of this batch of `jdp.batches` says which rows are padding."""
    mask = batch["mask"] if isinstance(batch, dict) else batch[-1]
    key = id(mask)
    _masks[key] = weakref.ref(mask, lambda _: _masks.pop(key, None))


def find_mask(batch: Any) -> Any | None:
    """Find the padding mask of a batch: the leaf, or None.

    It is the last element of a tuple only if `jdp.batches` made it, since that may well be bool
    labels of the author's; in a dict the key "mask" of bool `[rows]` says enough.
    """
    if isinstance(batch, dict):
        mask = batch.get("mask")
    elif isinstance(batch, (tuple, list)) and batch:
        mask = batch[-1]
        if (ref := _masks.get(id(mask))) is None or ref() is not mask:
            return None
    else:
        return None
    is_array = isinstance(mask, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    return mask if is_array and mask.dtype == bool and mask.ndim == 1 else None


def _array_reader(dataset: Any) -> tuple[int, Read]:
    dataset = jax.tree.map(_as_arrays, dataset, is_leaf=_is_leaf)
    found, treedef = jax.tree_util.tree_flatten_with_path(dataset, is_leaf=_is_leaf)
    arrays: list[tuple[str, Any]] = []
    for path, leaf in found:
        name = jax.tree_util.keystr(path) or "the dataset"
        if not _is_array(leaf):
            raise TypeError(
                f"{name} is of type {type(leaf).__name__}, but a dict or tuple holds one array per "
                "entry. Convert it with np.asarray; give single rows as a list of rows."
            )
        if not leaf.shape:
            raise ValueError(f"{name} is a scalar: an array's first dim must be its rows.")
        arrays.append((name, leaf))
        first, values = arrays[0]
        if leaf.shape[0] != values.shape[0]:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, {first} has {values.shape[0]}: row i of every "
                "array must belong together."
            )
    if not arrays:
        raise ValueError("the dataset holds no array.")
    num_rows = arrays[0][1].shape[0]
    return num_rows, lambda rows: treedef.unflatten([_take(*each, rows) for each in arrays])


def _take(name: str, array: Any, rows: np.ndarray) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array[rows]
    # h5py takes increasing numbers only, each once; any array-like may use its memory again.
    increasing, places = np.unique(rows, return_inverse=True)
    found = np.asarray(array[increasing])
    if found.shape[:1] != increasing.shape:
        raise ValueError(
            f"{name} of type {type(array).__name__} returned an array of the shape "
            f"{list(found.shape)} for {len(increasing)} row numbers, so that rows would not belong "
            "together. array[numbers] must return those rows, [len(numbers), ...]: wrap it in an "
            "object with __len__ and __getitem__ for one row, or convert it with np.asarray."
        )
    return found[places]


# Columns of pandas are read by position: their [rows] takes labels. The rows of a jax.Array are
# gathered in the host's memory: one by one from a device would wait for it.
def _as_arrays(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array | np.ndarray):
        return np.asarray(leaf)
    if _is_table(leaf):
        if leaf.ndim == 1:
            return leaf.to_numpy()
        if not leaf.columns.is_unique:
            twice = list(leaf.columns[leaf.columns.duplicated()])
            raise ValueError(f"columns of a table have the same name: {twice}. Rename them.")
        leaf = {name: leaf[name] for name in leaf.columns}
    if isinstance(leaf, Mapping):
        return jax.tree.map(_as_arrays, dict(leaf), is_leaf=_is_leaf)
    return leaf


def _is_table(value: Any) -> bool:
    return hasattr(value, "iloc") and hasattr(value, "to_numpy")


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_leaf(value: Any) -> bool:
    return value is not None and not isinstance(value, dict | tuple)


# Each row is copied before the thread reads the next: a dataset may use its memory again.
def _stack(rows: np.ndarray, dataset: Any, threads: int) -> Any:
    found, treedef = jax.tree_util.tree_flatten_with_path(_row(dataset, rows[0]))
    names = [jax.tree_util.keystr(path) for path, _ in found]
    firsts = [np.asarray(leaf) for _, leaf in found]
    stacked = [np.empty((len(rows), *first.shape), first.dtype) for first in firsts]
    others: dict[tuple[int, int], np.ndarray] = {}  # (leaf, place) -> of another dtype

    def copy(place: int, leaves: list[Any]) -> None:
        for i, leaf in enumerate(leaves):
            array = np.asarray(leaf)
            if array.shape != firsts[i].shape:
                raise ValueError(
                    f"row {rows[place]}{names[i]} has the shape {list(array.shape)}, but row "
                    f"{rows[0]} has {list(firsts[i].shape)}: rows are stacked into one array, so "
                    "their shapes must be equal. Pad or crop them in __getitem__. (jdp takes a "
                    "list as a list of rows; give columns as a tuple or dict.)"
                )
            if array.dtype == firsts[i].dtype:
                stacked[i][place] = array
            else:
                others[i, place] = array.copy()

    def read(place: int) -> None:
        leaves, other = jax.tree.flatten(_row(dataset, rows[place]))
        if other != treedef:
            raise ValueError(
                f"row {rows[place]} has the leaves {other}, but row {rows[0]} has {treedef}: rows "
                "are stacked leaf by leaf. Return the same keys for every row in __getitem__."
            )
        copy(place, leaves)

    copy(0, firsts)
    _in_threads(read, range(1, len(rows)), threads)
    for i in {i for i, _ in others}:
        late = {place: array for (leaf, place), array in others.items() if leaf == i}
        stacked[i] = stacked[i].astype(np.result_type(stacked[i], *late.values()))
        for place, array in late.items():
            stacked[i][place] = array
    return treedef.unflatten(stacked)


def _row(dataset: Any, number: np.integer) -> Any:
    try:
        return dataset[int(number)]
    except Exception as error:
        error.add_note(f"jdp: while row {number} of the dataset was read.")
        raise


# The threads last for one batch: beside the reading for which an author asks for them, their start
# costs little, and nothing is left to end. As daemons they never keep a program from its end.
def _in_threads(fn: Callable[[int], None], numbers: range, num_threads: int) -> None:
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
