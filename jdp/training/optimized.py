"""The optimizers in a state, and the variables that those of nnx update."""

import sys
from collections.abc import Iterator
from typing import Any

import jax

from jdp.reduction.optimizer import has_optimizer
from jdp.reduction.sharding import sharding_of

# Fields of a `TrainState`; a class that inherits from it may have more.
_FIELDS = ("step", "params", "opt_state", "model_state", "seed")


def nodes(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of a state, in the order of its leaves, each with its optimizer or None.

    A node is an optimizer with its state; a variable of nnx outside of these, whose optimizer is
    the one that it matches the `wrt` of; or another leaf.
    """
    nnx = sys.modules.get("flax.nnx")
    variable = () if nnx is None else nnx.Variable

    def is_node(node: Any) -> bool:
        return is_optimizer(node) or isinstance(node, variable)

    found = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_node)
    filters = [
        (nnx.filterlib.to_predicate(node.wrt), node.tx)
        for _, node in found
        if nnx is not None and isinstance(node, nnx.Optimizer) and is_optimizer(node)
    ]
    for path, node in found:
        if is_optimizer(node):
            yield node, node.tx
            continue
        names = tuple(map(_name, path)) if isinstance(node, variable) else ()
        yield node, _one([tx for is_of, tx in filters if names and is_of(names, node)])


def _one(found: list[Any]) -> Any:
    """Return the first of the optimizers of a variable if all reduce and split alike, else None."""
    ways = {(tx.axis_name, tx.reduce_dtype, sharding_of(tx)) for tx in found}
    return found[0] if len(ways) == 1 else None


def _name(key: Any) -> Any:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def parameters(node: Any) -> Any:
    """Return the parameters of a node that its optimizer updates; an empty tuple if it has none."""
    return getattr(node, "params", ()) if is_optimizer(node) else node


def is_optimizer(node: Any) -> bool:
    """Whether a node has an optimizer and its state: a `TrainState`, that of Flax, of nnx."""
    return has_optimizer(node) and hasattr(node, "opt_state")


def is_train_state(node: Any) -> bool:
    """Whether a node is a `TrainState`; not by its class, whose module imports this one."""
    return all(hasattr(node, name) for name in ("tx", *_FIELDS))
