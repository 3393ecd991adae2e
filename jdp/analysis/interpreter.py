"""Interpret a jaxpr: compute the class of every value, and record marks and deadlocks."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from jdp.analysis import high_level, jaxprs
from jdp.analysis.cells import Cell
from jdp.analysis.lattice import Lattice
from jdp.analysis.partitioned import first_shift
from jdp.analysis.records import Record

# Computes the class of an equation's result, or a list with a class for each output, from the
# analysis, the equation and the classes of its operands: `(interp, eqn, ins) -> class`.
Rule = Callable[..., Any]

# Zero if all operands are zero. Nothing depends on whether other operations return zeros.
ZERO_OF_ZEROS = frozenset("cumsum reduce_sum".split())


# The innermost loop of the interpreter repeats these rules, which it meets most often.
def mix(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Join the operands. The result differs where one of them does, and is not a scaled sum."""
    value = 0
    for operand in ins:
        value |= operand
    if value & interp.lattice.nonzero or eqn.primitive.name not in ZERO_OF_ZEROS:
        value = interp.lattice.mix(value)
    return value


def image(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Join the operands, as mix does, but a sum that is n times too large stays a wrong number."""
    (value,) = ins
    if value & interp.lattice.data:
        return value | interp.lattice.imaged
    if value & interp.lattice.nonzero or eqn.primitive.name not in ZERO_OF_ZEROS:
        value |= interp.lattice.nonzero
    return value


def move(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Return the class of the first operand: its elements, each at most scaled by a constant."""
    return ins[0]


class Quotient(NamedTuple):
    """A value that was divided by numbers: its class before, and the divisors."""

    value: int
    divisors: tuple[float, ...]


class Interpreter:
    """The state of one analysis.

    Args:
      rules: the rule of each primitive, by name.
      unknown: the rule of all other primitives.
      mesh: the mesh of the analysed shard_map.
      manual: names of its manual axes: those along which ranks run their own code.
      trusts_unknown: whether to treat unknown primitives as pure.
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
        # Axes along which ranks may skip the current body, and the control flow that causes it.
        self.where = 0
        self._controls: list[tuple[int, str]] = []
        # The record of the current body, and those of all analysed bodies. The key of a body holds
        # everything that its results depend on.
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
        # Values that were divided by numbers, and the sizes that sums added up: see `averages`.
        self.quotients: dict[Any, Quotient] = {}
        self.sums: dict[Any, tuple[int, ...]] = {}
        # Results of gathers: the class of a rank's part, the axes, and the dim that counts ranks.
        self.gathered: dict[Any, tuple[int, int, int]] = {}
        # Axes of more than one device that the compiler partitions.
        self._automatic = {name for name, size in mesh.shape.items() if size > 1} - manual

    def anything(self) -> int:
        """Return the class of an unknown value."""
        return self.lattice.anything | self.everywhere

    def number(self, atom: Any) -> float | None:
        """Return the value of a literal or of a captured array, None if it is unknown."""
        return jaxprs.number(atom) if type(atom) is Literal else self.numbers.get(atom)

    def body(self, jaxpr: Any, ins: Sequence[Any], eqn: Any) -> list[Any]:
        """Return the classes of the outputs of `jaxpr`, a body of `eqn`, for classes of its inputs.

        A body is analysed once for equal classes of inputs. Otherwise nested functions that are
        called twice each would be analysed 2^depth times.
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
        # The innermost loop: for speed, names are local and the most frequent rules are repeated.
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
        """Return the classes of the outputs of a body that some ranks may skip."""
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
        """Analyse, inside a with block, a body in which further axes are manual."""
        outside = self.everywhere, self._automatic
        self.everywhere |= self.lattice.axes(names)
        self._automatic = self._automatic - names
        yield
        self.everywhere, self._automatic = outside

    def expanded(self, eqn: Any) -> Any | None:
        """Return the traced body of a high-level primitive, None if it cannot be traced."""
        if id(eqn) not in self._expanded:
            manual = self.lattice.names(self.everywhere)
            self._expanded[id(eqn)] = high_level.expanded(eqn, self._mesh, manual)
        return self._expanded[id(eqn)]

    def record_deadlock(self, eqn: Any, absent: int, axes: int) -> None:
        """Record the collective `eqn` over `axes` that ranks along the `absent` axes may skip."""
        control = next(name for varying, name in reversed(self._controls) if varying & absent)
        self.record.add("deadlock", eqn, axes, absent, control)


def _alike(ins: Sequence[Any]) -> Iterator[Any]:
    for i, value in enumerate(ins):
        if isinstance(value, Cell):  # the first input with this Ref, and its contents
            first = next(j for j in range(i + 1) if ins[j] is value)
            yield first, value.value
        else:
            yield value


def _literal(atom: Any, nonzero: int) -> int:
    number = jaxprs.number(atom)
    if number is None:  # several numbers, or a complex one
        return nonzero
    if number in (1, -1):
        return nonzero & -nonzero
    return nonzero if number else 0
