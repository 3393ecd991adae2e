"""What comes out of primitives without a rule of their own, and of those in two parts.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import dataclasses

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from support.analysed import (
    JAX_0_12,
    UNIFORM,
    VARYING,
    W,
    closed,
    new_primitive,
    pair_table,
    psum,
    rank,
    report,
    strange,
    strange_p,
    with_ref,
)

from jdp.analysis import AbstractValue, declare_pure

declare_pure(strange_p)


STRANGE = {
    "operands": (lambda w, x: strange(w), lambda w, x: strange(w, x)),
    "axis in a parameter": (
        lambda w, x: strange(w, axis="model"),
        lambda w, x: strange(w, axis="data"),
    ),
    "axes in nested parameters": (
        lambda w, x: strange(w, options=((0, ("model",)),)),
        lambda w, x: strange(w, options=((0, ("data",)),)),
    ),
    "axes in a spec": (
        lambda w, x: strange(w, spec=P(None, "model")),
        lambda w, x: strange(w, spec=P(None, ("data", "model"))),
    ),
    "its name is no axis": (
        lambda w, x: strange(w, name="data"),
        lambda w, x: strange(w, kind="data"),
    ),
    "body": (
        lambda w, x: strange(w, body=closed(lambda w: 2 * w, w)),
        lambda w, x: strange(w, body=closed(lambda w: w * rank(), w)),
    ),
    "body of another shape": (
        lambda w, x: strange(w, bodies=(closed(lambda a, b: a @ b, w, w),)),
        lambda w, x: strange(w, bodies=(closed(lambda a, b: (a @ b) * rank(), w, w),)),
    ),
    "Ref": (with_ref(lambda r, w, x: strange(r, w)), with_ref(lambda r, w, x: strange(r, x))),
    "Ref under control flow": (
        with_ref(lambda r, w, x: lax.cond(w[0] < 2, lambda: strange(r, w) * 0, lambda: w * 0)),
        with_ref(lambda r, w, x: lax.cond(x[0] < 2, lambda: strange(r, w) * 0, lambda: w * 0)),
    ),
}


@pair_table(STRANGE)
def test_of_a_primitive_without_a_rule_everything_is_joined(right, wrong):
    assert [value.axes for value in report(right).outputs] == [UNIFORM]
    assert VARYING in [value.axes for value in report(wrong).outputs]


def test_a_ref_that_an_unknown_primitive_makes_may_hold_anything():
    made_p = Primitive("make_ref")
    made_p.ref_primitive = made_p.ref_allocating = True
    made_p.is_effectful = lambda params: True
    made_p.def_effectful_abstract_eval(lambda w, *, of: (of, set()))

    def program(w, x):
        ref = made_p.bind(w, of=jax.typeof(jax.new_ref(w)))
        ref[...] = w
        return ref[...]

    assert [value.axes for value in report(program).outputs] == [VARYING]


def test_an_unknown_primitive_that_names_an_axis_may_wait_for_all_ranks():
    def under(control, **params):
        return lambda w, x: lax.cond(control(w, x)[0] < 2, lambda: strange(w, **params), lambda: w)

    assert not report(under(lambda w, x: x)).deadlocks
    assert not report(under(lambda w, x: w, axis="data")).deadlocks
    (found,) = report(under(lambda w, x: x, axis="data")).deadlocks
    assert (found.primitive, found.axes, found.control) == ("strange", ("data",), "cond")


def test_a_deadlock_is_seen_in_the_body_of_an_unknown_primitive():
    def under(control):
        def inner(w, x):
            return lax.cond(control(w, x)[0] < 2, lambda: psum(x), lambda: x)

        return lambda w, x: strange(w, x, body=closed(inner, w, x))

    # Which operand is which in the body is not known, so that any may decide.
    assert not report(under(lambda w, x: w), W, W, in_specs=(P(), P())).deadlocks
    assert report(under(lambda w, x: x)).deadlocks


def test_an_unknown_body_may_run_again_on_what_it_wrote():
    def body(ref, w):
        summed = lax.cond(ref[0] < 2, lambda: psum(w), lambda: w)
        ref[...] = rank() * w
        return summed

    def program(w, x):
        ref = jax.new_ref(w)
        return strange(ref, w, body=jax.make_jaxpr(body)(ref, w))

    assert [found.primitive for found in report(program).deadlocks] == ["psum"]


def test_a_primitive_with_a_hidden_body_is_named():
    def program(w, x):
        return strange(w, function=lambda w: w), strange(w, function=jnp.float32)

    got = report(program)
    assert got.opaque == ("strange",)
    assert [value.axes for value in got.outputs] == [UNIFORM, UNIFORM]


slotted_p = new_primitive("slotted")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    """How a primitive may hold a body or none."""

    body: object


def test_a_body_in_a_dataclass_with_slots_is_looked_into():
    def program(w, x):
        return [
            slotted_p.bind(w, options=Slotted(closed(f, w)))[0]
            for f in (lambda w: 2 * w, lambda w: w * rank())
        ]

    assert [value.axes for value in report(program).outputs] == [UNIFORM, VARYING]


class Unexpandable:
    """Stands for a high-level primitive of JAX that cannot be traced on its own."""


def test_a_high_level_primitive_that_cannot_be_opened_may_give_anything():
    high_p = new_primitive("call_hi_primitive")

    def program(w, x):
        ref = jax.new_ref(w)
        return high_p.bind(ref, w, _prim=Unexpandable())[0], ref[...]

    got = report(program)
    assert got.opaque == ("Unexpandable",)
    assert [value.axes for value in got.outputs] == [VARYING, VARYING]


SUM = AbstractValue(UNIFORM, VARYING, False, total=VARYING, undivided=VARYING)
ASYNC = {
    "psum": (SUM, {"axes": ("data",)}),
    "psum_invariant": (SUM, {"axes": ("data",)}),
    "all_gather": (AbstractValue(UNIFORM, UNIFORM, False), {"axis_name": ("data",)}),
    "ppermute": (AbstractValue(VARYING, UNIFORM, False), {"axis_name": "data"}),
    "reduce_scatter": (AbstractValue(VARYING, UNIFORM, False), {"axis_name": ("data",)}),
}


@pytest.mark.parametrize("name", ASYNC)
def test_a_collective_in_two_parts_is_that_collective(name):
    # JAX does not hand them out yet; their names and parameters stand in its sources.
    want, params = ASYNC[name]
    start_p, done_p = new_primitive(f"{name}_start"), new_primitive(f"{name}_done")

    def exchange(x):
        return done_p.bind(*start_p.bind(x, **params))[0]

    if name == "psum_invariant":
        done_p = new_primitive("psum_done")
    assert report(lambda w, x: exchange(x)).outputs == (want,)
    assert report(lambda w, x: lax.cond(x[0] < 2, exchange, lambda x: x, x)).deadlocks


@pytest.mark.skipif(not JAX_0_12, reason="the source must be a number before JAX 0.12")
def test_ranks_that_disagree_on_the_source_of_a_broadcast_disagree():
    def program(w, x):
        def from_rank(source):
            return lax.pbroadcast(x, ("data",), source.astype(int))

        return from_rank(w[0]), from_rank(x[0])

    assert [value.axes for value in report(program).outputs] == [UNIFORM, VARYING]
