"""Which leaves of a tree are parameters, and which train."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp

from jdp import pytrees, rank_state
from jdp.analysis.step_refusals import stacklevel
from jdp.step_spec import StepSpec


def require_unshared(name: str, tree: Any) -> None:
    """Refuse an nnx variable at two places, except random streams: it would become two."""
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
                "two copies, and their values would drift apart. Split the module, which keeps "
                f"each variable once: graph, values = nnx.split({name}), pass `values` instead "
                f"of `{name}`, begin the step with {name} = nnx.merge(graph, values, copy=True), "
                f"and keep nnx.state({name})."
            )


_log = logging.getLogger("jdp")

_PARTITION = (
    "With Equinox keep it outside params: params, static = eqx.partition(model, "
    "eqx.is_inexact_array)."
)


def require_no_numbers_of_modules(params: Any, *, all_train: bool) -> None:
    """Refuse Python numbers as attributes of modules; log other floats."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if type(leaf) in (bool, int, float, complex) and _is_of_module(params, path):
            raise TypeError(
                f"`params{jax.tree_util.keystr(path)}` is {leaf!r}, a Python number of a module. "
                f"A step would get it as an array, and train it if it is a float. {_PARTITION} "
                'In a dataclass make the field static: dataclasses.field(metadata={"static": '
                "True}). To train it, make it an array."
            )
    if all_train:
        _log_floats(params)


def floats_of_equinox(state: Any) -> frozenset[str]:
    """Return the paths of Python floats in a state's Equinox modules."""
    if not any(type(leaf) in (float, complex) for leaf in jax.tree.leaves(state)):
        return frozenset()
    return frozenset(
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if type(leaf) in (float, complex) and _is_of_equinox(state, path)
    )


@contextlib.contextmanager
def not_trained(floats: frozenset[str], gradients: Set[str], state: str) -> Iterator[None]:
    """Refuse gradients of Python floats of modules, before any other error."""
    try:
        yield
    finally:
        for path in sorted(floats):
            if any(gradient and path.endswith(gradient) for gradient in gradients):
                raise TypeError(
                    f"the step differentiates with respect to `{state}{path}`, a Python number "
                    "of a module, and the optimizer would train it. In a step the numbers of a "
                    "state are arrays, so eqx.filter_grad differentiates them, unlike under "
                    "eqx.filter_jit. Keep them outside the state: params, static = "
                    "eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static) "
                    "in the loss. To train it, make it an array."
                )


def _is_of_equinox(tree: Any, path: tuple) -> bool:
    classes = type(_parent(tree, path)).__mro__
    return any(each.__module__.partition(".")[0] == "equinox" for each in classes)


def _is_of_module(tree: Any, path: tuple) -> bool:
    """Whether a leaf is an attribute, but not of a named tuple."""
    if not path or not isinstance(path[-1], jax.tree_util.GetAttrKey):
        return False
    return not isinstance(_parent(tree, path), tuple)


def _parent(tree: Any, path: tuple) -> Any:
    """Return a leaf's parent; None below a node with its own flattening."""
    try:
        for key in path[:-1]:
            if isinstance(key, jax.tree_util.GetAttrKey):
                tree = getattr(tree, key.name)
            else:
                tree = tree[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]
    except (AttributeError, KeyError, TypeError):
        return None
    return tree


def _log_floats(params: Any) -> None:
    named = jax.tree_util.tree_leaves_with_path(params)
    floats = [(path, leaf) for path, leaf in named if type(leaf) is float]
    if floats:
        path, leaf = floats[0]
        if number := _num_listed(named, path):
            _log.warning(
                "jdp: `params%s` is a list of %d Python floats, which train as %d scalars. Write "
                "jnp.array(...) around it to train one array.",
                *(jax.tree_util.keystr(_of_list(path)), number, number),
            )
            return
        others = f" ({len(floats)} of them)" if len(floats) > 1 else ""
        _log.warning(
            "jdp: `params%s` is the Python float %s%s and trains. Keep constants outside params, "
            "or write jnp.float32(%s) to train it.",
            *(jax.tree_util.keystr(path), leaf, others, leaf),
        )


def _of_list(path: tuple) -> tuple:
    """Return the path of the outermost list around a leaf, through lists alone."""
    while path and isinstance(path[-1], jax.tree_util.SequenceKey):
        path = path[:-1]
    return path


def _num_listed(named: list[tuple[Any, Any]], path: tuple) -> int:
    outer = _of_list(path)
    inner = [leaf for each, leaf in named if each[: len(outer)] == outer]
    return len(inner) if outer != path and all(type(leaf) is float for leaf in inner) else 0


def require_numbers(name: str, tree: Any) -> None:
    """Refuse NumPy arrays of Python objects."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if getattr(getattr(leaf, "dtype", None), "hasobject", False):
            raise TypeError(
                f"`{name}{jax.tree_util.keystr(path)}` is an array of Python objects. Convert it "
                'to numbers: np.asarray(value, "float32").'
            )


def trainable_flags(params: Any, trainable: Any) -> tuple[bool, ...]:
    """Whether each leaf of the parameters trains."""
    named = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), is_own in zip(named, rank_state.flags(params), strict=True):
        if not pytrees.is_array(leaf):
            raise TypeError(
                f"`params{jax.tree_util.keystr(path)}` is a {type(leaf).__name__}, not an array. "
                f'With Flax write params = model.init(key, x)["params"]. {_PARTITION}'
            )
        if is_own:
            raise ValueError(
                f"`params{jax.tree_util.keystr(path)}` is jdp.per_rank, but its gradient is "
                "averaged over all ranks. Keep per-rank state in model_state, or next to the "
                "TrainState: step((state, own), batch)."
            )
    if trainable is None:
        chosen = [True] * len(named)
    elif callable(trainable):
        chosen = [bool(trainable(jax.tree_util.keystr(path), leaf)) for path, leaf in named]
    else:
        chosen = _spread(trainable, params)
    flags = tuple(
        flag
        and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        and not pytrees.is_overwritten(path)
        for flag, (path, leaf) in zip(chosen, named, strict=True)
    )
    if not any(flags):
        raise ValueError(
            f"params has {len(flags)} leaves, and 0 of them train, so the step would change "
            "nothing. Pass float parameters, and a trainable= that selects some of "
            f"them{_shown(named) if callable(trainable) else ''}."
        )
    return flags


def _shown(named: list[tuple[Any, Any]]) -> str:
    paths = [f'"{jax.tree_util.keystr(path)}"' for path, _ in named[:3]]
    return f", from paths such as {', '.join(paths)}"


def _spread(trainable: Any, params: Any) -> list[bool]:
    """Return a flag per leaf, given a prefix tree."""
    try:
        spread = jax.tree.map(
            lambda flag, part: jax.tree.map(lambda _: flag, part), trainable, params
        )
    except ValueError as error:
        raise ValueError(
            f"trainable={trainable!r:.200} is not a tree like params or a prefix of it; "
            f"{jax.tree.map(lambda _: True, params)!r:.400} trains all leaves. Or pass a "
            'function, such as lambda path, leaf: "bias" not in path.'
        ) from error
    return [bool(flag) for flag in jax.tree.leaves(spread)]


_DROPPED = (
    "`{step}` updates batch statistics of `{state}`, which an evaluation drops. Its layers "
    "normalise with the rows of the batch, and dropout may be on.\n"
    "Call model.eval() before."
)


def warn_of_statistics(spec: StepSpec, state: Any, before: list[Any]) -> None:
    """Warn once if an evaluation has updated nnx batch statistics in its state."""
    text = _DROPPED.format(step=spec.name, state=spec.argument(0))
    is_changed = any(a is not b for a, b in zip(before, batch_statistics(state), strict=False))
    if is_changed and text not in spec.warned:
        spec.warned.add(text)
        warnings.warn(text, stacklevel=stacklevel())


def batch_statistics(tree: Any) -> list[Any]:
    """Return the values of nnx batch statistics in a tree."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.BatchStat))
    return jax.tree.leaves([node for node in nodes if isinstance(node, nnx.BatchStat)])
