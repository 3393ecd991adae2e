"""The learning rate and the measurements that the state of an Optax optimizer holds."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from jdp.pytrees import is_deleted

_INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_MEASURED = (optax.SnapshotState, optax.MonitorState)


def of_state(state: Any) -> dict[str, Any]:
    """Return the scalars by name, on one device, so that the next step may donate the state."""
    leaves, tree = jax.tree.flatten(state)
    indices = _indices(tree)
    if not indices:
        raise ValueError(
            "state= has no learning rate of optax.inject_hyperparams and no value of "
            "optax.snapshot or optax.monitor. Leave state= out, or name one: "
            'optax.chain(optax.snapshot("gradient_norm", optax.tree.norm), ...).'
        )
    found = {name: leaves[i] for name, i in indices.items()}
    if gone := [name for name, value in found.items() if is_deleted(value)]:
        raise ValueError(
            f"the state was donated to a step, and its {gone[0]} with it. Give jdp.log the state "
            "that the latest step returned."
        )
    return {name: _copied(value) for name, value in found.items() if np.size(value) == 1}


@functools.lru_cache(maxsize=8)
def _indices(tree: Any) -> dict[str, int]:
    """Return which leaves are logged, by name: labels of `optax.multi_transform`, and their own."""
    state = tree.unflatten(range(tree.num_leaves))
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, _INJECTED + _MEASURED)
    )
    found: dict[str, int] = {}
    for path, node in nodes:
        labels = _keys(path)
        for own, value in _values(node).items():
            for rest, index in jax.tree_util.tree_leaves_with_path(value):
                name = "/".join([*labels, own, *_keys(rest)])
                number = sum(each.partition(" ")[0] == name for each in found) + 1
                found[name if number == 1 else f"{name} {number}"] = index
    return found


def _values(node: Any) -> dict[str, Any]:
    if isinstance(node, _INJECTED):
        return {k: v for k, v in node.hyperparams.items() if k == "learning_rate"}
    if isinstance(node, optax.SnapshotState):
        return node.measurement
    return node.measurements if isinstance(node, optax.MonitorState) else {}


def _keys(path: Any) -> list[str]:
    """Return the keys of dicts on a path, without attributes and positions."""
    return [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]


def _copied(value: Any) -> Any:
    if not isinstance(value, jax.Array):
        return value
    return jax.numpy.copy(value.addressable_data(0))
