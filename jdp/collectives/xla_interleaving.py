"""Whether XLA may run one of its own collectives at the same time as a native call, on CPUs.

XLA has one thread for each device, and one pool with as many threads for all devices. Threads of
both wait for other ranks, and large operations also need threads of the pool. If each rank waits
for one operation at a time, the pool has a thread for the rank that the others wait for. If each
rank may wait in a native call and in a collective of XLA's, all threads may wait, and the program
deadlocks: 8 ranks on 2 cores did in the first step. In such a program the native calls wait on
jdp's own threads.

A loop returns to XLA while a call in it waits on such a thread. XLA then starts its collectives
behind the loop, as if those in the loop had run, and ranks take one for another: sums were wrong
without an error. Such a program must be left to XLA.

XLA forgets that order by itself in a program that was written to the compilation cache and loaded
from it: JAX 0.10.2 and 0.12 then took a sum in a loop for one outside of it, on 8 ranks in most
runs, which ended with a signal or with wrong numbers. Such a program must not be cached.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.interpreters import partial_eval

from jdp.analysis import jaxprs
from jdp.analysis.rules.collectives import RULES
from jdp.collectives import call_order

# Lookups that are not native exchange rows of a table with XLA's collectives.
_ROWS = {"jdp_take_rows", "jdp_add_rows"}
_XLA = frozenset(name for name in RULES if not name.startswith("jdp_")) - {"axis_index"} | _ROWS

# Operations that XLA runs as programs of their own. It inlines other bodies.
_CONTROL_FLOW = {"cond", "scan", "while"}

# A body is analysed once for each of its calls, up to this number of calls.
_MAX_BODIES = 10_000


def has_collectives_of_xla(jaxpr: Any) -> bool:
    """Whether a program has collectives of XLA's, in which ranks wait for each other."""
    return bool(jaxprs.primitive_names(jaxpr) & _XLA)


def runs_beside(jaxpr: Any) -> bool:
    """Whether a native call and a collective of XLA's in a program do not depend on each other.

    True if that cannot be excluded.
    """
    found = _Waits(jaxpr)
    return found.is_unknown or any(_pairs(found.native, found.xla))


def why_not(jaxpr: Any) -> str | None:
    """Return a sentence that says why a program must not make native calls, or None.

    XLA orders its collectives by when they start. A loop, or a branch, that makes native calls on
    jdp's threads has started long before the collectives in it have run.
    """
    found = _Waits(jaxpr)
    if found.native and (
        found.is_unknown or any(a.is_left_before(b) for a, b in _pairs(found.native, found.xla))
    ):
        return (
            "a loop or branch makes native calls and runs collectives of XLA's, while another "
            "collective of XLA's may run beside it, and nothing orders these two."
        )
    return None


def loses_order(jaxpr: Any) -> bool:
    """Whether XLA would not order the collectives of a program that is loaded from a cache.

    True if that cannot be excluded.
    """
    found = _Waits(jaxpr)
    return found.is_unknown or any(a.is_left_before(b) for a, b in _pairs(found.xla, found.xla))


class _Wait(NamedTuple):
    """An operation that waits for other ranks.

    Attributes:
      bit: its own.
      before: bits of the operations that it depends on.
      within: numbers of the loops and branches around it in which XLA runs collectives.
    """

    bit: int
    before: int
    within: frozenset[int]

    def is_left_before(self, other: "_Wait") -> bool:
        """Whether `other` is outside of a loop or branch in which this operation is."""
        return not self.within <= other.within


def _pairs(ones: list[_Wait], others: list[_Wait]) -> Iterator[tuple[_Wait, _Wait]]:
    """Yield one of each list, where neither depends on the other."""
    for one in ones:
        for other in others:
            if not one.before & other.bit and not other.before & one.bit:
                yield one, other


class _Waits:
    """The operations of a program that wait for other ranks, with one bit for each.

    The value of a variable is the union of the bits of all operations that it depends on.

    Attributes:
      native, xla: the operations.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.native: list[_Wait] = []
        self.xla: list[_Wait] = []
        self._num_bodies = 0
        self._bits = (1 << i for i in itertools.count())
        self._kinds: dict[int, frozenset[bool]] = {}
        self._num_within = itertools.count()
        self._within: frozenset[int] = frozenset()
        # Most programs run no collective of XLA's, so look for one first.
        if False in self.kinds_of(jaxprs.opened(jaxpr)):
            body = _without_unread(jaxpr)
            self.follow(body, [0] * len(body.invars))

    @property
    def is_unknown(self) -> bool:
        """Whether the program was too large to find all of its operations."""
        return self._num_bodies > _MAX_BODIES

    def kinds_of(self, jaxpr: Any) -> frozenset[bool]:
        """Return the kinds of operations in a jaxpr: True for native ones, False for XLA's."""
        if id(jaxpr) not in self._kinds:
            names = jaxprs.primitive_names(jaxpr)
            kinds = {True} if names & call_order.NATIVE else set()
            self._kinds[id(jaxpr)] = frozenset(kinds | ({False} if names & _XLA else set()))
        return self._kinds[id(jaxpr)]

    def follow(self, jaxpr: Any, ins: Sequence[int]) -> list[int]:
        """Record the operations of a jaxpr, and return the bits of its outputs for `ins`."""
        self._num_bodies += 1
        if self._num_bodies > _MAX_BODIES:
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
            found = self.native if name in call_order.NATIVE else self.xla
            found.append(_Wait(bit, before, self._within))
            return [before | bit] * len(eqn.outvars)
        kinds = frozenset().union(*map(self.kinds_of, jaxprs.bodies(eqn)))
        if not kinds:
            return [before] * len(eqn.outvars)
        around = self._within
        if name in _CONTROL_FLOW and False in kinds:
            self._within |= {next(self._num_within)}
        outs = self._outs_of_bodies(eqn, ins)
        self._within = around
        return outs

    def _outs_of_bodies(self, eqn: Any, ins: list[int]) -> list[int]:
        name = eqn.primitive.name
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
        bodies = jaxprs.bodies(eqn)
        if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
            outs = self.follow(bodies[0], ins)
            if len(outs) == len(eqn.outvars):
                return outs
        for body in bodies:
            self.follow(body, [0] * len(body.invars))
        return [0] * len(eqn.outvars)


def _without_unread(jaxpr: Any) -> Any:
    """Return a jaxpr without operations whose results nobody reads, as JAX hands it to XLA.

    A step gathers all shards of the state, and reads few of them.
    """
    body = jaxprs.opened(jaxpr)
    return partial_eval.dce_jaxpr(body, [True] * len(body.outvars))[0]


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
