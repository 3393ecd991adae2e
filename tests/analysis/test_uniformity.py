"""Small programs and the classes that the uniformity analysis gives their values.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import dataclasses

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.extend.core.primitives import cond_p, while_p
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.analysed import (
    BOTH,
    MESH,
    MESH_2D,
    MODEL,
    UNIFORM,
    VARYING,
    W,
    X,
    in_scan,
    local,
    pair_table,
    pmean,
    psum,
    rank,
    report,
    report_2d,
    shape_of,
    table,
)

from jdp.analysis import Class, analyse, declare_pure, find_shard_maps
from jdp.analysis.marks import mark

JAX_0_12 = jax.__version_info__ >= (0, 12)


def kernel(body):
    def call(x):
        return pl.pallas_call(body, out_shape=shape_of(x), interpret=True)(x)

    return call


def doubling_kernel(x, out):
    out[...] = 2 * x[...]


def rank_kernel(x, out):
    out[...] = x[...] + rank().astype(x.dtype)


def copy_kernel(x, out):
    out[...] = x[...]


def block_kernel(x, block):
    specs = {"in_specs": [pl.BlockSpec((2,), lambda i: (block(),))]}
    specs |= {"out_specs": pl.BlockSpec((2,), lambda i: (0,)), "grid": (1,)}
    shape = jax.ShapeDtypeStruct((2,), x.dtype)
    return pl.pallas_call(copy_kernel, out_shape=shape, interpret=True, **specs)(x)


# JAX 0.12 deprecates them; a program that has them is wrong in the same ways.
with_psend = pytest.mark.filterwarnings("ignore:jax.lax.p(send|recv) is dep:DeprecationWarning")


def pure_callback(x):
    return jax.pure_callback(np.asarray, shape_of(x), x)


def foreign(x, **options):
    return jax.ffi.ffi_call("target", shape_of(x), **options)(x)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_batching.custom_vmap
def tripled(x):
    return 3 * x


tripled.def_vmap(lambda size, batched, x: (3 * x, batched[0]))


def with_double(w):
    return w, 2 * w


def with_half(w):
    return w, w / 2


def pair(a, b):
    return a, b


def sines(w):
    return jnp.sin(w).sum()


def products(w):
    return (w[:2] * w[2:]).sum()


def choice(x):
    return (x[0] < 2).astype(int)


def closed(body, *args):
    return jax.make_jaxpr(body)(*args)


def count_on(c):
    return c[0], c[1] + 1


def counting_loop(w, x):
    cond, body = (
        closed(lambda end, w, i: i < end, 1.0, w, 0.0),
        closed(lambda w, i: (w, i + 1), w, 0.0),
    )
    jaxprs = {"cond_jaxpr": cond, "body_jaxpr": body}
    return while_p.bind(x[0], w, 0.0, **jaxprs, cond_nconsts=1, body_nconsts=0)


def root(f):
    def solve(f, x):
        return lax.fori_loop(0, 3, lambda _, x: x - f(x), x)

    return lax.custom_root(f, jnp.ones(()), solve, lambda g, y: y / g(1.0))


def cg(matvec, b):
    return jax.scipy.sparse.linalg.cg(matvec, b)[0]


def scaled_solve(matvec, b):
    return lax.custom_linear_solve(matvec, b, lambda matvec, b: 2 * b, symmetric=True)


def gathered(x, **options):
    return lax.all_gather(x, "data", tiled=True, **options)


# The rule table. For each row a program whose result is uniform, and one, as like as possible,
# whose result varies.
PAIRS = {
    "inputs": (lambda w, x: w, lambda w, x: x),
    "constants": (lambda w, x: jnp.arange(4.0), lambda w, x: jnp.arange(4.0) + x),
    "arithmetic": (lambda w, x: jnp.sin(w) @ w, lambda w, x: jnp.sin(w) @ x),
    "psum": (lambda w, x: psum(x), lambda w, x: psum(x) + x),
    "psum of a tree": (lambda w, x: psum({"x": x, "w": w})["x"], lambda w, x: psum((x, w))[1] * x),
    "pmean": (lambda w, x: pmean(x), lambda w, x: pmean(w) - x),
    "pmax": (lambda w, x: lax.pmax(x, "data"), lambda w, x: jnp.max(x)),
    "pmin": (lambda w, x: lax.pmin(x, "data"), lambda w, x: jnp.min(x)),
    "all_gather": (lambda w, x: gathered(x), lambda w, x: gathered(x)[rank()]),
    "psum in one group": (
        lambda w, x: lax.psum(x, "data", axis_index_groups=[[0, 1, 2, 3]]),
        lambda w, x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]),
    ),
    "psum in groups of a uniform value": (
        lambda w, x: lax.psum(w, "data", axis_index_groups=[[0, 1], [2, 3]]),
        lambda w, x: lax.psum(w, "data", axis_index_groups=[[0, 1, 2], [3]]),
    ),
    "pmax in groups": (
        lambda w, x: lax.pmax(w, "data", axis_index_groups=[[0, 1, 2], [3]]),
        lambda w, x: lax.pmax(x, "data", axis_index_groups=[[0, 1, 2], [3]]),
    ),
    "ppermute": (
        lambda w, x: pmean(lax.ppermute(x, "data", [(0, 1), (1, 0)])),
        lambda w, x: lax.ppermute(w, "data", [(0, 1)]),  # ranks 0, 2 and 3 receive zeros
    ),
    "all_to_all": (
        lambda w, x: psum(lax.all_to_all(x, "data", 0, 0, tiled=True)),
        lambda w, x: lax.all_to_all(x, "data", 0, 0, tiled=True),
    ),
    "psum_scatter": (
        lambda w, x: gathered(lax.psum_scatter(x, "data", tiled=True)),
        lambda w, x: lax.psum_scatter(w, "data", tiled=True),
    ),
    "precv": (
        lambda w, x: pmean(lax.precv(lax.create_token(), shape_of(w), "data", [(0, 1)])),
        lambda w, x: lax.precv(lax.create_token(), shape_of(w), "data", [(0, 1)]),
    ),
    "pbroadcast": (lambda w, x: lax.pbroadcast(x, ("data",), 0), lambda w, x: x + 0),
    "axis_index": (lambda w, x: lax.axis_size("data") * w, lambda w, x: rank() * w),
    "rng_uniform": (
        lambda w, x: jax.random.normal(jax.random.key(0), (4,)),
        lambda w, x: lax.rng_uniform(0.0, 1.0, (4,)),
    ),
    "random key of this rank": (
        lambda w, x: jax.random.bernoulli(jax.random.key(0), 0.5, (4,)),
        lambda w, x: jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), rank())),
    ),
    "rng_bit_generator": (
        lambda w, x: lax.rng_bit_generator(jnp.zeros(4, "uint32"), (3,))[1],
        lambda w, x: lax.rng_bit_generator(x.astype("uint32"), (3,))[1],
    ),
    "callbacks": (
        lambda w, x: pure_callback(w),
        lambda w, x: io_callback(np.asarray, shape_of(w), w),
    ),
    "pure_callback": (lambda w, x: pure_callback(w), lambda w, x: pure_callback(x)),
    "foreign function": (lambda w, x: foreign(w), lambda w, x: foreign(x)),
    "foreign function with side effects": (
        lambda w, x: foreign(w),
        lambda w, x: foreign(w, has_side_effect=True),
    ),
    "uninitialised memory": (lambda w, x: jnp.zeros(4), lambda w, x: lax.empty((4,), "float32")),
    "optimization_barrier": (
        lambda w, x: lax.optimization_barrier((w, x))[0],
        lambda w, x: lax.optimization_barrier((w, x))[1],
    ),
    "several arrays moved at once": (
        lambda w, x: jax.device_put((w, x))[0],
        lambda w, x: jax.device_put((w, x))[1],
    ),
    "sort, keys": (
        lambda w, x: lax.sort((w, x), num_keys=1)[0],
        lambda w, x: lax.sort((w, x), num_keys=2)[0],
    ),
    "sort, payload": (
        lambda w, x: lax.sort((w, w, x), num_keys=1)[1],
        lambda w, x: lax.sort((x, w), num_keys=1)[1],
    ),
    "argsort": (lambda w, x: jnp.argsort(w), lambda w, x: jnp.argsort(x)),
    "select": (lambda w, x: jnp.where(w > 0, w, 0), lambda w, x: jnp.where(x > 0, w, 0)),
    "zero times": (lambda w, x: 0 * w, lambda w, x: 0 * x),  # infinities give NaN
    "indexing": (lambda w, x: w[w.astype(int)], lambda w, x: w[x.astype(int)]),
    "updates": (
        lambda w, x: w.at[0].set(1.0).at[1].add(2.0),
        lambda w, x: w.at[x[0].astype(int)].set(1.0),
    ),
    "update by a function": (
        lambda w, x: w.at[0].apply(lambda a: 2 * a),
        lambda w, x: w.at[0].apply(lambda a: a * rank()),
    ),
    "reduction by a function": (
        lambda w, x: lax.reduce(w, 0.0, lambda a, b: a * b, (0,)),
        lambda w, x: lax.reduce(x, 0.0, lambda a, b: a * b, (0,)),
    ),
    "cond, predicate": (
        lambda w, x: lax.cond(w[0] < 2, lambda: w, lambda: 2 * w),
        lambda w, x: lax.cond(x[0] < 2, lambda: w, lambda: 2 * w),
    ),
    "cond, branch": (
        lambda w, x: lax.cond(w[0] < 2, lambda: w, lambda: psum(x)),
        lambda w, x: lax.cond(w[0] < 2, lambda: w, lambda: x),
    ),
    "cond, same operand": (
        lambda w, x: lax.cond(x[0] < 2, lambda w, x: (w, x), lambda w, x: (w, 2 * x), w, x)[0],
        lambda w, x: lax.cond(x[0] < 2, lambda w, v: w, lambda w, v: v, w, 2 * w),
    ),
    "cond, same operand of jit": (
        lambda w, x: lax.cond(x[0] < 2, jax.jit(with_double), jax.jit(with_half), w)[0],
        lambda w, x: lax.cond(x[0] < 2, jax.jit(with_double), jax.jit(with_half), w)[1],
    ),
    "cond, number handed through jit": (
        lambda w, x: lax.cond(w[0] < 2, lambda: jax.jit(with_double)(1.0), lambda: (2.0, 2.0))[0],
        lambda w, x: lax.cond(x[0] < 2, lambda: jax.jit(with_double)(1.0), lambda: (2.0, 2.0))[0],
    ),
    "cond, same operand left in place": (  # JAX takes some of these out itself
        lambda w, x: cond_p.bind(choice(x), w, x, branches=(closed(pair, w, x),) * 2)[0],
        lambda w, x: cond_p.bind(choice(x), w, x, branches=(closed(pair, w, x),) * 2)[1],
    ),
    "gradient of cond": (
        lambda w, x: jax.grad(lambda w: lax.cond(w[0] < 2, sines, products, w))(w),
        lambda w, x: jax.grad(lambda w: lax.cond(x[0] < 2, sines, products, w))(w),
    ),
    "switch": (
        lambda w, x: lax.switch(2, [lambda: w, lambda: w + 1, lambda: 2 * w]),
        lambda w, x: lax.switch(rank(), [lambda: w, lambda: w + 1, lambda: 2 * w]),
    ),
    "while, predicate": (
        lambda w, x: lax.while_loop(lambda c: c[0] < 9, lambda c: 2 * c, w),
        lambda w, x: lax.while_loop(lambda c: c[0] < x[0], lambda c: 2 * c, w),
    ),
    "while, what passes through": (
        lambda w, x: lax.while_loop(lambda c: c[1] < x[0], lambda c: (c[0], c[1] + 1), (w, 0.0))[0],
        lambda w, x: lax.while_loop(lambda c: c[1] < x[0], lambda c: (c[0], c[1] + 1), (w, 0.0))[1],
    ),
    "while, what passes through in place": (
        lambda w, x: counting_loop(w, x)[0],
        lambda w, x: counting_loop(w, x)[1],
    ),
    "while, what passes through jit": (
        lambda w, x: lax.while_loop(lambda c: c[1] < x[0], jax.jit(count_on), (w, 0.0))[0],
        lambda w, x: lax.while_loop(lambda c: c[1] < x[0], jax.jit(count_on), (w, 0.0))[1],
    ),
    "while, fixpoint": (
        lambda w, x: lax.fori_loop(0, 9, lambda i, c: (c[1], c[2], w), (w, w, psum(x)))[0],
        lambda w, x: lax.fori_loop(0, 9, lambda i, c: (c[1], c[2], c[2]), (w, w, x))[0],
    ),
    "fori_loop up to a rank": (
        lambda w, x: lax.fori_loop(0, w[0].astype(int), lambda i, c: c + 1, 0),
        lambda w, x: lax.fori_loop(0, rank(), lambda i, c: c + 1, 0),
    ),
    "scan, fixpoint": (
        lambda w, x: in_scan(lambda c: (c[1], c[2], w), (w, w, psum(x)))[0],
        lambda w, x: in_scan(lambda c: (c[1], c[2], c[2]), (w, w, x))[0],
    ),
    "scan, carries apart": (  # several of them: JAX 0.11 counts them in another way
        lambda w, x: in_scan(lambda c: {"a": c["a"] + w, "b": c["b"] * x}, {"a": w, "b": w})["a"],
        lambda w, x: in_scan(lambda c: {"a": c["a"] + w, "b": c["b"] * x}, {"a": w, "b": w})["b"],
    ),
    "scan, outputs": (
        lambda w, x: lax.scan(lambda c, y: (c, y + 1), x, w)[1],
        lambda w, x: lax.scan(lambda c, y: (c + x, c), w, w)[1],
    ),
    "jit": (
        lambda w, x: jax.jit(lambda w, x: (w, x))(w, x)[0],
        lambda w, x: jax.jit(lambda w, x: (w, x))(w, x)[1],
    ),
    "remat": (
        lambda w, x: jax.grad(jax.checkpoint(lambda w: jnp.sin(jnp.sin(w)).sum()))(w),
        lambda w, x: jax.grad(jax.checkpoint(lambda w: jnp.sin(jnp.sin(w * x)).sum()))(w),
    ),
    "custom_jvp": (lambda w, x: jax.nn.relu(w), lambda w, x: jax.nn.relu(x)),
    "custom_vjp": (lambda w, x: doubled(w), lambda w, x: doubled(x)),
    "composite": (
        lambda w, x: lax.composite(lambda w, x: w, "my.data")(w, x),
        lambda w, x: lax.composite(lambda w, x: x, "my.data")(w, x),
    ),
    "custom_vmap": (lambda w, x: tripled(w), lambda w, x: tripled(x)),
    "custom_linear_solve": (
        lambda w, x: cg(lambda v: pmean(x * v), w),
        lambda w, x: cg(lambda v: x * v, w),
    ),
    "custom_root": (
        lambda w, x: root(lambda z: z * z - psum(x.sum())),
        lambda w, x: root(lambda z: z * z - x.sum()),
    ),
    "custom_root on the rank": (
        lambda w, x: root(lambda z: z * z - w.sum()),
        lambda w, x: root(lambda z: z * z - rank()),
    ),
    "gradient of custom_root": (
        lambda w, x: jax.grad(lambda s: root(lambda z: z * z - s))(w.sum()),
        lambda w, x: jax.grad(lambda s: root(lambda z: z * z - s * x.sum()))(w.sum()),
    ),
    "pallas kernel": (lambda w, x: kernel(doubling_kernel)(w), lambda w, x: kernel(rank_kernel)(w)),
    "pallas kernel on a block": (
        lambda w, x: block_kernel(w, lambda: 1),
        lambda w, x: block_kernel(w, rank),
    ),
    "checkpoint_name": (
        lambda w, x: jax.ad_checkpoint.checkpoint_name(w, "data"),
        lambda w, x: jax.ad_checkpoint.checkpoint_name(x, "w"),
    ),
    "vmap over an axis of the same name": (
        lambda w, x: pmean(jax.vmap(pmean, axis_name="data")(jnp.stack([x, x]))),
        lambda w, x: jax.vmap(pmean, axis_name="data")(jnp.stack([x, x])),
    ),
    "gradient": (
        lambda w, x: pmean(jax.grad(lambda w: ((w @ x) ** 2).mean())(w)),
        lambda w, x: jax.grad(lambda w: pmean(((w @ x) ** 2).mean()))(w),  # stays local
    ),
    "marks": (
        lambda w, x: local(pmean(local(x))),
        lambda w, x: mark(x, kind="mean", path="['w']", axes=("data",)),
    ),
}


@with_psend
@pair_table(PAIRS)
def test_a_result_varies_exactly_if_ranks_may_disagree(right, wrong):
    assert [value.axes for value in report(right).outputs] == [UNIFORM]
    assert VARYING in [value.axes for value in report(wrong).outputs]


# Programs over the mesh axes "data" and "model", and the axes along which their results differ.
TWO_AXES = {
    "w": (lambda w, x, m: w, UNIFORM),
    "x": (lambda w, x, m: x, VARYING),
    "m": (lambda w, x, m: m, MODEL),
    "x + m": (lambda w, x, m: x + m, BOTH),
    "rank on model": (lambda w, x, m: lax.axis_index("model"), MODEL),
    "rank on both": (lambda w, x, m: lax.axis_index(("data", "model")), BOTH),
    "psum over data": (lambda w, x, m: psum(x + m), MODEL),
    "psum over model": (lambda w, x, m: lax.psum(x + m, "model"), VARYING),
    "psum over both": (lambda w, x, m: lax.psum(x + m, ("data", "model")), UNIFORM),
    "psum over the wrong axis": (lambda w, x, m: lax.psum(x, "model"), VARYING),
    "pmean of what differs along model": (lambda w, x, m: pmean(m), MODEL),
    "psum_scatter over model": (lambda w, x, m: lax.psum_scatter(w, "model", tiled=True), MODEL),
    "ppermute over model": (lambda w, x, m: lax.ppermute(x, "model", [(0, 1)]), BOTH),
    "all_gather over model": (lambda w, x, m: lax.all_gather(m, "model"), UNIFORM),
    "cond over model": (
        lambda w, x, m: lax.cond(m[0] < 2, lambda: psum(x), lambda: w),
        MODEL,
    ),
    "io_callback": (
        lambda w, x, m: io_callback(np.asarray, shape_of(w), w),
        BOTH,
    ),
}


@table(TWO_AXES)
def test_a_class_is_a_set_of_axes(program):
    body, axes = program
    assert [value.axes for value in report_2d(body).outputs] == [axes]


def test_a_partly_automatic_mesh_has_its_manual_axes_alone():
    options = {"mesh": MESH_2D, "axis_names": {"data"}}
    got = report(lambda w, x: (w, x, psum(x), io_callback(np.asarray, shape_of(w), w)), **options)
    assert [value.axes for value in got.outputs] == [UNIFORM, VARYING, UNIFORM, VARYING]


def nested(body, in_specs, out_specs):
    options = {"axis_names": {"model"}, "check_vma": False}
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, **options)


NESTED = {
    "split and put together": (
        lambda w, x: nested(lambda w: 2 * w, P("model"), P("model"))(w),
        UNIFORM,
    ),
    "rank, put together": (
        lambda w, x: nested(lambda w: w * lax.axis_index("model"), P("model"), P("model"))(w),
        UNIFORM,
    ),
    "rank, said to agree": (
        lambda w, x: nested(lambda w: w * lax.axis_index("model"), P(), P())(w),
        MODEL,
    ),
    "reduced inside": (lambda w, x: nested(lambda x: psum(x), P("model"), P("model"))(x), UNIFORM),
    "not reduced inside": (
        lambda w, x: nested(lambda x: lax.psum(x, "model"), P("model"), P())(x),
        VARYING,
    ),
    "a part of it, said to be all": (
        lambda w, x: nested(lambda w: w, P("model"), P())(w),
        MODEL,
    ),
    "io_callback inside, said to agree": (
        lambda w, x: nested(lambda w: io_callback(np.asarray, shape_of(w), w), P(), P())(w),
        BOTH,
    ),
    "io_callback inside": (
        lambda w, x: nested(
            lambda w: io_callback(np.asarray, shape_of(w), w),
            P("model"),
            P("model"),
        )(w),
        VARYING,
    ),
}


@table(NESTED)
def test_a_nested_shard_map_adds_its_axes_inside_and_takes_them_away_outside(program):
    body, axes = program
    (got,) = report(body, mesh=MESH_2D, axis_names={"data"}).outputs
    assert got.axes == axes


# Refs


def with_ref(body):
    """A program that makes a Ref of ones, hands it to body(ref, w, x), and reads it."""

    def program(w, x):
        ref = jax.new_ref(jnp.ones(4))
        body(ref, w, x)
        return ref[...]

    return program


def store(ref, value):
    ref[...] = value


def add(ref, value):
    jax.ref.addupdate(ref, ..., value)


def loop_of_two_refs(ref, w, x):
    # What x puts into `other` comes to `ref` one round later.
    other = jax.new_ref(jnp.ones(4))

    def body(_, c):
        ref[...] = other[...]
        other[...] = x
        return c

    lax.fori_loop(0, 3, body, 0)


def loop_of_two_uniform_refs(ref, w, x):
    other = jax.new_ref(jnp.ones(4))

    def body(_, c):
        ref[...] = other[...]
        other[...] = psum(x)
        return c

    lax.fori_loop(0, 3, body, 0)


def while_of_two_refs(value):
    def body(ref, w, x):
        other = jax.new_ref(jnp.ones(4))

        def step(i):
            ref[...] = other[...]
            other[...] = value(w, x)
            return i + 1

        lax.while_loop(lambda i: i < w[0], step, 1.0)  # a carry of nonzero constants all along

    return body


def while_with_a_ref_that_decides(value):
    def body(ref, w, x):
        end = jax.new_ref(w[0])

        def step(i):
            ref[...] = 2 * w
            end[...] = value(w, x)[0]
            return i + 1

        lax.while_loop(lambda i: i < end[...], step, 0.0)

    return body


REFS = {
    "store": (lambda r, w, x: store(r, w), lambda r, w, x: store(r, x)),
    "store of a part": (
        lambda r, w, x: r.__setitem__(0, w[0]),
        lambda r, w, x: r.__setitem__(0, x[0]),
    ),
    "index": (
        lambda r, w, x: r.__setitem__(w[0].astype(int), 2.0),
        lambda r, w, x: r.__setitem__(x[0].astype(int), 2.0),
    ),
    "addupdate": (lambda r, w, x: add(r, psum(x)), lambda r, w, x: add(r, x)),
    "swap": (
        lambda r, w, x: jax.ref.swap(r, ..., w),
        lambda r, w, x: jax.ref.swap(r, ..., x),
    ),
    "through jit": (
        lambda r, w, x: jax.jit(store)(r, w),
        lambda r, w, x: jax.jit(store)(r, x),
    ),
    "in a scan": (
        lambda r, w, x: in_scan(lambda c: (add(r, w), c)[1], w),
        lambda r, w, x: in_scan(lambda c: (add(r, c), c * x)[1], w),
    ),
    "in a loop, one round late": (loop_of_two_uniform_refs, loop_of_two_refs),
    "in a while loop, one round late": (
        while_of_two_refs(lambda w, x: w),
        while_of_two_refs(lambda w, x: x),
    ),
    "in a while loop that ends when another Ref says so": (
        while_with_a_ref_that_decides(lambda w, x: w),
        while_with_a_ref_that_decides(lambda w, x: x),
    ),
    "in a while loop": (
        lambda r, w, x: lax.while_loop(lambda i: i < w[0], lambda i: (store(r, w), i + 1)[1], 0.0),
        lambda r, w, x: lax.while_loop(lambda i: i < x[0], lambda i: (store(r, w), i + 1)[1], 0.0),
    ),
    "a uniform write under varying control flow": (
        lambda r, w, x: lax.cond(w[0] < 2, lambda: store(r, w), lambda: None),
        lambda r, w, x: lax.cond(x[0] < 2, lambda: store(r, w), lambda: None),
    ),
    "a uniform term under varying control flow": (
        lambda r, w, x: lax.cond(w[0] < 2, lambda: add(r, w), lambda: None),
        lambda r, w, x: lax.cond(x[0] < 2, lambda: add(r, w), lambda: None),
    ),
    "a uniform term at an index": (
        lambda r, w, x: jax.ref.addupdate(r, w[0].astype(int), 1.0),
        lambda r, w, x: jax.ref.addupdate(r, x[0].astype(int), 1.0),
    ),
    "a uniform write in a kernel of rank": (
        lambda r, w, x: store(r, kernel(doubling_kernel)(w)),
        lambda r, w, x: store(r, kernel(rank_kernel)(w)),
    ),
}


@pair_table(REFS)
def test_a_ref_holds_the_join_of_what_is_written(right, wrong):
    assert [value.axes for value in report(with_ref(right)).outputs] == [UNIFORM]
    assert [value.axes for value in report(with_ref(wrong)).outputs] == [VARYING]


def test_what_is_read_before_a_write_is_what_was_there():
    def program(w, x):
        ref = jax.new_ref(w)
        before = ref[...]
        swapped = jax.ref.swap(ref, ..., x)
        return before, swapped, ref[...], jax.freeze(ref)

    got = report(program).outputs
    assert [value.axes for value in got] == [UNIFORM, UNIFORM, VARYING, VARYING]


def test_an_index_that_varies_makes_what_is_read_vary():
    def program(w, x):
        ref = jax.new_ref(w)
        return ref[0], ref[x[0].astype(int)]

    assert [value.axes for value in report(program).outputs] == [UNIFORM, VARYING]


def test_a_ref_among_the_inputs_is_reported_with_what_it_holds_in_the_end():
    def body(kept, stored, x):
        kept[...] = psum(x)
        stored[...] = x
        return x

    def program(x):
        args = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4)), x
        specs = (P(), P(), P("data"))
        return jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("data"), check_vma=False)(
            *args
        )

    (eqn,) = find_shard_maps(jax.make_jaxpr(program)(X))
    (first, kept), (second, stored) = analyse(eqn).refs
    assert (first, kept.axes, second, stored.axes) == (0, UNIFORM, 1, VARYING)


# Reduced and zero

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
    "out of a Ref": lambda w, x: (
        ref := jax.new_ref(jnp.zeros(4)),
        add(ref, psum(x)),
        ref[...],
    )[2],
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
    assert cast == Class(UNIFORM, UNIFORM, False)


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
    assert report(program).outputs == (Class(UNIFORM, UNIFORM, True),)


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
    assert report(lambda w, x: 0 * x).outputs == (Class(VARYING, UNIFORM, True),)


# Deadlocks


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
        lambda w, x: (
            ref := jax.new_ref(w[0]),
            lax.cond(ref[...] < 2, lambda: psum(x), lambda: x),
        )[1],
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


# Primitives without a rule of their own: declared pure, with a body, or never heard of


def new_primitive(name):
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *args, **params: [args[-1]])
    return primitive


strange_p = new_primitive("strange")
declare_pure(strange_p)


def strange(*args, **params):
    return strange_p.bind(*args, **params)[0]


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
    "Ref": (
        with_ref(lambda r, w, x: strange(r, w)),
        with_ref(lambda r, w, x: strange(r, x)),
    ),
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


SUM = Class(UNIFORM, VARYING, False, total=VARYING, undivided=VARYING)
ASYNC = {
    "psum": (SUM, {"axes": ("data",)}),
    "psum_invariant": (SUM, {"axes": ("data",)}),
    "all_gather": (Class(UNIFORM, UNIFORM, False), {"axis_name": ("data",)}),
    "ppermute": (Class(VARYING, UNIFORM, False), {"axis_name": "data"}),
    "reduce_scatter": (Class(VARYING, UNIFORM, False), {"axis_name": ("data",)}),
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


# Inputs


def test_captured_arrays_stand_in_front_of_the_arguments():
    captured = np.arange(4.0)

    def program(w, x):
        return w + jnp.asarray(captured), x

    got = report(program)
    assert [value.axes for value in got.outputs] == [UNIFORM, VARYING]
    assert got.used_inputs[-2:] == (True, True)
    assert len(got.used_inputs) >= 2


def test_an_axis_of_a_pair_splits_an_input():
    specs = (P(None, ("data", "model")), P(("model",)))
    got = report(lambda a, b: (a, b), jnp.ones((2, 8)), jnp.ones(8), mesh=MESH_2D, in_specs=specs)
    assert [value.axes for value in got.outputs] == [BOTH, MODEL]


def ignores_second(a, b):
    return 2 * a


USED = {
    "read": (lambda w, x: w * x, (True, True)),
    "returned": (lambda w, x: x, (False, True)),
    "read in vain": (lambda w, x: (x.sum(), w)[1], (True, False)),
    "read by a collective in vain": (lambda w, x: (psum(x), w)[1], (True, False)),
    "read by jit, for an output in vain": (
        lambda w, x: jax.jit(lambda w, x: (w, x.sum()))(w, x)[0],
        (True, False),
    ),
    "split for a scan in vain": (
        lambda w, x: lax.scan(lambda c, y: (2 * c, None), w, x.reshape(2, 2))[0],
        (True, False),
    ),
    "carried by a scan in vain": (
        lambda w, x: in_scan(lambda c: (2 * c[0], c[0] * c[1]), (w, x))[0],
        (True, False),
    ),
    "carried by a scan, and used a round later": (
        lambda w, x: in_scan(lambda c: (c[1], c[2], c[2]), (w, w, x))[0],
        (True, True),
    ),
    "carried by a loop in vain": (
        lambda w, x: lax.while_loop(lambda c: c[0][0] < 2, lambda c: (w, c[1] * 2), (w, x))[0],
        (True, False),
    ),
    "carried by a loop, and used a round later": (
        lambda w, x: lax.while_loop(lambda c: c[0][0] < 2, lambda c: (c[1], c[2], c[2]), (w, w, x))[
            0
        ],
        (True, True),
    ),
    "carried by a loop for its predicate": (
        lambda w, x: lax.while_loop(lambda c: c[1][0] < 2, lambda c: (2 * c[0], 2 * c[1]), (w, x))[
            0
        ],
        (True, True),
    ),
    "printed": (lambda w, x: (jax.debug.print("{}", x), w)[1], (True, True)),
    "printed in a scan": (
        lambda w, x: in_scan(lambda c: (jax.debug.print("{}", x), c)[1], w),
        (True, True),
    ),
    "written": (with_ref(lambda r, w, x: store(r, x)), (False, True)),
    "ignored": (lambda w, x: 2 * w, (True, False)),
    "ignored by jit": (lambda w, x: jax.jit(ignores_second)(w, x), (True, False)),
    "ignored by jit in jit": (
        lambda w, x: jax.jit(lambda w, x: jax.jit(ignores_second)(w, x))(w, x),
        (True, False),
    ),
    "read by jit": (lambda w, x: jax.jit(ignores_second)(x, w), (False, True)),
    "handed on by jit": (lambda w, x: jax.jit(lambda w, x: x)(w, x), (False, True)),
    "ignored by remat": (lambda w, x: jax.checkpoint(ignores_second)(w, x), (True, False)),
    "ignored by a scan": (
        lambda w, x: lax.scan(lambda c, y: (2 * c, None), w, x)[0],
        (True, False),
    ),
    "read by a scan": (lambda w, x: lax.scan(lambda c, y: (y * c, None), w, x)[0], (True, True)),
    "ignored by branches": (
        lambda w, x: lax.cond(w[0] < 2, ignores_second, ignores_second, w, x),
        (True, False),
    ),
    "read by a branch": (
        lambda w, x: lax.cond(w[0] < 2, ignores_second, lambda a, b: b, w, x),
        (True, True),
    ),
    "decides": (lambda w, x: lax.cond(x[0] < 2, lambda: 1.0, lambda: 2.0), (False, True)),
    "read by a loop": (
        lambda w, x: lax.while_loop(lambda c: c[0] < 2, lambda c: c + x, w),
        (True, True),
    ),
    "read by a loop's predicate": (
        lambda w, x: lax.while_loop(lambda c: c < x[0], lambda c: c + 1, 0.0),
        (False, True),
    ),
    "read by an unknown body": (
        lambda w, x: strange(x, w, body=closed(ignores_second, x, w)),
        (True, True),
    ),
}


@table(USED)
def test_inputs_that_matter_are_known(program):
    body, used = program
    assert report(body).used_inputs == used


def test_shard_maps_are_found_in_order_and_wherever_they_stand():
    def over(size):
        return jax.shard_map(
            lambda x: psum(x), mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False
        )(jnp.ones(size))

    def program(x):
        first = over(4)
        second = jax.jit(lambda: jax.jit(over, static_argnums=0)(8))()
        _, third = lax.scan(lambda c, _: (c, over(12)), 0, None, length=2)
        fourth = lax.cond(x > 2, lambda: over(16), lambda: over(20)[:4])
        return first, second, third, fourth

    found = find_shard_maps(jax.make_jaxpr(program)(1.0))
    assert sorted(eqn.invars[0].aval.size for eqn in found[:3]) == [4, 8, 12]
    assert [eqn.invars[0].aval.size for eqn in found[:3]] == [4, 8, 12]
    assert {eqn.invars[0].aval.size for eqn in found[3:]} == {16, 20}
    assert find_shard_maps(jax.jit(program).trace(1.0).jaxpr) != []


# Against the numbers


def random_program(seed, num_steps=80):
    """Operations on values drawn from those before, some of which differ from rank to rank."""
    rng = np.random.default_rng(seed)
    operations = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: jnp.where(a > b, a, 0.5),
        lambda a, b: pmean(a),
        lambda a, b: lax.pmax(a - b, "data"),
        lambda a, b: gathered(a)[:4],
        lambda a, b: lax.ppermute(a, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        lambda a, b: lax.psum(a, "data", axis_index_groups=[[0, 1, 2], [3]]) / 4,
        lambda a, b: lax.cond(a[0] > b[0], lambda: a, lambda: b),
        lambda a, b: lax.cond(a[0] > 0.5, lambda a, b: (b, a), lambda a, b: (b, b), a, b)[0],
        lambda a, b: lax.while_loop(lambda c: c[0] < a[0], lambda c: c + 0.3, b * 0.1),
        lambda a, b: in_scan(lambda c: (c[1], c[1] * c[0]), (a, b))[1],
        lambda a, b: lax.sort((a, b), num_keys=1)[1],
        lambda a, b: (ref := jax.new_ref(a), ref.__setitem__(0, b[1]), ref[...])[2],
        lambda a, b: jax.jit(lambda a, b: (b, a))(a, b)[1],
        lambda a, b: jax.grad(lambda a: pmean((a * b).sum()))(a),
    ]

    def program(w, x):
        values = [w, x, w * 2, rank() * jnp.ones(4)]
        for _ in range(num_steps):
            operation = operations[rng.integers(len(operations))]
            # Bounded, and fresh values now and then, or all would soon be alike.
            i, j = rng.integers(len(values), size=2)
            values.append(jnp.tanh(operation(values[i], values[j])))
            if rng.random() < 0.3:
                values.append(jnp.cos(w * rng.random()))
        return values

    return program


def test_what_is_called_uniform_has_equal_bits_on_every_rank(make_mesh):
    x = jnp.asarray(np.random.default_rng(7).uniform(size=16).astype("float32"))
    mesh = make_mesh(4)
    collected = jax.jit(
        jax.shard_map(
            lambda w, x: jnp.stack(random_program(0)(w, x))[None],
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            check_vma=False,
        )
    )
    values = np.asarray(collected(jnp.linspace(0.1, 0.9, 4), x))
    got = report(random_program(0)).outputs
    differ = [bool((values[:, i] != values[0, i]).any()) for i in range(len(got))]
    assert not [i for i, value in enumerate(got) if differ[i] and not value.axes]
    # It is no answer to call everything varying.
    assert sum(not value.axes for value in got) > len(got) / 4
    assert sum(differ) > len(got) / 4
