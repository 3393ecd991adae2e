"""Checks that an optimizer's averages keep their digits in their dtype.

optax makes most of its state in the parameters' dtype. 16 bits suffice for a mean of gradients, but
not for a slow mean of their squares.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp import jax_compat, pytrees
from jdp.analysis import jaxprs
from jdp.error_codes import with_code
from jdp.reduction.local_steps import LocalSteps


class Decay(NamedTuple):
    """A leaf's multiplier.

    Attributes:
      is_rounded: computed from a 16-bit number of the state.
      is_of_count: computed from the number of steps.
    """

    value: float
    is_rounded: bool = False
    is_of_count: bool = False


class Sum(NamedTuple):
    """Leaf number `leaf` plus a term.

    `part` is the coefficient (1 for all) of squares, or of the leaf's difference from another
    value, in the term; None for other terms.
    """

    leaf: int
    part: float | None
    is_rounded: bool


class KnownValue(NamedTuple):
    """Known facts about a value of the update.

    Attributes:
      leaves: indices of state leaves; each element is from one of these, or of `sums`.
      number: of all elements, if known.
      factor: it is a multiple of this number.
      is_multiple: of squares, or of a leaf's difference from a value.
    """

    leaves: frozenset[int] = frozenset()
    sums: frozenset[Sum] = frozenset()
    number: Any = None
    is_rounded: bool = False
    is_of_count: bool = False
    factor: float = 1.0
    is_multiple: bool = False


UNKNOWN = KnownValue()


# Operations that keep one operand's facts.
_SAME = frozenset(
    "broadcast_in_dim convert_element_type copy jdp_mark reduce_max reduce_min reshape "
    "squeeze".split()
)
_CHOOSING = frozenset("max min select_n".split())


class _DecayWalk:
    """A pass over an update; `decays` maps a leaf to its multipliers."""

    def __init__(self) -> None:
        self.decays: dict[int, set[Decay]] = {}

    def results(self, program: Any, values: Sequence[KnownValue]) -> list[KnownValue]:
        body = jaxprs.opened(program)
        env = dict(zip(body.invars, values, strict=True))
        for variable, constant in jaxprs.constants(program):
            env[variable] = KnownValue(number=constant if np.ndim(constant) == 0 else None)

        def read(atom: Any) -> KnownValue:
            return KnownValue(number=atom.val) if jaxprs.is_literal(atom) else env[atom]

        for eqn in body.eqns:
            results = self._of(eqn, [*map(read, eqn.invars)])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in body.outvars]

    def _of(self, eqn: Any, ins: list[KnownValue]) -> list[KnownValue]:
        name = eqn.primitive.name
        if name == "cond":
            branches = [self.results(branch, ins[1:]) for branch in eqn.params["branches"]]
            return [_chosen(values) for values in zip(*branches, strict=True)]
        if (called := jaxprs.called(eqn)) is not None:
            return self.results(called, ins)
        if name == "mul":
            same = [self._product(eqn, *ins)]
        elif name in ("add", "sub"):
            same = [KnownValue(sums=_added(*ins) | _added(*ins[::-1]))]
        elif name == "square" or (name == "integer_pow" and eqn.params["y"] == 2):
            same = [KnownValue(is_multiple=True)]
        elif name in _CHOOSING:
            same = [_chosen(ins[1:] if name == "select_n" else ins)]
        else:
            same = ins if name in _SAME and len(ins) == 1 else [UNKNOWN] * len(eqn.outvars)
        return [*_computed(eqn, ins, same)]

    def _product(self, eqn: Any, one: KnownValue, other: KnownValue) -> KnownValue:
        """Return the facts about a product; record a decay."""
        if one.number is None:
            one, other = other, one
        if one.number is None:
            is_square = eqn.invars[0] is eqn.invars[1]
            is_multiple = is_square or one.is_multiple or other.is_multiple
            is_rounded = one.is_rounded or other.is_rounded
            factor = one.factor * other.factor
            return KnownValue(is_multiple=is_multiple, factor=factor, is_rounded=is_rounded)
        if np.iscomplexobj(one.number):
            return UNKNOWN
        number = float(one.number)
        decay = Decay(number, one.is_rounded, one.is_of_count)
        for leaf in other.leaves | {each.leaf for each in other.sums}:
            self.decays.setdefault(leaf, set()).add(decay)
        if number == 1:
            return other._replace(number=None)
        factor = other.factor * number
        is_rounded = one.is_rounded or other.is_rounded
        is_multiple = other.is_multiple or bool(other.sums)
        return KnownValue(factor=factor, is_multiple=is_multiple, is_rounded=is_rounded)


def _added(value: KnownValue, term: KnownValue) -> frozenset[Sum]:
    """Return the leaves in a sum; the first value may be a leaf."""
    part = abs(term.factor) if term.is_multiple else None
    return frozenset(Sum(leaf, part, term.is_rounded) for leaf in value.leaves)


def _computed(
    eqn: Any, ins: Sequence[KnownValue], same: Sequence[KnownValue]
) -> Sequence[KnownValue]:
    are_numbers = all(value.number is not None for value in ins) and not jaxprs.acts(eqn)
    if not ins or not are_numbers or any(v.aval.shape != () for v in eqn.outvars):
        return same
    with jax.ensure_compile_time_eval():
        results = jax_compat.bind(eqn, [value.number for value in ins])
    is_rounded = any(value.is_rounded for value in ins)
    is_of_count = any(value.is_of_count for value in ins)
    return [
        value._replace(number=x, is_rounded=is_rounded, is_of_count=is_of_count)
        for value, x in zip(same, results, strict=True)
    ]


def _chosen(values: Sequence[KnownValue]) -> KnownValue:
    """Return the facts about elements from any of some values."""
    if not all(value.leaves or value.sums for value in values):
        return UNKNOWN
    leaves = frozenset().union(*(value.leaves for value in values))
    return KnownValue(leaves, frozenset().union(*(value.sums for value in values)))


# Schedules of decays have ended by then.
MANY_STEPS = 10_000


class Change(NamedTuple):
    """A state leaf's change in an update.

    Attributes:
      decays: its multipliers.
      adds_squares: to the undecayed leaf.
      is_nothing: the leaf is returned unchanged.
    """

    decays: frozenset[Decay] = frozenset()
    adds_squares: bool = False
    is_nothing: bool = False


def moment_changes(tx: Any, opt_state: Any, params: Any) -> dict[int, Change]:
    """Return changes of an optimizer's state leaves by index, in float32; {} if untraceable."""
    leaves, tree = jax.tree.flatten(opt_state)

    def update(grads: Any, leaves: Any, params: Any) -> Any:
        # Arguments of some optax transformations; the others ignore them.
        extra = {"value": jnp.float32(1), "grad": grads, "value_fn": lambda _: jnp.float32(1)}
        _, new = tx.update(grads, tree.unflatten(leaves), params, synced=True, **extra)
        return jax.tree.leaves(new)

    wide = jax.tree.map(_wide, params)
    try:
        program = jax.make_jaxpr(update)(wide, list(map(_wide, leaves)), wide)
    except Exception:  # It needs other arguments, or ranks: not judged.
        return {}
    others = [UNKNOWN] * len(jax.tree.leaves(params))
    known = [_entering(i, leaf) for i, leaf in enumerate(_with_numbers(leaves, tx, params))]
    walk = _DecayWalk()
    new = walk.results(program, [*others, *known, *others])
    return {i: _change(i, value, walk.decays.get(i, set())) for i, value in enumerate(new)}


def _change(i: int, new: KnownValue, decays: set[Decay]) -> Change:
    parts = [(x.part, x.is_rounded) for x in new.sums if x.leaf == i and x.part is not None]
    # Adding a fraction of a square leaves room for, or removes, that fraction of the leaf.
    rests = {Decay(1 - part, is_rounded) for part, is_rounded in parts if part < 1}
    adds_squares = any(part >= 1 for part, _ in parts)
    return Change(frozenset(decays | rests), adds_squares, new.leaves == {i} and not new.sums)


def is_short(leaf: Any) -> bool:
    """Whether a leaf has 16-bit floats."""
    if not pytrees.is_array(leaf):
        return False
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 16


def _wide(leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.float32 if is_short(leaf) else jnp.result_type(leaf)
    return jax.ShapeDtypeStruct(jnp.shape(leaf), dtype)


def _with_numbers(leaves: Sequence[Any], tx: Any, params: Any) -> list[Any]:
    """Return leaves with the numbers that `init` shows for traced scalars."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return list(leaves)
    program = jax.make_jaxpr(tx.init)(params)
    first = _DecayWalk().results(program, [UNKNOWN] * len(jax.tree.leaves(params)))
    pairs = zip(leaves, first, strict=True)
    return [
        leaf if value.number is None else np.asarray(value.number, leaf.dtype)
        for leaf, value in pairs
    ]


def _entering(i: int, leaf: Any) -> KnownValue:
    """Return a state leaf's facts; a count has a later step's value."""
    value = KnownValue(frozenset([i]))
    if isinstance(leaf, jax.core.Tracer) or jnp.ndim(leaf):
        return value
    if jnp.issubdtype(jnp.result_type(leaf), jnp.integer):
        return value._replace(number=np.asarray(MANY_STEPS, leaf.dtype), is_of_count=True)
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return value
    is_rounded = is_short(leaf)
    number = np.asarray(leaf, np.float32 if is_rounded else leaf.dtype)
    return value._replace(number=number, is_rounded=is_rounded)


# Attributes of optax's states with squares of gradients, and with their sums over all steps; a
# traced update also shows such a sum.
_SQUARES = frozenset("nu nu_max e_g e_x v_row v_col exp_avg_sq".split())
_SUMS = frozenset("sum_of_squares grad_sum_of_squares grad_sum_sq".split())
_ADVICE = (
    "optax keeps it in the dtype of the parameters. Keep parameters in float32 and compute in "
    "bfloat16: jdp.sharded(tx, stage=3, gather_dtype=jnp.bfloat16), or p.astype(jnp.bfloat16) in "
    "the loss."
)

_INJECTED = (
    "an average whose decay below 1 optax.inject_hyperparams cast to {dtype}, where it rounds to "
    "1. The bias correction divides by 0, and the update is NaN. Write "
    "optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32), and keep more bits."
)


def require_digits(tx: Any, opt_state: Any, params: Any) -> None:
    """Refuse an optimizer state with too few digits."""
    named = jax.tree_util.tree_leaves_with_path(opt_state)
    short = [i for i, (_, leaf) in enumerate(named) if is_short(leaf)]
    if short and isinstance(tx, LocalSteps):
        for each in tx.optimizers:
            require_digits(each, each.init(params), params)
        return
    changes = moment_changes(tx, opt_state, params) if short else {}
    for i in short:
        path, leaf = named[i]
        names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        why = _why_not(jnp.result_type(leaf), names, changes.get(i, Change()))
        if why:
            where = f"opt_state{jax.tree_util.keystr(path)}"
            shown = f"`{where}` is {jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
            raise ValueError(with_code("JDP130", f"{shown}, {why} {_ADVICE}"))


def _why_not(dtype: np.dtype, names: set[str], change: Change) -> str:
    """Return why a leaf loses what is added to it."""
    if change.is_nothing:
        return ""
    below_1 = float(jnp.finfo(dtype).epsneg)
    # optax.inject_hyperparams has rounded the decay itself.
    lost = [x for x in change.decays if x.value < 1 or x.is_rounded]
    lost = [x for x in lost if np.asarray(x.value, dtype) == 1]
    if lost:
        decay = min(lost)
        if decay.is_rounded:
            return _INJECTED.format(dtype=dtype)
        least = 10.0 ** np.ceil(np.log10(2 * below_1))
        mend = (
            f"Write a decay of at most {1 - least:g}, such as optax.adamw(..., "
            f"b2={1 - least:g}), or keep more bits."
        )
        when = ""
        if decay.is_of_count:
            when = f" after {MANY_STEPS:,} steps"
            mend = "It depends on the number of steps and approaches 1: keep more bits."
        return (
            f"an average with the decay {decay.value:.6g}{when}. {dtype} has no number between "
            f"{1 - below_1:.6g} and 1, so the decay rounds to 1. The average never falls, and "
            f"after one large gradient all steps stay small. {mend}"
        )
    if names & _SUMS or change.adds_squares:
        most = round(1 / below_1)
        return (
            f"a sum of squares over all steps. {dtype} has {jnp.finfo(dtype).nmant + 1} binary "
            f"digits, so the sum stops growing at {most} times the square of a step, such as "
            f"after {most} steps of equal gradients."
        )
    if names & _SQUARES and dtype == jnp.float16:
        least = (float(jnp.finfo(dtype).smallest_subnormal) / 2) ** 0.5
        return (
            f"an average of squared gradients. The square of a gradient below {least:.2g} is 0 "
            "in float16, and the update divides by its root."
        )
    return ""
