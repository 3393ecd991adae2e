"""Collectives that some ranks may skip are found wherever they stand.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import pytest
from jax import lax
from support.analysed import (
    cg,
    gathered,
    in_scan,
    pair_table,
    pmean,
    psum,
    rank,
    report,
    report_2d,
    root,
    scaled_solve,
    shape_of,
    store,
    table,
    with_psend,
)

from jdp.analysis.marks import mark


def at_odds(collective):
    """A program that runs collective(x) where x says so, and one that does so where w does."""

    def under(predicate):
        return lambda w, x: lax.cond(
            predicate(w, x), lambda: collective(x), lambda: 0 * collective(x)
        )

    return under(lambda w, x: w[0] < 2), under(lambda w, x: x[0] < 2)


COLLECTIVES = {
    "psum": psum,
    "psum in groups": lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]),
    "pmax": lambda x: lax.pmax(x, "data"),
    "pmin": lambda x: lax.pmin(x, "data"),
    "all_gather": gathered,
    "all_to_all": lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "data", tiled=True),
    "ragged_all_to_all": lambda x: lax.ragged_all_to_all(
        x, x, *[jnp.zeros(4, int)] * 4, axis_name="data"
    ),
    "ppermute": lambda x: lax.ppermute(x, "data", [(0, 1)]),
    "psend": lambda x: (lax.psend(x, ("data",), [(0, 1)]), x)[1],
    "precv": lambda x: lax.precv(lax.create_token(), shape_of(x), "data", [(0, 1)]),
    "pbroadcast": lambda x: lax.pbroadcast(x, ("data",), 0),
    "all_reduce": lambda x: mark(x, kind="all_reduced", path="", axes=("data",)),
}


@with_psend
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_under_control_flow_that_varies_is_a_deadlock(name):
    right, wrong = at_odds(COLLECTIVES[name])
    assert not report(right).deadlocks
    found = report(wrong).deadlocks
    assert {(each.primitive, each.axes, each.control) for each in found} == {
        (name.split()[0], ("data",), "cond")
    }


DEADLOCKS = {
    "switch": (
        lambda w, x: lax.switch(w[0].astype(int), [psum, lambda x: x, psum], x),
        lambda w, x: lax.switch(rank(), [psum, lambda x: x, psum], x),
    ),
    "while, body": (
        lambda w, x: lax.while_loop(lambda c: psum(c[0]) < 9, lambda c: c + psum(c), x),
        lambda w, x: lax.while_loop(lambda c: c[0] < 9, lambda c: c + psum(c), x),
    ),
    "while, predicate": (
        lambda w, x: lax.while_loop(lambda c: psum(c[0]) < 9, lambda c: c + x, x),
        lambda w, x: lax.while_loop(lambda c: psum(c[0]) < x[0], lambda c: c + x, x),
    ),
    "while, predicate that varies in the second round": (
        lambda w, x: lax.while_loop(lambda c: psum(c[0]) < 9, lambda c: c + x, w),
        lambda w, x: lax.while_loop(lambda c: c[0] < 9, lambda c: c + psum(c) + x, w),
    ),
    "scan in a cond": (
        lambda w, x: in_scan(lambda c: psum(c), x),
        lambda w, x: lax.cond(x[0] < 2, lambda: in_scan(psum, x), lambda: x),
    ),
    "jit and remat in a cond": (
        lambda w, x: jax.jit(jax.checkpoint(psum))(x),
        lambda w, x: lax.cond(x[0] < 2, jax.jit(jax.checkpoint(psum)), lambda x: x, x),
    ),
    "gradient in a cond": (
        lambda w, x: jax.grad(lambda w: psum(w @ x))(w),
        lambda w, x: lax.cond(x[0] < 2, jax.grad(lambda w: psum(w @ x) ** 2), lambda w: w, w),
    ),
    "matvec of a solver": (
        lambda w, x: cg(lambda v: pmean(x * v), w),
        lambda w, x: cg(lambda v: pmean(x * v), x),
    ),
    "matvec that solve does not use": (
        lambda w, x: scaled_solve(lambda v: psum(x) * v, w),
        lambda w, x: lax.cond(x[0] < 2, lambda: scaled_solve(lambda v: psum(x) * v, w), lambda: w),
    ),
    "custom_root in a cond": (
        lambda w, x: root(lambda z: z - psum(x.sum())),
        lambda w, x: lax.cond(x[0] < 2, lambda: root(lambda z: z - psum(x.sum())), lambda: 0.0),
    ),
    "a Ref decides": (
        lambda w, x: (ref := jax.new_ref(w[0]), lax.cond(ref[...] < 2, lambda: psum(x), lambda: x))[
            1
        ],
        lambda w, x: (
            ref := jax.new_ref(w[0]),
            store(ref, x[0]),
            lax.cond(ref[...] < 2, lambda: psum(x), lambda: x),
        )[2],
    ),
}


@pair_table(DEADLOCKS)
def test_a_deadlock_is_seen_wherever_it_stands(right, wrong):
    assert not report(right).deadlocks
    assert {each.primitive for each in report(wrong).deadlocks} == {"psum"}


DEADLOCKS_2D = {
    # Ranks that share a place on "data" take the same branch, and those alone are needed.
    "psum": (lambda m: lax.psum(m, "model"), False),
    "all_gather": (lambda m: lax.all_gather(m, "model", tiled=True)[:4], False),
    "psum_scatter": (lambda m: jnp.tile(lax.psum_scatter(m, "model", tiled=True), 2), False),
    # A permutation is one operation of all devices: it hangs.
    "ppermute": (lambda m: lax.ppermute(m, "model", [(0, 1)]), True),
    "psum over data": (lambda m: psum(m), True),
    "psum over both": (lambda m: lax.psum(m, ("data", "model")), True),
}


@table(DEADLOCKS_2D)
def test_a_collective_in_groups_needs_the_ranks_along_its_own_axes(program):
    collective, hangs = program
    got = report_2d(lambda w, x, m: lax.cond(x[0] < 2, collective, lambda m: m, m))
    assert bool(got.deadlocks) == hangs


def test_a_deadlock_names_the_control_flow_that_varies():
    def program(w, x):
        def body(c):
            return lax.cond(w[0] < 2, lambda: psum(c), lambda: c)

        return lax.while_loop(lambda c: c[0] < 9, body, x)

    (found,) = report(program).deadlocks
    assert found.control == "while"
