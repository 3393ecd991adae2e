"""Which arguments of a step are parameters, optimizer state, rows: by their types and names."""

import re
from collections.abc import Mapping
from typing import Any

import jax

_BY_NAME = (("opt_state", "optimizer_state"), ("params", "parameters"))


def parts_of(state: Any) -> dict[str, str]:
    """Return the part that a leaf of a state belongs to, for leaves whose types say it.

    >>> import optax
    >>> params = {"w": jax.numpy.zeros(2)}
    >>> parts_of((params, optax.sgd(0.1, momentum=0.9).init(params)))
    {"[1][0].trace['w']": 'optimizer_state'}
    """
    found: dict[str, str] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_has_part):
        if part := _part(node):
            for inner, _ in jax.tree_util.tree_leaves_with_path(node):
                found[jax.tree_util.keystr((*path, *inner))] = part
    return found


def category(name: str, parts: Mapping[str, str]) -> str:
    """Return what an argument is for.

    >>> names = [f"args[0]{path}" for path in (".params['w']", ".params_ema", "['params'].w")]
    >>> [category(name, {}) for name in names]
    ['parameters', 'other_state', 'parameters']
    """
    argument, _, path = name.partition("]")
    if argument == "args[1":
        return "batch"
    if argument != "args[0":
        return "other_arguments"
    for part, found in _BY_NAME:
        if re.search(rf"\.{part}\b|\['{part}'\]", path):
            return found
    return parts.get(path, "other_state")


def _has_part(node: Any) -> bool:
    return _part(node) is not None


def _part(node: Any) -> str | None:
    for kind in type(node).__mro__:
        if kind.__module__.startswith("optax"):
            return "optimizer_state"
        if kind.__module__.startswith("flax.nnx"):
            if kind.__name__ == "Param":
                return "parameters"
            if kind.__name__ == "OptState":
                return "optimizer_state"
    return None
