"""One walk through a jaxpr: the class of every value, and what is met on the way."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Literal

from jdp.uniformity import arithmetic, collectives, control, jaxprs, refs
from jdp.uniformity.classes import Lattice
from jdp.uniformity.partitioned import shifts
from jdp.uniformity.refs import Cell
from jdp.uniformity.report import Deadlock, Marked
from jdp.uniformity.source import source

RULES: dict[str, Any] = {
    **arithmetic.RULES,
    **collectives.RULES,
    **control.RULES,
    **refs.RULES,
}


class Walk:
    """The state of one analysis.

    Args:
      mesh: of the shard_map that is analysed.
      manual: names of its manual axes: those along which ranks run their own code.
      trusts_unknown: take primitives that are on no list for pure.
    """

    def __init__(self, mesh: Any, manual: frozenset[str], *, trusts_unknown: bool = False):
        self.lattice = Lattice(mesh.axis_names)
        self.everywhere = self.lattice.axes(manual)
        # Axes along which ranks may not all come here, and the control flow that is why.
        self.where = 0
        self._controls: list[tuple[int, str]] = []
        # The equations whose bodies we are in: one body may be called from several places.
        self._path: list[Any] = []
        self._marks: dict[tuple[int, ...], tuple[Any, int, int, str]] = {}
        self._deadlocks: dict[int, Deadlock] = {}
        self._mesh = mesh
        self._expanded: dict[int, Any] = {}
        self.opaque: dict[str, None] = {}
        self.trusts_unknown = trusts_unknown
        self.unknown: dict[str, str] = {}
        # Axes of several devices that are left to the compiler.
        self._automatic = {name for name, size in mesh.shape.items() if size > 1} - manual

    def anything(self) -> int:
        """Give the class of a value of which nothing is known."""
        return self.lattice.mixed | self.everywhere

    def body(self, jaxpr: Any, ins: Sequence[Any], eqn: Any) -> list[Any]:
        """Give the classes of a jaxpr's outputs for those of its inputs. It is a body of `eqn`."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        for variable in jaxpr.constvars:
            env[variable] = self._captured(variable)
        self._path.append(eqn)
        self._equations(jaxpr.eqns, env)
        self._path.pop()
        nonzero = self.lattice.nonzero
        return [
            _literal(atom, nonzero) if type(atom) is Literal else env[atom]
            for atom in jaxpr.outvars
        ]

    def _captured(self, variable: Any) -> Any:
        return Cell(self.anything()) if jaxprs.is_ref(variable) else self.lattice.nonzero

    def _equations(self, eqns: Sequence[Any], env: dict[Any, Any]) -> None:
        # The innermost loop: names are local and the commonest rules written out, for speed.
        rule_of, unknown = RULES.get, control.unknown
        mix, move, zero_of_zeros = arithmetic.mix, arithmetic.move, arithmetic.ZERO_OF_ZEROS
        data, nonzero, mixed = self.lattice.data, self.lattice.nonzero, self.lattice.mixed
        for eqn in eqns:
            name = eqn.primitive.name
            rule = rule_of(name, unknown)
            if rule is mix:
                value = 0
                for atom in eqn.invars:
                    value |= _literal(atom, nonzero) if type(atom) is Literal else env[atom]
                if value & nonzero or name not in zero_of_zeros:
                    value |= mixed if value & data else nonzero
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
            self._note_shift(control, jaxpr, eqn)
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
        """Give what a high-level primitive does, traced once, None if it cannot be traced."""
        if id(eqn) not in self._expanded:
            manual = self.lattice.names(self.everywhere)
            self._expanded[id(eqn)] = jaxprs.expanded(eqn, self._mesh, manual)
        return self._expanded[id(eqn)]

    def note_deadlock(self, eqn: Any, absent: int, axes: int) -> None:
        """Note a collective over `axes` to which ranks along the `absent` axes may not come."""
        control = next(name for varying, name in reversed(self._controls) if varying & absent)
        name = eqn.primitive.name
        self._deadlocks[id(eqn)] = Deadlock(
            "all_reduce" if name == "jdp_mark" else name.removesuffix("_invariant"),
            tuple(sorted(self.lattice.names(axes))),
            control,
            self._source(eqn),
        )

    def _note_shift(self, control: str, jaxpr: Any, around: Any) -> None:
        found = next(shifts(jaxpr), None)
        if found is not None:
            self._deadlocks[id(around)] = Deadlock(
                found.primitive.name,
                tuple(sorted(self._automatic)),
                control,
                source(found) or source(around) or self._source(around),
                is_compilers=True,
            )

    def note_unknown(self, eqn: Any) -> None:
        """Note a primitive that is on no list, and a line where it stands."""
        self.unknown.setdefault(eqn.primitive.name, self._source(eqn))

    def note_mark(self, eqn: Any, value: int) -> None:
        """Note a mark. The last round of a loop, in which all is final, overwrites the others."""
        key = *map(id, self._path), id(eqn)
        self._marks[key] = eqn, value, self.where, self._source(eqn)

    def _source(self, eqn: Any) -> str:
        # JAX cuts tracebacks where it traces a body: without a line of the author's in that, the
        # equation around it has one. The outermost is the shard_map, which says too little.
        around = (source(each) for each in (eqn, *reversed(self._path[1:])))
        return next(filter(None, around), "")

    def deadlocks(self) -> tuple[Deadlock, ...]:
        """Give the deadlocks that were noted."""
        return tuple(self._deadlocks.values())

    def marks(self) -> tuple[Marked, ...]:
        """Give the marks that were noted, one for each equation, wherever it was called."""
        found: dict[int, Marked] = {}
        for eqn, value, where, line in self._marks.values():
            note, under = self.lattice.decode(value), self.lattice.names(where)
            other = found.get(id(eqn))
            if other is not None:
                note = note._replace(
                    axes=note.axes | other.value.axes,
                    reduced=note.reduced | other.value.reduced,
                    zero=note.zero and other.value.zero,
                )
                under |= other.under
            found[id(eqn)] = Marked(**eqn.params, value=note, under=under, source=line)
        return tuple(found.values())


def _literal(atom: Any, nonzero: int) -> int:
    try:
        return nonzero if atom.val else 0
    except (TypeError, ValueError):  # no number, or several
        return nonzero
