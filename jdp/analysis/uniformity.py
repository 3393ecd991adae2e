"""The analysis of hand-written training loops."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np

from jdp import axis
from jdp.analysis import causes, jaxprs, scales
from jdp.analysis.dataflow import Forward
from jdp.analysis.diagnostics import bulleted, shown, source_of, spelled
from jdp.analysis.interpreter import Interpreter, move
from jdp.analysis.provenance import Provenance, Report, decision, why, without_skipped
from jdp.analysis.records import Cell, value_of
from jdp.analysis.rules import RULES, UNKNOWN, control_flow
from jdp.analysis.rules.local import cast
from jdp.axis import AxisName
from jdp.error_codes import with_code

_declared: set[str] = set()


def declare_pure(primitive: jax.extend.core.Primitive) -> None:
    """Declare that a primitive gives equal results for equal operands on every rank.

    jdp has rules for the primitives of JAX and of some libraries, and analyses any primitive with a
    jaxpr among its parameters. Results of other primitives may differ between ranks, as from the
    device's number or a hidden state.

    Args:
      primitive: the object that your code or a library binds. The declaration holds for all
        primitives of its name.

    Raises:
      TypeError: it is not a primitive.
      ValueError: jdp has a rule for a primitive of this name.

    >>> from jax.extend.core import Primitive
    >>> double_p = Primitive("double")
    >>> declare_pure(double_p)
    """
    if not isinstance(primitive, jax.extend.core.Primitive):
        raise TypeError(
            f"jdp.declare_pure takes a jax.extend.core.Primitive, got {type(primitive).__name__} "
            f"{primitive!r}. Pass the object that your code binds."
        )
    if primitive.name in RULES and primitive.name not in _declared:
        raise ValueError(
            f"jdp already knows the primitive `{primitive.name}`, and a declaration would "
            "contradict its rule. If yours only has the same name, rename it."
        )
    _declared.add(primitive.name)
    RULES[primitive.name] = control_flow.joined


def find_shard_maps(jaxpr: Any) -> list[Any]:
    """Return the outermost shard_maps, in order, each once."""
    equations = jaxprs.equations(jaxpr, mapped=False)
    return [eqn for eqn in equations if eqn.primitive.name == "shard_map"]


def analyse(
    eqn: Any, *, trusts_unknown: bool = False, numbers: Mapping[Any, float] | None = None
) -> Report:
    """Compute which values may differ between ranks, from the axes in `in_specs`."""
    manual = jaxprs.manual_axes(eqn)
    interp = Interpreter(RULES, UNKNOWN, eqn.params["mesh"], manual, trusts_unknown=trusts_unknown)
    body = jaxprs.mapped_body(eqn)
    ins: list[Any] = []
    for variable, spec in zip(body.invars, eqn.params["in_specs"], strict=True):
        value = interp.lattice.mixed | interp.lattice.axes(jaxprs.spec_axes(spec))
        ins.append(Cell(value) if jaxprs.is_ref(variable) else value)
    for variable, operand in zip(body.invars, eqn.invars, strict=True):
        if numbers and not jaxprs.is_literal(operand):
            number = numbers.get(operand, 0.0)
            if interp.lattice.divisions(number):
                interp.numbers[variable] = number
    outs = interp.body(body, ins, eqn)
    outputs = tuple(interp.lattice.decode(value_of(value)) for value in outs)
    return Report(
        outputs=outputs,
        output_sources=_sources(eqn, outputs),
        deadlocks=interp.record.deadlocks(interp.lattice),
        marks=interp.record.marks(interp.lattice),
        opaque=tuple(interp.opaque),
        unknown=interp.record.unknown(),
        num_inputs=len(body.invars),
        refs=tuple(
            (i, interp.lattice.decode(value.value))
            for i, value in enumerate(ins)
            if isinstance(value, Cell)
        ),
        back=lambda axes, of="varying": Provenance(
            body, interp.record, eqn, interp.lattice.over(of, interp.lattice.axes(axes))
        ),
    )


def _sources(eqn: Any, outputs: tuple[Any, ...]) -> tuple[str, ...]:
    body = jaxprs.mapped_body(eqn)
    specs = zip(outputs, eqn.params["out_specs"], strict=True)
    torn = [bool(out.axes and out.axes - jaxprs.spec_axes(spec)) for out, spec in specs]
    if not any(torn):
        return ("",) * len(torn)
    makers = {variable: each for each in body.eqns for variable in each.outvars}
    return tuple(
        _maker(variable, makers) if differs else ""
        for variable, differs in zip(body.outvars, torn, strict=True)
    )


def _maker(variable: Any, makers: dict[Any, Any]) -> str:
    # JAX often adds casts and copies.
    while (eqn := None if jaxprs.is_literal(variable) else makers.get(variable)) is not None:
        rule = RULES.get(eqn.primitive.name)
        if rule not in (move, cast) and eqn.primitive.name != "jdp_mark":
            return source_of(eqn)
        variable = eqn.invars[0]
    return ""


def loop_refusals(
    eqn: Any, report: Report, names: tuple[str, ...], paths: dict[int, str], inputs: Sequence[str]
) -> Iterator[str]:
    """Refuse each mistake in a shard_map over the axes `names`."""
    yield from causes.unmatched_refusals(
        report, inputs, f"jax.lax.pmean(loss, {spelled(names)}) < 2"
    )
    yield from scales.reduction_refusals(eqn, report, names)
    yield from _torn_outputs(eqn, report, names, paths, inputs)
    yield from _torn_refs(eqn, report, names)


def _torn_outputs(
    eqn: Any, report: Report, names: tuple[str, ...], paths: dict[int, str], inputs: Sequence[str]
) -> Iterator[str]:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for i, spec in enumerate(eqn.params["out_specs"]):
        torn = report.outputs[i].axes.intersection(names) - jaxprs.spec_axes(spec)
        if not torn:
            continue
        back = report.back(torn)
        node = back.of_output(i)
        if not without_skipped(back, {i: node}, report.deadlocks):
            continue
        made, line, mend = "computed", report.output_sources[i], "average"
        if decided := decision(back, node):
            made, line, mend, node = "decided", back.nearest_line(decided), "decide", decided
        leaf = f"`output{paths[i]}`" if i in paths else f"output {i} of the shard_map"
        aval, reason = eqn.outvars[i].aval, why([back.origin(node)], inputs)
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            mend = "key"
        at = f" ({made} at {line})" if line else ""
        cause = at, spelled(torn), reason, mend
        grouped.setdefault(cause, []).append(f"{leaf} {aval.dtype}{list(aval.shape)}")
    for (at, along, reason, mend), leaves in grouped.items():
        yield with_code(
            "JDP101",
            f"{shown(leaves)}{at} may differ from rank to rank along {along}: {reason}. The "
            "out_specs declare it the same on all ranks, so ranks would drift apart silently. "
            f"{_MENDS[mend].format(spelled(names))}",
        )


_MENDS = {
    "average": "Average it first, jax.lax.pmean(x, {0}), or concatenate in out_specs, P({0}).",
    "key": "Return the key that all ranks share, and draw from jax.random.fold_in(key, "
    "jax.lax.axis_index({0})).",
    "decide": "Decide by a value that all ranks share, jax.lax.pmean(x, {0}) of the loss or the "
    "gradients.",
}


def _torn_refs(eqn: Any, report: Report, names: tuple[str, ...]) -> Iterator[str]:
    for i, value in report.refs:
        torn = value.axes.intersection(names) - jaxprs.spec_axes(eqn.params["in_specs"][i])
        if torn:
            yield with_code(
                "JDP106",
                f"the Ref that is input {i} of the shard_map may end with different values along "
                f"{spelled(torn)}, but its in_specs declare it shared by all ranks. Average the "
                f"stored value, jax.lax.pmean(x, {spelled(names)}), or split it, "
                f"P({spelled(names)}).",
            )


def unknown_primitives(report: Report) -> Iterator[str]:
    """Name every primitive without a rule."""
    for name, line in report.unknown:
        at = f" at {line}" if line else ""
        yield with_code(
            "JDP107",
            f"jdp does not know the primitive `{name}`{at} and assumes that its results differ "
            "from rank to rank. If equal operands give equal results on every rank, write "
            "jdp.declare_pure(primitive) before the first step. If not, average its results.",
        )


def uniformity(
    f: Callable[..., Any], *args: Any, axis_name: AxisName = "data", **kwargs: Any
) -> Any:
    """Return which outputs of a function are equal on every rank, and refuse mistakes.

    jdp traces `f` without running it, and analyses each `shard_map` or `pmap` over `axis_name`.

    Args:
      f: a function, jitted or not, that contains the `shard_map` or `pmap`.
      *args: its arguments. A `jax.ShapeDtypeStruct` can replace an array. `f` gets other values
        unchanged.
      axis_name: the data axis: a name, or a tuple of names.
      **kwargs: its keyword arguments.

    Returns:
      A tree like f's outputs, with "uniform" or "varying" for each returned array. An array that
      `out_specs` combines from shards is "varying".

    Raises:
      ValueError: ranks could deadlock; an output may differ from rank to rank although its
        `out_specs` declare it equal; a gradient was reduced before jdp reduces it; or no
        `shard_map` over the axis is found.

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
    over_axis = {id(eqn): eqn for eqn in shard_maps if jaxprs.manual_axes(eqn).issuperset(names)}
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
        # An output returned in several places has the path of the first.
        leaves = reversed(list(zip(left, traced.paths, strict=True)))
        paths = {value.position: path for value, path in leaves if value.origin == key}
        inputs = names_of_inputs.get(key) or _numbered(eqn)
        found = [*loop_refusals(eqn, reports[key], names, paths, inputs)]
        if found and reports[key].unknown:
            trusted = analyse(eqn, trusts_unknown=True)
            if found != [*loop_refusals(eqn, trusted, names, paths, inputs)]:
                found += unknown_primitives(reports[key])
        problems += found
    problems = list(dict.fromkeys(problems))
    if problems:
        raise ValueError(f"`{called}` fails on several ranks:\n{bulleted(problems)}")
    return traced.unflatten(["varying" if value.varying else "uniform" for value in left])


def _numbered(eqn: Any) -> list[str]:
    return [f"input {i} of the shard_map" for i in range(len(eqn.invars))]


def _nothing_found(called: str, shard_maps: list[Any], names: tuple[str, ...]) -> str:
    text = f"`{called}` has no shard_map or pmap over {spelled(names)}"
    others = frozenset[str]().union(*map(jaxprs.manual_axes, shard_maps))
    if not others:
        return f"{text}, so it has no ranks that could differ."
    return (
        f"{text}, only over {spelled(others)}. If that axis splits the batch, write "
        f"axis_name={spelled(others)}."
    )


class _TracedFunction(NamedTuple):
    jaxpr: Any
    inputs: list[str]  # paths of argument arrays, in order
    paths: list[str]  # of output arrays, in order
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
        # Others are program constants.
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


# A leaf's path in (args, kwargs), as its author would write it.
def _argument(path: tuple[Any, ...], names: Sequence[str]) -> str:
    of_kwargs, which, *rest = path
    name = which.key if of_kwargs.idx else names[which.idx]
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic))


class _Left(NamedTuple):
    """A value's facts outside of the shard_maps."""

    varying: bool = False
    # The shard_map that returned it unchanged, by id, and the output.
    origin: int | None = None
    position: int = -1
    name: str = ""

    @staticmethod
    def join(values: Sequence["_Left"]) -> "_Left":
        return _Left(any(value.varying for value in values))
