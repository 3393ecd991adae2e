"""The analysis of a whole function, for an author's own loop."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp import axis
from jdp.axis import AxisName
from jdp.uniformity import jaxprs
from jdp.uniformity.analysis import analyse, find_shard_maps
from jdp.uniformity.report import Report


def uniformity(
    f: Callable[..., Any], *args: Any, axis_name: AxisName = "data", **kwargs: Any
) -> Any:
    """Tell which outputs of a function are the same on every rank, and refuse what goes wrong.

    Nothing runs: `f` is traced, and every `shard_map` or `pmap` over `axis_name` in it is gone
    through once. Compilers for GPUs have an analysis of this name, for threads in place of ranks.

    Args:
      f: a function, jitted or not, that contains the `shard_map` or `pmap`.
      *args: its arguments. A `jax.ShapeDtypeStruct` will do for an array; what is no array goes
        to `f` as it is.
      axis_name: the data axis: a name, or a tuple of names.
      **kwargs: its keyword arguments.

    Returns:
      A tree like f's outputs, of "uniform" and "varying", as ranks leave them: what `out_specs`
      put together from the parts of all ranks is "varying".

    Raises:
      ValueError: if ranks could wait for each other for ever; if an output may differ from rank
        to rank although its `out_specs` say that it does not; if a gradient that jdp is to
        reduce was reduced before; or if there is no `shard_map` over the axis.

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
    traced = _trace(f, args, kwargs)
    shard_maps = find_shard_maps(traced.jaxpr)
    over_axis = [eqn for eqn in shard_maps if jaxprs.manual_axes(eqn).issuperset(names)]
    called = getattr(f, "__name__", type(f).__name__)
    if not over_axis:
        others = sorted({axis for eqn in shard_maps for axis in jaxprs.manual_axes(eqn)})
        raise ValueError(
            f"`{called}` has no shard_map or pmap over {_spell(names)}"
            + (f", only over {_spell(others)}: write axis_name=" if others else ": there is ")
            + (f"{_spell(others)} if that is the data axis." if others else "nothing to analyse.")
        )
    reports = {id(eqn): (eqn, analyse(eqn)) for eqn in over_axis}
    left = _leave(traced.jaxpr, [_Left(False, None)] * len(traced.jaxpr.invars), reports, names)
    paths = {}
    for path, value in zip(traced.paths, left, strict=True):
        paths.setdefault(value.origin, path)
    problems = [
        problem
        for eqn, report in reports.values()
        for problem in _problems(eqn, report, names, paths)
    ]
    if len(problems) == 1:
        raise ValueError(f"`{called}`: {problems[0]}")
    if problems:
        raise ValueError("\n".join([f"`{called}` goes wrong on several ranks:", *problems[:8]]))
    return traced.unflatten(["varying" if value.varying else "uniform" for value in left])


class _Traced(NamedTuple):
    jaxpr: Any
    paths: list[str]  # of the arrays among the outputs, in order
    unflatten: Callable[[list[str]], Any]


def _trace(f: Callable[..., Any], args: tuple, kwargs: dict) -> _Traced:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    named: list[tuple[Any, Any]] = []
    out_tree: list[Any] = []

    def on_arrays(*values: Any) -> list[Any]:
        filled = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            filled[i] = value
        args, kwargs = jax.tree.unflatten(treedef, filled)
        named[:], out_tree[:] = _flatten(f(*args, **kwargs))
        return [leaf for _, leaf in named if _is_array(leaf)]

    jaxpr = jaxprs.opened(jax.make_jaxpr(on_arrays)(*(leaves[i] for i in arrays)))

    def unflatten(classes: list[str]) -> Any:
        # What is no array is a constant of the program.
        each = iter(classes)
        found = [next(each) if _is_array(leaf) else "uniform" for _, leaf in named]
        return jax.tree.unflatten(out_tree[0], found)

    paths = [jax.tree_util.keystr(path) for path, leaf in named if _is_array(leaf)]
    return _Traced(jaxpr, paths, unflatten)


def _flatten(tree: Any) -> tuple[list[Any], list[Any]]:
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return named, [treedef]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


class _Left(NamedTuple):
    varying: bool
    origin: tuple[int, int] | None  # id of a shard_map, position among its outputs


def _leave(
    jaxpr: Any, ins: Sequence[_Left], reports: dict[int, Any], names: tuple[str, ...]
) -> list[_Left]:
    """Follow the outputs of shard_maps to the outputs of the function around them."""
    constant = _Left(False, None)
    env = {**dict.fromkeys(jaxpr.constvars, constant), **dict(zip(jaxpr.invars, ins, strict=True))}

    def read(atom: Any) -> _Left:
        return constant if jaxprs.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if id(eqn) in reports:
            _, report = reports[id(eqn)]
            outs = [
                _Left(not value.axes.isdisjoint(names), (id(eqn), i))
                for i, value in enumerate(report.outputs)
            ]
        elif eqn.primitive.name in jaxprs.CALLS and (body := jaxprs.called_body(eqn)) is not None:
            outs = _leave(body, operands, reports, names)
        else:
            varying = any(value.varying for value in operands)
            for body in jaxprs.bodies(eqn):
                inner = [_Left(varying, None)] * len(body.invars)
                varying |= any(value.varying for value in _leave(body, inner, reports, names))
            outs = [_Left(varying, None)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _problems(
    eqn: Any, report: Report, names: tuple[str, ...], paths: dict[Any, str]
) -> Iterator[str]:
    axes = _spell(names)
    for found in report.deadlocks:
        yield (
            f"`{found.primitive}` over {_spell(found.axes)}{_at(found.source)} runs under a "
            f"`{found.control}` whose predicate may differ from rank to rank; ranks that skip it "
            "leave the others waiting for ever. Make the predicate the same first, for instance "
            f"jax.lax.pmean(loss, {axes}) < 2."
        )
    for found in report.marks:
        if found.kind == "local" and found.value.reduced.intersection(found.axes, names):
            yield (
                f"the gradient of `{found.path}` was reduced before it came to "
                f"{found.source or 'jdp'}: a sum would be averaged as if it were each rank's own, "
                "a mean sent twice. Hand over the local gradient."
            )
    for i, (value, spec) in enumerate(zip(report.outputs, eqn.params["out_specs"], strict=True)):
        if torn := value.axes.intersection(names) - jaxprs.spec_axes(spec):
            path = paths.get((id(eqn), i))
            leaf = f"output {i} of the shard_map" if path is None else f"`output{path}`"
            yield (
                f"{leaf} {_type(eqn.outvars[i])}{_at(report.output_sources[i], 'computed at')} may "
                f"differ from rank to rank along {_spell(torn)}, but its out_specs say that it "
                "does not: one rank's value would be taken for that of all. Average it first, "
                f"jax.lax.pmean(x, {axes}), or let out_specs put the parts together, P({axes})."
            )
    for i, value in report.refs:
        if torn := value.axes.intersection(names) - jaxprs.spec_axes(eqn.params["in_specs"][i]):
            yield (
                f"the Ref that is input {i} of the shard_map may hold different values along "
                f"{_spell(torn)} in the end, but its in_specs say that ranks share it. Average "
                f"what is written, jax.lax.pmean(x, {axes}), or split it with P({axes})."
            )


def _at(source: str, how: str = "at") -> str:
    return f" ({how} {source})" if source and how != "at" else f" at {source}" if source else ""


def _type(variable: Any) -> str:
    return f"{variable.aval.dtype}{list(variable.aval.shape)}"


def _spell(names: Any) -> str:
    names = sorted(names) if isinstance(names, frozenset) else list(names)
    return repr(names[0]) if len(names) == 1 else repr(tuple(names))
