"""The class of each primitive's results for its operands' classes."""

from jdp.analysis.interpreter import Rule
from jdp.analysis.rules import collectives, control_flow, local

RULES: dict[str, Rule] = {
    **local.RULES,
    **local.NONLINEAR_RULES,
    **collectives.RULES,
    **control_flow.RULES,
    **control_flow.REF_RULES,
}
UNKNOWN = control_flow.unknown
