"""Rules for primitives with bodies, and for unknown primitives."""

from __future__ import annotations

from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.dataflow import Forward
from jdp.analysis.interpreter import Interpreter
from jdp.analysis.records import Cell, value_of
from jdp.analysis.rules import local


def _cell(interp: Interpreter, ref: int | Cell) -> Cell:
    # A Ref from a primitive without a rule may hold anything.
    return ref if isinstance(ref, Cell) else Cell(interp.anything())


def _varying(interp: Interpreter, indices: list[Any]) -> int:
    bits = 0
    for index in indices:
        bits |= value_of(index)
    return bits & interp.lattice.varying


def _new(interp: Interpreter, eqn: Any, ins: list[Any]) -> Cell:
    return Cell(value_of(ins[0]))


def _read(interp: Interpreter, eqn: Any, ins: list[Any]) -> int:
    ref, *indices = ins
    return _cell(interp, ref).value | _varying(interp, indices)


def _swap(interp: Interpreter, eqn: Any, ins: list[Any]) -> int:
    ref, value, *indices = ins
    cell, indexed = _cell(interp, ref), _varying(interp, indices)
    before = cell.value
    cell.value |= value | indexed | interp.where
    return before | indexed


def _add(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[int]:
    ref, value, *indices = ins
    cell = _cell(interp, ref)
    cell.value = interp.lattice.add(cell.value, value) | _varying(interp, indices) | interp.where
    return []


REF_RULES = {
    "new_ref": _new,
    "empty_ref": lambda interp, eqn, ins: Cell(interp.anything()),
    "get": _read,
    "freeze": _read,
    "swap": _swap,
    "addupdate": _add,
    "free_ref": lambda interp, eqn, ins: [],
}


def _call(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any] | Any:
    body = jaxprs.called_body(eqn)
    return interp.body(body, ins, eqn) if body is not None else unknown(interp, eqn, ins)


def _cond(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any]:
    index, operands = ins[0] & interp.lattice.varying, ins[1:]
    branches = jaxprs.branches(eqn)
    rows = [interp.under(index, "cond", branch, operands, eqn) for branch in branches]
    passed_on = [_passed_on(branch) for branch in branches]
    outs = []
    for values, origins in zip(zip(*rows, strict=True), zip(*passed_on, strict=True), strict=True):
        value = values[0]
        # The index does not matter if all branches return one operand.
        if origins[0] is None or len(set(origins)) > 1:
            value = index
            for each in values:
                value |= value_of(each)
        outs.append(value)
    return outs


def _passed_on(body: Any) -> list[int | None]:
    def visit(eqn: Any, operands: list[Any], _: Any) -> list[None] | None:
        return None if eqn.primitive.name in jaxprs.CALLS else [None] * len(eqn.outvars)

    return Forward(lambda positions: None, visit).outputs(body, range(len(body.invars)))


def _while(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any]:
    cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
    for_cond, for_body = ins[:num_cond], ins[num_cond : num_cond + num_body]
    carry = ins[num_cond + num_body :]
    untouched = [origin == num_body + i for i, origin in enumerate(_passed_on(body))]
    goes_on = 0  # axes along which ranks may leave the loop at different times
    before = None
    while before != (before := [goes_on, *map(value_of, [*for_cond, *for_body, *carry])]):
        (predicate,) = interp.under(goes_on, "while", cond, for_cond + carry, eqn)
        goes_on |= predicate & interp.lattice.varying
        outs = interp.under(goes_on, "while", body, for_body + carry, eqn)
        carry = [
            old if same else value_of(old) | value_of(new) | goes_on
            for old, new, same in zip(carry, outs, untouched, strict=True)
        ]
    return carry


def _scan(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any]:
    body, num_constants, num_carry = jaxprs.scan_parts(eqn)
    constants, xs = ins[:num_constants], ins[num_constants + num_carry :]
    carry = ins[num_constants : num_constants + num_carry]
    outs: list[Any] = []
    before = None
    while before != (before := [*map(value_of, [*constants, *carry, *xs])]):
        outs = interp.body(body, constants + carry + xs, eqn)
        pairs = zip(carry, outs[:num_carry], strict=True)
        carry = [value_of(old) | value_of(new) for old, new in pairs]
    local.record_rounds(interp, eqn)
    return carry + outs[num_carry:]


def _solve(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any]:
    (solve, at_solve), (matvec, at_matvec), at_rhs = jaxprs.solver_parts(eqn)
    num_rhs = len(ins) - at_rhs
    rhs = ins[at_rhs:]
    outs = interp.body(solve, ins[at_solve : at_solve + len(solve.invars) - num_rhs] + rhs, eqn)
    # The solver does not run matvec, but it may have collectives.
    constants = ins[at_matvec : at_matvec + len(matvec.invars) - num_rhs]
    interp.body(matvec, constants + outs[:num_rhs], eqn)
    return outs


def _shard_map(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any]:
    lattice = interp.lattice
    split = [lattice.axes(jaxprs.spec_axes(spec)) for spec in eqn.params["in_specs"]]
    joined = [lattice.axes(jaxprs.spec_axes(spec)) for spec in eqn.params["out_specs"]]
    inner = []
    for value, axes in zip(ins, split, strict=True):
        if isinstance(value, Cell):
            value.value |= axes
        elif axes:
            value = lattice.mix(value | axes | lattice.data)
        inner.append(value)
    with interp.manual_too(jaxprs.manual_axes(eqn)):
        outs = interp.body(jaxprs.mapped_body(eqn), inner, eqn)
    return [
        value_of(value) & ~axes | lattice.over("unsummed", axes)
        for value, axes in zip(outs, joined, strict=True)
    ]


def _high_level(interp: Interpreter, eqn: Any, ins: list[Any]) -> list[Any] | Any:
    body = interp.expanded(eqn)
    return interp.body(body, ins, eqn) if body is not None else _closed(interp, eqn, ins)


def _closed(interp: Interpreter, eqn: Any, ins: list[Any]) -> int:
    interp.opaque.setdefault(_name(eqn))
    return _source(interp, eqn, ins)


def _name(eqn: Any) -> str:
    # One primitive carries all high-level primitives.
    if "_prim" in eqn.params:
        return type(eqn.params["_prim"]).__name__
    return eqn.primitive.name


def unknown(interp: Interpreter, eqn: Any, ins: list[Any]) -> Any:
    """Analyse the bodies of a primitive without a rule; without any, results may differ."""
    if jaxprs.bodies(eqn) or interp.trusts_unknown:
        return joined(interp, eqn, ins)
    interp.record.add("unknown", eqn)
    joined(interp, eqn, ins)  # records deadlocks and opaque primitives
    return _source(interp, eqn, ins)


def _source(interp: Interpreter, eqn: Any, ins: list[Any]) -> int:
    """Join an unknown value into all Refs."""
    for value in ins:
        if isinstance(value, Cell):
            value.value |= interp.anything()
    return interp.anything()


def _copy_by_dma(interp: Interpreter, eqn: Any, ins: list[Any]) -> Any:
    # A Pallas copy's target device, None for its own.
    *_, device = eqn.params["tree"].unflatten(list(range(len(ins))))
    return joined(interp, eqn, ins) if device is None else _source(interp, eqn, ins)


def joined(interp: Interpreter, eqn: Any, ins: list[Any]) -> Any:
    """Join operands, results of bodies, and named axes, for inputs of bodies, and Refs."""
    lattice = interp.lattice
    axes = lattice.axes(jaxprs.named_axes(eqn)) & interp.everywhere
    if axes and interp.where:
        interp.record_deadlock(eqn, interp.where, axes)
    value = axes | (lattice.data if axes else 0)
    for operand in ins:
        value |= value_of(operand)
    value = lattice.mix(value)
    bodies = jaxprs.bodies(eqn)
    if not bodies and jaxprs.hides_a_function(eqn):
        interp.opaque.setdefault(_name(eqn))
    before = None
    while before != value:
        before = value
        for body in bodies:
            inner = [Cell(value) if jaxprs.is_ref(v) else value for v in body.invars]
            for result in interp.body(body, inner, eqn) + inner:
                value |= value_of(result)
    for operand in ins:
        if isinstance(operand, Cell):
            operand.value |= value | interp.where
    return value


# Of JAX, equinox, lineax and jax_triton, with bodies, Refs or hidden functions.
_JOINED = frozenset(
    "announce_jaxpr custom_jvp_call_jaxpr linear_solve maybe_set noinline nonbatchable pin "
    "nondifferentiable_backward nontraceable reduce reduce_window run_state scatter "
    "select_and_scatter select_if_vmap shard_alike stage tie triton_kernel_call unpin unvmap_all "
    "unvmap_any unvmap_max".split()
)

# They read the device, its host or its memory.
SOURCES = frozenset(
    "box_get box_set create_linear custom_lin empty global_array_to_host_local_array "
    "host_local_array_to_global_array infeed io_callback log_extend log_read new_box new_log "
    "rng_uniform".split()
)

RULES = {
    **dict.fromkeys(_JOINED | jaxprs.JOINED, joined),
    **dict.fromkeys(SOURCES | jaxprs.SOURCES, _source),
    **dict.fromkeys(jaxprs.CALLS, _call),
    "call_hi_primitive": _high_level,
    "call_hi_primitive_linearized": _closed,
    "cond": _cond,
    "custom_linear_solve": _solve,
    "dma_start": _copy_by_dma,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
