"""How each kind of primitive changes what is known of its operands."""

from jdp.analysis.interpreter import Rule
from jdp.analysis.rules import collectives, control_flow, local, nonlinear, refs

RULES: dict[str, Rule] = {
    **local.RULES,
    **nonlinear.RULES,
    **collectives.RULES,
    **control_flow.RULES,
    **refs.RULES,
}
# For primitives that have no rule.
UNKNOWN = control_flow.unknown
