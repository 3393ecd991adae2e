"""Converts leaves of rows to NumPy arrays for devices."""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


class RowError(ValueError):
    """An error about one of this process's rows, by index."""

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.row = row


def flattened(
    tree: Any, name: str, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[tuple, Any]], Any]:
    """Return the leaves with their paths, and the treedef; mappings become dicts.

    >>> import types
    >>> flattened(types.MappingProxyType({"x": 1}), "row 0")[1]
    PyTreeDef({'x': *})
    """
    try:
        found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
        if any(isinstance(leaf, Mapping) for _, leaf in found):
            return flattened(opened(tree), name, is_leaf)
    except ValueError as error:
        raise TypeError(
            f"{name} is or has a dict whose keys cannot be sorted, as JAX requires: {error} Use "
            "keys of one type, best strings."
        ) from error
    return found, treedef


def opened(tree: Any) -> Any:
    """Return a tree with a dict for each other mapping, a leaf to JAX."""

    def as_dict(leaf: Any) -> Any:
        return opened(dict(leaf)) if isinstance(leaf, Mapping) else leaf

    return jax.tree.map(as_dict, tree)


def is_table(value: Any) -> bool:
    """Whether a value is of pandas or polars."""
    is_known = hasattr(value, "iloc") or type(value).__module__.startswith("polars.")
    return is_known and hasattr(value, "to_numpy")


# Columns are read by position, since [rows] of pandas takes labels, and whole, since a part's dtype
# depends on missing values. A jax.Array is gathered on the host, since each read from a device
# would wait.
def columns(leaf: Any, name: str) -> Any:
    """Return a leaf in host memory, a table as a dict."""
    if isinstance(leaf, jax.Array | np.ndarray):
        return array(leaf, name)
    if is_table(leaf) and hasattr(leaf, "columns"):
        names = list(leaf.columns)
        if twice := sorted({str(each) for each in names if names.count(each) > 1}):
            raise ValueError(f"columns of a table have the same name: {twice}. Rename them.")
        return {each: leaf[each].to_numpy() for each in names}
    return leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf


def require_batches(function: str, batches: Any, instead: str) -> None:
    """Refuse rows where a function takes an iterable of batches.

    >>> require_batches("evaluate", {"x": np.ones(2)}, "jdp.batches(...)")
    Traceback (most recent call last):
    TypeError: evaluate takes an iterable of batches, got a dict. Write jdp.batches(...) ...
    """
    if isinstance(batches, Mapping | str | bytes) or hasattr(batches, "shape"):
        raise TypeError(
            f"{function} takes an iterable of batches, got a {type(batches).__name__}. Write "
            f"{instead} for a dataset, or [batch] for a single batch."
        )


def array(leaf: Any, name: str) -> np.ndarray:
    """Convert a leaf to NumPy, without a copy of an array.

    >>> array(np.ma.masked_equal([1, 2], 2), "`batch['x']`")
    Traceback (most recent call last):
    TypeError: `batch['x']` is a masked array, and its 1 masked values would count ...
    """
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise TypeError(
            f"{name} is a masked array, and its {np.ma.count_masked(leaf)} masked values would "
            "count like the others. Pass x.filled(0), and ~np.ma.getmaskarray(x) as a separate "
            "leaf."
        )
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{name} holds random keys, which NumPy cannot hold. Pass jax.random.key_data(keys), "
            "and write jax.random.wrap_key_data(data) in the step."
        )
    try:
        return np.asarray(leaf)
    except Exception as error:
        raise TypeError(
            f"{name}, of type {type(leaf).__name__}, does not convert to NumPy: {error} Convert "
            "it in the dataset or the loader."
        ) from error


def native(values: np.ndarray) -> np.ndarray:
    """Return the array in native byte order, as JAX needs."""
    dtype = values.dtype
    return values if dtype.isnative else values.astype(dtype.newbyteorder("="))


def require_numbers(dtype: np.dtype, name: str, example: Any = None) -> None:
    """Raise TypeError for a dtype that no device can hold."""
    if dtype.names is not None:
        raise TypeError(
            f"{name} has the fields {list(dtype.names)}, but a device holds arrays of one number "
            'per element. Pass a dict of the fields, {"name": array["name"], ...}.'
        )
    if dtype.kind not in "OSUMm":
        return
    what = ""
    if example is not None:
        what = f", {textwrap.shorten(repr(example), 60)} of type {type(example).__name__},"
    if dtype.kind == "O" and dataclasses.is_dataclass(example):
        raise TypeError(
            f"{name}{what} is a dataclass unknown to JAX. Decorate its class with "
            "@jax.tree_util.register_dataclass, or pass a dict of its arrays."
        )
    raise TypeError(
        f"{name}{what} cannot be placed on a device, which holds numbers. Remove it from the "
        "batch, or convert it to numbers in the dataset; pad rows of different lengths."
    )


def require_fits(values: np.ndarray, name: str) -> None:
    """Raise RowError for numbers changed on a device without 64-bit types."""
    held = jax.dtypes.canonicalize_dtype(values.dtype) if values.dtype.kind in "iufc" else None
    if held is None or held == values.dtype or not values.size:
        return
    if values.dtype.kind in "iu":
        least, most = np.iinfo(held).min, np.iinfo(held).max
        if values.min() >= least and values.max() <= most:
            return
        wrong = (values < least) | (values > most)
    else:
        least, most = np.finfo(held).min, np.finfo(held).max
        with np.errstate(over="ignore"):
            wrong = np.isfinite(values) & ~np.isfinite(values.astype(held))
        if not wrong.any():
            return
    place = np.unravel_index(np.argmax(wrong), values.shape)
    with np.errstate(over="ignore"):
        value, becomes = values[place], values[place].astype(held)
    raise RowError(
        f"{name} {values.dtype}{list(values.shape)} holds {value} in row {place[0]}, which would "
        f"become {becomes}: without 64 bits JAX holds {held}, from {least} to {most}. Call "
        'jax.config.update("jax_enable_x64", True) first, or scale the numbers down.',
        int(place[0]),
    )
