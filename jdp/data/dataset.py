"""Reading rows of a dataset by number, and marking the rows that count."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Read = Callable[[np.ndarray], Any]


def reader(dataset: Any) -> tuple[int, Read]:
    """Find how many rows a dataset has and how to read some of them.

    Args:
      dataset: an array, a dict or tuple of arrays with equal first dims, or anything with `__len__`
        and `__getitem__` that gives one row.

    Returns:
      The number of rows, and a function from row numbers [rows] int to a tree of NumPy arrays with
      those rows, in that order, in memory that nothing else uses.

    Raises:
      TypeError: if it is none of these.
      ValueError: if an array is a scalar, or arrays have different first dims.

    >>> num_rows, read = reader([{"x": 10, "y": [0, 1]}, {"x": 11, "y": [2, 3]}])
    >>> read(np.array([1, 0, 1]))
    {'x': array([11, 10, 11]), 'y': [array([2, 0, 2]), array([3, 1, 3])]}
    """
    if _is_array(dataset) or isinstance(dataset, dict | tuple):
        return _array_reader(dataset)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return len(dataset), lambda rows: _stack(rows, [dataset[int(row)] for row in rows])
    raise TypeError(
        f"a dataset of type {type(dataset).__name__} cannot be read by row number. Give an array, "
        "a dict or tuple of arrays, or an object with __len__ and __getitem__. For an iterable of "
        "batches use jdp.shard_batches."
    )


def with_mask(batch: Any, mask: np.ndarray) -> Any:
    """Add a mask: as key "mask" of a dict, last in a tuple, else `(batch, mask)`.

    Args:
      batch: tree of arrays.
      mask: [rows] bool, True for a row that counts.

    Raises:
      ValueError: if the batch has a "mask" already.
    """
    if isinstance(batch, dict):
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
    """Record that the mask of this batch says which rows are padding.

    Args:
      batch: from `jdp.batches`: a dict with the key "mask", or a tuple that ends with it.
    """
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
    found, treedef = jax.tree_util.tree_flatten_with_path(dataset, is_leaf=_is_leaf)
    arrays, first = [], None
    for path, leaf in found:
        name = jax.tree_util.keystr(path) or "the dataset"
        if not _is_array(leaf):
            raise TypeError(
                f"{name} is of type {type(leaf).__name__}, but a dict or tuple holds one array per "
                "entry. Convert it with np.asarray; give single rows as a list of rows."
            )
        if not leaf.shape:
            raise ValueError(f"{name} is a scalar: an array's first dim must be its rows.")
        first = first or (name, leaf.shape[0])
        if leaf.shape[0] != first[1]:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, {first[0]} has {first[1]}: row i of every "
                "array must belong together."
            )
        # Rows are gathered in the host's memory: one by one from a device would wait for it.
        arrays.append(np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf)
    if first is None:
        raise ValueError("the dataset holds no array.")
    return first[1], lambda rows: treedef.unflatten([np.asarray(leaf[rows]) for leaf in arrays])


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_leaf(value: Any) -> bool:
    return value is not None and not isinstance(value, dict | tuple)


def _stack(rows: np.ndarray, values: list[Any]) -> Any:
    def stack(path: Any, *leaves: Any) -> np.ndarray:
        arrays = [np.asarray(leaf) for leaf in leaves]
        for row, array in zip(rows, arrays, strict=True):
            if array.shape != arrays[0].shape:
                raise ValueError(
                    f"row {row}{jax.tree_util.keystr(path)} has the shape {list(array.shape)}, but "
                    f"row {rows[0]} has {list(arrays[0].shape)}: rows are stacked into one array, "
                    "so their shapes must be equal. Pad or crop them in __getitem__. (jdp takes a "
                    "list as a list of rows; give columns as a tuple or dict.)"
                )
        return np.stack(arrays)

    return jax.tree_util.tree_map_with_path(stack, *values)
