"""The analysis gives native reduce-scatters, all-gathers and all-to-alls the classes of XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.analysed import UNIFORM, VARYING, local, psum, report

from jdp.collectives import call_order, native_shards, split_rows, xla_shards
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.split_rows import add_p, take_rows

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


def cut(of, x, scale=1.0):
    return of.reduce_scatter([[x]], [[0]], "data", scale=scale)[0][0]


def joined(of, x):
    return of.all_gather([[x]], [[0]], "data")[0][0]


def sent(of, x):
    return of.all_to_all([[x]], [[(0, 0)]], "data")[0][0]


PROGRAMS = {
    "a slice of a sum": (lambda of, w, x: cut(of, x), VARYING),
    "a slice of what is the same": (lambda of, w, x: cut(of, w), VARYING),
    "a slice of a mean": (lambda of, w, x: cut(of, x, scale=0.25), VARYING),
    "a sum of slices": (lambda of, w, x: psum(cut(of, x)), UNIFORM),
    "what was gathered": (lambda of, w, x: joined(of, x), UNIFORM),
    "what is the same, gathered": (lambda of, w, x: joined(of, w), UNIFORM),
    "a sum in two halves": (lambda of, w, x: joined(of, cut(of, x)), UNIFORM),
    "a mean in two halves": (lambda of, w, x: joined(of, cut(of, x, scale=0.25)), UNIFORM),
    "a sum of what was gathered": (lambda of, w, x: joined(of, x).sum(0), UNIFORM),
    "a mean of what was gathered": (lambda of, w, x: joined(of, x).mean(0), UNIFORM),
    "the own part of what was gathered": (
        lambda of, w, x: joined(of, x)[lax.axis_index("data")], VARYING
    ),
    "what was sent": (lambda of, w, x: sent(of, x), VARYING),
    "what is the same, sent": (lambda of, w, x: sent(of, w), VARYING),
    "a sum of what was sent": (lambda of, w, x: psum(sent(of, x)), UNIFORM),
    "a gradient through what was sent": (
        lambda of, w, x: jax.grad(lambda x: (sent(of, x) ** 2).sum())(x), VARYING
    ),
    "a gradient through both": (
        lambda of, w, x: jax.grad(lambda x: (joined(of, cut(of, x)) ** 2).sum())(x), UNIFORM
    ),
    "in a loop": (
        lambda of, w, x: lax.fori_loop(0, 3, lambda _, x: joined(of, cut(of, x)), x), VARYING
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_classes_are_those_of_xla(name):
    program, axes = PROGRAMS[name]
    mine, wanted = (
        report(lambda w, x, of=of: local(program(of, w, x))) for of in (native_shards, xla_shards)
    )
    assert mine.outputs[0].axes == wanted.outputs[0].axes == axes
    assert mine.outputs == wanted.outputs
    assert [found.value for found in mine.marks] == [found.value for found in wanted.marks]


def exchanged(of, function, *operands):
    """Call a function of `split_rows` as `of` does in a step."""
    if of is xla_shards:
        return function(*operands)
    with call_order.entered():
        (eqn,) = jax.make_jaxpr(function)(*operands).eqns
        return split_rows.exchanged(eqn, operands, (), None)[0]


def taken(of, part, ids):
    return exchanged(of, lambda part, ids: take_rows(part, ids, 0, ("data",)), part, ids)


def added(of, rows, ids):
    of_table = {"num_rows": 16, "dim": 0, "axes": ("data",), "num_ranks": lax.axis_size("data")}
    return exchanged(of, lambda rows, ids: add_p.bind(rows, ids, **of_table), rows, ids)


SAME_IDS = np.arange(4)
LOOKUPS = {
    "rows of a split table": lambda of, w, x: taken(of, x, SAME_IDS),
    "own rows of parts that are the same": lambda of, w, x: taken(of, w, x.astype(int)),
    "what was added up": lambda of, w, x: added(of, x, SAME_IDS),
    "what is the same, added up": lambda of, w, x: added(of, w, SAME_IDS),
    "the same rows at own places": lambda of, w, x: added(of, w, x.astype(int)),
    "a sum of what was added up": lambda of, w, x: psum(added(of, x, SAME_IDS)[:4]),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_classes_of_lookups_are_those_of_xla(name):
    mine, wanted = (
        report(lambda w, x, of=of: local(LOOKUPS[name](of, w, x))) for of in (None, xla_shards)
    )
    assert mine.outputs == wanted.outputs
    assert [found.value for found in mine.marks] == [found.value for found in wanted.marks]


def test_a_lookup_is_in_the_order_of_a_step_only_outside_of_loops_and_functions():
    found = []

    def seen(x):
        found.append(call_order.is_in_step())
        return x

    def program(w, x):
        with call_order.entered():
            jax.jit(seen)(x)
            jax.grad(lambda x: seen(x).sum())(x)
            return lax.fori_loop(0, 3, lambda _, x: seen(x), seen(x))

    report(program)
    seen(0)
    assert found == [False, False, True, False, False]


@pytest.mark.parametrize("call", [cut, joined, sent])
def test_a_call_that_some_ranks_skip_is_a_deadlock(call):
    def program(w, x):
        return lax.cond(x[0] > 0, lambda x: jnp.sum(call(native_shards, x)), lambda x: 0.0, x)

    [found] = report(program).deadlocks
    assert (
        found.primitive == {cut: "reduce_scatter", joined: "all_gather", sent: "all_to_all"}[call]
    )
