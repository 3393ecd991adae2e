"""Which values are known to be a scaled sum over ranks, or zero.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.analysed import (
    BOTH,
    MODEL,
    UNIFORM,
    VARYING,
    add,
    gathered,
    in_scan,
    local,
    pmean,
    psum,
    rank,
    report,
    report_2d,
    table,
    with_ref,
)

from jdp.analysis import AbstractValue
from jdp.analysis.marks import mark

REDUCED = {
    "psum": lambda w, x: psum(x),
    "pmean": lambda w, x: pmean(x),
    "in one group": lambda w, x: lax.psum(x, "data", axis_index_groups=[[0, 1, 2, 3]]),
    "summed again": lambda w, x: psum(psum(x)),
    "scaled": lambda w, x: 2 * pmean(x) / 3,
    "scaled by data": lambda w, x: w * psum(x) / w.sum(),
    "scaled by a sum": lambda w, x: psum(x) * pmean(x).sum(),
    "negated": lambda w, x: -psum(x),
    "cast": lambda w, x: psum(x).astype(jnp.bfloat16),
    "reshaped": lambda w, x: psum(x).reshape(2, 2).T[None],
    "broadcast": lambda w, x: jnp.broadcast_to(psum(x), (3, 4)),
    "a bucket unpacked": lambda w, x: psum(jnp.concatenate([x, x]))[2:6].reshape(2, 2),
    "split": lambda w, x: jnp.split(psum(x), 2)[1],
    "behind a barrier": lambda w, x: lax.optimization_barrier((psum(x), x))[0],
    "where it is finite": lambda w, x: jnp.where(jnp.isfinite(psum(x)), psum(x), 0),
    "nan_to_num": lambda w, x: jnp.nan_to_num(psum(x)),
    "marked": lambda w, x: local(psum(x)),
    "through jit": lambda w, x: jax.jit(lambda x: 2 * x)(psum(x)),
    "in a cond": lambda w, x: lax.cond(w[0] < 2, lambda g: g, lambda g: 2 * g, psum(x)),
    "in a cond, or zeros": lambda w, x: lax.cond(w[0] < 2, psum, jnp.zeros_like, x),
    "out of a scan": lambda w, x: lax.scan(lambda c, y: (c, psum(y)), w, x)[1],
    "two sums": lambda w, x: psum(x) - 2 * psum(x * x) / 3 + jnp.zeros(4),
    "accumulated in a scan": lambda w, x: in_scan(lambda c: c + psum(x), jnp.zeros(4)) / 3,
    "accumulated in a Ref": lambda w, x: (
        ref := jax.new_ref(jnp.zeros(4)),
        in_scan(lambda c: (add(ref, psum(x)), c)[1], w),
        ref[...],
    )[2],
    "last of a scan": lambda w, x: in_scan(lambda _: psum(x), jnp.zeros(4)),
    "out of a Ref": lambda w, x: (ref := jax.new_ref(jnp.zeros(4)), add(ref, psum(x)), ref[...])[2],
    "by another collective": lambda w, x: mark(
        lax.ppermute(x, "data", [(0, 1)]), kind="all_reduced", path="", axes=("data",)
    ),
    "vmapped": lambda w, x: jax.vmap(lambda g: 2 * g)(psum(x)),
}


@table(REDUCED)
def test_a_scaled_sum_over_ranks_is_reduced(program):
    (got,) = report(program).outputs
    assert (got.axes, got.reduced, got.zero) == (UNIFORM, VARYING, False)


NOT_REDUCED = {
    "a parameter": lambda w, x: w,
    "a constant": lambda w, x: jnp.ones(4),
    "rows": lambda w, x: x,
    "psum of a parameter": lambda w, x: psum(w),
    "psum of a constant": lambda w, x: psum(jnp.ones(4)),
    "all_gather": lambda w, x: gathered(x).reshape(4, 4).mean(0),
    "pmax": lambda w, x: lax.pmax(x, "data"),
    "pbroadcast": lambda w, x: lax.pbroadcast(x, ("data",), 0),
    "psum_scatter and all_gather": lambda w, x: gathered(lax.psum_scatter(x, "data", tiled=True)),
    "with a term of its own": lambda w, x: psum(x) + w,
    "with a constant of its own": lambda w, x: psum(x) + 1,
    "its norm": lambda w, x: jnp.sqrt((psum(x) ** 2).sum()),
    "one over it": lambda w, x: 1 / psum(x),
    "times rows": lambda w, x: psum(x) * x,
    "divided by rows": lambda w, x: psum(x) / x,
    "clipped": lambda w, x: jnp.clip(psum(x), -1, 1),
    "where rows say so": lambda w, x: jnp.where(x > 0, psum(x), 0),
    "or a parameter": lambda w, x: jnp.where(w > 0, psum(x), w),
    "in a cond, or a parameter": lambda w, x: lax.cond(w[0] < 2, lambda: psum(x), lambda: w),
    "accumulated onto a parameter": lambda w, x: in_scan(lambda c: c + psum(x), w),
    "accumulated in a Ref of a parameter": lambda w, x: (
        ref := jax.new_ref(w),
        in_scan(lambda c: (add(ref, psum(x)), c)[1], w),
        ref[...],
    )[2],
    "a scan that may not run it": lambda w, x: in_scan(lambda _: psum(x), w),
    "a temperature after all_gather": lambda w, x: jax.grad(
        lambda t: jnp.exp(t) * (gathered(x) @ gathered(x))
    )(w[0]),
    "a parameter's penalty": lambda w, x: jax.grad(
        lambda v: pmean(((w * x) ** 2).mean()) + (v**2).sum()
    )(w),
    "the gradient of a mean loss": lambda w, x: jax.grad(lambda w: pmean((w * x).mean()))(w),
    "the gradient of a loss over a global weight": lambda w, x: jax.grad(
        lambda v: ((w * x).sum() + (v**2).sum()) / psum(x.sum())
    )(w),
}


@table(NOT_REDUCED)
def test_what_was_not_only_scaled_since_is_not_reduced(program):
    assert [value.reduced for value in report(program).outputs] == [UNIFORM]


def test_reduced_knows_the_axis():
    def program(w, x, m):
        count = jnp.where(x > 0, 1.0, 2.0)
        return (
            psum(x),
            psum(x) * m,
            lax.psum(m, "model"),
            lax.psum(x * m, ("data", "model")),
            psum(count),
        )

    got = report_2d(program).outputs
    assert [value.reduced for value in got] == [VARYING, VARYING, MODEL, BOTH, VARYING]
    assert [value.axes for value in got] == [UNIFORM, MODEL, UNIFORM, UNIFORM, UNIFORM]


def test_reduction_by_jax_itself_is_seen():
    # check_vma=True: the gradient of what does not vary is summed over ranks.
    def program(w, x):
        return jax.grad(lambda w: (w * x).sum())(w), psum(x), lax.pcast(w, "data", to="varying")

    out_specs = (P(), P(), P("data"))
    summed, reduced, cast = report(program, check_vma=True, out_specs=out_specs).outputs
    assert summed.reduced == reduced.reduced == VARYING
    assert cast == AbstractValue(UNIFORM, UNIFORM, False)


def test_partial_sums_vary_until_they_are_summed():
    mesh = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    rows = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def program(x):
        partial_sums = lax.pcast(x, "data", to="unreduced")
        return lax.psum(partial_sums, "data")

    (got,) = report(program, rows, mesh=mesh, in_specs=P("data"), check_vma=True).outputs
    assert (got.axes, got.reduced) == (UNIFORM, VARYING)

    spec = P(unreduced={"data"})
    partial_sums = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, spec))
    (got,) = report(psum, partial_sums, mesh=mesh, in_specs=spec, check_vma=True).outputs
    assert (got.axes, got.reduced) == (UNIFORM, VARYING)


ZERO = {
    "zeros": lambda w, x: jnp.zeros(4),
    "zeros_like": lambda w, x: jnp.zeros_like(w),
    "zero times": lambda w, x: 0 * w + 0.0 * w,
    "cast and reshaped": lambda w, x: jnp.zeros(4, int).astype(float).reshape(2, 2).T,
    "summed": lambda w, x: psum(jnp.zeros(4)).sum() - jnp.zeros(4),
    "matrix product": lambda w, x: jnp.zeros((3, 4)) @ w,
    "carried": lambda w, x: in_scan(lambda c: 2 * c + jnp.zeros(4), jnp.zeros(4)),
    "an unused parameter": lambda w, x: jax.grad(lambda w, v: (w * w).sum(), argnums=1)(w, w),
    "an unused parameter of a layer in a scan": lambda w, x: jax.grad(
        lambda p: lax.scan(lambda c, q: (c * q["a"], None), w[0], p)[0]
    )({"a": w, "b": w})["b"],
    "weighed": lambda w, x: jnp.where(w > 0, jnp.zeros(4) * w, 0).astype(jnp.float32),
}


@table(ZERO)
def test_zero_is_known(program):
    assert report(program).outputs == (AbstractValue(UNIFORM, UNIFORM, True),)


NOT_ZERO = {
    "a parameter": lambda w, x: w,
    "a constant": lambda w, x: jnp.ones(4),
    "rank": lambda w, x: rank(),
    "cosine of zero": lambda w, x: jnp.cos(jnp.zeros(4)),
    "one more": lambda w, x: jnp.zeros(4) + w,
    "padded": lambda w, x: jnp.pad(jnp.zeros(4), 1, constant_values=1.0),
    "carried": lambda w, x: in_scan(lambda c: c + 1, jnp.zeros(4)),
    "chosen": lambda w, x: jnp.where(w > 0, jnp.zeros(4), w),
    "branch": lambda w, x: lax.cond(w[0] > 0, lambda: jnp.zeros(4), lambda: w),
    "written": with_ref(lambda r, w, x: r.__setitem__(0, 0.0)),
}


@table(NOT_ZERO)
def test_what_may_be_something_else_is_not_zero(program):
    assert [value.zero for value in report(program).outputs] == [False]


def test_zero_times_rows_is_zero_as_far_as_rows_are_finite():
    assert report(lambda w, x: 0 * x).outputs == (AbstractValue(VARYING, UNIFORM, True),)
