"""The libraries that people write models with: each on n ranks equals one rank."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState
from support.training import NUM_ROWS, assert_close, batch, ranks, sgd, train

import jdp

EXAMPLE = jnp.zeros((1, 5))


def squares(prediction, batch):
    return jnp.mean((prediction - batch["y"]) ** 2)


# Flax linen


class Mlp(nn.Module):
    bn_axis: str | None = None
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, axis_name=self.bn_axis)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(1)(x)


def linen_state(model):
    variables = model.init(jax.random.key(0), EXAMPLE, train=False)
    return jdp.TrainState.create(variables["params"], sgd(), model_state=variables["batch_stats"])


def linen_step(model, local_stats=lambda stats: stats):
    def step(state, batch):
        def loss_fn(p):
            prediction, new = model.apply(
                {"params": p, "batch_stats": state.model_state},
                batch["x"],
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": state.key},
            )
            return squares(prediction, batch), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads).replace(model_state=local_stats(stats))
        return state, {"loss": loss}

    return step


def test_linen_batch_norm_over_the_global_batch():
    model = Mlp(bn_axis="data")
    step = jdp.train_step(linen_step(model))
    got, want = (train(n, step, lambda: linen_state(model)) for n in (4, 1))
    assert_close(got, want, tolerance=2e-5)


def test_linen_local_batch_statistics_are_refused_raw_and_taken_as_means():
    model = Mlp()
    for n in (1, 2):  # on one rank too: a program is right for any number of ranks, or for none
        ranks(n)
        with pytest.raises(ValueError, match=r"model_state\['BatchNorm_0'\]\['mean'\].*JDP101"):
            jdp.train_step(linen_step(model))(linen_state(model), batch())
    means = {}
    step = jdp.train_step(linen_step(model, jdp.mean_over_ranks))
    for n in (1, 3):
        state, _ = train(n, step, lambda: linen_state(model), num_steps=1)
        means[n] = state.model_state["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(means[3], means[1], rtol=1e-5, atol=1e-6)


def test_linen_dropout_differs_between_ranks():
    ranks(4)
    model = Mlp(dropout=0.5)

    @jdp.eval_step
    def masks(state, batch):
        ones = jnp.ones((1, 8))
        dropped = nn.Dropout(0.5, deterministic=False).apply({}, ones, rngs={"dropout": state.key})
        return jdp.rows(jnp.broadcast_to(dropped, (batch["x"].shape[0], 8)))

    drawn = np.asarray(masks(linen_state(model), batch()))[:: NUM_ROWS // 4]
    assert len({row.tobytes() for row in drawn}) == 4


def test_linen_lstm_with_its_zero_carry():
    model = nn.RNN(nn.LSTMCell(4))

    @jdp.train_step
    def step(state, batch):
        def loss_fn(p):
            out = model.apply({"params": p}, batch["x"][:, :, None])
            return squares(out[:, -1, :1], batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def make_state():
        p = model.init(jax.random.key(0), EXAMPLE[:, :, None])["params"]
        return jdp.TrainState.create(p, sgd())

    assert_close(train(3, step, make_state), train(1, step, make_state))


def test_flax_train_state_with_a_wrapped_optimizer():
    model = nn.Dense(1)

    @jdp.train_step
    def step(state, batch):
        def loss_fn(p):
            return squares(state.apply_fn({"params": p}, batch["x"]), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    def make_state(tx=None):
        p = model.init(jax.random.key(0), EXAMPLE)["params"]
        return FlaxTrainState.create(apply_fn=model.apply, params=p, tx=tx or sgd())

    assert_close(train(4, step, make_state), train(1, step, make_state))
    ranks(2)
    with pytest.raises(ValueError, match=r"params\['kernel'\].*JDP101"):
        step(make_state(optax.sgd(0.1)), batch())
    inside = optax.chain(optax.clip_by_global_norm(1.0), sgd())
    with pytest.raises(ValueError, match=r"jdp\.replicated\(optax\.chain\(\.\.\.\)\)"):
        jdp.train_step(step.__wrapped__)(make_state(inside), batch())


# Flax nnx


class NnxMlp(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.hidden = nnx.Linear(5, 8, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def test_nnx_split_and_merge():
    graph, _ = nnx.split(NnxMlp(nnx.Rngs(0)))

    @jdp.train_step
    def step(state, batch):
        def loss_fn(p):
            model = nnx.merge(graph, p, state.model_state)
            return squares(model(batch["x"]), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    def make_state():
        _, p, rest = nnx.split(NnxMlp(nnx.Rngs(0)), nnx.Param, ...)
        return jdp.TrainState.create(p, sgd(), model_state=rest)

    assert_close(train(4, step, make_state), train(1, step, make_state))


class NnxNormed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(5, axis_name="data", rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(x)))


def nnx_normed_step(graph, *rest, kept):
    def step(state, batch):
        def loss_fn(p):
            model = nnx.merge(graph, p, state.model_state, *rest, copy=True)
            nnx.reseed(model, default=state.key)
            loss = squares(model(batch["x"]), batch)
            dropped = model.dropout(jnp.ones((1, 64)))
            return loss, (nnx.state(model, kept), dropped)

        (_, (kept_state, dropped)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        dropped = jdp.rows(jnp.broadcast_to(dropped, (batch["x"].shape[0], 64)))
        return state.apply_gradients(grads).replace(model_state=kept_state), {"dropped": dropped}

    return jdp.train_step(step)


def test_nnx_batch_statistics_and_dropout_that_differs_between_ranks():
    ranks(4)
    graph, p, stats, rest = nnx.split(NnxNormed(nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...)
    state = jdp.TrainState.create(p, sgd(), model_state=stats)
    step = nnx_normed_step(graph, rest, kept=nnx.BatchStat)
    for _ in range(2):
        state, metrics = step(state, batch())
    drawn = np.asarray(metrics["dropped"])[:: NUM_ROWS // 4]
    assert len({row.tobytes() for row in drawn}) == 4


def test_nnx_keys_of_a_rank_are_refused_in_the_state():
    ranks(2)
    graph, p, rest = nnx.split(NnxNormed(nnx.Rngs(0)), nnx.Param, ...)
    state = jdp.TrainState.create(p, sgd(), model_state=rest)
    with pytest.raises(ValueError, match=r"model_state\['dropout'\].*`state\.key`.*JDP101"):
        nnx_normed_step(graph, kept=nnx.Not(nnx.Param))(state, batch())


def nnx_optimizer(tx):
    model = NnxMlp(nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


def nnx_step(graph):
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda m: squares(m(batch["x"]), batch))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    return step


def test_nnx_optimizer_update():
    graph, _ = nnx_optimizer(sgd())
    step = jdp.train_step(nnx_step(graph))

    def make_state():
        return nnx_optimizer(sgd())[1]

    assert_close(train(3, step, make_state), train(1, step, make_state))


def test_nnx_optimizer_that_is_not_wrapped_is_refused():
    graph, state = nnx_optimizer(optax.sgd(0.1))
    ranks(2)
    with pytest.raises(ValueError, match=r"kernel.*JDP101"):
        jdp.train_step(nnx_step(graph))(state, batch())


def test_nnx_optimizer_with_the_reduction_inside_another_is_refused():
    tx = optax.chain(optax.clip_by_global_norm(1.0), sgd())
    graph, state = nnx_optimizer(tx)
    ranks(2)
    with pytest.raises(ValueError, match=r"jdp\.replicated\(optax\.chain\(\.\.\.\)\)"):
        jdp.train_step(nnx_step(graph))(state, batch())


# Equinox


def test_equinox_module_with_leaves_that_are_no_arrays():
    tx = sgd()

    @jdp.train_step
    def step(state, batch):
        model, opt_state = state

        def loss_fn(model):
            return squares(jax.vmap(model)(batch["x"]), batch)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return (eqx.apply_updates(model, updates), opt_state), {"loss": loss}

    def make_state():
        model = eqx.nn.MLP(5, 1, 8, 2, activation=jnp.tanh, key=jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_array))

    got, want = train(4, step, make_state), train(1, step, make_state)
    assert got[0][0].activation is jnp.tanh
    assert_close(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array))


class Scaled(eqx.Module):
    layer: eqx.nn.Linear
    scale: float

    def __call__(self, x):
        return self.layer(x) / self.scale


def scaled_step(tx, trained):
    def step(state, batch):
        model, opt_state = state

        def loss_fn(part):
            return squares(jax.vmap(eqx.combine(part, model))(batch["x"]), batch)

        grads = eqx.filter_grad(loss_fn)(eqx.filter(model, trained))
        updates, opt_state = tx.update(grads, opt_state)
        return (eqx.apply_updates(model, updates), opt_state), {}

    return jdp.train_step(step)


def scaled_state(tx):
    model = Scaled(eqx.nn.Linear(5, 1, key=jax.random.key(0)), 2.0)
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


def test_number_of_an_equinox_module_that_would_be_trained_is_refused():
    tx = sgd()
    ranks(2)
    with pytest.raises(TypeError, match=r"state\[0\]\.scale.*eqx\.partition"):
        scaled_step(tx, eqx.is_inexact_array)(scaled_state(tx), batch())


def test_number_of_an_equinox_module_that_is_not_trained_stays():
    tx = sgd()
    ranks(2)
    only_layer = Scaled(layer=True, scale=False)
    (model, _), _ = scaled_step(tx, only_layer)(scaled_state(tx), batch())
    assert model.scale == 2.0


def test_a_metric_of_nnx_that_a_state_keeps_is_refused_with_words_of_metrics():
    ranks(2)
    graph, kept = nnx.split(nnx.metrics.Average("values"))

    @jdp.train_step
    def step(state, batch):
        average = nnx.merge(graph, state["metrics"])
        average.update(values=batch["y"][:, 0])
        return {"metrics": nnx.state(average)}, {}

    with pytest.raises(ValueError, match=r"Return the value as a metric of the step.*JDP101"):
        step({"metrics": kept}, batch())


@pytest.mark.parametrize("key", ["train", 0])
def test_metrics_of_nnx_are_known_by_their_variables(key):
    ranks(2)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("y"), spread=nnx.metrics.Welford("y"))
    graph, kept = nnx.split(metrics)

    @jdp.train_step
    def step(state, batch):
        metrics = nnx.merge(graph, state[key])
        metrics.update(y=batch["y"][:, 0])
        return {key: nnx.state(metrics)}, {}

    with pytest.raises(ValueError, match=r"Return the value as a metric of the step.*JDP101"):
        step({key: kept}, batch())


def test_parameters_that_are_called_metric_are_not_taken_for_metrics():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        return {"metric_head": state["metric_head"] + batch["x"].mean()}, {}

    with pytest.raises(ValueError, match=r"jdp\.sync_gradients(?!.*as a metric of the step)"):
        step({"metric_head": jnp.ones(3)}, batch())
