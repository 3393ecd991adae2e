"""Read the names of mesh axes in the parameters of JAX's primitives."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec


def manual_axes(eqn: Any) -> frozenset[str]:
    """Return the names of the axes that a shard_map makes manual."""
    return frozenset(eqn.params["newly_manual_axes"])


def spec_axes(spec: PartitionSpec) -> set[Any]:
    """Return the names of the axes along which arrays with this spec differ, also partial sums."""
    found = set(spec.unreduced)
    for entry in spec.partitions:
        found.update(entry if isinstance(entry, tuple) else (entry,))
    return found


def collective_axes(eqn: Any) -> tuple[Any, ...]:
    """Return the axes of a collective: names of mesh axes, or positions of dims under a vmap."""
    axes = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def groups(eqn: Any) -> Sequence[Sequence[int]] | None:
    """Return the groups of ranks of a collective, None if all ranks form one group."""
    found = eqn.params.get("axis_index_groups")
    return found if found is not None and len(found) > 1 else None


def named_axes(eqn: Any) -> set[str]:
    """Return every string in the parameters of an equation that may be the name of an axis."""
    return _strings_in(value for key, value in eqn.params.items() if key != "name")


def _strings_in(values: Any) -> set[str]:
    found = set()
    for value in values:
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, PartitionSpec):
            found |= spec_axes(value)
        elif isinstance(value, (tuple, list, set, frozenset)):
            found |= _strings_in(value)
    return found
