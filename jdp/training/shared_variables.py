"""Variables of nnx that are in a state twice: a step would train two copies of them."""

import sys
from typing import Any

import jax


def require_unshared(name: str, tree: Any) -> None:
    """Refuse a tree that holds one variable of nnx at two places.

    JAX opens a state into its arrays, so that a step sees two variables. Its function may change
    one and read the other. Random streams are left out: modules share them, and use them at
    initialisation alone.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    places: dict[int, str] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    ):
        if not isinstance(node, nnx.Variable) or isinstance(node, nnx.RngState):
            continue
        place = f"{name}{jax.tree_util.keystr(path)}"
        first = places.setdefault(id(node), place)
        if first != place:
            raise ValueError(
                f"`{first}` and `{place}` are one {type(node).__name__} of nnx. A step would get "
                "two of them, and a change of one would not reach the other: shared weights would "
                "drift apart, and an optimizer that holds the variables of a model would update "
                "copies. nnx.split keeps each variable once: write graph, values = "
                f"nnx.split({name}), give `values` in the place of `{name}`, begin the step with "
                f"{name} = nnx.merge(graph, values, copy=True), and keep nnx.state({name})."
            )
