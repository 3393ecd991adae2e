"""Constants of a step that differ from trace to trace: random numbers of NumPy, the time."""

from typing import Any

import numpy as np

from jdp import pytrees
from jdp.analysis import jaxprs, source_of
from jdp.training.step import Step

_UNKNOWN = "an array of the step"


def changing(step: Step, args: tuple, keywords: dict[str, Any]) -> list[str]:
    """Return the author's lines that compute another constant in each trace of a step.

    Args:
      step: is traced anew, twice.
      args: of a call.
      keywords: those by keyword.

    Returns:
      The lines, "an array of the step" in the place of one that is not known.
    """
    one, other = (Step(step.spec).trace(*args, **keywords).jaxpr for _ in range(2))
    lines: dict[str, None] = {}
    for eqn, again in zip(jaxprs.equations(one), jaxprs.equations(other), strict=False):
        if not eqn.outvars:
            continue  # a print
        for atom, atom_again in zip(eqn.invars, again.invars, strict=False):
            if jaxprs.is_literal(atom) and jaxprs.is_literal(atom_again):
                if not _are_equal(atom.val, atom_again.val):
                    lines[source_of(eqn) or _UNKNOWN] = None
    if not lines and not all(map(_are_equal, one.consts, other.consts)):
        lines[_UNKNOWN] = None
    return [*lines]


def _are_equal(one: Any, other: Any) -> bool:
    one, other = (np.asarray(pytrees.without_key(x)) for x in (one, other))
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()
