"""Metrics and states that most often have another scale than is meant: a warning, with the line."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpus.wrong import corpus
from corpus.wrong.scaled import masked_gradients, masked_loss
from jax import lax

import jdp

WEIGHED = {"weight": lambda batch: batch["mask"].sum()}


def trained(state, batch):
    return state.apply_gradients(masked_gradients(state, batch))


def told(metrics_of, num_ranks=4, after=None, **options):
    """The warnings of a step that reports `metrics_of`, each with the line of `# <- here`."""

    def step(state, batch):
        new = trained(state, batch)
        return new if after is None else after(new, batch), metrics_of(state, batch)

    jdp.init(devices=jax.devices()[:num_ranks])
    state, batch = corpus.training(batch=corpus.masked_rows(), model_state=np.zeros(3, np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = jdp.train_step(step, **options)
        step.lower(state, batch)
    # JDP129: the loss of these steps weighs rows, and only some of the steps weigh ranks.
    texts = [str(each.message) for each in caught]
    return [text for text in texts if "JDP129" not in text]


def psum(x):
    return lax.psum(x, "data")


def pmean(x):
    return lax.pmean(x, "data")


SUMS = {
    "a learning rate": lambda state, batch: psum(0.1 * state.params["b"]),
    "a count of steps": lambda state, batch: jdp.sum_over_ranks(state.step),
    "a norm": lambda state, batch: jnp.sqrt(psum(optax.tree.norm(state.params, squared=True))),
    "an array": lambda state, batch: psum(state.params["w"]),
    "a mean": lambda state, batch: psum(jdp.mean_over_ranks(batch["x"].mean())),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("metric", SUMS.values(), ids=SUMS)
def test_warns_of_a_metric_that_sums_what_every_rank_has(metric, num_ranks):
    (message,) = told(lambda *args: {"loss": args[1]["x"].mean(), "m": metric(*args)}, num_ranks)
    many = f"{num_ranks} times" if num_ranks > 1 else "n times"
    assert re.search(rf"^`metrics\['m'\]` .* {many} .* test_scales.py:\d+ .*JDP122", message), (
        message
    )


NOTHING_TO_SAY = {
    "what every rank has": lambda state, batch: psum(state.params["b"]) / lax.axis_size("data"),
    "a mean": lambda state, batch: pmean(state.params["b"]),
    "not summed": lambda state, batch: state.step,
    "a number of ranks": lambda state, batch: psum(1.0),
    "rows": lambda state, batch: jdp.sum_over_ranks(batch["x"].sum()),
    "a number of rows": lambda state, batch: jdp.sum_over_ranks(batch["x"].shape[0]),
    "are all finite": lambda state, batch: psum(jnp.isfinite(state.params["b"])) == 4,
}


@pytest.mark.parametrize("metric", NOTHING_TO_SAY.values(), ids=NOTHING_TO_SAY)
def test_does_not_warn_of_a_right_metric(metric):
    assert told(lambda *args: {"m": metric(*args)}) == []


def test_tells_metrics_of_one_line_once():
    (message,) = told(lambda state, batch: psum({"a": state.params["b"], "b": state.step}))
    assert message.startswith("`metrics['a']`, `metrics['b']` ")


def test_warns_of_an_evaluation_too():
    @jdp.eval_step
    def measure(state, batch):
        return {"decay": psum(optax.tree.norm(state.params))}

    jdp.init(devices=jax.devices()[:4])
    with pytest.warns(UserWarning, match=r"`metrics\['decay'\]` .* 4 times .*JDP122"):
        measure(*corpus.training())


# States that depend on a sum of what every rank has


def carried(x):
    return lax.scan(lambda c, _: (jnp.sin(c) + psum(x), None), x, None, length=2)[0]


KEPT = {
    "a product of sums": lambda a: psum(a) * psum(jnp.cos(a)),
    "the larger": lambda a: jnp.maximum(psum(a), a),
    "sorted": lambda a: jnp.sort(psum(a)),
    "beside something": lambda a: jnp.concatenate([psum(a)[:1], a[1:]]),
    "in a branch": lambda a: lax.cond(a[0] < 2, lambda: psum(a), lambda: a),
    "in a loop": carried,
    "scattered and gathered": lambda a: lax.all_gather(
        lax.psum_scatter(jnp.resize(a, 12), "data", tiled=True), "data", tiled=True
    )[:3],
    "of what was changed": lambda a: a + jnp.sort(psum(jnp.cos(a))),
}


def kept(change):
    return lambda state, batch: state.replace(model_state=change(state.model_state))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_warns_of_a_state_that_depends_on_a_sum_of_what_every_rank_has(change, num_ranks):
    (message,) = told(lambda *args: {}, num_ranks, kept(change))
    many = f"{num_ranks} times" if num_ranks > 1 else "n times"
    assert re.match(rf"`new state.model_state` .*{many} .*test_scales.py:\d+ .*JDP122", message)


def test_refuses_a_state_that_is_gathered_and_added_up():
    with pytest.raises(ValueError, match=r" 4 times .*JDP122"):
        told(lambda *args: {}, after=kept(lambda a: lax.all_gather(a, "data").sum(0)))


KEPT_RIGHT = {
    "a mean": lambda a: jnp.sort(pmean(a)),
    "divided": lambda a: a * (psum(jnp.cos(a)) / lax.axis_size("data")),
    "divided at last": lambda a: jnp.sort(psum(a)) / lax.axis_size("data"),
    "a mean of what was gathered": lambda a: jnp.sort(lax.all_gather(a, "data").mean(0)),
    "what n times is meant by": lambda a: jnp.sort(lax.axis_size("data") * a),
    "as long as before": lambda a: a * psum(a) / jnp.linalg.norm(psum(a)),
    "from one rank": lambda a: jnp.sort(psum(jnp.where(lax.axis_index("data") == 0, a, 0))),
    "if any": lambda a: jnp.where(psum(a) > 0, a, 0),
    "the gradient of a mean": lambda a: jax.grad(lambda a: jnp.sin(pmean(a) ** 2).sum())(a),
    "a mean over elements": lambda a: jnp.full(3, lax.all_gather(a, "data").mean()),
}


@pytest.mark.parametrize("change", KEPT_RIGHT.values(), ids=KEPT_RIGHT)
def test_does_not_warn_of_a_right_state(change):
    assert told(lambda *args: {}, after=kept(change)) == []


# Means in which ranks count alike, in a step that weighs them

MEANS = {
    "of a loss": lambda state, batch: pmean(corpus.loss_fn(state.params, batch)),
    "by hand": lambda state, batch: psum(corpus.loss_fn(state.params, batch)) / 4,
    "a root": lambda state, batch: jnp.sqrt(pmean(corpus.loss_fn(state.params, batch))),
    "an array": lambda state, batch: pmean(batch["x"].mean(0)),
}


@pytest.mark.parametrize("metric", MEANS.values(), ids=MEANS)
def test_warns_of_an_unweighted_mean_where_ranks_weigh(metric):
    def metrics_of(state, batch):
        return {"rows": batch["mask"].mean(), "m": metric(state, batch)}

    (message,) = told(metrics_of, **WEIGHED)
    assert re.match(r"`metrics\['m'\]` .*test_scales.py:\d+.*weight=.*JDP123", message), message
    assert told(metrics_of) == []


def test_warns_of_unweighted_statistics_in_the_state():
    def kept(state, batch):
        mean = 0.9 * state.model_state + 0.1 * pmean(batch["x"].mean(0))
        return state.replace(model_state=mean)

    (message,) = told(lambda *args: {}, after=kept, **WEIGHED)
    assert re.match("`new state.model_state` .*weight=.*JDP123", message), message
    assert told(lambda *args: {}, after=kept) == []


WEIGHED_ALREADY = {
    "the own": lambda state, batch: corpus.loss_fn(state.params, batch),
    "by jdp": lambda state, batch: jdp.mean_over_ranks(batch["x"].mean(0)),
    "all count alike": lambda state, batch: jdp.mean_over_ranks(batch["x"].mean(), weight=1.0),
    "by hand": lambda state, batch: (
        pmean((batch["y"] * batch["mask"]).sum()) / jnp.maximum(pmean(batch["mask"].sum()), 1)
    ),
    "by sums": lambda state, batch: psum(batch["y"].sum()) / psum(batch["mask"].sum()),
    "what every rank has": lambda state, batch: pmean(state.params["b"]),
}


@pytest.mark.parametrize("metric", WEIGHED_ALREADY.values(), ids=WEIGHED_ALREADY)
def test_does_not_warn_of_a_weighted_mean(metric):
    assert told(lambda *args: {"m": metric(*args)}, **WEIGHED) == []


def test_micro_batches_that_weigh_leave_ranks_alike():
    def step(state, batch):
        weigh = {"accumulate": 2, "weight": lambda batch: batch["mask"].sum()}
        _, grads = jdp.value_and_grad(masked_loss, **weigh)(state.params, batch)
        return state.apply_gradients(pmean(grads), synced=True), {}

    jdp.init(devices=jax.devices()[:2])
    with pytest.warns(UserWarning) as caught:
        jdp.train_step(step).lower(*corpus.training(batch=corpus.masked_rows()))
    (message,) = {str(each.message) for each in caught}
    assert "JDP129" in message
