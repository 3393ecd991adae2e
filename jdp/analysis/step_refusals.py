"""Refusals and warnings for a traced step."""

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import jax_compat, pytrees
from jdp.analysis import (
    Report,
    analyse,
    bfloat16_reductions,
    bulleted,
    causes,
    find_shard_maps,
    jaxprs,
    lints,
    scales,
    shown,
    source_of,
    unknown_primitives,
)
from jdp.analysis.dataflow import Forward, used_inputs
from jdp.analysis.diagnostics import WEIGHT, Traced
from jdp.analysis.marks import AVERAGED, LOCAL, SHARED
from jdp.analysis.rules import collectives
from jdp.error_codes import with_code

# Their frames are between a warning and the author's code.
_LIBRARIES = (f"{Path(__file__).parents[1]}/", f"{Path(jax.__file__).parent}/")
_UNIFORM = "jdp.mean_over_ranks(loss) < 2"


class Proved(NamedTuple):
    """An accepted step's properties."""

    gradients: frozenset[str] | None
    own_metrics: tuple[bool, ...]


def check(jaxpr: Any, traced: Traced) -> Proved:
    """Raise ValueError if ranks could deadlock or end with different states."""
    step = find_shard_maps(jaxpr)[0]
    numbers = jaxprs.captured_numbers(jaxpr)
    report = analyse(step, numbers=numbers)
    problems = _problems(step, report, traced)
    if problems:
        if report.unknown:
            trusted = analyse(step, trusts_unknown=True, numbers=numbers)
            if problems != _problems(step, trusted, traced):
                problems += unknown_primitives(report)
        raise ValueError(
            f"`{traced.spec.name}` is not the same training on every rank:\n{bulleted(problems)}"
        )
    for warning in (
        *_unused(report),
        *_untouched(step, traced),
        *_means(report, traced),
        *scales.warnings(step, report, traced),
        *_padding_warnings(step, report, traced),
        *lints.clip_warnings(report, traced),
        *lints.division_warnings(step, report, traced),
    ):
        if warning not in traced.spec.warned:
            traced.spec.warned.add(warning)
            warnings.warn(warning, stacklevel=stacklevel())
    return _proved(report, traced)


def stacklevel() -> int:
    """Count the frames below the author's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level


def proved(jaxpr: Any, traced: Traced) -> Proved:
    """Return the properties of an already checked step."""
    return _proved(analyse(find_shard_maps(jaxpr)[0]), traced)


def _proved(report: Report, traced: Traced) -> Proved:
    own = [
        not value.axes
        for output, value in zip(traced.outputs, report.outputs, strict=True)
        if output.kind == "own"
    ]
    return Proved(_uniform_gradients(report), tuple(own))


def _problems(step: Any, report: Report, traced: Traced) -> list[str]:
    if unknown := [*_not_compiled(step, report, traced)]:
        return unknown
    problems = [
        *causes.unmatched_refusals(report, causes.input_names(report, traced), _UNIFORM),
        *scales.refusals(step, report, traced),
        *_hidden_reductions(report, traced),
        *causes.refusals(report, traced),
        *_padding_refusals(step, report, traced),
        *_wrong_gather(step, traced),
        *_gathered_keys(step),
        *scales.transpose_refusals(step, report, traced),
        *_forward_mode(step, report),
        *_aborting_reductions(step, traced),
        *_unordered_axes(step, traced),
    ]
    return list(dict.fromkeys(problems))


def _uniform_gradients(report: Report) -> frozenset[str] | None:
    if not any(found.kind == AVERAGED for found in report.marks):
        return None
    local = [found for found in report.marks if found.kind == LOCAL]
    varying = {found.path for found in local if found.value.axes & set(found.axes)}
    return frozenset(found.path for found in local) - varying


def _hidden_reductions(report: Report, traced: Traced) -> Iterator[str]:
    # A reduction inside an opaque primitive could happen twice.
    hidden = sorted(
        traced.found.marked - {each.path for each in report.marks if each.kind == LOCAL}
    )
    if hidden and report.opaque:
        yield with_code(
            "JDP108",
            f"{shown(_quoted(sorted(report.opaque)))} hides from the analysis how the gradients "
            f"of {shown(_quoted(hidden))} are reduced. Call apply_gradients outside it.",
        )


def _wrong_gather(step: Any, traced: Traced) -> Iterator[str]:
    if jax_compat.INVARYING_GATHER_HAS_WRONG_GRADIENT and traced.spec.returns_state:
        if "all_gather_invariant" in _primitives(step):
            yield with_code(
                "JDP110",
                f'all_gather(to="invarying") has a wrong gradient in JAX {jax.__version__}. '
                'Write all_gather(to="varying"), the default, or use JAX >= 0.11.',
            )


def _gathered_keys(step: Any) -> Iterator[str]:
    """Refuse gathers of typed keys into a new dim, lowered wrongly by JAX."""
    for eqn in jaxprs.equations(step.params["jaxpr"]) if "all_gather" in _primitives(step) else ():
        if eqn.primitive.name == "all_gather" and not eqn.params["tiled"]:
            aval = eqn.invars[0].aval
            if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
                line = source_of(eqn)
                yield (
                    f"`all_gather`{f' at {line}' if line else ''} gathers typed keys, "
                    f"{aval.dtype}{list(aval.shape)}, into a new dim, which JAX cannot lower. "
                    'Write jax.random.wrap_key_data(jax.lax.all_gather(jax.random.key_data(keys), "'
                    f'{eqn.params["axis_name"][0]}")).'
                )


def _primitives(step: Any) -> frozenset[str]:
    return jaxprs.primitive_names(step.params["jaxpr"])


def _forward_mode(step: Any, report: Report) -> Iterator[str]:
    # JAX refuses this only in the lowering, without naming a layer.
    layers = dict.fromkeys(found.source for found in report.marks if found.kind == SHARED)
    if layers and "custom_lin" in _primitives(step):
        yield forward_mode(", ".join(filter(None, layers)))


def forward_mode(line: str) -> str:
    """Refuse a forward-mode derivative through `scan_layers`."""
    return with_code(
        "JDP111",
        "a forward-mode derivative (jax.jvp, jax.jacfwd, jax.hessian) goes through "
        f"jdp.scan_layers{line and f' at {line}'}, but its reduction in the backward loop, the "
        "default on GPUs, has none. Write jdp.scan_layers(..., late=False).",
    )


def _not_compiled(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    inputs = jaxprs.mapped_body(step).invars[report.num_inputs - len(traced.inputs) :]
    leaves = [*zip(traced.inputs, (x.aval for x in inputs), strict=True)]
    for leaf, aval in leaves + [(output, output.aval) for output in traced.outputs]:
        if pytrees.is_not_compiled(aval.dtype):
            name = leaf if isinstance(leaf, str) else leaf.path
            yield with_code(
                "JDP112",
                f"`{name}` is {aval.dtype}{list(aval.shape)}, and XLA cannot compute in that "
                "dtype. Write uint8 or bool for 1-bit integers, float8 or float32 for 6-bit "
                "floats.",
            )


def _aborting_reductions(step: Any, traced: Traced) -> Iterator[str]:
    if traced.platform != "cpu":
        return
    for eqn in bfloat16_reductions(step):
        line = source_of(eqn)
        others = set(step.params["mesh"].axis_names) - set(traced.spec.axis_name)
        yield with_code(
            "JDP113",
            f"`{eqn.primitive.name}`{f' at {line}' if line else ''} reduces bfloat16 over the "
            f"ranks of a mesh with a further axis, {shown(_quoted(sorted(others)))}. XLA would "
            "abort the process on CPUs. Write jdp.mean_over_ranks(x), jdp.sum_over_ranks(x) or "
            "jdp.max_over_ranks(x), or cast to float32 around it. If it is the gradient of an "
            "all_gather, cast the gathered value.",
        )


def _unordered_axes(step: Any, traced: Traced) -> Iterator[str]:
    if not jax_compat.ABORTS_ON_UNORDERED_AXES:
        return
    sizes = dict(step.params["mesh"].shape)
    names = [*sizes]

    # A place: axes of the shard_maps that XLA sees, outermost first, and all manual axes. JAX shows
    # XLA no shard_map over axes of size 1.
    def entered(place: tuple[Any, ...], axes: Collection[str]) -> tuple[Any, ...]:
        seen, manual = place
        is_seen = any(sizes[name] > 1 for name in axes)
        return (*seen, *sorted(axes, key=names.index)) if is_seen else seen, manual | {*axes}

    def enter(place: tuple[Any, ...], eqn: Any) -> tuple[Any, ...]:
        is_map = eqn.primitive.name == "shard_map"
        return entered(place, jaxprs.manual_axes(eqn)) if is_map else place

    start = entered(((), frozenset()), jaxprs.manual_axes(step))
    if start[1].issuperset(names):
        return
    for eqn, place in jaxprs.placed_equations(step.params["jaxpr"], start, enter):
        inner = enter(place, eqn)
        if eqn.primitive.name == "axis_index" and sizes.get(eqn.params["axis_name"], 1) > 1:
            inner = entered(place, {*names} - place[1])  # JAX lowers it as a shard_map over those
        seen = [*map(names.index, inner[0])]
        if inner == place or seen == sorted(seen) or len(seen) == len(names):
            continue
        line = source_of(eqn)
        new, around = (_quoted([*each]) for each in (inner[0][len(place[0]) :], place[0]))
        others = [name for name in (*inner[0], *names) if name not in traced.spec.axis_name]
        axes = {name: sizes[name] for name in others}
        yield with_code(
            "JDP132",
            f"`{eqn.primitive.name}`{f' at {line}' if line else ''} needs {shown(new)} in a "
            f"shard_map over {shown(around)}, which is another order than the mesh's, {names}. XLA "
            f"would abort the process. Write jdp.init(axes={axes}), or one shard_map over all "
            "these axes.",
        )


def _unused(report: Report) -> Iterator[str]:
    # A leaf, by path and shape, is used if any loss (of a GAN, a branch) depends on it.
    local = [found for found in report.marks if found.kind == LOCAL]
    leaves = [(found.path, found.eqn.outvars[0].aval.shape) for found in local]
    zero = [found.value.zero for found in local]
    used = {leaf for leaf, is_zero in zip(leaves, zero, strict=True) if not is_zero}
    unused = [path for path, shape in leaves if (path, shape) not in used]
    if unused:
        yield (
            f"the loss does not depend on {shown(_quoted(unused))}, so their gradients are zero, "
            "as on one device (weight decay and momentum still change them). To exclude them, "
            "write TrainState.create(trainable=...)."
        )


def _untouched(step: Any, traced: Traced) -> Iterator[str]:
    """Warn if gradients change only optimizer state."""
    body = jaxprs.mapped_body(step)
    if not traced.found.marked or any(map(jaxprs.is_ref, [*body.invars, *body.constvars])):
        return  # a Ref may hold parameters
    moved: set[Any] = set()  # values that depend on gradients
    same = {*body.invars}
    inner = jaxprs.bodies_by_equation(body)
    for eqn in body.eqns:
        read = [v for v in eqn.invars if not jaxprs.is_literal(v)]
        if not moved.isdisjoint(read) or _marks_gradients(eqn, inner):
            moved.update(eqn.outvars, filter(jaxprs.is_ref, read))
        elif eqn.primitive.name == "jdp_mark" and same.issuperset(read):
            same.update(eqn.outvars)
    leaves = [
        (output.path, v)
        for v, output in zip(body.outvars, traced.outputs, strict=True)
        if output.kind == "state"
        and "opt_state" not in output.path
        and jnp.issubdtype(output.aval.dtype, jnp.inexact)
        and not jaxprs.is_literal(v)
    ]
    ends = tuple(traced.found.marked)
    named = [(path, v) for path, v in leaves if path.removesuffix(".value").endswith(ends)]
    if named and same.issuperset(v for _, v in named) and moved.isdisjoint(v for _, v in leaves):
        yield (
            "the step reduces gradients, and returns "
            f"{shown(_quoted([path for path, _ in named]))} unchanged, so it does not train. "
            "Return the result of apply_gradients: state = state.apply_gradients(grads). With "
            "nnx the model comes first: optimizer.update(model, grads)."
        )


def _marks_gradients(eqn: Any, inner: Mapping[int, list[Any]]) -> bool:
    if eqn.primitive.name == "jdp_mark":
        return eqn.params["kind"] == LOCAL
    bodies = inner.get(id(eqn), ())
    marked = [body for body in bodies if "jdp_mark" in jaxprs.primitive_names(body)]
    return any(_marks_gradients(each, inner) for body in marked for each in body.eqns)


def _means(report: Report, traced: Traced) -> Iterator[str]:
    if any(found.kind == AVERAGED for found in report.marks):
        return
    # jdp's means weight ranks; the user's may not.
    mend = (
        "Pass the local gradient, which jdp weights."
        if traced.found.weighed
        else "Remove that mean: the optimizer averages. Or keep it, with synced=True: in "
        "apply_gradients of a jdp.TrainState, or in tx.update of another state."
    )
    for source, paths in scales.means(report, traced.found.averaged).items():
        yield (
            f"the gradient of {shown(_quoted(paths))} is already the mean over ranks at "
            f"{source or 'jdp.sync_gradients'}, and would be reduced again. {mend}"
        )


def _quoted(paths: Sequence[str]) -> list[str]:
    return [f"`{path or 'grads'}`" for path in paths]


class _PaddingKind(IntEnum):
    CONSTANT = 0
    MASK = 1  # the mask and constants
    COUNT = 2  # sums of such values
    OTHER = 3


_SUMS = frozenset(("reduce_sum", "dot_general"))


def _padding_refusals(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Refuse a step that averages over rows without the mask."""
    averages = any(
        out.kind in ("state", "metric") and out.tree.name != WEIGHT for out in traced.outputs
    )
    if traced.mask is None or not averages:  # jdp.evaluate takes the padding out of rows
        return
    if not used_inputs(jaxprs.mapped_body(step))[_mask_place(report, traced)]:
        yield with_code(
            "JDP109",
            f"`{traced.inputs[traced.mask]}` marks padding, but the step does not read it, or "
            "only for its weight=, so repeated rows would count. Weight the loss with it, "
            '`(losses * batch["mask"]).sum() / batch["mask"].sum()`, and write `weight=lambda '
            'batch: batch["mask"].sum()` in the decorator; or drop the last batch: '
            'jdp.batches(..., tail="drop").',
        )


def _padding_warnings(step: Any, report: Report, traced: Traced) -> Iterator[str]:
    """Warn of means of ranks not weighted by the mask."""
    if traced.mask is None:
        return
    body, place = jaxprs.mapped_body(step), _mask_place(report, traced)
    weighs = traced.spec.weight_fn is not None
    if weighs and _weight_reads(body, place, traced):
        return
    if lines := _local_means(body, place):
        mask = traced.inputs[traced.mask]
        how = "with equal weight: in a padded batch"
        if weighs:
            how = "by a weight= that does not depend on that mask: with padding"
        yield with_code(
            "JDP129",
            f"the mean at {shown([line or 'a line of a library' for line in lines])} is over the "
            f"unpadded rows of one rank (`{mask}`), and ranks are then averaged {how} the result "
            "depends on the number of ranks, and is NaN where a rank has only padding. Write "
            f"`weight=lambda {traced.spec.argument(1)}: {mask}.sum()` in the decorator.",
        )


def _mask_place(report: Report, traced: Traced) -> int:
    assert traced.mask is not None
    return report.num_inputs - len(traced.inputs) + traced.mask


def _weight_reads(body: Any, place: int, traced: Traced) -> bool:
    pass_over = Forward(any, lambda eqn, operands, _: None)
    depends = pass_over.outputs(body, [i == place for i in range(len(body.invars))])
    return any(
        found for out, found in zip(traced.outputs, depends, strict=True) if out.tree.name == WEIGHT
    )


def _local_means(body: Any, mask: int) -> list[str]:
    """Return the lines that divide by a rank's number of unpadded rows, unless weighted by hand."""
    walk, inputs = _PaddingWalk(), [_PaddingKind.OTHER] * len(body.invars)
    inputs[mask] = _PaddingKind.MASK
    walk.follow(body, inputs)
    return [] if walk.is_weighed else list(walk.lines)


class _PaddingWalk:
    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.is_weighed = False

    def follow(self, jaxpr: Any, inputs: Sequence[_PaddingKind]) -> list[_PaddingKind]:
        kinds = dict(zip(jaxpr.invars, inputs, strict=True))

        def kind_of(atom: Any) -> _PaddingKind:
            return (
                _PaddingKind.CONSTANT
                if jaxprs.is_literal(atom)
                else kinds.get(atom, _PaddingKind.OTHER)
            )

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [kind_of(atom) for atom in eqn.invars])
            kinds.update(zip(eqn.outvars, results, strict=True))
        return [kind_of(atom) for atom in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[_PaddingKind]) -> list[_PaddingKind]:
        name, unknown = eqn.primitive.name, [_PaddingKind.OTHER] * len(eqn.outvars)
        if name in jaxprs.CALLS:
            body = jaxprs.called_body(eqn)
            return unknown if body is None else self.follow(body, operands)
        if name == "scan":
            body, num_constants, num_carry = jaxprs.scan_parts(eqn)
            carry = [_PaddingKind.OTHER] * num_carry
            rest = operands[num_constants + num_carry :]
            self.follow(body, [*operands[:num_constants], *carry, *rest])
            return unknown
        if name == "cond":
            for branch in jaxprs.branches(eqn):
                self.follow(branch, operands[1:])
            return unknown
        if name in collectives.RULES and name != "jdp_mark":
            self.is_weighed |= any(
                kind in (_PaddingKind.MASK, _PaddingKind.COUNT) for kind in operands
            )
            return unknown
        if jaxprs.bodies(eqn):
            return unknown
        if name == "div" and operands[1] == _PaddingKind.COUNT:
            self.lines[source_of(eqn)] = None
        kind = max(operands, default=_PaddingKind.CONSTANT)
        if name in _SUMS and kind == _PaddingKind.MASK:
            kind = _PaddingKind.COUNT
        return [kind] * len(eqn.outvars)
