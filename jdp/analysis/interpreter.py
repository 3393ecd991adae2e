"""Interpret a jaxpr: the class of every value, and what is met on the way."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jdp.analysis import jaxprs
from jdp.analysis.cells import Cell
from jdp.analysis.lattice import Lattice
from jdp.analysis.partitioned import first_shift
from jdp.analysis.records import Record

# Computes the class of an equation from those of its operands, or a list with a class for each
# output: `(interp, equation, classes) -> class`.
Rule = Callable[..., Any]

# Zero if all operands are zero. Other operations may give zeros too; nothing depends on those.
ZERO_OF_ZEROS = frozenset("cumsum reduce_sum".split())


# These rules are written out in the interpreter itself, which meets them most often.
def mix(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Join the operands: they may differ, so may the result. It is not a scaled sum any more."""
    value = 0
    for operand in ins:
        value |= operand
    if value & interp.lattice.nonzero or eqn.primitive.name not in ZERO_OF_ZEROS:
        value = interp.lattice.mix(value)
    return value


def image(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Join the operands, as mix does. A sum n times too large becomes another wrong number."""
    (value,) = ins
    if value & interp.lattice.data:
        return value | interp.lattice.imaged
    if value & interp.lattice.nonzero or eqn.primitive.name not in ZERO_OF_ZEROS:
        value |= interp.lattice.nonzero
    return value


def move(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Return the first operand's elements, each scaled by a constant at most."""
    return ins[0]


class Quotient(NamedTuple):
    """A value that was divided by numbers: its class before, and the divisors."""

    value: int
    divisors: tuple[float, ...]


class Interpreter:
    """The state of one analysis.

    Args:
      rules: for each primitive, by name.
      unknown: the rule for all others.
      mesh: of the shard_map that is analysed.
      manual: names of its manual axes: those along which ranks run their own code.
      trusts_unknown: take primitives that are on no list for pure.
    """

    def __init__(
        self,
        rules: Mapping[str, Rule],
        unknown: Rule,
        mesh: Any,
        manual: frozenset[str],
        *,
        trusts_unknown: bool = False,
    ):
        self._rules, self._unknown = rules, unknown
        self.lattice = Lattice(dict(mesh.shape))
        self.everywhere = self.lattice.axes(manual)
        # Axes along which ranks may not all come here, and the control flow that is why.
        self.where = 0
        self._controls: list[tuple[int, str]] = []
        # The record of the current body, and those of all analysed bodies, by everything that their
        # results depend on.
        self.record = Record(None, {})
        self._known: dict[tuple, Record] = {}
        self._mesh = mesh
        self._expanded: dict[int, Any] = {}
        self.opaque: dict[str, None] = {}
        self.trusts_unknown = trusts_unknown
        # Captured arrays whose value is a number of ranks, or one over it.
        self.numbers: dict[Any, float] = {}
        # How often a constant was divided by a number of ranks; negative if it was multiplied.
        self.divisions: dict[Any, int] = {}
        # Values that were divided by numbers, and how many elements were added up: see `averages`.
        self.quotients: dict[Any, Quotient] = {}
        self.sums: dict[Any, tuple[int, ...]] = {}
        # Results of gathers: the class of each rank's part, the axes, and the dim of the ranks.
        self.gathered: dict[Any, tuple[int, int, int]] = {}
        # Axes of several devices that the compiler partitions.
        self._automatic = {name for name, size in mesh.shape.items() if size > 1} - manual

    def anything(self) -> int:
        """Return the class of an unknown value."""
        return self.lattice.anything | self.everywhere

    def number(self, atom: Any) -> float | None:
        """Return the number that a literal or a captured array is, None if its value is unknown."""
        return jaxprs.number(atom) if type(atom) is Literal else self.numbers.get(atom)

    def body(self, jaxpr: Any, ins: Sequence[Any], eqn: Any) -> list[Any]:
        """Return the classes of a jaxpr's outputs for those of its inputs. It is a body of `eqn`.

        A body is walked once for all inputs that are alike: nested functions that are called twice
        each would else be walked 2^depth times.
        """
        key = (id(jaxpr), self.where, self.everywhere, *self._controls, *_alike(ins))
        record = self._known.get(key)
        if record is None:
            record = self._known[key] = self._walked(jaxpr, ins)
        self.record.add_call(eqn, jaxpr, record)
        return record.results(ins)

    def _walked(self, jaxpr: Any, ins: Sequence[Any]) -> Record:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        for variable in jaxpr.constvars:
            env[variable] = self._captured(variable)
        around, self.record = self.record, Record(jaxpr, env)
        self._equations(jaxpr.eqns, env)
        nonzero = self.lattice.nonzero
        outs = [
            _literal(atom, nonzero) if type(atom) is Literal else env[atom]
            for atom in jaxpr.outvars
        ]
        record, self.record = self.record, around
        record.end(ins, outs)
        return record

    def _captured(self, variable: Any) -> Any:
        return Cell(self.anything()) if jaxprs.is_ref(variable) else self.lattice.nonzero

    def _equations(self, eqns: Sequence[Any], env: dict[Any, Any]) -> None:
        # The innermost loop: names are local and the commonest rules written out, for speed.
        rule_of, unknown, imaged = self._rules.get, self._unknown, self.lattice.imaged
        data, nonzero, mixed = self.lattice.data, self.lattice.nonzero, self.lattice.mixed
        for eqn in eqns:
            name = eqn.primitive.name
            rule = rule_of(name, unknown)
            if rule is mix or rule is image:
                value = 0
                for atom in eqn.invars:
                    value |= _literal(atom, nonzero) if type(atom) is Literal else env[atom]
                if value & nonzero or name not in ZERO_OF_ZEROS:
                    ends = mixed if rule is mix else imaged
                    value |= ends if value & data else nonzero
            elif rule is move:
                atom = eqn.invars[0]
                value = _literal(atom, nonzero) if type(atom) is Literal else env[atom]
            else:
                value = rule(
                    self,
                    eqn,
                    [
                        _literal(atom, nonzero) if type(atom) is Literal else env[atom]
                        for atom in eqn.invars
                    ],
                )
                if type(value) is list:
                    for variable, each in zip(eqn.outvars, value, strict=True):
                        env[variable] = each
                    continue
            for variable in eqn.outvars:
                env[variable] = value

    def under(self, varying: int, control: str, jaxpr: Any, ins: list[Any], eqn: Any) -> list[Any]:
        """Walk a body that ranks along the `varying` axes may not all run."""
        outside = self.where
        self.where |= varying
        if varying and self._automatic:
            shift = first_shift(jaxpr, eqn, len(self._automatic))
            if shift is not None:
                axes = tuple(sorted(self._automatic))
                self.record.add("shift", eqn, shift, axes, control)
        self._controls.append((varying, control))
        outs = self.body(jaxpr, ins, eqn)
        self._controls.pop()
        self.where = outside
        return outs

    @contextlib.contextmanager
    def manual_too(self, names: frozenset[str]) -> Iterator[None]:
        """Walk where further axes are manual."""
        outside = self.everywhere, self._automatic
        self.everywhere |= self.lattice.axes(names)
        self._automatic = self._automatic - names
        yield
        self.everywhere, self._automatic = outside

    def expanded(self, eqn: Any) -> Any | None:
        """Return what a high-level primitive does, traced once, None if it cannot be traced."""
        if id(eqn) not in self._expanded:
            manual = self.lattice.names(self.everywhere)
            self._expanded[id(eqn)] = jaxprs.expanded(eqn, self._mesh, manual)
        return self._expanded[id(eqn)]

    def record_deadlock(self, eqn: Any, absent: int, axes: int) -> None:
        """Record a collective over `axes` to which ranks along the `absent` axes may not come."""
        control = next(name for varying, name in reversed(self._controls) if varying & absent)
        self.record.add("deadlock", eqn, axes, absent, control)


def _alike(ins: Sequence[Any]) -> Iterator[Any]:
    for i, value in enumerate(ins):
        if isinstance(value, Cell):  # which of the others it is the same Ref as, and what it holds
            first = next(j for j in range(i + 1) if ins[j] is value)
            yield first, value.value
        else:
            yield value


def _literal(atom: Any, nonzero: int) -> int:
    number = jaxprs.number(atom)
    if number is None:  # several, or a complex one
        return nonzero
    if number in (1, -1):
        return nonzero & -nonzero
    return nonzero if number else 0
