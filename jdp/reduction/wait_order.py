"""When a step waits: operations for other arrays, and rings after independent work."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from jdp.analysis import jaxprs
from jdp.collectives import call_order


def after(values: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Return values, but not before some others have been computed.

    XLA drops `lax.optimization_barrier` before it schedules collectives on GPUs, and with JAX 0.10
    before it merges equal operations on CPUs.

    >>> float(after([jnp.float32(2)], [jnp.float32(jnp.nan)])[0])
    2.0
    """
    others = [x for x in others if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    if not values or not others:
        return list(values)
    count = len(values)
    return _tied_p.bind(*values, *others, count=count)[:count]


def next_call_after(others: Sequence[jax.Array]) -> None:
    """Let the next native call wait for arrays, by its token, without copies."""
    token = call_order.first_token()
    if token is not None:
        call_order.passed(*after([token], others))


# (*values, *others) -> the same, each by itself for the proof and liveness.
_tied_p = jax.extend.core.Primitive("jdp_tied")
_tied_p.multiple_results = True


def _run(*operands: jax.Array, count: int) -> list[jax.Array]:
    firsts = [lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(()) for x in operands[count:]]
    # XLA does not see that no number both equals and differs from itself.
    never = functools.reduce(jnp.logical_or, ((x != x) & (x == x) for x in firsts))
    values = [jnp.where(never, jnp.zeros_like(x), x) for x in operands[:count]]
    return [*values, *operands[count:]]


def _jvp(primals: tuple, tangents: tuple, *, count: int) -> tuple[Any, Any]:
    return _tied_p.bind(*primals, count=count), list(tangents)


_tied_p.def_impl(lambda *operands, count: list(operands))
_tied_p.def_abstract_eval(lambda *operands, count: list(operands))
ad.primitive_jvps[_tied_p] = _jvp
batching.primitive_batchers[_tied_p] = lambda values, dims, *, count: (
    _tied_p.bind(*values, count=count),
    list(dims),
)
mlir.register_lowering(_tied_p, mlir.lower_fun(_run, multiple_results=True))


# By this operand a waiting call takes the token before.
_AFTER = 1


def update_between(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Update a bucket's parameters before the next ring's wait, unless each needs all gradients."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        body = jaxprs.opened(closed)
        given = [*closed.consts, *jax.tree.leaves(args)]
        values = dict(zip([*body.constvars, *body.invars], given, strict=True))
        parts = _parts(body.eqns)
        last_use = {v: i for i, part in enumerate(parts) for v in _read(part)}
        last_use |= dict.fromkeys(_variables(body.outvars), len(parts))
        final: list[Any] = []
        for i, part in enumerate(parts):
            if final:
                _hold(part[0].invars[_AFTER], final, values)
            made = [v for eqn in part for v in eqn.outvars if last_use.get(v, 0) > i]
            segment = body.replace(
                constvars=[],
                invars=[v for v in _read(part) if v in values],
                outvars=made,
                eqns=part,
            )
            function = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(segment, []))
            results = function(*(values[v] for v in segment.invars))
            values.update(zip(made, results, strict=True))
            final = [v for v in made if last_use[v] == len(parts) and _is_float(v)] if i else []
        leaves = [v.val if jaxprs.is_literal(v) else values[v] for v in body.outvars]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return run


def _parts(eqns: Sequence[Any]) -> list[list[Any]]:
    """Group equations by their last wait, which begins each group."""
    parts: defaultdict[int, list[Any]] = defaultdict(list)
    wait_of: dict[Any, int] = {}
    _sort(eqns, wait_of, parts)
    return [parts[i] for i in sorted(parts)]


def _sort(eqns: Sequence[Any], wait_of: dict[Any, int], parts: dict[int, list[Any]]) -> None:
    for eqn in eqns:
        wait = max((wait_of.get(v, 0) for v in _variables(eqn.invars)), default=0)
        if wait and not _is_wait(eqn) and (inner := _opened(eqn)) is not None:
            # An optimizer's jitted function takes all leaves, and so all waits.
            _sort(inner, wait_of, parts)
            continue
        wait += _is_wait(eqn)
        wait_of |= dict.fromkeys(eqn.outvars, wait)
        parts[wait].append(eqn)


def _opened(eqn: Any) -> list[Any] | None:
    body = jaxprs.called_body(eqn) if eqn.primitive.name == "jit" else None
    if body is None or body.constvars or jaxprs.acts(eqn):
        return None
    named = dict(zip(body.invars, eqn.invars, strict=True))
    inner_results = _variables(body.outvars)
    if len(set(inner_results)) < len(body.outvars) or not named.keys().isdisjoint(inner_results):
        return None  # it returns one of its inputs, or one value twice
    named |= dict(zip(body.outvars, eqn.outvars, strict=True))
    fresh = jax.extend.core.gensym()
    opened = []
    for inner in body.eqns:
        for v in inner.outvars:
            if v not in named:  # JAX traces a function once: its variables may come again
                named[v] = v if type(v) is jax.extend.core.DropVar else fresh(v.aval)
        given = [v if jaxprs.is_literal(v) else named[v] for v in inner.invars]
        opened.append(inner.replace(invars=given, outvars=[named[v] for v in inner.outvars]))
    return opened


def _hold(token: Any, final: list[Any], values: dict[Any, Any]) -> None:
    held = lax.optimization_barrier([values[token], *(values[v] for v in final)])
    values.update(zip([token, *final], held, strict=True))


def _read(part: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(v for eqn in part for v in _variables(eqn.invars)))


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not jaxprs.is_literal(atom)]


def _is_wait(eqn: Any) -> bool:
    return eqn.primitive.name == "ffi_call" and eqn.params["target_name"] == call_order.DONE


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
