"""Maps the rows of a batch to processes, and places them on the devices."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis
from jdp.axis import AxisName
from jdp.distributed.mesh import num_ranks, require_axes


def batch_sharding(mesh: Mesh, axis_name: AxisName) -> NamedSharding:
    """Split the first dim over `axis_name`: rank r has the r-th block of rows.

    Raises:
      ValueError: if the mesh has no such axis.
    """
    names = axis.names(axis_name)
    require_axes(mesh, names)
    return NamedSharding(mesh, PartitionSpec(names))


def num_blocks(sharding: NamedSharding) -> int:
    """Count the blocks of rows, one for each rank."""
    return sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]


def process_rows(
    sharding: NamedSharding, num_rows: int, devices: Collection[jax.Device] | None = None
) -> np.ndarray:
    """Return the rows of a global batch on the devices of one process, by default of this one.

    [rows] int, ascending, each once (ranks along further mesh axes share rows). The sharding says
    it: neither the order of processes in a mesh nor the ids of devices do.

    >>> mesh = Mesh(jax.devices()[:2], "data")
    >>> process_rows(batch_sharding(mesh, "data"), 6, devices=mesh.devices[1:]).tolist()
    [3, 4, 5]
    """
    devices = sharding.addressable_devices if devices is None else devices
    if len(devices) == 0:
        raise ValueError(
            f"process {jax.process_index()} has no device on the mesh {dict(sharding.mesh.shape)}, "
            "so no rows are its own. Build the mesh over devices of every process that asks for "
            "batches."
        )
    index_map = sharding.devices_indices_map((num_rows,))
    blocks = {index_map[device][0].indices(num_rows) for device in devices}
    return np.concatenate([np.arange(*block) for block in sorted(blocks)])


def place_batch(batch: Any, where: Mesh, axis_name: tuple[str, ...]) -> Any:
    """Split a global batch over the ranks of a mesh; leaves that lie there already stay.

    Raises:
      ValueError: if a leaf is a scalar, leaves have different first dims, these do not divide
        by the ranks, or the array is of one process among several.
      TypeError: if a leaf does not hold numbers.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(batch)
    ranks = num_ranks(where, axis_name)
    sharding = NamedSharding(where, PartitionSpec(axis_name))
    rows = np.shape(named[0][1])[:1] if named else ()
    for path, leaf in named:
        if not rows or np.shape(leaf)[:1] != rows or rows[0] == 0 or rows[0] % ranks:
            raise ValueError(_rows_error(path, leaf, named[0], ranks))
    return treedef.unflatten([_place_rows(path, leaf, sharding) for path, leaf in named])


def _place_rows(path: tuple, leaf: Any, sharding: NamedSharding) -> Any:
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    if not sharding.is_fully_addressable:
        raise ValueError(
            f"{_name(path)} is an array of this process alone, but {jax.process_count()} processes "
            "train together, and jdp cannot know which rows of the global batch it holds. Make "
            "batches with jdp.batches(dataset, ...) or jdp.shard_batches(loader)."
        )
    # A copy first: JAX may use a NumPy array's memory as a CPU device's, and the caller may fill
    # it with the next batch while this one is still read.
    if not isinstance(leaf, jax.Array):
        leaf = _native(np.array(leaf))
        _require_numbers(Leaf(_name(path), leaf.shape, leaf.dtype))
        _require_fits(_name(path), leaf)
    return jax.device_put(leaf, sharding)


def _rows_error(path: tuple, leaf: Any, first: tuple[tuple, Any], ranks: int) -> str:
    name, rows = _name(path), np.shape(leaf)[:1]
    if not rows and path and isinstance(path[-1], jax.tree_util.SequenceKey):
        if not hasattr(leaf, "shape"):
            return (
                f"{name} is the single value {leaf!r}: JAX takes a list as a tree of separate "
                "values. Give an array, np.asarray(values), and keep strings out of the batch."
            )
    if not rows and np.asarray(leaf).dtype == object:
        return (
            f"{name} is a {type(leaf).__name__}, which JAX does not open: a batch is a tree of "
            "arrays. Give a dict of its arrays; or, if it is a dataclass, decorate its class with "
            "@jax.tree_util.register_dataclass."
        )
    if not rows or rows != np.shape(first[1])[:1]:
        return _differs(name, rows, _name(first[0]), np.shape(first[1]))
    if rows == (0,):
        return f"{name} has no rows: the mean over none of them is not defined."
    return (
        f"{name} has {rows[0]} rows, which is not divisible by {ranks} ranks: a rank with fewer "
        "rows would count for as much as the others. Write jdp.batches(..., mask=True), which pads "
        f"batches and masks the padding; or choose a batch size that is a multiple of {ranks}."
    )


class Leaf(NamedTuple):
    """One leaf of a process's host batch."""

    name: str
    shape: tuple[int, ...]  # with this process's rows
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """Structure and placement of all batches of a loop."""

    sharding: NamedSharding
    num_rows: int  # of the global batch
    rows: np.ndarray  # [rows] int, those of this process
    treedef: Any
    leaves: tuple[Leaf, ...]

    @classmethod
    def of(cls, batch: Any, sharding: NamedSharding) -> "Layout":
        """Take the layout from this process's host batch, a tree of arrays with equal first dims.

        Raises:
          TypeError: if a leaf is not of numbers.
          ValueError: if a leaf is a scalar, first dims differ, or they do not divide by the number
            of ranks on this process's devices.
        """
        leaves, _, treedef = _leaves(batch)
        for leaf in leaves:
            _require_numbers(leaf)
            if not leaf.shape or leaf.shape[0] != leaves[0].shape[0]:
                first = leaves[0]
                raise ValueError(_differs(leaf.name, leaf.shape, first.name, first.shape))
        rows = leaves[0].shape[0] if leaves else 0
        all_ranks = num_blocks(sharding)
        ranks = len(process_rows(sharding, all_ranks))
        if rows == 0 or rows % ranks:
            raise ValueError(
                f"a batch of {rows} rows cannot be split over the {ranks} ranks of this process: "
                f"all ranks need equally many rows, at least one. Use a multiple of {ranks}; drop "
                "a short last batch (drop_remainder, drop_last), or pad and mask it."
            )
        total = rows // ranks * all_ranks
        return cls(sharding, total, process_rows(sharding, total), treedef, tuple(leaves))

    def place(self, batch: Any) -> Any:
        """Put this process's host batch on its devices, as its part of the global batch.

        Raises:
          ValueError: if the batch does not look like the one that the layout was taken from.
        """
        leaves, arrays, treedef = _leaves(batch)
        if treedef != self.treedef:
            raise ValueError(
                f"a later batch has the leaves {treedef}, but the first one had {self.treedef}: "
                "the step was traced for the first. Give every batch the same keys."
            )
        for leaf, array, first in zip(leaves, arrays, self.leaves, strict=True):
            _require_fits(leaf.name, array)
            if leaf != first:
                raise ValueError(
                    f"a later batch has {leaf}, but the first one had {first}: the step was traced "
                    "for the first, and all processes must run the same program. Drop a short last "
                    'batch (drop_remainder, drop_last, tail="drop"), or pad and mask it.'
                )
        return treedef.unflatten(map(self._place_leaf, arrays))

    def _place_leaf(self, values: np.ndarray) -> jax.Array:
        def block(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.num_rows)
            first = int(np.searchsorted(self.rows, start))
            return values[first : first + stop - start]

        shape = (self.num_rows, *values.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, block)


def _leaves(batch: Any) -> tuple[list[Leaf], list[np.ndarray], Any]:
    found, treedef = jax.tree_util.tree_flatten_with_path(batch)
    arrays = [_native(np.asarray(leaf)) for _, leaf in found]
    leaves = [
        Leaf(_name(path), array.shape, array.dtype)
        for (path, _), array in zip(found, arrays, strict=True)
    ]
    return leaves, arrays, treedef


# JAX takes no numbers whose bytes are in another order than the machine's, as of some file formats.
def _native(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _name(path: tuple) -> str:
    return f"`batch{jax.tree_util.keystr(path)}`"


def _require_numbers(leaf: Leaf) -> None:
    if leaf.dtype.names is not None:
        raise TypeError(
            f"{leaf} has the fields {list(leaf.dtype.names)}, and a device holds arrays of one "
            'number per element. Give a dict of the fields, {"name": array["name"], ...}.'
        )
    if leaf.dtype.kind in "OSUMm":
        raise TypeError(
            f"{leaf} cannot be put on a device, which holds numbers. Leave it out of the batch, or "
            "turn it into numbers in the dataset."
        )


def _require_fits(name: str, array: np.ndarray) -> None:
    held = jax.dtypes.canonicalize_dtype(array.dtype) if array.dtype.kind in "iu" else array.dtype
    if held == array.dtype or not array.size:
        return
    least, most = np.iinfo(held).min, np.iinfo(held).max
    if array.min() >= least and array.max() <= most:
        return
    place = np.unravel_index(np.argmax((array < least) | (array > most)), array.shape)
    value = array[place]
    raise ValueError(
        f"{name} {array.dtype}{list(array.shape)} holds {value} in row {place[0]}, which would "
        f"become {value.astype(held)}: without 64 bits JAX holds {held}, from {least} to {most}. "
        'Call jax.config.update("jax_enable_x64", True) first, or make the numbers smaller.'
    )


def _differs(name: str, shape: tuple[int, ...], first: str, first_shape: tuple[int, ...]) -> str:
    if not shape:
        return (
            f"{name} is a scalar, but a batch is split over ranks on its first dim, its rows. Give "
            "it as a further argument: step(state, batch, scalar)."
        )
    return (
        f"{name} has {shape[0]} rows and {first} has {first_shape[0]}: row i of every leaf must "
        "belong together. Give what is not per row as a further argument."
    )
