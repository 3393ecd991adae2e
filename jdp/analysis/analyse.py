"""The analysis of one shard_map."""

from collections.abc import Mapping
from typing import Any

from jdp.analysis import eqn_axes, jaxprs
from jdp.analysis.cells import Cell, value_of
from jdp.analysis.interpreter import Interpreter, move
from jdp.analysis.provenance import Provenance
from jdp.analysis.report import Report
from jdp.analysis.rules import RULES, UNKNOWN
from jdp.analysis.rules.local import cast
from jdp.analysis.source_lines import source


def find_shard_maps(jaxpr: Any) -> list[Any]:
    """Return the outermost shard_map equations of a traced program, also inside jit, in order.

    A shard_map that is called in several places is returned once.
    """
    equations = jaxprs.equations(jaxpr, mapped=False)
    return [eqn for eqn in equations if eqn.primitive.name == "shard_map"]


def analyse(
    eqn: Any, *, trusts_unknown: bool = False, numbers: Mapping[Any, float] | None = None
) -> Report:
    """Compute which values may differ from rank to rank in the body of a shard_map.

    The `in_specs` decide which inputs vary: an input varies along the axes that split it.
    """
    manual = eqn_axes.manual_axes(eqn)
    interp = Interpreter(RULES, UNKNOWN, eqn.params["mesh"], manual, trusts_unknown=trusts_unknown)
    body = jaxprs.mapped_body(eqn)
    ins: list[Any] = []
    for variable, spec in zip(body.invars, eqn.params["in_specs"], strict=True):
        value = interp.lattice.mixed | interp.lattice.axes(eqn_axes.spec_axes(spec))
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
    torn = [bool(out.axes and out.axes - eqn_axes.spec_axes(spec)) for out, spec in specs]
    if not any(torn):
        return ("",) * len(torn)
    makers = {variable: each for each in body.eqns for variable in each.outvars}
    return tuple(
        _maker(variable, makers) if differs else ""
        for variable, differs in zip(body.outvars, torn, strict=True)
    )


def _maker(variable: Any, makers: dict[Any, Any]) -> str:
    # JAX often adds casts and copies itself, so return the line that computed the value.
    while (eqn := None if jaxprs.is_literal(variable) else makers.get(variable)) is not None:
        rule = RULES.get(eqn.primitive.name)
        if rule not in (move, cast) and eqn.primitive.name != "jdp_mark":
            return source(eqn)
        variable = eqn.invars[0]
    return ""
