"""Whether one chain of tokens orders all native calls of a program."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jdp.analysis import jaxprs
from jdp.collectives.call_order import NATIVE, START, TOKEN

# XLA gives a rank two threads that may block on other ranks, and its own collectives use one, so
# only one chain of native calls is safe.
_MAX_CHAINS = 1

# It returns its operands, see `reduction.tied`.
_TIED = "jdp_tied"


def why_unordered(jaxpr: Any) -> str | None:
    """Return a sentence that says why ranks could match different all-reduces, or None.

    JAX traces a user's jitted function once for all its calls. The program then has its all-reduces
    several times, with the same numbers, and not ordered by jdp's token.
    """
    found, _ = _chains(jaxpr, frozenset(), _Known(jaxprs.bodies_by_equation(jaxpr)))
    if found.is_repeated:
        return "a function that reduces is called twice in one program, and JAX traced it once."
    if found.num_chains > _MAX_CHAINS:
        return f"{found.num_chains} functions within the program reduce, and nothing orders them."
    return None


class _Chains(NamedTuple):
    """The native calls of a jaxpr and of the bodies in it.

    Attributes:
      num_chains: number of calls that do not wait for another call.
      numbers: the numbers of all of them.
      is_repeated: whether two of them share a number.
    """

    num_chains: int
    numbers: frozenset[int]
    is_repeated: bool

    def joined(self, other: "_Chains") -> "_Chains":
        """Return the chains of two bodies of one program."""
        return _Chains(
            self.num_chains + other.num_chains,
            self.numbers | other.numbers,
            self.is_repeated or other.is_repeated or bool(self.numbers & other.numbers),
        )


# Positions of inputs that are the token of the last call before a jaxpr, or of outputs: in it.
_Places = frozenset[int]
_NONE: _Places = frozenset()


class _Known(dict[tuple[int, _Places], tuple[_Chains, _Places]]):
    """The chains of the bodies that were read.

    Args:
      bodies: of the equations of the program, see `jaxprs.bodies_by_equation`.
    """

    def __init__(self, bodies: dict[int, list[Any]]):
        super().__init__()
        self.bodies = bodies


def _chains(jaxpr: Any, entering: _Places, known: _Known) -> tuple[_Chains, _Places]:
    """Return the chains of a jaxpr, and where its last token leaves it."""
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
            given.discard(token)  # a second call with this token may run beside the first
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
    """The ids of the variables that hold the token of the last call of a chain."""

    def __init__(self, ids: Iterable[int]):
        super().__init__(ids)
        self._origin: dict[int, int] = {}  # a variable -> the one whose value it has

    def origin(self, atom: Any) -> int:
        """Return the id of the variable that a value comes from."""
        return self._origin.get(id(atom), id(atom))

    def holds(self, atom: Any) -> bool:
        """Whether a value is one of the tokens."""
        return self.origin(atom) in self

    def rename(self, eqn: Any) -> None:
        """Record that the results of an equation are its operands."""
        for operand, result in zip(eqn.invars, eqn.outvars, strict=True):
            self._origin[id(result)] = self.origin(operand)


def _places(atoms: Any, given: _Tokens) -> _Places:
    return frozenset([i for i, atom in enumerate(atoms) if given.holds(atom)]) if given else _NONE


def _hands_on(eqn: Any, bodies: list[Any]) -> bool:
    """Whether an equation runs one body, once or as a loop, from its operands to its results."""
    if eqn.primitive.name not in jaxprs.CALLS | {"scan", "shard_map"} or len(bodies) != 1:
        return False
    (body,) = bodies
    return (len(body.invars), len(body.outvars)) == (len(eqn.invars), len(eqn.outvars))


def _counts(eqn: Any) -> tuple[int, ...]:
    return jaxprs.scan_parts(eqn)[1:] if eqn.primitive.name == "scan" else ()


def _of_loop(
    body: Any, entering: _Places, known: _Known, num_constants: int, num_carry: int
) -> tuple[_Chains, _Places]:
    """Return the chains of a loop that passes its token from turn to turn, as `_chains` does."""
    alone, made = _chains(body, frozenset(), known)
    if max(made, default=0) >= num_carry:  # kept for the way back of a derivative, say
        return alone, frozenset()
    around = entering | {num_constants + i for i in made}
    within, leaving = _chains(body, around, known)
    if leaving != {i - num_constants for i in around} or max(leaving, default=0) >= num_carry:
        return alone, frozenset()  # The calls of a turn do not wait for the turn before.
    begun = len(around - entering)
    return within._replace(num_chains=within.num_chains + begun), leaving
