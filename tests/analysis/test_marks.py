"""Marks are found again whatever JAX does to a program, and change nothing in it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.analysed import (
    BOTH,
    MODEL,
    UNIFORM,
    VARYING,
    in_scan,
    local,
    pmean,
    rank,
    report,
    report_2d,
    table,
)

from jdp.analysis import AbstractValue
from jdp.analysis.marks import mark


def test_a_mark_reports_and_never_changes_a_class():
    def program(w, x):
        return local(x, "['a']"), mark(pmean(x), kind="param", path="['b']", axes=("data", "model"))

    got = report(program)
    assert got.outputs == (
        AbstractValue(VARYING, UNIFORM, False),
        AbstractValue(UNIFORM, VARYING, False, even=VARYING),
    )
    first, second = got.marks
    assert (first.kind, first.path, first.axes) == ("local", "['a']", ("data",))
    assert (second.kind, second.path, second.axes) == ("param", "['b']", ("data", "model"))
    assert (first.value, second.value) == got.outputs
    assert first.under == second.under == UNIFORM


def test_noise_of_a_rank_is_seen_through_marks():
    # An optimizer that adds it to the mean gradient, between two marks.
    def program(w, x):
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), rank()), w.shape)
        update = pmean(local(x)) + noise
        return mark(w - update, kind="param", path="['w']", axes=("data",))

    assert [value.axes for value in report(program).outputs] == [VARYING]


def test_a_mark_says_under_what_it_stands():
    def program(w, x):
        return lax.cond(x[0] < 2, lambda: local(w, "['a']"), lambda: w), local(w, "['b']")

    assert {m.path: m.under for m in report(program).marks} == {"['a']": VARYING, "['b']": UNIFORM}


def test_a_mark_in_a_loop_is_one_entry_and_has_its_final_class():
    def program(w, x):
        return in_scan(lambda c: (local(c[0], "['a']") + c[1], c[1] + c[2], x), (w, w, w))

    (found,) = report(program).marks
    assert found.value.axes == VARYING


def test_a_mark_that_is_reached_from_two_places_shows_a_reduction_in_either():
    sync = jax.jit(lambda g: pmean(local(g)))
    (once,) = report(lambda w, x: (sync(x), sync(2 * x))).marks
    (twice,) = report(lambda w, x: sync(sync(x))).marks
    assert (once.value.axes, once.value.reduced) == (VARYING, UNIFORM)
    assert (twice.value.axes, twice.value.reduced) == (VARYING, VARYING)


def test_a_sum_that_comes_round_in_a_loop_is_not_taken_for_reduced():
    # Every round reduces a gradient of its own: k steps in one scan.
    (found,) = report(lambda w, x: in_scan(lambda c: c - pmean(local(c * x)), w)).marks
    assert found.value == AbstractValue(VARYING, UNIFORM, False)


def count_marks(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("jdp_mark")


def noted(x):
    return jnp.sin(local(jnp.cos(x))).sum()


POLICIES = jax.checkpoint_policies
TRANSFORMED = {
    "itself": noted,
    "grad": jax.grad(noted),
    "vmap": jax.vmap(lambda x: local(x)),
    "jvp": lambda x: jax.jvp(noted, (x,), (x,)),
    "linearize": lambda x: jax.linearize(noted, x)[0],
    "hessian": jax.hessian(noted),
    "jit": jax.jit(noted),
    "scan": lambda x: in_scan(lambda c: c + noted(x), 0.0),
    "cond": lambda x: lax.cond(x[0] < 2, noted, jnp.sum, x),
    "remat": jax.grad(jax.checkpoint(noted)),
    "remat that saves all": jax.grad(jax.checkpoint(noted, policy=POLICIES.everything_saveable)),
    "remat that saves dots": jax.grad(jax.checkpoint(noted, policy=POLICIES.dots_saveable)),
    "remat that saves names": jax.grad(
        jax.checkpoint(noted, policy=POLICIES.save_only_these_names("a"))
    ),
    "remat that saves other names": jax.grad(
        jax.checkpoint(noted, policy=POLICIES.save_any_names_but_these("a"))
    ),
}


@pytest.fixture(params=[False, True], ids=["remat", "remat3"])
def remat3(request):
    # JAX's coming rematerialization, in which checkpoint_name is another kind of primitive.
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", False)


@table(TRANSFORMED)
def test_a_mark_survives(program, remat3):
    assert count_marks(program, jnp.ones(3)) >= 1


def test_a_mark_is_found_in_every_kind_of_remat(remat3):
    def program(w, x):
        return jax.grad(jax.checkpoint(lambda w: jnp.sin(jnp.sin(local(jnp.sin(w) * x))).sum()))(w)

    got = report(program)
    assert {(found.path, found.value.axes) for found in got.marks} == {("['w']", VARYING)}
    assert not got.opaque


def test_a_mark_changes_no_number_and_is_not_lowered():
    x = jnp.arange(3.0)
    plain = jax.grad(lambda x: jnp.sin(jnp.cos(x)).sum())
    np.testing.assert_array_equal(jax.jit(jax.grad(noted))(x), jax.jit(plain)(x))
    np.testing.assert_array_equal(local(x), x)
    assert jax.random.key_data(local(jax.random.key(3))).tolist() == [0, 3]
    assert "jdp" not in jax.jit(local).lower(x).as_text()


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mark_runs_in_a_shard_map(check_vma, make_mesh):
    f = jax.shard_map(
        jax.grad(lambda x: (local(x) ** 2).sum()),
        mesh=make_mesh(2),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(f(jnp.arange(4.0)), 2 * np.arange(4.0))


@pytest.mark.parametrize("in_axes", [0, None])
def test_a_mark_loses_the_axis_that_a_vmap_binds(in_axes):
    def program(w, x):
        names = ("data", "model")
        return jax.vmap(
            lambda x: mark(x, kind="all_reduced", path="", axes=names),
            axis_name="data",
            in_axes=in_axes,
            axis_size=4,
        )(x)

    got = report(program)
    assert [found.axes for found in got.marks] == [("model",)]
    assert [value.axes for value in got.outputs] == [VARYING]


def test_only_the_mark_of_a_collective_is_believed():
    def program(w, x, m):
        both = x + m
        return (
            mark(both, kind="all_reduced", path="", axes=("data",)),
            mark(both, kind="all_reduced", path="", axes=("data", "model")),
            mark(both, kind="mean", path="", axes=("data", "model")),
        )

    assert [value.axes for value in report_2d(program).outputs] == [MODEL, UNIFORM, BOTH]


def gradient(pattern):
    """Lower for CPU the marked gradient of an einsum's weight, `x[4, 3, 2] -> [..., 5]`."""
    x = jnp.arange(24.0).reshape(4, 3, 2)

    def f(w):
        w = mark(w, kind="local", path="", axes=("data",))
        return jnp.einsum(pattern, x, w).sum() ** 2

    def grad(w):
        return mark(jax.grad(f)(w), kind="local", path="", axes=("data",))

    w = jnp.ones((3, 2, 5) if pattern == "rtd,tdo->ro" else (2, 5))
    lowered = jax.jit(grad).lower(w)
    np.testing.assert_array_equal(lowered.compile()(w), jax.grad(f)(w))
    return lowered.as_text()


def test_on_cpu_the_transpose_of_a_gradient_is_not_folded_into_a_product_over_several_dims():
    text = gradient("rtd,do->rto")
    product = re.search(r"(%\w+) = stablehlo.dot_general .*contracting_dims = \[0, 1\]", text)[1]
    barrier = re.search(rf"(%\w+) = stablehlo.optimization_barrier {product} ", text)[1]
    assert f"stablehlo.transpose {barrier}," in text


def test_a_gradient_that_is_summed_over_one_dim_has_no_barrier():
    assert "optimization_barrier" not in gradient("rtd,tdo->ro")
