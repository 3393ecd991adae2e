"""Maps a batch's rows to processes, and places them on devices."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdp import axis
from jdp.axis import AxisName
from jdp.data import host_arrays
from jdp.distributed.mesh import num_ranks, require_axes, sharding_of_rows


class Leaf(NamedTuple):
    """A leaf of a process's host batch."""

    name: str
    shape: tuple[int, ...]  # of this process's rows
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


# Batch structures whose nodes keep no shape of all rows.
_checked: set[Any] = set()
_MOST_CHECKED = 100


def batch_sharding(
    mesh: Mesh, axis_name: AxisName, virtual_ranks: int | None = None
) -> NamedSharding:
    """Shard rows in rank order; undivided `virtual_ranks` give every rank all rows."""
    names = axis.names(axis_name)
    require_axes(mesh, names)
    is_whole = virtual_ranks is not None and virtual_ranks % num_ranks(mesh, names)
    return NamedSharding(mesh, PartitionSpec()) if is_whole else sharding_of_rows(mesh, names)


def num_blocks(sharding: NamedSharding) -> int:
    """Count the blocks of rows, one for each rank."""
    return sharding.num_devices // sharding.shard_shape((sharding.num_devices,))[0]


def process_rows(
    sharding: NamedSharding, num_rows: int, devices: Collection[jax.Device] | None = None
) -> np.ndarray:
    """Return a process's rows by the sharding: `[rows]` int, ascending and unique."""
    devices = sharding.addressable_devices if devices is None else devices
    if len(devices) == 0:
        raise ValueError(
            f"process {jax.process_index()} has no device on the mesh "
            f"{dict(sharding.mesh.shape)}, so it owns no rows. Build the mesh over devices of "
            "every process that requests batches."
        )
    index_map = sharding.devices_indices_map((num_rows,))
    blocks = {index_map[device][0].indices(num_rows) for device in devices}
    return np.concatenate([np.arange(*block) for block in sorted(blocks)])


def place_batch(
    batch: Any, where: Mesh, axis_name: tuple[str, ...], virtual_ranks: int | None = None
) -> Any:
    """Shard a global batch over a mesh's ranks; leaves already there stay."""
    named, treedef = host_arrays.flattened(batch, "`batch`")
    if any(host_arrays.is_table(leaf) for _, leaf in named):
        of = [host_arrays.columns(leaf, _name(path)) for path, leaf in named]
        return place_batch(treedef.unflatten(of), where, axis_name, virtual_ranks)
    ranks = num_ranks(where, axis_name) if virtual_ranks is None else virtual_ranks
    sharding = by_rows = sharding_of_rows(where, axis_name)
    if virtual_ranks is not None:
        sharding = batch_sharding(where, axis_name, virtual_ranks)
    rows = np.shape(named[0][1])[:1] if named else ()
    for path, leaf in named:
        if not rows or np.shape(leaf)[:1] != rows or rows[0] == 0 or rows[0] % ranks:
            text = _rows_error(path, leaf, named[0], ranks, is_virtual=virtual_ranks is not None)
            raise ValueError(_of_list_of_rows(batch) or text)
    if treedef not in _checked:  # once, not in each call of a step
        _require_own_shapes(batch)
        if len(_checked) > _MOST_CHECKED:  # values beside the arrays may differ in each batch
            _checked.clear()
        _checked.add(treedef)
    return treedef.unflatten([_place_rows(path, leaf, sharding, by_rows) for path, leaf in named])


def _place_rows(path: tuple, leaf: Any, sharding: NamedSharding, by_rows: NamedSharding) -> Any:
    if isinstance(leaf, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return leaf
    if isinstance(leaf, jax.Array):
        where, dims = leaf.sharding, leaf.ndim
        if where.is_equivalent_to(sharding, dims) or where.is_equivalent_to(by_rows, dims):
            return leaf
    if not sharding.is_fully_addressable:
        raise ValueError(
            f"{_name(path)} is an array of this process alone, but {jax.process_count()} "
            "processes train together, and jdp cannot know its rows in the global batch. Make "
            "batches with jdp.batches(dataset, ...) or jdp.shard_batches(loader)."
        )
    # Copy first: JAX may alias it for a CPU device, and the caller may refill it.
    if not isinstance(leaf, jax.Array):
        leaf = host_arrays.native(np.array(host_arrays.array(leaf, _name(path))))
        host_arrays.require_numbers(leaf.dtype, str(Leaf(_name(path), leaf.shape, leaf.dtype)))
        host_arrays.require_fits(leaf, _name(path))
    return jax.device_put(leaf, sharding)


def _rows_error(
    path: tuple, leaf: Any, first: tuple[tuple, Any], ranks: int, *, is_virtual: bool
) -> str:
    name, rows = _name(path), np.shape(leaf)[:1]
    if not rows and path and isinstance(path[-1], jax.tree_util.SequenceKey):
        if not hasattr(leaf, "shape"):
            return (
                f"{name} is the single value {leaf!r}, because JAX treats a list as a tree of "
                "separate values. Pass an array, np.asarray(values), and remove strings from the "
                "batch."
            )
    if not rows and hasattr(leaf, "__iter__") and not hasattr(leaf, "shape"):
        if not isinstance(leaf, (str, bytes)):
            return (
                f"{name} is a {type(leaf).__name__}, not a tree of arrays. If it yields batches, "
                "call the step with each: for batch in batches."
            )
    if not rows and np.asarray(leaf).dtype == object:
        return (
            f"{name} is a {type(leaf).__name__}, a type unknown to JAX, but a batch is a tree of "
            "arrays. Pass a dict of its arrays; or, if it is a dataclass, decorate its class "
            "with @jax.tree_util.register_dataclass."
        )
    if not rows or rows != np.shape(first[1])[:1]:
        return _differs(name, rows, _name(first[0]), np.shape(first[1]))
    if rows == (0,):
        return f"{name} has no rows; the mean over no rows is undefined."
    kind = "virtual ranks" if is_virtual else "ranks"
    options = f"mask=True, virtual_ranks={ranks}" if is_virtual else "mask=True"
    return (
        f"{name} has {rows[0]} rows, which is not divisible by {ranks} {kind}. A rank with fewer "
        f"rows would count as much as the others. Write jdp.batches(..., {options}), which pads "
        f"batches and masks the padding; or use a batch size that is a multiple of {ranks}."
    )


@dataclass(frozen=True)
class Layout:
    """The structure and placement of all batches of a loop."""

    sharding: NamedSharding
    num_rows: int  # of the global batch
    rows: np.ndarray  # [rows] int, of this process
    treedef: Any
    leaves: tuple[Leaf, ...]

    @classmethod
    def of_batch(cls, batch: Any, sharding: NamedSharding) -> "Layout":
        """Return the layout of this process's host batch."""
        leaves, _, treedef = _leaves(batch)
        for leaf in leaves:
            host_arrays.require_numbers(leaf.dtype, str(leaf))
            if not leaf.shape or leaf.shape[0] != leaves[0].shape[0]:
                first = leaves[0]
                text = _differs(leaf.name, leaf.shape, first.name, first.shape)
                raise ValueError(_of_list_of_rows(batch) or text)
        _require_own_shapes(batch)
        rows = leaves[0].shape[0] if leaves else 0
        all_ranks = num_blocks(sharding)
        ranks = len(process_rows(sharding, all_ranks))
        if rows == 0 or rows % ranks:
            raise ValueError(
                f"a batch of {rows} rows cannot be split over the {ranks} ranks of this process, "
                "because all ranks need equally many rows, at least one. Use a multiple of "
                f"{ranks}; drop a short last batch (drop_remainder, drop_last), or pad and mask "
                "it."
            )
        total = rows // ranks * all_ranks
        return cls(sharding, total, process_rows(sharding, total), treedef, tuple(leaves))

    def of_later(self, batch: Any) -> "Layout":
        """Return a later batch's layout: this one unless shapes differ."""
        leaves, _, treedef = _leaves(batch)
        if treedef != self.treedef:
            raise ValueError(
                f"a later batch has the leaves {treedef}, but the step was traced for those of "
                f"the first: {self.treedef}. Return the same keys in every batch."
            )
        for leaf, first in zip(leaves, self.leaves, strict=True):
            if leaf.dtype != first.dtype:
                raise ValueError(
                    f"a later batch has {leaf}, but the step was traced for the first, {first}. "
                    f"Cast every batch to {first.dtype}."
                )
        return self if tuple(leaves) == self.leaves else Layout.of_batch(batch, self.sharding)

    def place(self, batch: Any) -> Any:
        """Place this process's host batch as its shard of the global batch."""
        leaves, arrays, treedef = _leaves(batch)
        for leaf, array in zip(leaves, arrays, strict=True):
            host_arrays.require_fits(array, leaf.name)
        return treedef.unflatten(map(self._place_leaf, arrays))

    def _place_leaf(self, values: np.ndarray) -> jax.Array:
        def block(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(self.num_rows)
            first = int(np.searchsorted(self.rows, start))
            return values[first : first + stop - start]

        shape = (self.num_rows, *values.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, block)


def _leaves(batch: Any) -> tuple[list[Leaf], list[np.ndarray], Any]:
    found, treedef = host_arrays.flattened(batch, "`batch`")
    arrays = [host_arrays.native(host_arrays.array(leaf, _name(path))) for path, leaf in found]
    leaves = [
        Leaf(_name(path), array.shape, array.dtype)
        for (path, _), array in zip(found, arrays, strict=True)
    ]
    return leaves, arrays, treedef


def _name(path: tuple) -> str:
    return f"`batch{jax.tree_util.keystr(path)}`"


def _of_list_of_rows(batch: Any) -> str:
    """Return the error for a list of single rows as a batch."""
    is_of_dicts = isinstance(batch, list) and all(isinstance(row, dict) for row in batch)
    if not is_of_dicts or len(batch) < 2 or any(row.keys() != batch[0].keys() for row in batch):
        return ""
    return (
        f"`batch` is a list of {len(batch)} dicts, but a batch is one dict of arrays, whose "
        "first dim is its rows.\n"
        "Stack the dicts: jax.tree.map(lambda *x: np.stack(x), *rows). Or write "
        "jdp.batches(rows, batch_size=...), which stacks them."
    )


def _differs(name: str, shape: tuple[int, ...], first: str, first_shape: tuple[int, ...]) -> str:
    if not shape and re.search(r"\]\[\d+\]`$", name):
        return (
            f"{name} is a single number, because JAX treats a list as a tree of separate values. "
            "Pass an array, np.asarray(values), and pad lists of different lengths first."
        )
    if not shape:
        return (
            f"{name} is a scalar, but the first dim of a batch is split over ranks. Pass it as a "
            "further argument: step(state, batch, scalar)."
        )
    few, many = sorted((shape[0], first_shape[0]))
    beside = f"[{few}, {many // few}, ...]" if few and many % few == 0 else "[rows, k, ...]"
    return (
        f"{name} has {shape[0]} rows and {first} has {first_shape[0]}, but row i of every leaf "
        f"must belong together. Pass a second set of rows as {beside}, some beside each row of "
        "the first; a further argument is whole on every rank. If rows differ in size, as graphs "
        "do in their nodes, pack them into rows of one size (docs/data.md)."
    )


def _require_own_shapes(batch: Any) -> None:
    """Refuse a node that keeps its arrays' shape as data: a shard's is another."""
    named, _ = host_arrays.flattened(batch, "`batch`", _has_shape)
    for path, node in named:
        if not _has_shape(node):
            continue
        leaves, treedef = jax.tree.flatten(node)
        more = [np.zeros((2 * np.shape(leaf)[0], *np.shape(leaf)[1:]), bool) for leaf in leaves]
        try:
            grown = treedef.unflatten(more).shape
        except Exception:  # its class takes other arrays alone: JAX says so in the step
            continue
        # A sparse array, or a shape that counts the rows.
        counts_rows = hasattr(node, "todense") or node.shape[:1] == np.shape(leaves[0])[:1]
        if counts_rows and tuple(grown) == tuple(node.shape):
            kind = type(node).__name__
            raise TypeError(
                f"{_name(path)} is a {kind} of shape {list(node.shape)}, which a rank would keep "
                "although it has only a part of the rows. Pass its arrays as leaves, [rows, "
                f"...], and make the {kind} in the step."
            )


def _has_shape(node: Any) -> bool:
    is_array = hasattr(node, "__array__") or isinstance(node, (jax.Array, jax.ShapeDtypeStruct))
    return isinstance(getattr(node, "shape", None), tuple) and not is_array
