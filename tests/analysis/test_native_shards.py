"""The analysis gives native reduce-scatters and all-gathers the classes of XLA's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.analysed import UNIFORM, VARYING, local, psum, report

from jdp.collectives import native_shards, xla_shards
from jdp.collectives.cpu import runtime as cpu_runtime

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


def cut(of, x, scale=1.0):
    return of.reduce_scatter([[x]], [[0]], "data", scale=scale)[0][0]


def joined(of, x):
    return of.all_gather([[x]], [[0]], "data")[0][0]


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


@pytest.mark.parametrize("call", [cut, joined])
def test_a_call_that_some_ranks_skip_is_a_deadlock(call):
    def program(w, x):
        return lax.cond(x[0] > 0, lambda x: jnp.sum(call(native_shards, x)), lambda x: 0.0, x)

    [found] = report(program).deadlocks
    assert found.primitive == {cut: "reduce_scatter", joined: "all_gather"}[call]
