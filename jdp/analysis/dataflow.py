"""Forward and backward dataflow over jaxprs."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal

from jdp.analysis import jaxprs
from jdp.analysis.marks import WEIGHED


class Forward:
    """A forward pass. A call's body gets its operands; other bodies get their join.

    `visit(eqn, operands, place)` returns outputs, or None for a pass over the bodies.
    """

    def __init__(
        self,
        join: Callable[[Sequence[Any]], Any],
        visit: Callable[[Any, list[Any], Any], list[Any] | None],
        enter: Callable[[Any, Any], Any] = lambda place, eqn: place,
    ):
        self._join, self._visit, self._enter = join, visit, enter
        # Without it nested calls would take 2^depth passes.
        self._known: dict[Any, list[Any]] = {}

    def outputs(self, jaxpr: Any, ins: Sequence[Any], place: Any = None) -> list[Any]:
        """Return the outputs' values for the inputs'."""
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
        for body in jaxprs.bodies(eqn) * 2:  # a loop's results return as inputs
            value = self._join([value, *self.outputs(body, [value] * len(body.invars), inside)])
        return [value] * len(eqn.outvars)


# of wanted outputs, or needed inputs
_Flags = tuple[bool, ...]
_Known = dict[tuple[int, _Flags], _Flags]


def used_inputs(jaxpr: Any) -> _Flags:
    """Return which inputs are used, other than by `WEIGHED` marks."""
    return _needed(jaxpr, (True,) * len(jaxpr.outvars), {})


def _needed(jaxpr: Any, wanted: _Flags, known: _Known) -> _Flags:
    key = id(jaxpr), wanted
    if key not in known:
        live = set(_variables(jaxpr.outvars, wanted))
        for eqn in reversed(jaxpr.eqns):
            if not live.isdisjoint(eqn.outvars) or (eqn.effects and jaxprs.acts(eqn)):
                rule = _RULES.get(eqn.primitive.name)
                if rule is None:
                    live.update([atom for atom in eqn.invars if type(atom) is not Literal])
                else:
                    needs = rule(eqn, tuple(v in live for v in eqn.outvars), known)
                    live.update(_variables(eqn.invars, needs))
        known[key] = tuple(v in live for v in jaxpr.invars)
    return known[key]


def _variables(atoms: Sequence[Any], flags: _Flags) -> list[Any]:
    flagged = zip(atoms, flags, strict=True)
    return [atom for atom, flag in flagged if flag and type(atom) is not Literal]


def _call(eqn: Any, wanted: _Flags, known: _Known) -> _Flags:
    body = jaxprs.called_body(eqn)
    return (True,) * len(eqn.invars) if body is None else _needed(body, wanted, known)


def _shard_map(eqn: Any, wanted: _Flags, known: _Known) -> _Flags:
    return _needed(jaxprs.mapped_body(eqn), wanted, known)


def _cond(eqn: Any, wanted: _Flags, known: _Known) -> _Flags:
    needs = [_needed(branch, wanted, known) for branch in jaxprs.branches(eqn)]
    return (True, *map(any, zip(*needs, strict=True)))


def _scan(eqn: Any, wanted: _Flags, known: _Known) -> _Flags:
    body, num_constants, num_carry = jaxprs.scan_parts(eqn)
    carry, ys = wanted[:num_carry], wanted[num_carry:]
    while True:
        needs = _needed(body, carry + ys, known)
        more = _either(carry, needs[num_constants : num_constants + num_carry])
        if more == carry:
            return needs[:num_constants] + carry + needs[num_constants + num_carry :]
        carry = more


def _while(eqn: Any, wanted: _Flags, known: _Known) -> _Flags:
    cond, body, num_cond, num_body = jaxprs.while_parts(eqn)
    decides = _needed(cond, (True,), known)
    carry = _either(wanted, decides[num_cond:])
    while True:
        needs = _needed(body, carry, known)
        more = _either(carry, needs[num_body:])
        if more == carry:
            return decides[:num_cond] + needs[:num_body] + carry
        carry = more


def _either(a: _Flags, b: _Flags) -> _Flags:
    return tuple(x or y for x, y in zip(a, b, strict=True))


def _mark(eqn: Any, wanted: _Flags, known: _Known) -> _Flags:
    return (eqn.params["kind"] != WEIGHED,)


_RULES = {
    "jdp_mark": _mark,
    **dict.fromkeys(jaxprs.CALLS, _call),
    "cond": _cond,
    "jdp_tied": lambda eqn, wanted, known: wanted,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}
