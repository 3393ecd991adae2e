"""What makes native calls unsafe: order, XLA beside them, overwritten arrays."""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.interpreters import partial_eval

from jdp.analysis import jaxprs
from jdp.analysis.rules.collectives import RULES
from jdp.collectives import call_order
from jdp.collectives.call_order import NATIVE, START, TOKEN

# Two threads of a rank may block on others, and XLA's collectives use one.
_MAX_CHAINS = 1

# Returns its operands, see `jdp/reduction/wait_order.py`.
_TIED = "jdp_tied"


def why_unordered(jaxpr: Any) -> str | None:
    """Return why ranks could match different all-reduces: one trace serves all calls."""
    found, _ = _chains(jaxpr, frozenset(), _Known(jaxprs.bodies_by_equation(jaxpr)))
    if found.is_repeated:
        return "one program calls a reducing function twice, but JAX traced it once."
    if found.num_chains > _MAX_CHAINS:
        return f"{found.num_chains} functions within the program reduce, and jdp cannot order them."
    return None


class _Chains(NamedTuple):
    """The native calls of a jaxpr and its bodies.

    Attributes:
      num_chains: calls that wait for no other call.
      is_repeated: whether two calls share a number.
    """

    num_chains: int
    numbers: frozenset[int]
    is_repeated: bool

    def joined(self, other: "_Chains") -> "_Chains":
        return _Chains(
            self.num_chains + other.num_chains,
            self.numbers | other.numbers,
            self.is_repeated or other.is_repeated or bool(self.numbers & other.numbers),
        )


# Indices of the inputs, or outputs, with the last call's token.
_Places = frozenset[int]
_NONE: _Places = frozenset()


class _Known(dict[tuple[int, _Places], tuple[_Chains, _Places]]):
    def __init__(self, bodies: dict[int, list[Any]]):
        super().__init__()
        self.bodies = bodies


def _chains(jaxpr: Any, entering: _Places, known: _Known) -> tuple[_Chains, _Places]:
    """Return a jaxpr's chains, and the outputs that hold its last token."""
    jaxpr = jaxprs.opened(jaxpr)
    key = id(jaxpr), entering
    if key in known:
        return known[key]
    found = _Chains(0, frozenset(), False)
    given = _Tokens(id(jaxpr.invars[i]) for i in entering)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == _TIED:
            given.rename(eqn)
        if name in NATIVE:
            token, passed_on = given.origin(eqn.invars[TOKEN]), id(eqn.outvars[0])
            number = frozenset([eqn.params["number"]])
            found = found.joined(_Chains(int(token not in given), number, False))
            given.discard(token)  # a second call with it may run beside the first
            given.add(passed_on)
            continue
        if name == "ffi_call" and eqn.params["target_name"] == START:  # it does not block
            number = frozenset([int(dict(eqn.params["attributes"])["bucket"])])
            found = found.joined(_Chains(0, number, False))
        bodies = known.bodies.get(id(eqn)) if eqn.params else None
        if not bodies:
            continue
        taken = _places(eqn.invars, given)
        if not _hands_on(eqn, bodies):
            for body in bodies:
                found = found.joined(_chains(body, frozenset(), known)[0])
            continue
        of_body = _of_loop if name == "scan" else _chains
        within, leaving = of_body(bodies[0], taken, known, *_counts(eqn))
        found = found.joined(within)
        given -= {given.origin(eqn.invars[i]) for i in taken}
        given |= {id(eqn.outvars[i]) for i in leaving}
    known[key] = found, _places(jaxpr.outvars, given)
    return known[key]


class _Tokens(set[int]):
    """The ids of variables with a chain's last token."""

    def __init__(self, ids: Iterable[int]):
        super().__init__(ids)
        self._origin: dict[int, int] = {}  # a variable -> the one whose value it has

    def origin(self, atom: Any) -> int:
        """Return the id of a value's first variable."""
        return self._origin.get(id(atom), id(atom))

    def holds(self, atom: Any) -> bool:
        return self.origin(atom) in self

    def rename(self, eqn: Any) -> None:
        """Record that an equation returns its operands."""
        for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
            self._origin[id(result)] = self.origin(operand)


def _places(atoms: Any, given: _Tokens) -> _Places:
    return frozenset([i for i, atom in enumerate(atoms) if given.holds(atom)]) if given else _NONE


def _hands_on(eqn: Any, bodies: list[Any]) -> bool:
    """Whether an equation passes its operands through one body, once or as a loop."""
    if eqn.primitive.name not in jaxprs.CALLS | {"scan", "shard_map"} or len(bodies) != 1:
        return False
    (body,) = bodies
    return (len(body.invars), len(body.outvars)) == (len(eqn.invars), len(eqn.outvars))


def _counts(eqn: Any) -> tuple[int, ...]:
    return jaxprs.scan_parts(eqn)[1:] if eqn.primitive.name == "scan" else ()


def _of_loop(
    body: Any, entering: _Places, known: _Known, num_constants: int, num_carry: int
) -> tuple[_Chains, _Places]:
    alone, made = _chains(body, frozenset(), known)
    if max(made, default=0) >= num_carry:  # a stacked output, as for a backward pass
        return alone, frozenset()
    around = entering | {num_constants + i for i in made}
    within, leaving = _chains(body, around, known)
    if leaving != {i - num_constants for i in around} or max(leaving, default=0) >= num_carry:
        return alone, frozenset()  # each iteration's calls do not wait for the previous one's
    begun = len(around - entering)
    return within._replace(num_chains=within.num_chains + begun), leaving


# XLA would first copy an array to read later, more slowly than a gather that overwrites nothing.
_GATHER = "jdp_all_gather"  # the one primitive that overwrites operands


def is_read_later(jaxpr: Any) -> bool:
    """Whether an operation reads what an earlier gather overwrites; true for a loop or branch."""
    if _GATHER not in jaxprs.primitive_names(jaxpr):
        return False
    body = jaxprs.opened(jaxpr)
    body, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars))
    return _is_read_later(body, frozenset())


def _is_read_later(jaxpr: Any, read: frozenset[int]) -> bool:
    """As `is_read_later`, if inputs in `read` are read afterwards."""
    jaxpr = jaxprs.opened(jaxpr)
    later = {id(x) for x in jaxpr.outvars} | {id(jaxpr.invars[i]) for i in read}
    for eqn in reversed(jaxpr.eqns):
        if any(id(x) in later for x in _overwritten(eqn)):
            return True
        for body in jaxprs.bodies(eqn):
            if eqn.primitive.name in {*jaxprs.CALLS, "shard_map"}:
                within = {i for i, x in enumerate(eqn.invars) if id(x) in later}
                if _is_read_later(body, frozenset(within)):
                    return True
            elif any(any(_overwritten(each)) for each in jaxprs.equations(body)):
                return True
        later.update(map(id, eqn.invars))
    return False


def _overwritten(eqn: Any) -> Iterator[Any]:
    if any(eqn.params.get("overwrites", ())):
        yield from eqn.invars[-sum(eqn.params["overwrites"]) :]


# ARCHITECTURE.md says why native calls may wait on threads of their own, and why some programs are
# left to XLA or not cached.
# Non-native lookups use XLA's collectives.
_ROWS = {"jdp_take_rows", "jdp_add_rows"}
_XLA = frozenset(name for name in RULES if not name.startswith("jdp_")) - {"axis_index"} | _ROWS

# XLA runs these as programs of their own, and inlines others.
_CONTROL_FLOW = {"cond", "scan", "while"}

# A body is analysed in each call, up to this number.
_MAX_BODIES = 10_000


def has_collectives_of_xla(jaxpr: Any) -> bool:
    """Whether a program has XLA's collectives."""
    return bool(jaxprs.primitive_names(jaxpr) & _XLA)


def runs_beside(jaxpr: Any) -> bool:
    """Whether a native call and an XLA collective may be independent."""
    found = _Waits(jaxpr)
    return found.is_unknown or any(_pairs(found.native, found.xla))


def why_not_beside(jaxpr: Any) -> str | None:
    """Return why a program must not make native calls: a loop starts before its collectives ran."""
    found = _Waits(jaxpr)
    if found.native and (
        found.is_unknown or any(a.is_left_before(b) for a, b in _pairs(found.native, found.xla))
    ):
        return (
            "a loop or branch makes native calls and runs collectives of XLA, while another "
            "collective of XLA may run concurrently, in any order."
        )
    return None


def loses_order(jaxpr: Any) -> bool:
    """Whether XLA may lose the collectives' order in a cached program."""
    found = _Waits(jaxpr)
    return found.is_unknown or any(a.is_left_before(b) for a, b in _pairs(found.xla, found.xla))


class _Wait(NamedTuple):
    """An operation that waits for other ranks.

    Attributes:
      before: bits of the operations before it.
      within: ids of enclosing loops and branches with XLA's collectives.
    """

    bit: int
    before: int
    within: frozenset[int]

    def is_left_before(self, other: "_Wait") -> bool:
        """Whether `other` is outside a loop or branch around this one."""
        return not self.within <= other.within


def _pairs(ones: list[_Wait], others: list[_Wait]) -> Iterator[tuple[_Wait, _Wait]]:
    for one in ones:
        for other in others:
            if not one.before & other.bit and not other.before & one.bit:
                yield one, other


class _Waits:
    """A program's operations that wait, a bit each; a variable's value: bits of those before."""

    def __init__(self, jaxpr: Any) -> None:
        self.native: list[_Wait] = []
        self.xla: list[_Wait] = []
        self._num_bodies = 0
        self._bits = (1 << i for i in itertools.count())
        self._kinds: dict[int, frozenset[bool]] = {}
        self._num_within = itertools.count()
        self._within: frozenset[int] = frozenset()
        # Most programs have no collective of XLA.
        if False in self.kinds_of(jaxprs.opened(jaxpr)):
            body = _without_unread(jaxpr)
            self.follow(body, [0] * len(body.invars))

    @property
    def is_unknown(self) -> bool:
        return self._num_bodies > _MAX_BODIES

    def kinds_of(self, jaxpr: Any) -> frozenset[bool]:
        """Return the kinds of operations in a jaxpr: True is native."""
        if id(jaxpr) not in self._kinds:
            names = jaxprs.primitive_names(jaxpr)
            kinds = {True} if names & call_order.NATIVE else set()
            self._kinds[id(jaxpr)] = frozenset(kinds | ({False} if names & _XLA else set()))
        return self._kinds[id(jaxpr)]

    def follow(self, jaxpr: Any, ins: Sequence[int]) -> list[int]:
        """Record a jaxpr's operations; return its outputs' bits."""
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
        name, before = eqn.primitive.name, functools.reduce(operator.or_, ins, 0)
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
            return [
                ins[0] | functools.reduce(operator.and_, outs)
                for outs in zip(*branches, strict=True)
            ]
        if name == "while":
            condition, body, num_first, num_constants = jaxprs.while_parts(eqn)
            carry = ins[num_first + num_constants :]
            self.follow(condition, [*ins[:num_first], *carry])
            outs = self.follow(body, ins[num_first:])
            return [*itertools.starmap(operator.and_, zip(carry, outs, strict=True))]
        # XLA may run one iteration without a loop.
        bodies = jaxprs.bodies(eqn)
        if len(bodies) == 1 and len(bodies[0].invars) == len(ins):
            outs = self.follow(bodies[0], ins)
            if len(outs) == len(eqn.outvars):
                return outs
        for body in bodies:
            self.follow(body, [0] * len(body.invars))
        return [0] * len(eqn.outvars)


def _without_unread(jaxpr: Any) -> Any:
    body = jaxprs.opened(jaxpr)
    return partial_eval.dce_jaxpr(body, [True] * len(body.outvars))[0]
