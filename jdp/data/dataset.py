"""Reads dataset rows by number, and adds the padding mask."""

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jdp.data import host_arrays


def in_threads(fn: Callable[[int], None], numbers: range, num_threads: int) -> None:
    """Call `fn` with each number, in this and further threads."""
    # Daemons: cheap beside slow reads, and none outlives the call.
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


Read = Callable[[np.ndarray], Any]

_HAS_MASK = (
    "the dataset {}, which jdp.batches() needs for its own mask of padding. Rename the {} in the "
    'dataset, or disable padding: tail="drop", without mask=True.'
)


def reader(dataset: Any, threads: int = 1) -> tuple[int, Read]:
    """Return a dataset's number of rows, and a function that reads rows.

    `threads` are for a dataset that returns one row at a time.

    >>> num_rows, read = reader([{"x": 10, "y": [0, 1]}, {"x": 11, "y": [2, 3]}])
    >>> batch = read(np.array([1, 0, 1]))
    >>> batch["x"].tolist(), batch["y"].tolist()
    ([11, 10, 11], [[2, 3], [0, 1], [2, 3]])
    """
    if has_rows_of_objects(dataset):
        return len(dataset), lambda rows: _stack(rows, dataset, threads)
    if _is_of_arrays(dataset) or not jax.tree_util.all_leaves([dataset]):
        return _array_reader(dataset)  # also a pytree, as a registered dataclass
    raise TypeError(
        f"a dataset of type {type(dataset).__name__} cannot be read by row number. Pass an "
        "array, a dict or tuple of arrays, or an object with __len__ and __getitem__. For an "
        "iterable of batches use jdp.shard_batches."
    )


def has_rows_of_objects(dataset: Any) -> bool:
    """Whether a dataset returns one row at a time, by code that may be random."""
    if _is_of_arrays(dataset):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def _is_of_arrays(dataset: Any) -> bool:
    is_leaf = _is_array(dataset) or host_arrays.is_table(dataset)
    return is_leaf or isinstance(dataset, Mapping | tuple)


def with_mask(batch: Any, mask: np.ndarray) -> Any:
    """Add a `[rows]` bool mask: a dict's key "mask", a tuple's last element, else of a pair."""
    if isinstance(batch, dict):
        if others := [key for key in batch if not isinstance(key, str)]:
            raise TypeError(
                f'the dataset has the keys {others}, and its mask the key "mask", but JAX sorts '
                "the keys of a dict and cannot compare them. Rename them to strings, or disable "
                'padding: tail="drop", without mask=True.'
            )
        if "mask" in batch:
            raise ValueError(_HAS_MASK.format('has a key "mask"', "key"))
        return {**batch, "mask": mask}
    if not isinstance(batch, tuple):
        return batch, mask
    if not hasattr(batch, "_fields"):
        return *batch, mask
    return _with_mask_field(type(batch))(*batch, mask)


@functools.cache
def _with_mask_field(kind: Any) -> Any:
    if "mask" in kind._fields:
        raise ValueError(_HAS_MASK.format(f"is a {kind.__name__} with a field `mask`", "field"))
    fields = collections.namedtuple(kind.__name__, (*kind._fields, "mask"), rename=True)
    return type(kind.__name__, (fields, kind), {"__slots__": ()})


# Masks of jdp.batches, by id because arrays are not hashable.
_masks: dict[int, weakref.ref] = {}


def record_mask(batch: Any) -> None:
    """Record that this batch's mask marks padding."""
    mask = batch["mask"] if isinstance(batch, dict) else batch[-1]
    key = id(mask)
    _masks[key] = weakref.ref(mask, lambda _: _masks.pop(key, None))


def find_mask(batch: Any) -> Any | None:
    """Find the padding mask; a tuple's last only if `jdp.batches` made it: it may be labels."""
    mask = None
    if isinstance(batch, dict):
        mask = batch.get("mask")
    elif isinstance(batch, (tuple, list)) and batch and (ref := _masks.get(id(batch[-1]))):
        mask = ref()
    is_array = isinstance(mask, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    return mask if is_array and mask.dtype == bool and mask.ndim == 1 else None


def _array_reader(dataset: Any) -> tuple[int, Read]:
    parts, outer = host_arrays.flattened(dataset, "the dataset", _is_leaf)
    dataset = outer.unflatten([host_arrays.columns(part, _name(path)) for path, part in parts])
    found, treedef = host_arrays.flattened(dataset, "the dataset", _is_leaf)
    arrays: list[tuple[str, Any]] = []
    for path, leaf in found:
        name = _name(path)
        if not _is_array(leaf):
            raise TypeError(
                f"{name} is of type {type(leaf).__name__}, but a dict or tuple holds one array "
                "per entry. Convert it with np.asarray; pass single rows as a list of rows."
            )
        if not leaf.shape:
            raise ValueError(f"{name} is a scalar, but the first dim of an array must be its rows.")
        arrays.append((name, leaf))
        first, values = arrays[0]
        if leaf.shape[0] != values.shape[0]:
            raise ValueError(
                f"{name} has {leaf.shape[0]} rows, {first} has {values.shape[0]}. Row i of every "
                "array must belong together."
            )
    if not arrays:
        raise ValueError("the dataset holds no array. Pass at least one array of rows.")
    num_rows = arrays[0][1].shape[0]
    return num_rows, lambda rows: treedef.unflatten([_take(*each, rows) for each in arrays])


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path) or "the dataset"


def _take(name: str, values: Any, rows: np.ndarray) -> np.ndarray:
    if isinstance(values, np.ndarray):
        return values[rows]
    # h5py accepts only increasing, unique numbers. Any array type may reuse its memory.
    increasing, places = np.unique(rows, return_inverse=True)
    try:
        found = host_arrays.array(values[increasing], name)
    except Exception as error:
        error.add_note(f"jdp: while rows {increasing.tolist()} of {name} were read.")
        raise
    if found.shape[:1] != increasing.shape:
        raise ValueError(
            f"{name} of type {type(values).__name__} returned an array of shape "
            f"{list(found.shape)} for {len(increasing)} row numbers, so rows would not belong "
            "together. array[numbers] must return those rows, [len(numbers), ...]. Wrap it in an "
            "object with __len__ and __getitem__ for one row, or convert it with np.asarray."
        )
    return found[places]


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_leaf(value: Any) -> bool:
    if value is None or isinstance(value, dict | tuple):
        return False
    return isinstance(value, list | Mapping) or jax.tree_util.all_leaves([value])


# JAX would treat each number of a list as a leaf.
def _is_of_numbers(value: Any) -> bool:
    return type(value) is list and all(
        isinstance(each, int | float | complex | np.number) or _is_of_numbers(each)
        for each in value
    )


# Copies each row before the next: a dataset may reuse its memory.
def _stack(rows: np.ndarray, dataset: Any, threads: int) -> Any:
    numbers = rows.tolist()
    first, treedef = _row(dataset, numbers[0])
    first = [(name, values.copy()) for name, values in first]
    columns = [np.empty((len(rows), *values.shape), values.dtype) for _, values in first]
    others: dict[tuple[int, int], np.ndarray] = {}  # (leaf, index) -> value of another dtype

    def read(place: int) -> None:
        row, other = _row(dataset, numbers[place]) if place else (first, treedef)
        if other != treedef:
            raise ValueError(
                f"row {numbers[place]} has the leaves {other}, but row {numbers[0]} has "
                f"{treedef}, and rows are stacked leaf by leaf. Return the same keys for every "
                "row in __getitem__, and a list of numbers as np.asarray(numbers), padded to one "
                "length."
            )
        for i, ((name, values), column) in enumerate(zip(row, columns, strict=True)):
            if values.shape != column.shape[1:]:
                raise ValueError(
                    f"{name} has the shape {list(values.shape)}, but row {numbers[0]} has "
                    f"{list(column.shape[1:])}. Rows are stacked into one array, so their shapes "
                    "must be equal. Pad or crop them in __getitem__. (A list is a list of rows; "
                    "pass columns as a tuple or dict.)"
                )
            if values.dtype == column.dtype:
                column[place] = values
            else:
                others[i, place] = values.copy()

    in_threads(read, range(len(rows)), threads)
    for i in {i for i, _ in others}:
        late = {place: values for (leaf, place), values in others.items() if leaf == i}
        columns[i] = columns[i].astype(np.result_type(columns[i], *late.values()))
        columns[i][[*late]] = [*late.values()]
    return treedef.unflatten(columns)


def _row(dataset: Any, number: int) -> tuple[list[tuple[str, np.ndarray]], Any]:
    try:
        row = dataset[number]
    except StopIteration as error:  # it would end the loop silently
        text = f"row {number} of {len(dataset)} rows of the dataset raised StopIteration."
        raise RuntimeError(text) from error
    except Exception as error:
        error.add_note(f"jdp: while row {number} of the dataset was read.")
        raise
    found, treedef = host_arrays.flattened(
        row, f"row {number}", lambda value: value is not row and _is_of_numbers(value)
    )
    leaves = []
    for path, leaf in found:
        name = f"row {number}{jax.tree_util.keystr(path)}"
        values = host_arrays.array(leaf, name)
        host_arrays.require_numbers(values.dtype, name, leaf)
        leaves.append((name, values))
    return leaves, treedef
