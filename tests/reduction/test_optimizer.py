import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P
from support import training
from support.training import assert_close, batch, loss_fn, plain_step, ranks, state, train

import jdp
from jdp.reduction.optimizer import Replicated


def labels(p):
    return {name: "slow" if name == "b" else "fast" for name in p}


# What stands inside sees mean gradients and counts optimizer steps, as it would on one rank.
INSIDE = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 3)),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
    "multi_steps": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9),
    "muon": lambda: optax.contrib.muon(0.01),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), {"w": True, "v": True, "b": False}),
        optax.sgd(0.1),
    ),
    "partition": lambda: optax.partition({"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)}, labels),
    "sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, 3), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", INSIDE)
def test_wrapped_optimizers_equal_one_rank(name):
    step = jdp.train_step(plain_step)
    three, one = (train(n, step, lambda: state(jdp.replicated(INSIDE[name]()))) for n in (3, 1))
    assert_close(three, one)


def test_lookahead_equals_one_rank():
    # Its gradients are those of half of its parameters.
    tx = jdp.replicated(optax.lookahead(optax.sgd(0.1), 2, 0.5))

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params.fast, batch)
        return state.apply_gradients(grads), {"loss": loss}

    def make_state():
        return jdp.TrainState.create(optax.LookaheadParams.init_synced(training.params()), tx)

    assert_close(train(3, step, make_state), train(1, step, make_state))


def test_line_search_on_a_global_mean_equals_one_rank():
    @jdp.train_step
    def step(state, batch):
        value_fn = jdp.global_mean(lambda p: loss_fn(p, batch))
        value, grads = jax.value_and_grad(value_fn)(state.params)
        state = state.apply_gradients(
            grads, synced=True, value=value, grad=grads, value_fn=value_fn
        )
        return state, {"loss": value}

    def make_state():
        return state(jdp.replicated(optax.lbfgs()))

    assert_close(train(3, step, make_state), train(1, step, make_state), tolerance=1e-4)


def test_reduce_on_plateau_with_the_mean_value_equals_one_rank():
    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads, value=jdp.mean_over_ranks(loss)), {"loss": loss}

    def make_state():
        plateau = optax.contrib.reduce_on_plateau(patience=1, factor=0.5)
        return state(jdp.replicated(optax.chain(optax.sgd(0.1), plateau)))

    assert_close(train(4, step, make_state), train(1, step, make_state))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner),
        lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
        lambda inner: optax.masked(inner, {"w": True, "v": True, "b": False}),
        lambda inner: optax.partition({"slow": inner, "fast": inner}, labels),
        lambda inner: optax.apply_if_finite(inner, 2),
    ],
    ids=["chain", "multi_steps", "masked", "partition", "apply_if_finite"],
)
def test_a_reduction_inside_another_optimizer_is_refused(wrong):
    ranks(2)
    tx = wrong(jdp.replicated(optax.sgd(0.1)))
    with pytest.raises(TypeError, match=r"jdp\.replicated\(\.\.\.\)"):
        state(tx)

    def mine(s, batch):  # built without TrainState
        grads = jax.grad(loss_fn)(s["params"], batch)
        updates, opt_state = tx.update(grads, s["opt_state"], s["params"])
        return {"params": optax.apply_updates(s["params"], updates), "opt_state": opt_state}, {}

    s = {"params": training.params(), "opt_state": tx.init(training.params())}
    with pytest.raises(ValueError, match=r"jdp\.replicated\(optax\.chain\(\.\.\.\)\)"):
        jdp.train_step(mine)(s, batch())


def test_two_wrapped_optimizers_side_by_side_are_not_inside_one_another():
    ranks(2)
    tx = training.sgd()

    def step(s, batch):
        return s, {}

    p = training.params()
    jdp.train_step(step)((tx.init(p), tx.init(p)), batch())
    jdp.train_step(step)((p, tx.init(p)), batch())


def test_an_optimizer_that_is_not_wrapped_is_refused_by_name():
    with pytest.raises(TypeError, match="'adamw'|'chain'"):
        state(optax.adamw(1e-3))
    with pytest.raises(TypeError, match=r"MultiSteps"):
        state(optax.MultiSteps(optax.sgd(0.1), 2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_works_in_a_shard_map_of_the_users(make_mesh, check_vma):
    tx = training.sgd()
    p = training.params()

    def step(p, opt_state, batch):
        _, grads = jdp.value_and_grad(loss_fn)(p, batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        return optax.apply_updates(p, updates), opt_state

    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=make_mesh(4),
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )
    got, opt_state = mapped(p, tx.init(p), batch())
    want, _ = train(1, jdp.train_step(plain_step), num_steps=1)
    assert_close(jax.device_get(got), want.params)
    assert_close(jax.device_get(opt_state), want.opt_state)


def test_works_in_pmap():
    tx = training.sgd(axis_name="batch")
    p = training.params()

    def step(p, batch):
        updates, _ = tx.update(jax.grad(loss_fn)(p, batch), tx.init(p), p)
        return optax.apply_updates(p, updates)

    rows = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch())
    got = jax.pmap(step, axis_name="batch", in_axes=(None, 0), devices=jax.devices()[:4])(p, rows)
    want, _ = train(1, jdp.train_step(plain_step), num_steps=1)
    for rank in range(4):
        assert_close(jax.tree.map(lambda x, r=rank: np.asarray(x[r]), got), want.params)


def test_pmap_over_another_axis_is_refused():
    tx, p = training.sgd(), training.params()
    rows = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch())
    step = jax.pmap(
        lambda p, b: tx.update(jax.grad(loss_fn)(p, b), tx.init(p), p)[0],
        axis_name="batch",
        in_axes=(None, 0),
        devices=jax.devices()[:4],
    )
    with pytest.raises(ValueError, match=r"axis_name='batch'"):
        step(p, rows)


def test_gradients_of_single_rows_are_refused():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        def per_row(p, x, y):
            return loss_fn(p, {"x": x[None], "y": y[None]})

        grads = jax.vmap(jax.grad(per_row), (None, 0, 0))(state.params, batch["x"], batch["y"])
        return state.apply_gradients(grads), {}

    with pytest.raises(ValueError, match=r"`\['b'\]` .*\[12, 1\], .* \[1\]"):
        step(state(), batch())


def first_row(updates, state, params=None):
    return jax.tree.map(lambda x: x[:1], updates), state


def as_complex(updates, state, params=None):
    return jax.tree.map(lambda x: x + 1j, updates), state


def transformation(update):
    return optax.GradientTransformation(lambda p: optax.EmptyState(), update)


def private(max_norm):
    """DP-SGD of Optax without noise."""
    rows = optax.contrib.differentially_private_aggregate(max_norm, 0.0, key=0)
    return optax.chain(rows, optax.sgd(0.1))


UNFIT = {
    "broadcast": (transformation(first_row), r"`\['v'\]` is \[1, 1\].* \[4, 1\]"),
    "complex": (transformation(as_complex), r"`\['b'\]` is complex.* float32"),
}


@pytest.mark.parametrize("wrap", ["replicated", 1, 3])
@pytest.mark.parametrize("name", UNFIT)
def test_updates_that_do_not_fit_their_parameters_are_refused(name, wrap):
    tx, named = UNFIT[name]
    if wrap == "replicated":
        tx = jdp.replicated(tx)
    else:
        tx = jdp.sharded(tx, stage=wrap, min_size=1)
    for n in (1, 2):
        ranks(n)
        with pytest.raises(ValueError, match=named):
            jdp.train_step(plain_step)(state(tx), batch())


@pytest.mark.parametrize("n", [1, 2])
def test_dp_sgd_of_optax_refuses_mean_gradients_whose_first_dim_is_no_row(n):
    ranks(n)
    s = jdp.TrainState.create({"w": np.ones((5, 4), "f")}, jdp.replicated(private(1.0)))

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(lambda p: (batch["x"] @ p["w"]).mean())(state.params)
        return state.apply_gradients(grads), {}

    with pytest.raises(ValueError, match=r"`\['w'\]` is \[4\].* \[5, 4\]"):
        step(s, batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dp_sgd_with_rows_clipped_on_their_rank_equals_that_of_optax_on_one_device(stage):
    max_norm, num_rows = 0.3, len(batch()["x"])

    def of_rows(params, batch):
        def of_row(p, row):
            return loss_fn(p, jax.tree.map(lambda x: x[None], row))

        return jax.vmap(jax.grad(of_row), (None, 0))(params, batch)

    @jdp.train_step
    def step(state, batch):
        grads = of_rows(state.params, batch)
        sums, num_clipped = optax.per_example_global_norm_clip(grads, max_norm)
        mean = jax.tree.map(lambda s, g: s / len(g), sums, grads)
        return state.apply_gradients(mean), {"clipped": jdp.sum_over_ranks(num_clipped)}

    def made(multiplier):
        noise = optax.add_noise((max_norm * multiplier / num_rows) ** 2, 0.0, jax.random.key(1))
        tx = optax.chain(noise, optax.sgd(0.1))
        wrapped = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
        return state(wrapped)

    ranks(3)
    without, metrics = step(made(0.0), batch())
    assert 0 < metrics["clipped"] < num_rows
    tx = private(max_norm)
    updates, _ = tx.update(of_rows(training.params(), batch()), tx.init(training.params()))
    assert_close(without.params, optax.apply_updates(training.params(), updates), 1e-5)

    def noise_of(n):
        ranks(n)
        pair = [step(made(multiplier), batch())[0].params for multiplier in (2.0, 0.0)]
        return jax.tree.map(lambda a, b: np.subtract(a, b), *map(jax.device_get, pair))

    assert_close(noise_of(3), noise_of(1), 1e-6)
    numbers = np.concatenate([x.ravel() for x in jax.tree.leaves(noise_of(3))])
    assert 0.5 < numbers.std() / (0.1 * max_norm * 2.0 / num_rows) < 1.5


def test_mean_false_gives_the_sum():
    ranks(4)
    step = jdp.train_step(plain_step)
    s, _ = step(state(jdp.replicated(optax.sgd(0.1), mean=False)), batch())
    want, _ = train(1, jdp.train_step(plain_step), lambda: state(jdp.replicated(optax.sgd(0.4))), 1)
    assert_close(jax.device_get(s.params), want.params)


def test_a_wrong_bucket_size_is_refused_at_once():
    with pytest.raises(ValueError, match=r"bucket_bytes .*\b0\b"):
        jdp.replicated(optax.sgd(0.1), bucket_bytes=0)


def test_where_no_axis_is_bound_there_is_one_rank():
    tx = jdp.replicated(optax.sgd(0.5))
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
    np.testing.assert_array_equal(updates["w"], [-0.5, -0.5])


@pytest.mark.parametrize("tx, kind", [(optax.sgd, "function"), (0.1, "float")])
def test_what_is_no_optax_transformation_is_refused(tx, kind):
    with pytest.raises(TypeError, match=f" {kind}.* jdp.replicated"):
        jdp.replicated(tx)


@pytest.mark.parametrize("outer", [jdp.replicated, jdp.sharded])
@pytest.mark.parametrize("inner", [jdp.replicated, jdp.sharded])
def test_an_optimizer_is_wrapped_once(outer, inner):
    with pytest.raises(TypeError, match="already"):
        outer(inner(optax.sgd(0.1)))


@pytest.mark.parametrize("wrap", [jdp.replicated, jdp.sharded])
def test_an_algorithm_is_a_function(wrap):
    with pytest.raises(TypeError, match="all_reduce='ring' .*jdp.collectives.auto"):
        wrap(optax.sgd(0.1), all_reduce="ring")


def test_an_optimizer_that_is_part_of_a_tree_keeps_its_axis():
    tx = jax.tree.map(lambda part: part, jdp.replicated(optax.sgd(0.5), axis_name="batch"))
    assert isinstance(tx, Replicated) and tx.axis_name == "batch"
    updates, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}))
    np.testing.assert_array_equal(updates["w"], [-0.5, -0.5])
