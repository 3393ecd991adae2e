"""What the compiled all-reduce does under JAX's transformations, and where it cannot run."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.per_rank import assert_equal_bits, per_rank
from support.training import assert_close, batch, loss_fn, plain_step, ranks, sgd, state
from support.transforms import each_transform

import jdp
from jdp.collectives import hazards, native, xla
from jdp.collectives.cpu import runtime as cpu_runtime

pytestmark = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


def total(x, **kwargs):
    return native([[x]], "data", **kwargs)[0][0]


def psum(x):
    return xla([[x]], "data")[0][0]


def rows(num_ranks, *shape):
    return np.random.default_rng(0).integers(-9, 9, (num_ranks, *shape)).astype(np.float32)


def summed(x):
    return np.stack([x.sum(axis=0)] * len(x))


def test_in_a_scan_every_turn_is_a_reduction_of_its_own(mesh):
    x = rows(mesh.size, 50, 3)
    got = per_rank(mesh, lambda x: lax.scan(lambda c, row: (c, total(row)), 0, x)[1], x)
    np.testing.assert_array_equal(got, summed(x))


def test_1000_steps_give_1000_right_sums(make_mesh):
    mesh = make_mesh(3)

    def turn(x, _):
        return total(x, scale=1 / 4) + x / 4, None  # stays whole: 3 x / 4 + x / 4

    x = np.broadcast_to(rows(1, 17), (3, 17))
    got = per_rank(mesh, lambda x: lax.scan(turn, x, length=1000)[0], x)
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_40_buckets_that_do_not_depend_on_each_other_come_in_one_order(mesh, algorithm):
    buckets = [[rows(mesh.size, 5, i)] for i in range(40)]
    got = per_rank(mesh, lambda b: native(b, "data", algorithm=algorithm), buckets)
    for [mine], [leaf] in zip(got, buckets, strict=True):
        np.testing.assert_array_equal(mine, summed(leaf))


def test_equal_buckets_in_one_program_are_told_apart(mesh):
    x = rows(mesh.size, 2, 7)
    got = per_rank(mesh, lambda x: [jdp.sync_gradients(x[i], mean=False) for i in (0, 1, 0)], x)
    for mine, i in zip(got, (0, 1, 0), strict=True):
        np.testing.assert_array_equal(mine, summed(x[:, i]))


def test_two_programs_may_be_in_flight(make_mesh):
    mesh = make_mesh(2)
    x = rows(2, 33)
    mapped = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    one = jax.jit(mapped(lambda x: total(x)))
    other = jax.jit(mapped(lambda x: 2 * total(x)))
    got = [f(x) for _ in range(7) for f in (one, other)]
    for i, mine in enumerate(jax.device_get(got)):
        np.testing.assert_array_equal(mine, (1 + i % 2) * summed(x))


def test_in_a_cond_that_is_uniform_and_under_checkpoint(mesh):
    x = rows(mesh.size, 6)

    def fn(x):
        chosen = lax.cond(lax.psum(1, "data") > 0, total, lambda x: x, x)
        return chosen, jax.grad(lambda x: jax.checkpoint(lambda x: (total(x) ** 2).sum())(x))(x)

    for mine, want in zip(per_rank(mesh, fn, x), per_rank(mesh, _as_psum, x), strict=True):
        np.testing.assert_array_equal(mine, want)


def _as_psum(x):
    return psum(x), jax.grad(lambda x: (psum(x) ** 2).sum())(x)


@pytest.mark.parametrize("check_vma", [False, True])
@each_transform()
def test_transforms_as_psum_does(make_mesh, of, check_vma):
    mesh, x = make_mesh(3), rows(3, 4)
    mine = per_rank(mesh, of(total), x, check_vma=check_vma)
    np.testing.assert_array_equal(mine, per_rank(mesh, of(psum), x, check_vma=check_vma))


def test_a_typed_shard_map_lets_the_sum_leave_as_uniform(mesh):
    x = rows(mesh.size, 5)
    mapped = jax.shard_map(
        lambda x: total(x, scale=0.5), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x), x.sum(axis=0, keepdims=True) / 2)


def test_runs_without_jit(make_mesh):
    x = rows(2, 5)
    mapped = jax.shard_map(
        total, mesh=make_mesh(2), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    np.testing.assert_array_equal(mapped(x), summed(x))


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_ranks_are_positions_on_the_mesh_and_not_numbers_of_devices(algorithm):
    mesh = Mesh(np.array(jax.devices()[3::-1]).reshape(2, 2), ("other", "data"))
    x = rows(4, 5)

    def fn(x):
        first = lax.axis_index("data") * x
        return native([[x], [first]], "data", algorithm=algorithm)

    [[both]], [[second]] = (jax.tree.map(np.asarray, y) for y in _in_order(per_rank(mesh, fn, x)))
    groups = x.reshape(2, 2, 5)
    np.testing.assert_array_equal(both.reshape(2, 2, 5), np.repeat(groups.sum(1)[:, None], 2, 1))
    np.testing.assert_array_equal(second.reshape(2, 2, 5), np.repeat(groups[:, 1:], 2, 1))


def _in_order(buckets):
    return [[bucket] for bucket in buckets]


@pytest.mark.parametrize("name", ["data", "model"])
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_reduces_over_either_axis_of_a_mesh(name, algorithm):
    mesh = jax.make_mesh((2, 3), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:6])
    x = rows(6, 41)
    got = per_rank(mesh, lambda x: native([[x]], name, algorithm=algorithm)[0][0], x)
    grid, dim = x.reshape(2, 3, 41), ["data", "model"].index(name)
    want = np.broadcast_to(grid.sum(axis=dim, keepdims=True), grid.shape)
    np.testing.assert_array_equal(got.reshape(grid.shape), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_floats_are_added_up_in_float32_and_rounded_once(make_mesh, dtype):
    x = np.random.default_rng(0).normal(size=(8, 999)).astype(jnp.dtype(dtype))
    got = per_rank(make_mesh(8), functools.partial(total, scale=1 / 8), x)
    want = x.astype(np.float32)
    while len(want) > 1:  # pairs of ranks, pairs of pairs, and so on
        want = want[::2] + want[1::2]
    np.testing.assert_array_equal(got[0], (want[0] / 8).astype(jnp.dtype(dtype)))
    assert_equal_bits(got)


def test_what_it_does_not_know_is_summed_by_xla(make_mesh):
    x = np.ones((2, 3), np.complex64)
    np.testing.assert_array_equal(per_rank(make_mesh(2), total, x), summed(x))


def test_gradients_are_reduced_in_place():
    ranks(2)
    step, s = jdp.train_step(plain_step), state(sgd(all_reduce=native))
    compiled = step.lower(s, batch()).compile().as_text()
    calls = re.findall(rf'.*custom_call_target="{cpu_runtime.TARGET}".*', compiled)
    assert all("output_to_operand_aliasing" in call for call in calls)
    assert len(calls) == 2, "one bucket of gradients, and the loss"
    # Of more than one number; a weight's gradient may have to be turned, wherever it goes.
    copies = re.findall(r".*= f32\[(?:\d\d+|\d+,\d+)\]\S* copy\(.*", compiled)
    assert not [copy for copy in copies if "transpose" not in copy]


def test_metrics_are_averaged_as_the_gradients_are():
    ranks(2)
    compiled = jdp.train_step(plain_step).lower(state(), batch()).compile().as_text()
    assert len(re.findall(rf'custom_call_target="{cpu_runtime.TARGET}"', compiled)) == 2
    assert " all-reduce(" not in compiled and "all-reduce-start" not in compiled


def test_nothing_of_a_run_is_in_the_program():
    def text():
        ranks(2)
        jax.clear_caches()
        return jdp.train_step(plain_step).lower(state(), batch()).as_text()

    first = text()
    jax.jit(jax.vmap(psum, axis_name="data"))(rows(2, 3))  # other programs in between
    assert text() == first


def test_auto_takes_it_and_says_so_once(caplog):
    ranks(2)
    step = jdp.train_step(plain_step)
    with caplog.at_level(logging.INFO, "jdp"):
        s, _ = step(state(), batch())
        jdp.train_step(plain_step)(s, batch())
    [told] = [r.getMessage() for r in caplog.records if "(collectives." in r.getMessage()]
    assert "(collectives.native)" in told


# Where it cannot run: a reason, and XLA's sum from `auto`.


def refused(mesh, fn, x, **kwargs):
    with pytest.raises(ValueError, match="collectives.native") as caught:
        jax.jit(jax.shard_map(fn, mesh=mesh, check_vma=False, **kwargs))(x)
    return str(caught.value)


def test_an_axis_left_to_the_compiler_is_a_reason():
    mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    where = dict(in_specs=P("data"), out_specs=P(), axis_names={"data"})
    assert "'model'" in refused(mesh, total, rows(2, 3), **where)


def test_a_vmap_is_a_reason():
    with pytest.raises(ValueError, match="vmap"):
        jax.vmap(total, axis_name="data")(rows(2, 3))


def test_a_missing_library_is_a_reason(make_mesh, monkeypatch):
    monkeypatch.setattr(cpu_runtime, "why_missing", lambda: "it was not built.")
    where = dict(in_specs=P("data"), out_specs=P("data"))
    assert "it was not built" in refused(make_mesh(2), total, rows(2, 3), **where)
    x = rows(2, 3)
    got = per_rank(make_mesh(2), lambda x: jdp.sync_gradients(x, mean=False), x)
    np.testing.assert_array_equal(got, summed(x))


def test_training_is_the_same_with_every_algorithm():
    def trained(all_reduce):
        ranks(3)
        step = jdp.train_step(plain_step)
        s = state(jdp.replicated(optax.sgd(0.1, momentum=0.9), all_reduce=all_reduce))
        for i in range(3):
            s, _ = step(s, batch(i))
        return jax.device_get(s.params)

    for all_reduce in (native, jdp.collectives.auto, jdp.collectives.ring):
        assert_close(trained(all_reduce), trained(xla))


# What nothing orders: a jitted function of the author's is traced once, whoever calls it.

update = jax.jit(lambda s, grads: s.apply_gradients(grads))


def test_two_calls_of_one_jitted_update_are_left_to_xla(caplog):

    def run(num_ranks):
        ranks(num_ranks)

        @jdp.train_step
        def step(critics, batch):
            grads = [jax.grad(loss_fn)(s.params, batch) for s in critics]
            return [update(s, g) for s, g in zip(critics, grads, strict=True)], {}

        tx = sgd()
        critics, _ = step([state(tx, seed=0), state(tx, seed=1)], batch())
        lowered = step.lower(critics, batch()).as_text()
        return jax.device_get([s.params for s in critics]), lowered

    with caplog.at_level(logging.INFO, "jdp"):
        params, lowered = run(3)
    assert cpu_runtime.TARGET not in lowered and "all_reduce" in lowered
    assert "collectives.xla" in caplog.text
    assert_close(params, run(1)[0])


def test_a_chain_of_its_own_in_a_loop_is_left_to_xla_beside_another():
    ranks(2)

    @jdp.train_step
    def step(s, batch):
        s, _ = lax.scan(
            lambda s, _: (s.apply_gradients(jax.grad(loss_fn)(s.params, batch)), 0), s, length=2
        )
        return s.apply_gradients(jax.grad(loss_fn)(s.params, batch)), {}

    assert cpu_runtime.TARGET not in step.lower(state(), batch()).as_text()
    alone = jdp.train_step(
        lambda s, batch: (
            lax.scan(
                lambda s, _: (s.apply_gradients(jax.grad(loss_fn)(s.params, batch)), 0), s, length=2
            )[0],
            {},
        )
    )
    assert cpu_runtime.TARGET in alone.lower(state(), batch()).as_text()


def test_outside_of_a_step_auto_leaves_it_to_xla(make_mesh):
    x = rows(2, 3)
    mapped = jax.shard_map(
        jdp.sync_gradients, mesh=make_mesh(2), in_specs=P("data"), out_specs=P(), check_vma=False
    )
    assert cpu_runtime.TARGET not in jax.jit(mapped).lower(x).as_text()


def test_a_step_within_a_program_of_the_authors_is_left_to_xla():
    ranks(2)
    step = jdp.train_step(plain_step)
    several = jax.jit(lambda s, b: [step(s, b), step(jax.tree.map(jnp.copy, s), b)])
    assert cpu_runtime.TARGET not in several.lower(state(), batch()).as_text()
    assert cpu_runtime.TARGET in step.lower(state(), batch()).as_text()


def test_native_is_refused_in_a_step_where_nothing_orders_its_calls():
    ranks(2)

    @jdp.train_step
    def step(s, batch):
        grads = jax.grad(loss_fn)(s.params, batch)
        return update(update(s, grads), grads), {}

    with pytest.raises(ValueError, match=r"twice.*collectives\.auto"):
        step(state(sgd(all_reduce=native)), batch())


def test_two_updates_in_one_step_are_one_chain():
    ranks(2)

    @jdp.train_step
    def step(both, batch):
        grads = [jax.grad(loss_fn)(s.params, batch) for s in both]
        return [s.apply_gradients(g) for s, g in zip(both, grads, strict=True)], {}

    tx = sgd()
    text = step.lower([state(tx), state(tx)], batch()).as_text()
    assert text.count(f"@{cpu_runtime.TARGET}") == 2 and "all_reduce" not in text.replace(
        cpu_runtime.TARGET, ""
    )


def test_a_body_that_is_called_twice_at_each_depth_is_looked_through_once(make_mesh, monkeypatch):
    depth = 8
    reduce = lambda x: jdp.sync_gradients(x, all_reduce=jdp.collectives.native)  # noqa: E731
    for _ in range(depth):
        reduce = jax.jit(lambda x, inner=reduce: inner(x) + inner(x + 1))
    mapped = jax.shard_map(
        jax.jit(reduce), mesh=make_mesh(2), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    jaxpr = jax.jit(mapped).trace(jnp.ones(4)).jaxpr
    looked_at, bodies = [], hazards.jaxprs.bodies
    monkeypatch.setattr(hazards.jaxprs, "bodies", lambda x: [looked_at.append(x), *bodies(x)][1:])
    assert "JAX" in hazards.why_unordered(jaxpr)
    assert depth < len(looked_at) == len(set(map(id, looked_at)))
