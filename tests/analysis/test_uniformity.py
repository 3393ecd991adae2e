"""Small programs and the classes that the uniformity analysis gives their values.

Everything here is traced, and nothing of it runs: wrong programs would hang.
"""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core.primitives import cond_p, while_p
from jax.sharding import PartitionSpec as P
from support.analysed import (
    BOTH,
    MESH_2D,
    MODEL,
    UNIFORM,
    VARYING,
    cg,
    closed,
    doubling_kernel,
    gathered,
    in_scan,
    kernel,
    local,
    pair_table,
    pmean,
    psum,
    rank,
    rank_kernel,
    report,
    report_2d,
    root,
    shape_of,
    table,
    with_psend,
)

from jdp.analysis.marks import mark


def copy_kernel(x, out):
    out[...] = x[...]


def block_kernel(x, block):
    specs = {"in_specs": [pl.BlockSpec((2,), lambda i: (block(),))]}
    specs |= {"out_specs": pl.BlockSpec((2,), lambda i: (0,)), "grid": (1,)}
    shape = jax.ShapeDtypeStruct((2,), x.dtype)
    return pl.pallas_call(copy_kernel, out_shape=shape, interpret=True, **specs)(x)


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


def count_on(c):
    return c[0], c[1] + 1


def counting_loop(w, x):
    cond, body = (
        closed(lambda end, w, i: i < end, 1.0, w, 0.0),
        closed(lambda w, i: (w, i + 1), w, 0.0),
    )
    jaxprs = {"cond_jaxpr": cond, "body_jaxpr": body}
    return while_p.bind(x[0], w, 0.0, **jaxprs, cond_nconsts=1, body_nconsts=0)


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
    "cond over model": (lambda w, x, m: lax.cond(m[0] < 2, lambda: psum(x), lambda: w), MODEL),
    "io_callback": (lambda w, x, m: io_callback(np.asarray, shape_of(w), w), BOTH),
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
    "a part of it, said to be all": (lambda w, x: nested(lambda w: w, P("model"), P())(w), MODEL),
    "io_callback inside, said to agree": (
        lambda w, x: nested(lambda w: io_callback(np.asarray, shape_of(w), w), P(), P())(w),
        BOTH,
    ),
    "io_callback inside": (
        lambda w, x: nested(
            lambda w: io_callback(np.asarray, shape_of(w), w), P("model"), P("model")
        )(w),
        VARYING,
    ),
}


@table(NESTED)
def test_a_nested_shard_map_adds_its_axes_inside_and_takes_them_away_outside(program):
    body, axes = program
    (got,) = report(body, mesh=MESH_2D, axis_names={"data"}).outputs
    assert got.axes == axes


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
