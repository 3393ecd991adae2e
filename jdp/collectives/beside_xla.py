"""Whether XLA may run one of its own collectives at the same time as a native call, on CPUs.

XLA has one thread for each device, and one pool with as many threads for all devices. Threads of
both wait for other ranks, and large operations also need threads of the pool. If each rank waits
for one operation at a time, the pool has a thread for the rank that the others wait for. If each
rank may wait in a native call and in a collective of XLA's, all threads may wait, and the program
deadlocks: 8 ranks on 2 cores did in the first step. In such a program the native calls wait on
jdp's own threads.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jdp.analysis import jaxprs
from jdp.analysis.rules.collectives import RULES
from jdp.collectives import call_order

# jdp exchanges rows of a table with XLA's collectives.
_ROWS = {"jdp_take_rows", "jdp_add_rows"}
_XLA = frozenset(name for name in RULES if not name.startswith("jdp_")) - {"axis_index"} | _ROWS

# A body is analysed once for each of its calls, up to this number of calls.
_MAX_BODIES = 10_000


def runs_beside(jaxpr: Any) -> bool:
    """Whether a native call and a collective of XLA's in a program do not depend on each other.

    True if that cannot be excluded.
    """
    body = jaxprs.opened(jaxpr)
    found = _Waits()
    if not found.of(body) >= {True, False}:
        return False
    found.follow(body, [0] * len(body.invars))
    return found.num_bodies > _MAX_BODIES or found.any_pair()


class _Waits:
    """The operations of a program that wait for other ranks, with one bit for each.

    The value of a variable is the union of the bits of all operations that it depends on.
    """

    def __init__(self) -> None:
        self.num_bodies = 0
        self._bits = (1 << i for i in itertools.count())
        self._native: dict[int, int] = {}  # bit -> bits of the operations that it depends on
        self._xla: dict[int, int] = {}
        self._kinds: dict[int, frozenset[bool]] = {}

    def any_pair(self) -> bool:
        """Whether there are a native and an XLA operation of which neither depends on the other."""
        return any(
            not before & native and not earlier & xla
            for xla, before in self._xla.items()
            for native, earlier in self._native.items()
        )

    def of(self, jaxpr: Any) -> frozenset[bool]:
        """Return the kinds of operations in a jaxpr: True for native ones, False for XLA's."""
        if id(jaxpr) not in self._kinds:
            names = {eqn.primitive.name for eqn in jaxprs.equations(jaxpr)}
            kinds = {True} if names & call_order.NATIVE else set()
            self._kinds[id(jaxpr)] = frozenset(kinds | ({False} if names & _XLA else set()))
        return self._kinds[id(jaxpr)]

    def follow(self, jaxpr: Any, ins: Sequence[int]) -> list[int]:
        """Record the operations of a jaxpr, and return the bits of its outputs for `ins`."""
        self.num_bodies += 1
        if self.num_bodies > _MAX_BODIES:
            return [0] * len(jaxpr.outvars)
        env = dict(zip(jaxpr.invars, ins, strict=True))

        def read(atom: Any) -> int:
            return 0 if jaxprs.is_literal(atom) else env.get(atom, 0)

        for eqn in jaxpr.eqns:
            outs = self._outs(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _outs(self, eqn: Any, ins: list[int]) -> list[int]:
        name, before = eqn.primitive.name, _union(ins)
        if name in call_order.NATIVE or name in _XLA:
            bit = next(self._bits)
            (self._native if name in call_order.NATIVE else self._xla)[bit] = before
            return [before | bit] * len(eqn.outvars)
        if not any(map(self.of, jaxprs.bodies(eqn))):
            return [before] * len(eqn.outvars)
        if name == "cond":
            branches = [self.follow(branch, ins[1:]) for branch in jaxprs.branches(eqn)]
            return [ins[0] | _common(outs) for outs in zip(*branches, strict=True)]
        if name == "while":
            condition, body, num_first, num_constants = jaxprs.while_parts(eqn)
            carry = ins[num_first + num_constants :]
            self.follow(condition, [*ins[:num_first], *carry])
            outs = self.follow(body, ins[num_first:])
            return [_common(pair) for pair in zip(carry, outs, strict=True)]
        # One round of a scan: XLA may run the body without a loop.
        bodies = list(jaxprs.bodies(eqn))
        if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
            outs = self.follow(bodies[0], ins)
            if len(outs) == len(eqn.outvars):
                return outs
        for body in bodies:
            self.follow(body, [0] * len(body.invars))
        return [0] * len(eqn.outvars)


def _union(masks: Sequence[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _common(masks: Sequence[int]) -> int:
    found = masks[0]
    for mask in masks[1:]:
        found &= mask
    return found
