"""Collectives that XLA puts in for a mesh axis of its own, under control flow of the ranks."""

import math
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.analysed import report
from support.training import ranks

import jdp
from jdp.analysis import find_shard_maps, jaxprs

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
W = jax.ShapeDtypeStruct((8, 12), jnp.float32)


def under_cond(f):
    def program(w, x):
        return lax.cond(x.sum() > 0, f, lambda w: jnp.zeros_like(jax.eval_shape(f, w)), w)

    return program


def convolved(w):
    return jax.vmap(lambda row: jnp.convolve(row, jnp.ones(3), mode="same"), 1, 1)(w)


def max_pooled(w):
    return lax.reduce_window(w, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME")


SHIFTED = {
    "roll": lambda w: jnp.roll(w, 1, axis=0),
    "flip": lambda w: w[::-1],
    "slice": lambda w: w[1:5],
    "pad": lambda w: jnp.pad(w, 1),
    "diff": lambda w: jnp.diff(w, axis=0),
    "split": lambda w: jnp.split(w, 2)[0],
    "convolve": convolved,
    "max pool": max_pooled,
}
OTHERS = {
    "elementwise": lambda w: jnp.tanh(w) * 2 + w**2,
    "matmul": lambda w: jnp.tanh(w @ w.T),
    "softmax": lambda w: jax.nn.softmax(w, 0),
    "mean": lambda w: w / w.mean(),
    "transpose": lambda w: w.T,
    "sort": lambda w: jnp.sort(w, 0),
    "argmax": lambda w: w * w.argmax(0),
    "gather": lambda w: w[jnp.array([3, 1, 2, 0])],
    "scatter": lambda w: w.at[jnp.array([1, 2])].add(1.0),
    "random": lambda w: w * jax.random.uniform(jax.random.key(0), w.shape),
    "a new dim": lambda w: w[:, None] * w.reshape(8, 1, 12),
    "scalars": lambda w: w * jnp.concatenate([w.sum()[None]]).reshape(()),
    "layers": lambda w: lax.scan(lambda x, row: (x + row, None), w.sum(0), w)[0],
}


def compiled_collectives(f, kind=AUTO):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO, kind))

    def on_rank(w, x):
        return lax.pmean(under_cond(f)(w, x), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(on_rank, mesh=mesh, axis_names={"data"}, **specs)
    split = NamedSharding(mesh, P("model"))
    w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=split)
    x = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    text = jax.jit(mapped).lower(w, x).compile().as_text()
    return set(re.findall(r" (collective-permute|all-[a-z]+)(?:-start)?\(", text))


def deadlocks(program, names=("data", "model"), sizes=(2, 4), kind=AUTO, manual=("data",)):
    mesh = AbstractMesh(sizes, names, axis_types=(AUTO, *[kind] * (len(sizes) - 1)))
    options = {"mesh": mesh, "axis_names": set(manual)}
    return report(program, W, jnp.ones(4), **options).deadlocks


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("name", SHIFTED)
def test_a_shift_under_a_varying_predicate_is_refused(name, kind):
    f = SHIFTED[name]
    (found,) = deadlocks(under_cond(f), kind=kind)
    assert (found.axes, found.control, found.is_compilers) == (("model",), "cond", True)
    assert "test_partitioned.py" in found.source


@pytest.mark.parametrize("name", SHIFTED)
def test_what_is_refused_is_a_permutation_of_all_devices(name):
    assert "collective-permute" in compiled_collectives(SHIFTED[name])
    assert deadlocks(under_cond(SHIFTED[name]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_accepted_is_no_permutation(name):
    assert "collective-permute" not in compiled_collectives(OTHERS[name])
    assert not deadlocks(under_cond(OTHERS[name]))


def test_a_reshape_of_other_dims_than_1_is_refused():
    assert deadlocks(under_cond(lambda w: w.reshape(6, -1)))
    assert not deadlocks(under_cond(lambda w: w.reshape(1, 8, 1, 12)))


def roll_in(control):
    roll = SHIFTED["roll"]
    if control == "while":
        return lambda w, x: lax.while_loop(
            lambda c: c[0] < x.sum(), lambda c: (c[0] + 1, roll(c[1])), (0.0, w)
        )[1]
    if control == "while's predicate":
        return lambda w, x: lax.while_loop(
            lambda c: (c[0] < x.sum()) & (roll(c[1]).sum() < 3),
            lambda c: (c[0] + 1, c[1]),
            (0.0, w),
        )[1]
    inner = under_cond(lambda w: lax.scan(lambda c, _: (roll(c), None), w, None, length=2)[0])
    return lambda w, x: jax.jit(inner)(w, x)


@pytest.mark.parametrize("control", ["while", "while's predicate", "scan in cond in jit"])
def test_a_shift_is_seen_wherever_it_stands(control):
    (found,) = deadlocks(roll_in(control))
    assert found.primitive in ("concatenate", "slice")


REORDERED = {
    "transpose": lambda w, v: w + w.T,
    "sum of arrays that are split in different orders": lambda w, v: w + v,
    "another order handed on": lambda w, v: v,
    "another order asked for": lambda w, v: lax.with_sharding_constraint(w * 1, P("b", "a")),
}


def with_two_automatic_axes(f, predicate=lambda x: x.sum() > 0):
    def on_rank(w, v, x):
        return lax.pmean(w + lax.cond(predicate(x), f, lambda w, v: w, w, v), "data")

    axes = ("data", "a", "b")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AUTO,) * 3)
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(on_rank, mesh=mesh, axis_names={"data"}, **specs)
    splits = {"w": (P("a", "b"), (8, 8)), "v": (P("b", "a"), (8, 8)), "x": (P("data"), (2,))}
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec, shape in splits.values()
    ]
    return mapped, arguments


@pytest.mark.parametrize("name", REORDERED)
def test_over_two_axes_arrays_may_be_put_in_another_order(name):
    mapped, arguments = with_two_automatic_axes(REORDERED[name])
    assert "collective-permute" in jax.jit(mapped).lower(*arguments).compile().as_text()
    with pytest.raises(ValueError, match=r"\('a', 'b'\).*JDP104"):
        jdp.uniformity(mapped, *arguments)


def test_over_two_axes_numbers_and_uniform_predicates_are_allowed():
    def mean(w, v, x):
        return w * lax.cond(x.sum() > 0, lambda s: jnp.tanh(s) + 1, lambda s: s, w.sum())

    mapped, arguments = with_two_automatic_axes(lambda w, v: w + v, lambda x: True)
    assert jdp.uniformity(mapped, *arguments) == "uniform"
    (w, v, x), mesh = arguments, arguments[0].sharding.mesh
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P("data"), "check_vma": False}
    mapped = jax.shard_map(mean, mesh=mesh, axis_names={"data"}, **specs)
    assert jdp.uniformity(mapped, w, v, x) == "varying"


def test_a_predicate_that_is_the_same_is_allowed():
    def program(w, x):
        return lax.cond(lax.pmean(x.sum(), "data") > 0, SHIFTED["roll"], lambda w: w, w)

    assert not deadlocks(program)


def test_a_shift_is_allowed_where_no_axis_of_several_devices_is_left():
    program = under_cond(SHIFTED["roll"])
    assert not deadlocks(program, names=("data",), sizes=(2,))
    assert not deadlocks(program, sizes=(2, 1))
    assert not deadlocks(program, manual=("data", "model"))
    assert not deadlocks(lambda w, x: SHIFTED["roll"](w))
    assert not deadlocks(lambda w, x: jnp.where(x.sum() > 0, SHIFTED["roll"](w), w))
    # A cond under vmap is a select.
    each = lambda p, w: lax.cond(p, lambda w: jnp.roll(w, 1), lambda w: w, w)  # noqa: E731
    assert not deadlocks(lambda w, x: jax.vmap(each)(w[:, 0] > x[0], w))


def test_a_nested_shard_map_leaves_nothing_to_the_compiler():
    def program(w, x):
        inner = jax.shard_map(
            SHIFTED["roll"], in_specs=P("model"), out_specs=P("model"), axis_names={"model"}
        )
        return lax.cond(x.sum() > 0, inner, lambda w: w, w)

    assert not deadlocks(program)


def test_inside_of_a_nested_shard_map_its_axis_is_the_authors():
    def program(w, x):
        inner = jax.shard_map(
            under_cond(SHIFTED["roll"]),
            in_specs=(P("model"), P()),
            out_specs=P("model"),
            axis_names={"model"},
            check_vma=False,
        )
        return inner(w, x)

    assert not deadlocks(program)


def test_a_step_says_what_to_write():
    jdp.init(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AUTO, AUTO), devices=four()))

    @jdp.train_step
    def step(state, batch):
        moved = under_cond(SHIFTED["roll"])(state["w"], batch)
        return {"w": jdp.mean_over_ranks(moved)}, {}

    with pytest.raises(ValueError, match=r"'model'.*jnp\.where.*JDP104") as caught:
        step.lower({"w": jnp.ones((8, 12))}, jnp.ones(4))
    assert "test_partitioned.py" in str(caught.value)


def four():
    return jax.devices()[: math.prod((2, 2))]


HANGS = """
import os, jax, jax.numpy as jnp
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_num_cpu_devices", 4)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
def on_rank(w, x):
    moved = lax.cond(x.sum() > 0, lambda w: jnp.{}, lambda w: w, w)
    return lax.pmean(moved, "data")
mapped = jax.shard_map(
    on_rank, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={{"data"}},
    check_vma=False,
)
w = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("model")))
x = jax.device_put(jnp.array([-1.0, 1.0]), NamedSharding(mesh, P("data")))
print("begins", flush=True)
moved = float(jax.jit(mapped)(w, x).sum())
print("ends", flush=True)
"""


def run_with_deadline(what, seconds):
    child = subprocess.Popen(
        [sys.executable, "-c", HANGS.format(what)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(60, child.kill)  # to import JAX and compile
    killer.start()
    begun = child.stdout.readline()
    try:
        rest, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return begun
    finally:
        killer.cancel()
        child.kill()
        child.communicate()
    assert not child.returncode, errors
    return begun + rest


def test_the_program_that_is_refused_hangs_and_its_twin_ends():
    assert run_with_deadline("roll(w, 1, axis=0)", 6).split() == ["begins"]
    assert "ends" in run_with_deadline("tanh(w @ w)", 60)


# Reductions of bfloat16, on which XLA's CPU backend aborts beside an axis of the compiler


def over_further_axis(size, reduce, dtype="bfloat16", num_ranks=2):
    """A step that trains nothing and reports `reduce` of its rows, `[2, 2]`."""
    mesh = jax.make_mesh(
        (num_ranks, size), ("data", "model"), (AxisType.Auto,) * 2,
        devices=jax.devices()[: num_ranks * size],
    )  # fmt: skip
    state = jax.device_put({"w": jnp.zeros(4)}, jax.NamedSharding(mesh, P()))

    @jdp.train_step
    def fit(state, batch):
        return state, {"found": jdp.mean_over_ranks(reduce(batch.astype(dtype)).astype("float32"))}

    return lambda: fit(state, np.ones((2 * num_ranks, 2), np.float32))


ABORTS = {
    "psum": lambda x: lax.psum(x, "data"),
    "pmean": lambda x: lax.pmean(x, "data"),
    "pmax": lambda x: lax.pmax(x, "data"),
    "pmin": lambda x: lax.pmin(x.sum(), "data"),
    "psum_scatter": lambda x: lax.psum_scatter(x[:1], "data", scatter_dimension=1, tiled=True),
    "in a jit": jax.jit(lambda x: lax.psum(x, "data")),
    "in a loop": lambda x: lax.fori_loop(0, 2, lambda i, x: lax.pmean(x, "data"), x),
    "gradient of a gather": jax.grad(lambda x: jnp.sum(lax.all_gather(x, "data") ** 2)),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ABORTS)
def test_a_reduction_of_bfloat16_is_refused_by_line(name, size):
    with pytest.raises(
        ValueError, match=r"at test_partitioned\.py:\d+ .*bfloat16.*`model`.*JDP113"
    ):
        over_further_axis(size, ABORTS[name])()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_it_is_refused_on_any_number_of_ranks(num_ranks):
    with pytest.raises(ValueError, match="JDP113"):
        over_further_axis(2, ABORTS["psum"], num_ranks=num_ranks)()


PASSES = {
    "float32": (ABORTS["psum"], "float32"),
    "float16": (ABORTS["psum"], "float16"),
    "moved": (lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), "bfloat16"),
    "gathered": (lambda x: lax.all_gather(x, "data"), "bfloat16"),
    "summed by jdp": (jdp.sum_over_ranks, "bfloat16"),
    "averaged by jdp": (jdp.mean_over_ranks, "bfloat16"),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_xla_can_run_is_not_refused(name):
    reduce, dtype = PASSES[name]
    _, metrics = over_further_axis(2, reduce, dtype)()
    assert np.isfinite(np.asarray(metrics["found"])).all()


def test_a_mesh_without_an_axis_of_the_compiler_reduces_bfloat16():
    ranks(2)
    fit = jdp.train_step(lambda state, batch: (state, {"sum": lax.psum(batch.sum(), "data")}))
    _, metrics = fit({"w": jnp.zeros(4)}, jnp.ones(4, "bfloat16"))
    assert float(metrics["sum"]) == 4.0


@pytest.mark.parametrize("platform, dtype", [("cpu", "float32"), ("gpu", "bfloat16")])
def test_jdp_sums_in_the_dtype_that_the_platform_of_the_mesh_can(platform, dtype):
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    described = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))

    def summed(x):
        return jdp.collectives.xla([[x]], "data", mesh=described)[0][0]

    mapped = jax.shard_map(
        summed, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}, check_vma=False
    )
    (step,) = find_shard_maps(jax.make_jaxpr(mapped)(jnp.ones(4, "bfloat16")))
    (psum,) = [eqn for eqn in jaxprs.mapped_body(step).eqns if "psum" in str(eqn)]
    assert psum.invars[0].aval.dtype == dtype
