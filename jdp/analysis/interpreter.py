"""Compute the class of each jaxpr value."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jdp.analysis import jaxprs
from jdp.analysis.lattice import Lattice
from jdp.analysis.records import Cell, Record
from jdp.jax_compat import opened


def expanded(eqn: Any, mesh: Any, manual: frozenset[str]) -> Any | None:
    """Return a high-level primitive's traced body."""
    primitive = eqn.params.get("_prim")
    try:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in primitive.in_avals_flat]

        def expand(*flat: Any) -> Any:
            args = jax.tree.unflatten(primitive.in_tree, flat)
            return jax.tree.leaves(primitive.expand(*args))

        # In a shard_map, because the body may name axes.
        spec = PartitionSpec()
        mapped = jax.shard_map(
            expand, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=manual, check_vma=False
        )
        (mapped_eqn,) = opened(jax.make_jaxpr(mapped)(*shapes)).eqns
    except Exception:  # foreign code
        return None
    return jaxprs.mapped_body(mapped_eqn)


# XLA exchanges a split dim's edges by a collective-permute of all devices.
_SHIFTS = frozenset(
    "concatenate conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum "
    "dynamic_update_slice pad reduce_window reduce_window_max reduce_window_min reduce_window_sum "
    "reshape rev select_and_gather_add select_and_scatter select_and_scatter_add slice split "
    "unstack".split()
)


# XLA:CPU widens these to float32, and aborts with a compiler-partitioned axis.
_REDUCTIONS = "psum", "pmax", "pmin", "reduce_scatter", "unreduced_"


def bfloat16_reductions(eqn: Any) -> list[Any]:
    """Return a shard_map's bfloat16 reductions with compiler-partitioned axes."""
    every = frozenset(eqn.params["mesh"].axis_names)

    def enter(manual: frozenset[str], inner: Any) -> frozenset[str] | None:
        if inner.primitive.name == "shard_map":
            manual = manual | jaxprs.manual_axes(inner)
        return None if manual >= every else manual

    manual = enter(frozenset(), eqn)
    if manual is None:
        return []
    placed = jaxprs.placed_equations(jaxprs.mapped_body(eqn), manual, enter)
    named = (inner for inner, _ in placed if inner.primitive.name.startswith(_REDUCTIONS))
    return [inner for inner in named if _is_bfloat16(inner)]


def _is_bfloat16(eqn: Any) -> bool:
    return any(getattr(atom.aval, "dtype", None) == jnp.bfloat16 for atom in eqn.invars)


def first_shift(jaxpr: Any, around: Any, num_axes: int) -> Any | None:
    """Return an equation that may become a collective-permute: several partitioned axes meet."""
    inside = jaxprs.equations(jaxpr, mapped=False)
    if num_axes == 1:
        shifts = (eqn for eqn in inside if eqn.primitive.name in _SHIFTS)
        return next((eqn for eqn in shifts if not _is_local(eqn)), None)
    with_arrays = [eqn for eqn in inside if not all(map(_is_number, (*eqn.invars, *eqn.outvars)))]
    innermost = (eqn for eqn in with_arrays if not jaxprs.bodies(eqn))
    if with_arrays:
        return next(innermost, with_arrays[0])
    return None if all(map(_is_number, jaxpr.outvars)) else around


def _is_number(atom: Any) -> bool:
    return getattr(atom.aval, "size", 1) == 1


def _is_local(eqn: Any) -> bool:
    shapes = [[d for d in atom.aval.shape if d != 1] for atom in (*eqn.invars, *eqn.outvars)]
    if eqn.primitive.name == "reshape":
        return shapes[0] == shapes[-1]
    return not any(shapes)


# `(interp, eqn, ins) -> class`, or one per output.
Rule = Callable[..., Any]

# Zero if all operands are zero, as far as the analysis needs.
ZERO_OF_ZEROS = frozenset("cumsum reduce_sum".split())


# `_equations` repeats these frequent rules.
def mix(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Join the operands into a value other than a scaled sum."""
    value = 0
    for operand in ins:
        value |= operand
    if value & interp.lattice.nonzero or eqn.primitive.name not in ZERO_OF_ZEROS:
        value = interp.lattice.mix(value)
    return value


def image(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Join as mix does, but a sum n times too large stays wrong."""
    (value,) = ins
    if value & interp.lattice.data:
        return value | interp.lattice.imaged
    if value & interp.lattice.nonzero or eqn.primitive.name not in ZERO_OF_ZEROS:
        value |= interp.lattice.nonzero
    return value


def move(interp: "Interpreter", eqn: Any, ins: list[int]) -> int:
    """Return the first operand's class, moved or scaled by a constant."""
    return ins[0]


class Quotient(NamedTuple):
    """A value's class before its division by numbers."""

    value: int
    divisors: tuple[float, ...]


class Interpreter:
    """One analysis; along `manual` axes ranks run their own code."""

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
        # Axes along which ranks may skip the body, and why.
        self.where = 0
        self._controls: list[tuple[int, str]] = []
        # A known body's key holds all that determines its results.
        self.record = Record(None, {})
        self._known: dict[tuple, Record] = {}
        self._mesh = mesh
        self._expanded: dict[int, Any] = {}
        self.opaque: dict[str, None] = {}
        self.trusts_unknown = trusts_unknown
        # Captured numbers of ranks, or one over them.
        self.numbers: dict[Any, float] = {}
        # How often a constant was divided by numbers of ranks; negative for products.
        self.divisions: dict[Any, int] = {}
        # Values divided by numbers, and sizes of sums: see `local`.
        self.quotients: dict[Any, Quotient] = {}
        self.sums: dict[Any, tuple[int, ...]] = {}
        # Gathers: a shard's class, the axes, and the dim of ranks.
        self.gathered: dict[Any, tuple[int, int, int]] = {}
        self._automatic = {name for name, size in mesh.shape.items() if size > 1} - manual

    def anything(self) -> int:
        """Return an unknown value's class."""
        return self.lattice.anything | self.everywhere

    def number(self, atom: Any) -> float | None:
        """Return a literal's or captured array's value."""
        return jaxprs.number(atom) if type(atom) is Literal else self.numbers.get(atom)

    def body(self, jaxpr: Any, ins: Sequence[Any], eqn: Any) -> list[Any]:
        """Return a body's output classes; nested calls would take 2^depth without a memory."""
        key = (id(jaxpr), self.where, self.everywhere, *self._controls, *_alike(ins))
        record = self._known.get(key)
        if record is None:
            record = self._known[key] = self._walked(jaxpr, ins)
        self.record.add_call(eqn, jaxpr, record)
        return record.results(ins)

    def _walked(self, jaxpr: Any, ins: Sequence[Any]) -> Record:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
        for variable in jaxpr.constvars:
            is_ref = jaxprs.is_ref(variable)
            env[variable] = Cell(self.anything()) if is_ref else self.lattice.nonzero
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

    def _equations(self, eqns: Sequence[Any], env: dict[Any, Any]) -> None:
        # Local names and repeated rules for speed.
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
        """Return a body's output classes if some ranks may skip it."""
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
        """Make more axes manual in a with block."""
        outside = self.everywhere, self._automatic
        self.everywhere |= self.lattice.axes(names)
        self._automatic = self._automatic - names
        yield
        self.everywhere, self._automatic = outside

    def expanded(self, eqn: Any) -> Any | None:
        """Return a high-level primitive's traced body."""
        if id(eqn) not in self._expanded:
            manual = self.lattice.names(self.everywhere)
            self._expanded[id(eqn)] = expanded(eqn, self._mesh, manual)
        return self._expanded[id(eqn)]

    def record_deadlock(self, eqn: Any, absent: int, axes: int) -> None:
        """Record a collective that ranks along `absent` may skip."""
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
    if number is None:
        return nonzero
    if number in (1, -1):
        return nonzero & -nonzero
    return nonzero if number else 0
