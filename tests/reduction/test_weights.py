"""A weight that is not a finite number >= 0 is refused, or ends the run and names the rank."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.training import ranks

import jdp
from jdp.distributed import in_flight


def mean_step(weight, **options):
    """A step that moves `w` to the mean of the batch, whose rows weigh `weight(batch)`."""

    @jdp.train_step(weight=weight, **options)
    def fit(state, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["w"] - batch) ** 2) / 2)(
            state.params
        )
        return state.apply_gradients(grads), {"loss": loss}

    return fit


def start():
    return jdp.TrainState.create({"w": jnp.zeros(())}, jdp.replicated(optax.sgd(1.0)))


CONSTANTS = [-1, -1.0, np.float32(-0.5), np.nan, np.inf]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("weight", CONSTANTS, ids=str)
def test_a_constant_that_is_not_a_weight_is_refused_before_anything_runs(num_ranks, weight):
    ranks(num_ranks)
    state = start()
    with pytest.raises(ValueError, match=rf"{weight}.*JDP126"):
        mean_step(lambda batch: weight)(state, np.ones(num_ranks, np.float32))
    assert float(state.params["w"]) == 0.0  # was not donated


@pytest.mark.parametrize("weight", CONSTANTS, ids=str)
@pytest.mark.parametrize("function", [jdp.sync_gradients, jdp.mean_over_ranks])
def test_a_constant_weight_of_a_function_is_refused(function, weight):
    with pytest.raises(ValueError, match=rf"{weight}.*JDP126"):
        jax.vmap(lambda x: function(x, weight=weight), axis_name="data")(jnp.ones(2))


@pytest.mark.parametrize("num_ranks, odd", [(1, 0), (2, 1), (3, 0), (8, 6)])
@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_a_weight_of_one_rank_is_an_error_that_names_rank_and_weight(num_ranks, odd, value):
    ranks(num_ranks)
    fit, rows = mean_step(lambda batch: batch[0]), np.ones(num_ranks, np.float32)
    state, _ = fit(start(), rows)
    rows[odd] = value
    state, metrics = fit(state, rows)
    assert np.isnan(metrics["loss"]) and np.isnan(state.params["w"])  # not silent before either
    with pytest.raises(RuntimeError, match=rf"call 2 of `fit`.* {value} .*rank {odd}\b.*JDP212"):
        in_flight.drain()
    in_flight.drain()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("returns_state", [True, False])
def test_weights_whose_sum_overflows_give_nan_and_an_error_that_says_so(num_ranks, returns_state):
    ranks(num_ranks)
    rows, weight = np.ones(num_ranks, np.float32), lambda batch: batch[0] * 3e38
    if returns_state:
        state, metrics = mean_step(weight)(start(), rows)
        assert np.isnan(state.params["w"])
    else:
        metrics = jdp.eval_step(lambda state, batch: {"loss": batch.mean()}, weight=weight)(0, rows)
    assert np.isnan(metrics["loss"])
    with pytest.raises(RuntimeError, match=r"3e\+38 .*rank 0 .*3e\+38 .* float32[.] .*JDP212"):
        in_flight.drain()


def test_the_largest_weights_whose_sum_float32_holds_are_weights():
    ranks(2)
    state, _ = mean_step(lambda batch: 1.5e38)(start(), np.float32([1, 3]))
    in_flight.drain()
    assert float(state.params["w"]) == 2.0


@pytest.mark.parametrize("function", [jdp.sync_gradients, jdp.mean_over_ranks])
def test_a_mean_by_weights_whose_sum_overflows_is_nan(function):
    mean = jax.vmap(lambda x, w: function(x, weight=w), axis_name="data")
    assert np.isnan(mean(jnp.ones(2), jnp.full(2, 3e38))).all()


def test_a_mean_over_micro_batches_whose_weights_overflow_is_nan():
    loss_fn, weight = lambda p, batch: (p * batch).mean(), lambda batch: 3e38
    both = jdp.value_and_grad(loss_fn, accumulate=2, weight=weight)
    assert np.isnan(both(jnp.float32(1e-9), jnp.full(2, 1e-9))).all()


class Wrapped:
    """What some libraries keep arrays in."""

    def __init__(self, x):
        self.x = x

    def __jax_array__(self):
        return self.x


NO_NUMBERS = {
    "None": lambda batch: None,
    "a dict": lambda batch: {"a": batch[0]},
    "a list": lambda batch: [batch[0]],
    "a str": lambda batch: "sum",
    "a function": lambda batch: NO_NUMBERS["None"],
    r"float32\[1\]": lambda batch: batch[:1],
    r"complex64\[\]": lambda batch: batch[0] * 1j,
    r"key<fry>\[\]": lambda batch: jax.random.key(0),
    r"<U3\[\]": lambda batch: np.array("sum"),
    r"object\[\]": lambda batch: np.array(None),
}


@pytest.mark.parametrize("found", NO_NUMBERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_not_one_real_number_is_refused_by_its_kind(num_ranks, found):
    ranks(num_ranks)
    state = start()
    with pytest.raises(ValueError, match=rf"{found}.*JDP126"):
        mean_step(NO_NUMBERS[found])(state, np.ones(num_ranks, np.float32))
    assert float(state.params["w"]) == 0.0  # was not donated
    if found != "None":  # which means the default
        with pytest.raises(ValueError, match=rf"{found}.*JDP126"):
            jdp.mean_over_ranks(1.0, weight=NO_NUMBERS[found](jnp.ones(1)))


NUMBERS = {
    "int": lambda batch: 2**40,
    "float64": lambda batch: np.float64(2),
    "float8": lambda batch: batch[0].astype(jnp.float8_e4m3fn),
    "int4": lambda batch: batch[0].astype(jnp.int4),
    "uint8": lambda batch: batch[0].astype(jnp.uint8),
    "wrapped": lambda batch: Wrapped(batch[0]),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_any_real_number_is_a_weight(kind):
    ranks(2)
    state, _ = mean_step(NUMBERS[kind])(start(), np.float32([2, 6]))
    in_flight.drain()
    assert float(state.params["w"]) == (4.0 if kind in ("int", "float64") else 5.0)


def test_a_weight_function_that_asks_for_a_value_is_told_of_which_argument():
    ranks(2)
    with pytest.raises(TypeError, match=r"`fit`.*`batch` at test_weights\.py:\d+"):
        mean_step(lambda batch: 1.0 if batch.any() else 0.0)(start(), np.ones(2, np.float32))


def test_without_a_look_at_the_result_it_is_an_error_within_8_calls():
    ranks(2)
    fit, state = mean_step(lambda batch: batch[0]), start()
    with pytest.raises(RuntimeError, match="-2.0 .*rank 0 .*-3.0 .*rank 1.*JDP212"):
        for _ in range(9):
            state, _ = fit(state, np.array([-2.0, -3.0], np.float32))


def test_each_of_two_steps_in_turn_that_is_wrong_is_reported():
    ranks(2)
    steps = [mean_step(lambda batch: batch[0]), mean_step(lambda batch: batch[0])]
    states, errors = [start(), start()], []
    for i in range(20):
        for k, step in enumerate(steps):
            try:
                states[k], _ = step(states[k], np.float32([1, -2 - k if i == 3 else 1]))
            except RuntimeError as error:
                errors.append(str(error))
    assert [" -2.0" in each for each in errors] == [True, False]
    assert " -3.0" in errors[1]
    in_flight.drain()


def test_an_evaluation_names_it_too():
    ranks(2)

    @jdp.eval_step(weight=lambda batch: batch[0])
    def measure(params, batch):
        return {"mean": batch.mean()}

    with pytest.raises(RuntimeError, match=r"`measure`.* -2.0 .*rank 1.*JDP212"):
        for _ in range(9):
            measure(jnp.zeros(()), np.array([3.0, -2.0], np.float32))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_of_any_dtype_weigh(num_ranks, dtype):
    ranks(num_ranks)
    rows = np.arange(num_ranks).astype(dtype)
    state, _ = mean_step(lambda batch: batch[0])(start(), rows)
    wide = rows.astype(float)
    wanted = (wide * wide).sum() / max(wide.sum(), 1)
    np.testing.assert_allclose(state.params["w"], wanted, rtol=1e-6)
    in_flight.drain()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_batch_that_weighs_nothing_leaves_gradient_and_metrics_0(num_ranks):
    ranks(num_ranks)
    rows = np.full(num_ranks, np.nan, np.float32)
    state, metrics = mean_step(lambda batch: 0.0)(start(), rows)
    assert float(state.params["w"]) == 0.0 and float(metrics["loss"]) == 0.0
    in_flight.drain()


@pytest.mark.parametrize("checks", [True, False])
def test_a_negative_weight_in_a_loop_of_ones_own_gives_nan_on_every_rank(make_mesh, checks):
    def mean(weight, x):
        return jdp.sync_gradients(x, weight=weight[0])

    mapped = jax.shard_map(
        mean,
        mesh=make_mesh(2),
        in_specs=(P("data"), P("data")),
        out_specs=P("data"),
        check_vma=checks,
    )
    found = jax.jit(mapped)(jnp.array([3.0, -1.0]), jnp.ones(2))
    assert np.isnan(found).all()


def test_what_follows_from_a_bad_weight_is_not_saved(tmp_path):
    ranks(2)
    fit = mean_step(lambda batch: batch[0])
    with pytest.raises(RuntimeError, match="call 4 of `fit`.* -2.0 .*rank 1.*JDP212"):
        with jdp.Checkpointer(tmp_path, save_every=2) as ckpt:
            state = ckpt.restore(start())
            for i in range(20):
                state, _ = fit(state, np.float32([1, -2 if i == 3 else 1]))
                ckpt.step(state)
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(start())
        assert ckpt.steps == 2 and float(state.params["w"]) == 1.0


@pytest.mark.parametrize("donate", [True, False])
def test_a_bad_weight_of_an_eval_step_costs_no_training(donate):
    ranks(2)
    rows = np.ones(2, np.float32)
    score = jdp.eval_step(
        lambda state, batch: {"loss": batch.mean()}, weight=lambda batch: -1 * batch[0]
    )
    fit = mean_step(None, donate=donate)
    state, _ = fit(start(), rows)
    score(state, rows)
    errors = []
    for _ in range(20):
        try:
            state, _ = fit(state, rows)
        except RuntimeError as error:
            errors.append(str(error))
    assert len(errors) == 1 and re.search(r"call 1 of `.*`.*JDP212", errors[0])
    assert float(state.params["w"]) == 1.0
    in_flight.drain()
