"""A global batch as a step takes it: its rows checked and split over ranks, its mask found."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import mesh


def place_batch(batch: Any, where: Mesh, axis_name: tuple[str, ...]) -> Any:
    """Split a batch over ranks, after a look at its rows; leaves that lie right stay.

    Args:
      batch: tree of arrays whose first dim is the rows of the global batch.
      where: the mesh.
      axis_name: the axes that split it.

    Raises:
      ValueError: if a leaf is a scalar, leaves have different first dims, these do not divide
        by the ranks, or the array is of one process among several.
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
            raise ValueError(
                f"`{name}` is a scalar, but a batch is split over ranks on its first dim. "
                "Give it as a further argument: step(state, batch, scalar)."
            )
        num_rows = shape[0] if num_rows is None else num_rows
        if shape[0] != num_rows or num_rows % num_ranks:
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
    return jax.device_put(leaf, sharding)


def _rows_error(name: str, shape: tuple, num_rows: int, first: tuple, num_ranks: int) -> str:
    if shape[0] != num_rows:
        return (
            f"`{name}` has {shape[0]} rows and `batch{jax.tree_util.keystr(first)}` has "
            f"{num_rows}: every leaf of a batch has the same first dim. Give what is not per row "
            "as a further argument."
        )
    return (
        f"`{name}` has {num_rows} rows, which do not divide by {num_ranks} ranks: ranks with fewer "
        "rows would count for as much as the others. jdp.batches pads the last batch and masks "
        f"what it added; or choose a batch size that is a multiple of {num_ranks}."
    )


def find_mask(batch: Any) -> Any | None:
    """Find the padding mask that `jdp.batches` puts into a batch: the leaf, or None.

    It is the key "mask" of a dict, or the last element of a tuple if that is bool `[rows]`.
    """
    if isinstance(batch, dict):
        mask = batch.get("mask")
    elif isinstance(batch, (tuple, list)) and batch:
        mask = batch[-1]
    else:
        return None
    is_array = isinstance(mask, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    return mask if is_array and mask.dtype == bool and mask.ndim == 1 else None
