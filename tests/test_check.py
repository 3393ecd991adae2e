import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
import training
from training import batch, loss_fn, plain_step, predict, ranks, state

import jdp


def test_a_right_step_passes_and_changes_nothing(capsys):
    ranks(4)
    s, rows = state(), batch()
    found = jdp.check_step(jdp.train_step(plain_step), s, rows)
    assert found.cause is None and found.num_ranks == 4
    assert len(found.leaves) == len(jax.tree.leaves(s))
    assert not s.params["w"].is_deleted()
    assert "state.params['w']" in capsys.readouterr().out


def test_one_rank_is_refused_since_any_step_would_pass():
    ranks(1)
    with pytest.raises(ValueError, match=r"has 1 rank.*cpu_ranks=4"):
        jdp.check_step(jdp.train_step(summed_loss), state(), batch())


def summed_loss(state, batch):
    grads = jax.grad(lambda p: jnp.sum((predict(p, batch["x"]) - batch["y"]) ** 2))(state.params)
    return state.apply_gradients(grads), {}


def summed_gradient(state, batch):
    grads = jax.tree.map(
        lambda g: jdp.sync_gradients(g, mean=False) * 1.0, jax.grad(loss_fn)(state.params, batch)
    )
    return state.apply_gradients(grads, synced=True), {}


def local_masked_mean(state, batch):
    def masked(p):
        losses = ((predict(p, batch["x"]) - batch["y"]) ** 2).mean(-1)
        return (losses * (batch["x"][:, 0] > 0)).sum() / (batch["x"][:, 0] > 0).sum()

    return state.apply_gradients(jax.grad(masked)(state.params)), {}


def noisy(state, batch):
    noise = jax.random.normal(state.key, batch["x"].shape)
    grads = jax.grad(loss_fn)(state.params, {**batch, "x": batch["x"] + noise})
    return state.apply_gradients(grads), {}


@pytest.mark.parametrize(
    "program, cause",
    [
        (summed_loss, "summed over rows"),
        (summed_gradient, "summed over ranks"),
        (local_masked_mean, "not a mean over rows"),
        (noisy, "random numbers"),
    ],
)
def test_says_what_the_analysis_cannot_see(program, cause):
    ranks(3)
    plain_sgd = state(jdp.replicated(optax.sgd(0.1)))
    with pytest.raises(ValueError, match=f"on 3 ranks than on one.*{cause}"):
        jdp.check_step(jdp.train_step(program), plain_sgd, batch())


def test_names_batch_statistics():
    model = nn.BatchNorm(use_running_average=False, momentum=0.5)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 5)))

    def step(state, batch):
        def loss(p):
            x, new = model.apply(
                {"params": p, "batch_stats": state.model_state}, batch["x"], mutable=["batch_stats"]
            )
            return jnp.mean((x.sum(-1, keepdims=True) - batch["y"]) ** 2), new["batch_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads)
        return state.replace(model_state=jdp.mean_over_ranks(stats)), {}

    ranks(2)
    s = jdp.TrainState.create(
        variables["params"], training.sgd(), model_state=variables["batch_stats"]
    )
    with pytest.raises(ValueError, match="Batch statistics differ"):
        jdp.check_step(jdp.train_step(step), s, batch())


def test_takes_weights_random_keys_and_further_arguments():
    ranks(4)

    @jdp.train_step(weight=lambda batch: batch["mask"].sum())
    def step(state, batch, key):
        def loss(p):
            losses = ((predict(p, batch["x"]) - batch["y"]) ** 2).mean(-1)
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

        new = state.apply_gradients(jax.grad(loss)(state.params))
        return new.replace(model_state=jax.random.fold_in(state.model_state, 1)), {}

    masked = {**batch(), "mask": jnp.arange(24) < 9}
    jdp.check_step(step, state(model_state=jax.random.key(3)), masked, jax.random.key(1))
