"""Skipped updates and loss scales, compared with one device that leaves out bad batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import sharded_training as model
from support.training import assert_close, fetched, ranks

import jdp
from jdp.distributed import in_flight

BAD = [False, True, False, True, True, False, False]
STEPS = {
    "jax": lambda params, rows: jax.value_and_grad(model.loss_fn)(params, rows),
    "jdp": lambda params, rows: jdp.value_and_grad(model.loss_fn)(params, rows),
    "accumulated": lambda params, rows: jdp.value_and_grad(model.loss_fn, accumulate=2)(
        params, rows
    ),
}


def rows(i, is_bad, row=-1):
    found = model.batch(i)
    if is_bad:
        found["x"][row, 3] = [np.nan, np.inf, -np.inf][i % 3]
    return found


def step_of(differentiate=STEPS["jdp"], weight=None):
    @jdp.train_step(weight=weight)
    def step(state, rows):
        loss, grads = differentiate(state.params, rows)
        mean = jdp.mean_over_ranks(rows["x"].mean(0))
        return state.apply_gradients(grads, model_state=mean), {"loss": loss}

    return step


def started(stage, tx=None, **options):
    tx = jdp.skip_nonfinite(model.clipped() if tx is None else tx, **options)
    return jdp.TrainState.create(
        model.params(), model.optimizer(stage, tx), model_state=np.zeros(24, np.float32)
    )


def on_one_device():
    params, tx = model.params(), model.clipped()
    opt_state, mean = tx.init(params), np.zeros(24)
    for i, is_bad in enumerate(BAD):
        if not is_bad:
            grads = jax.grad(model.loss_fn)(params, rows(i, False))
            updates, opt_state = tx.update(grads, opt_state, params)
            params, mean = optax.apply_updates(params, updates), rows(i, False)["x"].mean(0)
    return jax.device_get((params, opt_state, mean))


def trained_by(stage, step, state):
    for i, is_bad in enumerate(BAD):
        before = fetched(state)
        state, _ = step(state, rows(i, is_bad))
        if is_bad:
            inner = state.opt_state.inner_state
            assert_equal_bits(before.opt_state.inner_state, inner)
            assert_equal_bits(
                (before.params, before.model_state), (state.params, state.model_state)
            )
    in_flight.drain()
    return state


def assert_equal_bits(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_training_is_that_of_the_good_batches_alone(n, stage, how):
    ranks(n)
    state = trained_by(stage, step_of(STEPS[how]), started(stage, max_consecutive=3))
    jdp.check_replicas(state)
    found = state.params, state.opt_state.inner_state, state.model_state
    assert_close(fetched(found), on_one_device(), 2e-5)
    assert (state.step, state.opt_state.num_skipped) == (len(BAD), sum(BAD))
    assert not np.any(state.opt_state.nonfinite)


@pytest.mark.parametrize(("n", "stage"), [(1, 0), (2, 0), (3, 1), (8, 2), (2, 3)])
def test_too_many_in_a_row_are_an_error_that_names_ranks_and_leaves(n, stage):
    ranks(n)
    step, state = step_of(), started(stage, max_consecutive=3)
    state, _ = step(state, rows(0, False))
    before = fetched(state.params)
    for call, row in ((4, 40), (7, 3)):  # the count begins anew with each error
        for _ in range(3):
            state, _ = step(state, rows(0, True, row))
        match = rf"call {call} of .*`grads\['b'\]`, .* of rank {row * n // 48}: (?s:.*)JDP217"
        with pytest.raises(RuntimeError, match=match):
            in_flight.drain()
        in_flight.require_right_states()
    assert_equal_bits(before, state.params)
    for _ in range(3):
        state, _ = step(state, rows(1, False))
    in_flight.drain()


def test_the_error_comes_with_a_later_call():
    ranks(2)
    step, state = step_of(), started(0, max_consecutive=1)
    with pytest.raises(RuntimeError, match="JDP217"):
        for _ in range(20):
            state, _ = step(state, rows(1, True))
    while in_flight.latest_call():
        with pytest.raises(RuntimeError, match="JDP217"):
            in_flight.drain()
    assert_equal_bits(model.params(), state.params)


def summed(values, **options):
    """Train one number whose gradient is a value of each rank."""
    ranks(len(values))
    tx = jdp.replicated(jdp.skip_nonfinite(optax.sgd(1.0), max_consecutive=1), **options)
    state = jdp.TrainState.create({"w": np.float32(0)}, tx)

    @jdp.train_step(weight=lambda rows: rows[0, 1])
    def step(state, rows):
        return state.apply_gradients({"w": rows[0, 0]}), {}

    return step(state, np.array(values, np.float32))[0]


def test_an_overflow_of_the_sum_alone_is_skipped_and_names_no_rank():
    assert summed([[3e38, 1.0], [3e38, 1.0]]).params["w"] == -np.float32(3e38)
    in_flight.drain()
    state = summed([[3e38, 1.0], [3e38, 1.0]], mean=False)
    assert (state.params["w"], state.opt_state.num_skipped) == (0, 1)
    with pytest.raises(RuntimeError, match=r"in `grads\['w'\]`: (?s:.*)JDP217"):
        in_flight.drain()


def test_rows_of_weight_0_may_have_nan():
    state = summed([[np.nan, 0.0], [2.0, 3.0], [4.0, 1.0]])
    assert (state.params["w"], state.opt_state.num_skipped) == (-2.5, 0)
    in_flight.drain()


def test_opposite_infinities_are_skipped_as_nan():
    assert summed([[np.inf, 1.0], [-np.inf, 1.0]]).params["w"] == 0
    with pytest.raises(RuntimeError, match="of rank 0, 1: "):
        in_flight.drain()


PARAMETERS = {
    "negative zeros": lambda: np.array([-0.0, 0.0], np.float32),
    "bfloat16": lambda: np.array([1.0, -0.0], jnp.bfloat16),
    "complex64": lambda: np.array([1 - 0j, complex(-0.0, -0.0)], np.complex64),
    "nan": lambda: np.array([np.nan, 1.0], np.float32),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_skipped_update_changes_no_bit(name, stage):
    ranks(2)
    tx = jdp.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
    state = jdp.TrainState.create({"w": PARAMETERS[name]()}, model.optimizer(stage, tx))

    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients(jax.tree.map(lambda x: x * batch[0], state.params)), {}

    state, _ = step(state, np.array([1.0, np.nan], np.float32))
    assert_equal_bits(PARAMETERS[name](), state.params["w"])
    assert state.opt_state.num_skipped == 1


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_skipped_update_added_by_optax_changes_no_bit(name):
    params = {"w": jnp.asarray(PARAMETERS[name]())}
    tx = jdp.replicated(jdp.skip_nonfinite(optax.sgd(0.1)))
    updates, _ = tx.update(jax.tree.map(lambda x: x * np.nan, params), tx.init(params), params)
    assert_equal_bits(params, optax.apply_updates(params, updates))


def test_inside_a_scan_steps_are_skipped_and_counted():
    ranks(2)
    state, step = started(1, max_consecutive=2), step_of()
    batches = [rows(i, is_bad) for i, is_bad in enumerate(BAD)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, stacked))(state)
    found = state.params, state.opt_state.inner_state, state.model_state
    assert_close(fetched(found), on_one_device(), 2e-5)
    assert state.opt_state.num_skipped == sum(BAD)


FIELDS = ["num_skipped", "skips_left", "nonfinite"]


@pytest.mark.parametrize("names", [FIELDS[:1], FIELDS[1:], FIELDS])
def test_parameters_may_have_the_names_of_its_fields(names):
    ranks(2)
    params = {name: jnp.ones(3) for name in ["w", *names]}
    state = jdp.TrainState.create(
        params, jdp.replicated(optax.adam(0.1)), model_state=jnp.zeros(())
    )

    @jdp.train_step
    def step(state, x):
        grads = jax.grad(lambda p: sum(leaf.sum() for leaf in p.values()) * x.mean())(state.params)
        return state.apply_gradients(grads, model_state=state.model_state + 1), {}

    for _ in range(12):
        state, _ = step(state, np.ones(2, np.float32))
    jax.tree.map(lambda x: np.testing.assert_allclose(x, -0.2, atol=1e-4), state.params)
    assert float(state.model_state) == 12


def test_two_optimizers_in_a_step_are_told_apart():
    ranks(2)
    first, second = (jdp.skip_nonfinite(optax.sgd(1.0), max_consecutive=k) for k in (1, 2))
    create = jdp.TrainState.create
    states = create({"a": 1.0}, jdp.replicated(first)), create({"b": 1.0}, jdp.replicated(second))

    @jdp.train_step
    def step(states, batch):
        a, b = states
        return (a.apply_gradients({"a": batch[0]}), b.apply_gradients({"b": batch[1]})), {}

    states, _ = step(states, np.array([1.0, np.nan] * 2, np.float32))
    in_flight.drain()
    states, _ = step(states, np.array([1.0, np.nan] * 2, np.float32))
    with pytest.raises(RuntimeError, match=r"in `grads\['b'\]` of rank 0, 1:"):
        in_flight.drain()
    assert (states[0].params["a"], states[1].params["b"]) == (-1, 1)


def test_optax_applies_the_update_at_its_limit_and_jdp_never_does():
    ranks(2)
    grads, params = {"w": np.float32(np.nan)}, {"w": np.float32(1)}
    for wrap, want in ((optax.apply_if_finite, np.nan), (jdp.skip_nonfinite, 1)):
        options = {
            "max_consecutive_errors" if wrap is optax.apply_if_finite else "max_consecutive": 2
        }
        state = jdp.TrainState.create(params, jdp.replicated(wrap(optax.sgd(1.0), **options)))
        for _ in range(3):
            state = state.apply_gradients(grads)
        np.testing.assert_equal(np.asarray(state.params["w"]), np.float32(want))


WRONG = {
    "outside of replicated": lambda: jdp.skip_nonfinite(jdp.replicated(optax.sgd(0.1))),
    "outside of sharded": lambda: jdp.dynamic_loss_scale(jdp.sharded(optax.sgd(0.1))),
    "no optimizer": lambda: jdp.skip_nonfinite(0.1),
    "a limit of 0": lambda: jdp.skip_nonfinite(optax.sgd(0.1), max_consecutive=0),
    "no growth": lambda: jdp.dynamic_loss_scale(optax.sgd(0.1), growth_interval=0),
    "a scale of 0": lambda: jdp.dynamic_loss_scale(optax.sgd(0.1), initial=0),
    "an infinite scale": lambda: jdp.dynamic_loss_scale(optax.sgd(0.1), initial=np.inf),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    kind = TypeError if name.split()[0] in ("outside", "no") and name != "no growth" else ValueError
    with pytest.raises(kind):
        WRONG[name]()


def test_an_unknown_keyword_of_an_update_is_still_refused():
    with pytest.raises(TypeError, match="no effect"):
        started(0).apply_gradients(model.params(), vlaue=1.0)


def scales(flags, initial, interval):
    """The scale after each update by torch.amp.GradScaler: equal to 60 steps of PyTorch 2.13."""
    scale, count, found = initial, 0, []
    for is_bad in flags:
        count = 0 if is_bad else count + 1
        scale = 0.5 * scale if is_bad else 2.0 * scale if count == interval else scale
        count %= interval
        found.append(scale)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_a_loss_scale_grows_and_shrinks_as_in_torch(interval, stage):
    ranks(2)
    flags = np.random.default_rng(interval).random(30) < 0.3
    tx = jdp.dynamic_loss_scale(optax.sgd(1.0), initial=8.0, growth_interval=interval)
    state = jdp.TrainState.create({"w": np.zeros(4, "f")}, model.optimizer(stage, tx))

    @jdp.train_step
    def step(state, batch):
        def loss(params, batch):
            return (params["w"] * batch.mean()).sum() * state.opt_state.scale

        _, grads = jdp.value_and_grad(loss)(state.params, batch)
        state = state.apply_gradients(grads)
        return state, {"scale": state.opt_state.scale}

    found, params = [], []
    for is_bad in flags:
        state, metrics = step(state, np.array([1.0, np.nan if is_bad else 3.0], "f"))
        found.append(float(metrics["scale"]))
        params.append(float(state.params["w"][0]))
    assert found == scales(flags, 8.0, interval)
    assert params == [*(-2.0 * np.cumsum(~flags))]


def test_a_loss_scale_stays_within_float32():
    tx = jdp.dynamic_loss_scale(optax.sgd(1.0), initial=2.0**127, growth_interval=1)
    state = tx.init(jnp.float32(1))
    assert tx.update(jnp.float32(1), state)[1].scale == 2.0**127
    state = state._replace(scale=jnp.finfo(jnp.float32).tiny)
    assert tx.update(jnp.float32(jnp.nan), state)[1].scale == jnp.finfo(jnp.float32).tiny


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_float16_trains_as_float32_does_and_recovers_from_overflow(n, stage):
    ranks(n)

    def trained(tx, dtype):
        state = jdp.TrainState.create(model.params(), model.optimizer(stage, tx))

        @jdp.train_step
        def step(state, rows):
            def loss_fn(params, rows):
                narrow = jax.tree.map(lambda x: x.astype(dtype), params)
                x = {**rows, "x": rows["x"].astype(dtype), "y": rows["y"].astype(dtype)}
                scale = getattr(state.opt_state, "scale", 1.0)
                return 1e-10 * model.losses(narrow, x).astype(jnp.float32).mean() * scale

            _, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
            return state.apply_gradients(grads), {}

        skipped = 0
        for i in range(60):
            state, _ = step(state, model.batch((i - skipped) % 4))
            is_good = int(getattr(state.opt_state, "num_skipped", 0)) == skipped
            skipped += not is_good
            if i - skipped == 19:
                break
        in_flight.drain()
        return fetched(state.params), skipped

    want, _ = trained(optax.sgd(3e6), jnp.float32)
    scaled = jdp.dynamic_loss_scale(optax.sgd(3e6), initial=2.0**54, max_consecutive=40)
    found, skipped = trained(scaled, jnp.float16)
    plain, _ = trained(optax.sgd(3e6), jnp.float16)
    assert 5 < skipped < 40
    start = model.params()["w"]
    change = np.abs(want["w"] - start).max()
    assert np.abs(found["w"] - want["w"]).max() < 0.02 * change
    assert np.abs(plain["w"] - want["w"]).max() > 0.2 * change
