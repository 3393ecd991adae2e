"""A global batch as a step takes it: its rows checked and split over ranks, its mask found."""

import weakref
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp.distributed import mesh


def place_batch(batch: Any, where: Mesh, axis_name: tuple[str, ...]) -> Any:
    """Split a batch over ranks, after a look at its rows; leaves that lie right stay.

    Args:
      batch: tree of arrays whose first dim is the rows of the global batch.
      where: the mesh.
      axis_name: the axes that split it.

    Raises:
      ValueError: if a leaf is a scalar, leaves have different first dims, these do not divide
        by the ranks, or the array is of one process among several.
      TypeError: if a leaf does not hold numbers.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(batch)
    num_ranks = mesh.num_ranks(where, axis_name)
    sharding = NamedSharding(where, PartitionSpec(axis_name))
    placed = []
    num_rows = None
    for path, leaf in named:
        name = f"batch{jax.tree_util.keystr(path)}"
        shape = np.shape(leaf)
        if not shape:
            raise ValueError(_scalar_error(name, path, leaf))
        num_rows = shape[0] if num_rows is None else num_rows
        if num_rows == 0 or shape[0] != num_rows or num_rows % num_ranks:
            raise ValueError(_rows_error(name, shape, num_rows, named[0][0], num_ranks))
        placed.append(_place_rows(name, leaf, sharding))
    return jax.tree.unflatten(treedef, placed)


def _place_rows(name: str, leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if not sharding.is_fully_addressable:
        raise ValueError(
            f"`{name}` is an array of this process alone, and jdp cannot know which rows of the "
            f"global batch it holds ({jax.process_count()} processes train together). "
            "Make batches with jdp.batches(dataset, ...) or jdp.shard_batches(loader)."
        )
    # A copy first: JAX may use a NumPy array's memory as a CPU device's, and the caller may fill
    # it with the next batch while this one is still read.
    if not isinstance(leaf, jax.Array):
        leaf = np.array(leaf)
        if leaf.dtype.kind in "OSUMm":
            raise TypeError(
                f"`{name}` {leaf.dtype}{list(leaf.shape)} cannot be put on a device, which holds "
                "numbers. Leave it out of the batch."
            )
    return jax.device_put(leaf, sharding)


def _scalar_error(name: str, path: tuple, leaf: Any) -> str:
    if path and isinstance(path[-1], jax.tree_util.SequenceKey) and not hasattr(leaf, "shape"):
        return (
            f"`{name}` is the single value {leaf!r}: to JAX a list is a tree, whose elements are "
            "arrays of their own. Give columns, such as np.asarray(values); strings stay outside."
        )
    return (
        f"`{name}` is a scalar, but a batch is split over ranks on its first dim. "
        "Give it as a further argument: step(state, batch, scalar)."
    )


def _rows_error(name: str, shape: tuple, num_rows: int, first: tuple, num_ranks: int) -> str:
    if shape[0] != num_rows:
        return (
            f"`{name}` has {shape[0]} rows and `batch{jax.tree_util.keystr(first)}` has "
            f"{num_rows}: every leaf of a batch has the same first dim. Give what is not per row "
            "as a further argument."
        )
    if num_rows == 0:
        return f"`{name}` has no rows: the mean over none of them is not defined."
    return (
        f"`{name}` has {num_rows} rows, which do not divide by {num_ranks} ranks: ranks with fewer "
        "rows would count for as much as the others. jdp.batches(..., mask=True) pads batches "
        f"and masks what it added; or choose a batch size that is a multiple of {num_ranks}."
    )


# The masks that jdp.batches made and somebody still holds, by identity: arrays have no hash.
_masks: dict[int, weakref.ref] = {}


def note_mask(batch: Any) -> None:
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
