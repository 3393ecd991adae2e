"""Dtypes of few bits, of JAX and of ml_dtypes: what a step takes is exact, the rest is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.training import ranks

import jdp

SMALL = sorted(name for name in dir(ml_dtypes) if name.startswith(("float", "int", "uint")))
NOT_COMPILED = [name for name in SMALL if name.endswith("int1") or name.startswith("float6")]
COMPILED = [name for name in SMALL if name not in NOT_COMPILED]
FLOATS = [name for name in COMPILED if name.startswith("float")]


def some(name, *shape):
    """Values that the dtype holds, not all the same."""
    values = np.resize([1, 0, 1, 1], shape).astype(np.float32)
    if name == "float8_e8m0fnu":  # powers of two alone
        values = values + 1
    return values.astype(getattr(ml_dtypes, name))


def wide(x):
    return np.asarray(x).astype(np.float32)


def fit(state, batch, *rest):
    """Use every input, keep the odd leaves of the state, hand out the rows."""
    used = sum(x.astype("float32").sum() for x in [*rest, batch["e"]])
    loss_fn = lambda w: jnp.mean((w - batch["x"]) ** 2)  # noqa: E731
    grads = jax.tree.map(jnp.zeros_like, state.params) | {"w": jax.grad(loss_fn)(state.params["w"])}
    return state.apply_gradients(grads), {"used": used, "rows": jdp.rows(batch["e"])}


def state_with(model_state=None, **params):
    params = {"w": jnp.zeros(()), **params}
    return jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.5)), model_state=model_state)


@pytest.mark.parametrize("name", COMPILED)
def test_the_state_the_batch_and_further_arguments_keep_every_value(name):
    ranks(2)
    step = jdp.train_step(fit)
    odd, rows = some(name, 3), some(name, 4)
    state = state_with({"all": odd, "own": jdp.per_rank(rows)})
    for _ in range(2):
        batch = {"x": np.ones(4, np.float32), "e": rows}
        state, metrics = step(state, batch, odd, odd[0])
        assert jdp.check_replicas(state)
    np.testing.assert_array_equal(wide(state.model_state["all"]), wide(odd))
    np.testing.assert_array_equal(wide(state.model_state["own"].value), wide(rows))
    np.testing.assert_array_equal(wide(metrics["rows"]), wide(rows))
    assert metrics["rows"].dtype == odd.dtype
    assert float(metrics["used"]) == wide(odd).sum() + wide(odd[0]) + wide(rows).sum() / 2
    assert float(state.params["w"]) == 1.0


@pytest.mark.parametrize("name", FLOATS)
def test_a_hash_tells_values_apart(name):
    ranks(2)
    assert jdp.check_replicas(some(name, 4)) != jdp.check_replicas(some(name, 4)[::-1].copy())


@pytest.mark.parametrize("name", COMPILED)
def test_parameters_of_it_are_refused_by_path_or_left_alone(name):
    ranks(2)
    batch = {"x": np.ones(4, np.float32), "e": some(name, 4)}
    step, state = jdp.train_step(fit), state_with(e=some(name, 3))
    if name in FLOATS:
        with pytest.raises(TypeError, match=rf"grads\['e'\]` is {name}\[3\].*float32 .*bfloat16"):
            step(state, batch)
    else:
        state, _ = step(state, batch)
        np.testing.assert_array_equal(wide(state.params["e"]), wide(some(name, 3)))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", FLOATS)
def test_a_scalar_of_few_bits_among_the_metrics_is_refused_by_path(num_ranks, name):
    ranks(num_ranks)
    step = jdp.eval_step(lambda state, batch: {"m": batch.sum().astype(name)})
    with pytest.raises(TypeError, match=rf"`metrics\['m'\]` is {name}\[\].*float32"):
        step(jnp.zeros(()), np.ones(4, np.float32))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("function", [jdp.sum_over_ranks, jdp.mean_over_ranks])
def test_floats_of_few_bits_are_not_summed_over_ranks(function, name):
    x = jnp.asarray(some(name, 2))
    with pytest.raises(TypeError, match=rf"{function.__name__} .*{name}.* float32"):
        function(x)


@pytest.mark.parametrize("name", NOT_COMPILED)
@pytest.mark.parametrize("where", ["state", "own", "batch", "rest", "metric"])
def test_what_xla_does_not_compile_is_refused_by_path(where, name):
    if name.startswith("float6") and jax.__version_info__ < (0, 11):
        pytest.skip("this JAX puts no float6 on a device, and says so by name")
    ranks(2)
    odd, good = some(name, 4), np.ones(4, np.float32)
    names = {
        "state": r"state\.model_state",
        "own": r"state\.model_state\.value",
        "batch": r"batch\['e'\]",
        "rest": "extra",
        "metric": "rows",
    }
    state = state_with({"state": odd, "own": jdp.per_rank(odd)}.get(where))

    @jdp.train_step
    def step(state, batch, extra):
        rows = jdp.rows(batch["x"].astype(name)) if where == "metric" else 0
        return state, {"rows": rows}

    with pytest.raises(ValueError, match=rf"`{names[where]}.*` is {name}\[.*uint8"):
        batch = {"x": good, "e": odd if where == "batch" else good}
        step(state, batch, odd if where == "rest" else 0)
