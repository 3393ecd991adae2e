"""The analysis of a whole function, for a training loop that the user wrote."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import axis
from jdp.analysis import eqn_axes, jaxprs
from jdp.analysis.analyse import analyse, find_shard_maps
from jdp.analysis.forward import Forward
from jdp.analysis.loop_refusals import refusals, unknown_primitives
from jdp.analysis.wording import bulleted, spelled
from jdp.axis import AxisName
from jdp.error_codes import with_code


def uniformity(
    f: Callable[..., Any], *args: Any, axis_name: AxisName = "data", **kwargs: Any
) -> Any:
    """Return which outputs of a function are the same on every rank, and refuse what goes wrong.

    Nothing runs: `f` is traced, and every `shard_map` or `pmap` over `axis_name` in it is analysed
    once. Compilers for GPUs have an analysis of this name for threads, here it is for ranks.

    Args:
      f: a function, jitted or not, that contains the `shard_map` or `pmap`.
      *args: its arguments. A `jax.ShapeDtypeStruct` can replace an array. A value that is not an
        array is passed to `f` unchanged.
      axis_name: the data axis: a name, or a tuple of names.
      **kwargs: its keyword arguments.

    Returns:
      A tree like f's outputs, with "uniform" or "varying" for each array, as f returns it: an array
      that `out_specs` combines from the parts of all ranks is "varying".

    Raises:
      ValueError: if ranks could deadlock; if an output may differ from rank to rank although its
        `out_specs` declare it equal; if a gradient that jdp is about to reduce was already reduced;
        or if there is no `shard_map` over the axis.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    >>> def on_rank(x):
    ...     return {"mean": jax.lax.pmean(x.mean(), "data"), "largest": x.max(keepdims=True)}
    >>> specs = {"mean": P(), "largest": P("data")}
    >>> f = jax.shard_map(on_rank, mesh=mesh, in_specs=P("data"), out_specs=specs, check_vma=False)
    >>> uniformity(f, jnp.arange(8.0))
    {'largest': 'varying', 'mean': 'uniform'}
    """
    names = axis.names(axis_name)
    called = getattr(f, "__name__", type(f).__name__)
    traced = _trace(f, args, kwargs)
    shard_maps = find_shard_maps(traced.jaxpr)
    over_axis = {id(eqn): eqn for eqn in shard_maps if eqn_axes.manual_axes(eqn).issuperset(names)}
    if not over_axis:
        raise ValueError(with_code("JDP128", _nothing_found(called, shard_maps, names)))
    reports = {key: analyse(eqn) for key, eqn in over_axis.items()}
    names_of_inputs: dict[int, list[str]] = {}

    def visit(eqn: Any, operands: list[_Left], _: Any) -> list[_Left] | None:
        if id(eqn) not in reports:
            return None
        called = zip(operands, _numbered(eqn), strict=True)
        names_of_inputs.setdefault(id(eqn), [value.name or other for value, other in called])
        outputs = enumerate(reports[id(eqn)].outputs)
        return [_Left(not x.axes.isdisjoint(names), id(eqn), i) for i, x in outputs]

    ins = [_Left(name=name) for name in traced.inputs]
    left = Forward(_Left.join, visit).outputs(traced.jaxpr, ins)
    problems = []
    for key, eqn in over_axis.items():
        # An output that is returned in several places has the path of the first.
        leaves = reversed(list(zip(left, traced.paths, strict=True)))
        paths = {value.position: path for value, path in leaves if value.origin == key}
        inputs = names_of_inputs.get(key) or _numbered(eqn)
        found = [*refusals(eqn, reports[key], names, paths, inputs)]
        if found and reports[key].unknown:
            trusted = analyse(eqn, trusts_unknown=True)
            if found != [*refusals(eqn, trusted, names, paths, inputs)]:
                found += unknown_primitives(reports[key])
        problems += found
    problems = list(dict.fromkeys(problems))  # one line may reduce several leaves
    if problems:
        raise ValueError(f"`{called}` goes wrong on several ranks:\n{bulleted(problems)}")
    return traced.unflatten(["varying" if value.varying else "uniform" for value in left])


def _numbered(eqn: Any) -> list[str]:
    return [f"input {i} of the shard_map" for i in range(len(eqn.invars))]


def _nothing_found(called: str, shard_maps: list[Any], names: tuple[str, ...]) -> str:
    text = f"`{called}` has no shard_map or pmap over {spelled(names)}"
    others = frozenset[str]().union(*map(eqn_axes.manual_axes, shard_maps))
    if not others:
        return f"{text}: there are no ranks in it that could differ."
    return (
        f"{text}, only over {spelled(others)}. Write axis_name={spelled(others)} if that is what "
        "splits the batch."
    )


class _TracedFunction(NamedTuple):
    jaxpr: Any
    inputs: list[str]  # paths of the arrays among the arguments, in order
    paths: list[str]  # of the arrays among the outputs, in order
    unflatten: Callable[[list[str]], Any]


def _trace(f: Callable[..., Any], args: tuple, kwargs: dict) -> _TracedFunction:
    named_in, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in named_in]
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    argument_names = _argument_names(f, len(args))
    outputs: list[tuple[list[tuple[str, bool]], Any]] = []

    def on_arrays(*values: Any) -> list[Any]:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        args, kwargs = jax.tree.unflatten(treedef, filled)
        named, out_tree = jax.tree_util.tree_flatten_with_path(f(*args, **kwargs))
        found = [(jax.tree_util.keystr(path), _is_array(leaf)) for path, leaf in named]
        outputs.append((found, out_tree))
        return [leaf for _, leaf in named if _is_array(leaf)]

    jaxpr = jaxprs.opened(jax.make_jaxpr(on_arrays)(*(leaves[i] for i in arrays)))
    named, out_tree = outputs[-1]

    def unflatten(classes: list[str]) -> Any:
        # A leaf that is not an array is a constant of the program.
        each = iter(classes)
        found = [next(each) if is_array else "uniform" for _, is_array in named]
        return jax.tree.unflatten(out_tree, found)

    inputs = [_argument(named_in[i][0], argument_names) for i in arrays]
    return _TracedFunction(jaxpr, inputs, [path for path, is_array in named if is_array], unflatten)


def _argument_names(f: Callable[..., Any], num: int) -> list[str]:
    try:
        parameters = [
            name
            for name, parameter in inspect.signature(f).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # f has no signature
        parameters = []
    return [*parameters[:num], *(f"argument {i}" for i in range(len(parameters), num))]


# The path of a leaf of (args, kwargs), as its author would write it.
def _argument(path: tuple[Any, ...], names: Sequence[str]) -> str:
    of_kwargs, which, *rest = path
    name = which.key if of_kwargs.idx else names[which.idx]
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


class _Left(NamedTuple):
    """The facts about a value outside of the shard_maps."""

    varying: bool = False
    # The id of the shard_map that returned the value unchanged, and the position of the output.
    origin: int | None = None
    position: int = -1
    # The name of the argument, if the value is one.
    name: str = ""

    @staticmethod
    def join(values: Sequence["_Left"]) -> "_Left":
        return _Left(any(value.varying for value in values))
