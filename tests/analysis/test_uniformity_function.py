"""What `jdp.uniformity` tells the author of a loop of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from support.analysed import AUTO, MESH_2D, W, X, local, mapped, pmean, psum, shape_of, table

from jdp.analysis import uniformity


def sgd(w, x):
    loss, grads = jax.value_and_grad(lambda w: ((w * x) ** 2).mean())(w)
    return {"w": w - pmean(local(grads)), "loss": pmean(loss), "largest": x.max(keepdims=True)}


SGD_SPECS = {"w": P(), "loss": P(), "largest": P("data")}
SGD_CLASSES = {"w": "uniform", "loss": "uniform", "largest": "varying"}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: jax.jit(jax.jit(f))])
def test_uniformity_gives_a_class_to_every_output(wrap):
    f = wrap(mapped(sgd, out_specs=SGD_SPECS))
    assert uniformity(f, W, X) == SGD_CLASSES
    assert uniformity(f, shape_of(W), shape_of(X)) == SGD_CLASSES
    assert uniformity(lambda w: (f(w, X), w, 2.0), np.ones(4)) == (
        SGD_CLASSES,
        "uniform",
        "uniform",
    )


def test_uniformity_follows_outputs_out_of_the_shard_map():
    def f(w, x):
        out = mapped(sgd, out_specs=SGD_SPECS)(w, x)
        looped, _ = lax.scan(
            lambda c, _: (mapped(sgd, out_specs=SGD_SPECS)(c, x)["w"], None), w, None, length=2
        )
        _, stacked = lax.scan(
            lambda c, _: (c, mapped(sgd, out_specs=SGD_SPECS)(c, x)["largest"]), w, None, length=2
        )
        return out["largest"].max() + 1, out["w"] + 1, looped, stacked

    assert uniformity(f, W, X) == ("varying", "uniform", "uniform", "varying")


def test_uniformity_takes_arguments_that_are_no_arrays():
    def f(w, x, scale, *, name):
        assert (scale, name) == (3, "a")
        return mapped(sgd, out_specs=SGD_SPECS)(scale * w, x) | {"name": name}

    assert uniformity(f, W, X, 3, name="a") == SGD_CLASSES | {"name": "uniform"}
    static = jax.jit(
        lambda w, x, num: mapped(sgd, out_specs=SGD_SPECS)(w, x[: len(range(num))]),
        static_argnums=2,
    )
    assert uniformity(static, W, X, 16) == SGD_CLASSES


def test_uniformity_knows_pmap(make_mesh):
    devices = jax.devices()[:4]
    rows = jnp.ones((4, 3))
    options = {"axis_name": "batch", "devices": devices}
    mean = jax.pmap(lambda x: (lax.pmean(x, "batch"), x), **options)
    assert uniformity(mean, rows, axis_name="batch") == ("uniform", "varying")
    shared = jax.pmap(lambda x: x, out_axes=None, **options)
    with pytest.raises(ValueError, match=r"`output` float32\[3\] .*'batch'.*JDP101"):
        uniformity(shared, rows, axis_name="batch")


def test_uniformity_over_two_axes():
    specs = {"in_specs": (P(), P(("data", "model"))), "mesh": MESH_2D}
    both = mapped(lambda w, x: lax.pmean(x, ("data", "model")), **specs)
    one = mapped(lambda w, x: lax.pmean(x, "data"), **specs)
    assert uniformity(both, W, X, axis_name=("data", "model")) == "uniform"
    assert uniformity(one, W, X, axis_name="data") == "uniform"
    with pytest.raises(ValueError, match="'model'.*JDP101"):
        uniformity(one, W, X, axis_name=("data", "model"))


REFUSED = {
    "forgotten": (
        mapped(lambda w, x: {"params": {"w": w - x, "b": pmean(x)}}),
        [
            r"`output['params']['w']` float32[4]",
            "test_uniformity_function.py:",
            "along 'data'",
            "pmean(x",
        ],
    ),
    "inside jit": (
        jax.jit(mapped(lambda w, x: (w, x.sum()))),
        ["`output[1]` float32[]", "pmean(x, 'data')", "P('data')"],
    ),
    "not handed out": (
        lambda w, x: mapped(lambda w, x: (w, x))(w, x)[1].sum(),
        ["output 1 of the shard_map float32[4]"],
    ),
    "deadlock": (
        mapped(lambda w, x: lax.cond(x[0] < 2, lambda: psum(w), lambda: psum(w))),
        ["`psum` at analysed.py:", " over 'data'", "`cond`", "pmean(loss, 'data') < 2"],
    ),
    "reduced twice": (
        mapped(lambda w, x: pmean(local(psum(x), "['w']"))),
        ["`['w']`", "analysed.py:", "JDP121"],
    ),
    "no shard_map": (lambda w, x: w, ["'data'", "JDP128"]),
    "another axis": (
        mapped(
            lambda w, x: w,
            mesh=AbstractMesh((4,), ("batch",), axis_types=(AUTO,)),
            in_specs=(P(), P("batch")),
        ),
        ["'data'", "axis_name='batch'", "JDP128"],
    ),
}


@table(REFUSED)
def test_uniformity_refuses_and_says_what_where_and_what_to_write(program):
    f, parts = program
    with pytest.raises(ValueError) as refusal:
        uniformity(f, W, X)
    for part in parts:
        assert part in str(refusal.value)


def test_uniformity_tells_all_problems_of_all_shard_maps():
    def f(w, x):
        first = mapped(lambda w, x: (w, x))(w, x)
        return first, mapped(lambda w, x: x.sum())(w, x)

    with pytest.raises(ValueError) as refusal:
        uniformity(f, W, X)
    assert "`output[0][1]` float32[4]" in str(refusal.value)
    assert "`output[1]` float32[]" in str(refusal.value)


def test_uniformity_tells_a_problem_once_wherever_it_is_called():
    step = jax.jit(mapped(lambda w, x: x))
    with pytest.raises(ValueError) as refusal:
        uniformity(lambda w, x: (step(w, x), step(w, 2 * x)), W, X)
    assert str(refusal.value).count("JDP") == 1
    assert "`output[0]`" in str(refusal.value)


def test_uniformity_refuses_a_shared_ref_that_ranks_write_apart():
    def f(x, size, spec):
        ref = jax.new_ref(jnp.zeros(size))
        write = mapped(
            lambda r, x: (r.__setitem__(..., x), x)[1],
            in_specs=(spec, P("data")),
            out_specs=P("data"),
        )
        return write(ref, x)

    assert uniformity(f, X, 16, P("data")) == "varying"
    with pytest.raises(ValueError, match="input 0 .*JDP106"):
        uniformity(f, X, 4, P())


def named(on_rank):
    f = mapped(on_rank, out_specs=(P(), P()))

    def train(params, batch, *, scale=1.0):
        return jax.jit(f)(params["w"], batch["x"])

    return train


SOURCES = {
    "an argument": (lambda w, x: (w, x.sum()), "`batch['x']`"),
    "a line": (
        lambda w, x: (w, pmean(x) * x.sum()),
        "test_uniformity_function.py:",
        "`batch['x']`",
    ),
    "the number of the rank": (lambda w, x: (w, w * lax.axis_index("data")), "`axis_index`"),
    "a predicate": (
        lambda w, x: (w, lax.cond(x.sum() < 0, lambda: psum(w), lambda: w)),
        "`batch['x']`",
    ),
}


@table(SOURCES)
def test_uniformity_says_where_a_difference_comes_in(program):
    on_rank, *parts = program
    with pytest.raises(ValueError) as refusal:
        uniformity(named(on_rank), {"w": W}, {"x": X})
    for part in parts:
        assert part in str(refusal.value)


def test_uniformity_names_the_leaves_of_one_cause_together():
    def f(w, x):
        grads = local(jax.grad(lambda w: ((w * x) ** 2).mean())(w))
        return {f"w{i}": grads for i in range(9)} | {"loss": x.mean()}

    with pytest.raises(ValueError) as caught:
        uniformity(mapped(f), W, X)
    of_loss, of_weights = sorted(str(caught.value).split("\n- ")[1:])
    assert "`output['loss']`" in of_loss and "`output['w0']`" in of_weights
    assert "and 4 more" in of_weights


def test_uniformity_leaves_out_what_follows_from_a_collective_that_ranks_skip():
    def f(w, x):
        def descend(w):
            return w - psum(w), w - pmean(w)

        return lax.while_loop(lambda c: c[0].sum() > x.sum(), lambda c: descend(c[1]), (w, w))

    with pytest.raises(ValueError, match="`while` .*JDP103") as caught:
        uniformity(mapped(f, out_specs=(P(), P())), W, X)
    problems = str(caught.value).split("\n- ")[1:]
    assert len(set(problems)) == len(problems) and "out_specs" not in str(caught.value)
