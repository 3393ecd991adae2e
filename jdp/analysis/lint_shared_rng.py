"""Find random numbers that are the same on every rank, though there is one for each of its rows."""

from typing import Any

from jdp.analysis import eqn_axes
from jdp.analysis.analyse import find_shard_maps
from jdp.analysis.forward import Forward
from jdp.analysis.rules import collectives
from jdp.analysis.source_lines import source


def equal_draws(jaxpr: Any, num_rows: int) -> list[str]:
    """Return the author's lines that draw numbers for rows from a key that all ranks share."""
    step = find_shard_maps(jaxpr)[0]
    lines: dict[str, None] = {}

    def line(around: str, eqn: Any) -> str:
        return source(eqn) or around

    def visit(eqn: Any, operands: list[bool], around: str) -> list[bool] | None:
        name = eqn.primitive.name
        if name == "random_bits" and not any(operands) and num_rows in eqn.outvars[0].aval.shape:
            lines[line(around, eqn)] = None
        if name in collectives.RULES and name != "jdp_mark":
            return [name == "axis_index"] * len(eqn.outvars)
        return None

    # Whether they may differ from rank to rank.
    ins = [bool(eqn_axes.spec_axes(spec)) for spec in step.params["in_specs"]]
    if num_rows > 1:
        Forward(any, visit, line).outputs(step.params["jaxpr"], ins, "")
    return [*filter(None, lines)]
