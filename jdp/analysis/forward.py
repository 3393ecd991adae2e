"""Compute a fact for each variable of a jaxpr, through calls, branches and loops."""

from collections.abc import Callable, Sequence
from typing import Any

from jdp.analysis import jaxprs


class Forward:
    """One pass over a jaxpr. A call's body gets its operands; other bodies get the join of theirs.

    Args:
      join: returns the value that stands for several; for none, that of a constant.
      visit: `(eqn, operands, place) -> outputs`, or None to compute them from the bodies of `eqn`.
      enter: `(place, eqn) -> place` of the bodies of an equation, as for `placed_equations`.
    """

    def __init__(
        self,
        join: Callable[[Sequence[Any]], Any],
        visit: Callable[[Any, list[Any], Any], list[Any] | None],
        enter: Callable[[Any, Any], Any] = lambda place, eqn: place,
    ):
        self._join, self._visit, self._enter = join, visit, enter
        # The results of analysed bodies: without them nested calls would take 2^depth passes.
        self._known: dict[Any, list[Any]] = {}

    def outputs(self, jaxpr: Any, ins: Sequence[Any], place: Any = None) -> list[Any]:
        """Return the values of a jaxpr's outputs.

        Args:
          ins: values of its inputs, in order.
        """
        key = id(jaxpr), place, *ins
        if key not in self._known:
            env = dict(zip(jaxpr.invars, ins, strict=True))
            constant = self._join([])

            def read(atom: Any) -> Any:
                return constant if jaxprs.is_literal(atom) else env.get(atom, constant)

            for eqn in jaxpr.eqns:
                outs = self._outs(eqn, [read(atom) for atom in eqn.invars], place)
                env.update(zip(eqn.outvars, outs, strict=True))
            self._known[key] = [read(atom) for atom in jaxpr.outvars]
        return self._known[key]

    def _outs(self, eqn: Any, operands: list[Any], place: Any) -> list[Any]:
        outs = self._visit(eqn, operands, place)
        if outs is not None:
            return outs
        inside = self._enter(place, eqn)
        if eqn.primitive.name in jaxprs.CALLS and (body := jaxprs.called_body(eqn)) is not None:
            return self.outputs(body, operands, inside)
        value = self._join(operands)
        for body in jaxprs.bodies(eqn) * 2:  # twice: a loop's results return as inputs
            value = self._join([value, *self.outputs(body, [value] * len(body.invars), inside)])
        return [value] * len(eqn.outvars)
