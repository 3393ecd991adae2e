import copy
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from support import training
from support.training import (
    assert_close,
    batch,
    loss_fn,
    masked_loss,
    params,
    plain_step,
    ranks,
    sgd,
    state,
    train,
)

import jdp


def with_frozen():
    # A frozen encoder and an integer leaf beside what trains.
    return {**training.params(), "frozen": np.ones((5, 5), np.float32), "count": np.int32(3)}


def frozen_loss(p, batch):
    return loss_fn(p, {**batch, "x": batch["x"] @ p["frozen"]})


def frozen_step(state, batch):
    loss, grads = jax.value_and_grad(frozen_loss, allow_int=True)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


@pytest.mark.parametrize(
    "trainable",
    [
        {"w": True, "v": True, "b": True, "frozen": False, "count": True},
        lambda path, leaf: path != "['frozen']",
    ],
    ids=["tree", "function"],
)
def test_frozen_parameters_stay_and_are_never_reduced(trainable):
    def make_state():
        tx = jdp.replicated(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)))
        return jdp.TrainState.create(with_frozen(), tx, trainable=trainable)

    step = jdp.train_step(frozen_step)
    three, one = train(3, step, make_state), train(1, step, make_state)
    assert_close(three, one)
    np.testing.assert_array_equal(three[0].params["frozen"], np.ones((5, 5)))
    assert three[0].params["count"] == 3

    ranks(3)
    text = step.lower(make_state(), batch()).as_text()
    collectives = [line for line in text.splitlines() if "all_reduce" in line or "}) :" in line]
    assert collectives and not any("5x5" in line for line in collectives)


def test_integer_leaves_never_train():
    p = {**training.params(), "count": np.int32(3)}
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(loss_fn, allow_int=True)(state.params, batch)
        return state.apply_gradients(grads), {}

    s, _ = step(jdp.TrainState.create(p, sgd()), batch())
    assert int(s.params["count"]) == 3 and s.params["count"].dtype == np.int32


def test_an_empty_place_beside_a_frozen_parameter_is_no_leaf():
    ranks(2)
    p = {**with_frozen(), "empty": None}
    s = jdp.TrainState.create(p, sgd(), trainable=lambda path, leaf: path != "['frozen']")
    s, _ = jdp.train_step(frozen_step)(s, batch())
    assert s.params["empty"] is None


def biased_step(state, batch):
    def loss_fn_of(p):
        return loss_fn(p, batch) + jnp.sum(p["none"]) + jnp.sum(p["no rows"] @ batch["x"].T)

    loss, grads = jax.value_and_grad(loss_fn_of)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


# JAX 0.11.2 crashes where it compiles a shard_map with such an argument.
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parameters_without_elements_train_beside_others(num_ranks):
    def make_state(has_empty=True):
        empty = {"none": np.zeros((3, 0), np.float32), "no rows": np.zeros((0, 5), np.float32)}
        return jdp.TrainState.create({**training.params(), **(empty if has_empty else {})}, sgd())

    step = jdp.train_step(biased_step)
    several, metrics = train(num_ranks, step, make_state)
    want, _ = train(1, jdp.train_step(plain_step), lambda: make_state(has_empty=False))
    assert (several.params.pop("none").shape, several.params.pop("no rows").shape) == (
        (3, 0),
        (0, 5),
    )
    assert_close(several.params, want.params)


def test_a_parameter_that_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"params\['f'\]` is a .*eqx\.partition"):
        jdp.TrainState.create({**training.params(), "f": jnp.tanh}, sgd())


def test_a_model_of_flax_in_a_state_is_told_where_it_belongs():
    options: Any = {"apply_fn": print, "params": {"w": jnp.ones(2)}, "tx": optax.sgd(0.1)}
    with pytest.raises(TypeError, match=r"no apply_fn.*\n.*jdp\.TrainState\.create\(params, "):
        jdp.TrainState.create(**options)


def test_a_state_can_be_copied():
    again = copy.deepcopy(state())
    assert again.tx.axis_name == "data"


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="3 leaves, .*trainable="):
        state(trainable=False)


def test_paths_that_a_function_gets_are_shown_if_it_selects_none():
    with pytest.raises(ValueError, match=r"\['b'\].*\['v'\].*\['w'\]"):
        state(trainable=lambda path, leaf: path == "w")


@pytest.mark.parametrize("trainable", [{"q": True}, ["w"], {"w": {"x": True}}])
def test_a_tree_of_what_trains_that_is_not_like_params_is_refused(trainable):
    with pytest.raises(ValueError, match=re.escape(f"trainable={trainable!r} ")):
        state(trainable=trainable)


def test_parameters_in_the_place_of_the_optimizer_are_told_from_one():
    with pytest.raises(TypeError, match="tx is a dict.*parameters first"):
        jdp.TrainState.create(sgd(), params())


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match="seed.*-1"):
        state(seed=-1)


def test_keys_differ_by_rank_and_step_and_shared_ones_only_by_step():
    ranks(4)

    @jdp.train_step
    def step(state, batch):
        own = lax.all_gather(jax.random.key_data(state.key), "data")
        shared = lax.all_gather(jax.random.key_data(state.shared_key), "data")
        new, _ = plain_step(state, batch)
        return new, {"own": own, "shared": shared}

    seen = set()
    for seed in (0, 1):
        s = state(seed=seed)
        for _ in range(2):
            s, metrics = step(s, batch())
            own = {tuple(key) for key in np.asarray(metrics["own"])}
            shared = {tuple(key) for key in np.asarray(metrics["shared"])}
            assert (len(own), len(shared)) == (4, 1)
            assert not seen & (own | shared)
            seen |= own | shared


def test_the_key_of_a_rank_does_not_depend_on_the_number_of_ranks():
    @jdp.train_step
    def step(state, batch):
        mine = jax.random.key_data(state.key)[None]
        first = lax.all_gather(mine, "data", tiled=True)[:2]
        return plain_step(state, batch)[0], {"keys": first}

    def keys(n):
        ranks(n)
        return np.asarray(step(state(), batch())[1]["keys"])

    np.testing.assert_array_equal(keys(2), keys(8))


def test_outside_of_a_step_the_key_is_that_of_rank_0():
    s = state()
    np.testing.assert_array_equal(
        jax.random.key_data(s.key),
        jax.random.key_data(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 1)),
    )


def test_replace_changes_one_field():
    s = state().replace(model_state={"mean": np.zeros(2)})
    assert s.model_state["mean"].shape == (2,)


@dataclasses.dataclass(frozen=True)
class WithAverage(jdp.TrainState):
    average: Any = None


jax.tree_util.register_dataclass(
    WithAverage,
    data_fields=["step", "params", "opt_state", "model_state", "seed", "average"],
    meta_fields=["tx", "trainable"],
)


@pytest.mark.parametrize("stage", [0, 3])
def test_apply_gradients_replaces_other_fields_as_that_of_flax_does(stage):
    ranks(2)
    wrapped = jdp.sharded(optax.sgd(0.1), stage=3, min_size=1) if stage else sgd()
    old = WithAverage.create(training.params(), wrapped, model_state=np.zeros(3))

    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        mean = jdp.mean_over_ranks(batch["x"].mean(0))[:3]
        return state.apply_gradients(grads, model_state=mean, average=state.params), {}

    new, _ = jdp.train_step(step)(old, batch())
    np.testing.assert_allclose(new.model_state, batch()["x"].mean(0)[:3], rtol=1e-5)
    assert_close(jax.device_get(new.average), training.params(), tolerance=0)
    grads = jax.grad(loss_fn)(training.params(), batch())
    want = jax.tree.map(lambda p, g: p - 0.1 * g, training.params(), grads)
    assert_close(jax.device_get(new.params), want, tolerance=1e-6)


PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())


@pytest.mark.parametrize(
    ("tx", "keyword", "named"),
    [
        (optax.sgd(0.1), "model_stats", "Write model_state="),
        (optax.sgd(0.1), "value", "Leave it out"),
        (optax.adam(0.1), "batch_stats", "model_state, seed"),
        (optax.lbfgs(), "params", r"\.replace\(params="),
        (PLATEAU, "step", r"\.replace\(step="),
    ],
)
def test_a_keyword_of_apply_gradients_without_effect_is_refused(tx, keyword, named):
    s = jdp.TrainState.create(training.params(), jdp.replicated(tx))
    with pytest.raises(TypeError, match=f"apply_gradients got {keyword}=.*{named}"):
        s.apply_gradients(training.params(), **{keyword: 1.0})


@pytest.mark.parametrize("tx", [PLATEAU, optax.MultiSteps(PLATEAU, 2)], ids=["chain", "steps"])
def test_a_keyword_that_an_optimizer_reads_is_handed_to_it(tx):
    s = jdp.TrainState.create(training.params(), jdp.replicated(tx))
    s = s.apply_gradients(training.params(), value=jnp.float32(1.0), model_state=3)
    assert s.model_state == 3 and s.step == 1


def test_apply_gradients_without_a_step_is_one_rank():
    grads = jax.grad(loss_fn)(training.params(), batch())
    got = state(jdp.replicated(optax.sgd(0.1))).apply_gradients(grads).params
    want = jax.tree.map(lambda p, g: p - 0.1 * g, training.params(), grads)
    assert_close(jax.device_get(got), jax.device_get(want), tolerance=1e-6)


# Beside Adam, which is traced: one that keeps the parameters themselves, and one that asks for
# their values, which only an array has.
KEEPS = optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s))
ASKS = optax.GradientTransformation(
    lambda p: jax.tree.map(lambda x: jnp.float32(float(jnp.sum(x))), p), lambda g, s, p=None: (g, s)
)


@pytest.mark.parametrize("tx", [optax.adam(0.1), KEEPS, ASKS], ids=["adam", "keeps", "asks"])
def test_the_optimizer_begins_with_what_its_init_gives_on_every_rank(tx):
    mesh = jdp.init(cpu_ranks=3)
    created = jdp.TrainState.create(training.params(), jdp.replicated(tx))
    expected = tx.init(jax.tree.map(jnp.asarray, training.params()))
    assert jax.tree.structure(created.opt_state) == jax.tree.structure(expected)
    for ours, theirs in zip(
        jax.tree.leaves(created.opt_state), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype and ours.weak_type == theirs.weak_type
        assert ours.sharding == NamedSharding(mesh, PartitionSpec())


def test_an_init_that_fails_fails_with_its_own_error():
    def init(params):
        raise KeyError("no such parameter")

    jdp.init(cpu_ranks=2)
    tx = jdp.replicated(optax.GradientTransformation(init, lambda g, s, p=None: (g, s)))
    with pytest.raises(KeyError, match="no such parameter"):
        jdp.TrainState.create(training.params(), tx)


def test_lies_on_the_mesh_of_init():
    mesh = ranks(3)
    for leaf in jax.tree.leaves(state()):
        assert leaf.sharding.mesh == mesh and leaf.sharding.is_fully_replicated


# Weights


def masked_step(state, batch):
    loss, grads = jdp.value_and_grad(masked_loss)(state.params, batch)
    stats = jdp.mean_over_ranks((batch["x"] * batch["mask"][:, None]).sum(0) / batch["mask"].sum())
    return state.apply_gradients(grads).replace(model_state=stats), {"loss": loss}


def masked_and_accumulated(state, batch):
    loss, grads = jdp.value_and_grad(masked_loss, accumulate=3)(state.params, batch)
    total = jdp.sum_over_ranks((batch["x"] * batch["mask"][:, None]).sum(0))
    stats = total / jdp.sum_over_ranks(batch["mask"].sum())
    return state.apply_gradients(grads).replace(model_state=stats), {"loss": loss}


@pytest.mark.parametrize("program", [masked_step, masked_and_accumulated])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_weighted_steps_equal_one_rank_on_the_rows_that_count(program, n):
    # The last rows are masked: with 8 ranks whole ranks, and micro-batches, count nothing.
    def make_batch(seed):
        mask = np.arange(24) < (7, 24, 1)[seed % 3]
        return {**batch(seed), "mask": mask}

    def make_state():
        return state(model_state=np.zeros(5, np.float32))

    step = jdp.train_step(program, weight=lambda batch: batch["mask"].sum())
    got = train(n, step, make_state, num_steps=3, make_batch=make_batch)

    p, tx, losses = training.params(), optax.sgd(0.1, momentum=0.9), []
    opt_state = tx.init(p)
    for i in range(3):
        rows = make_batch(i)
        rows = {k: rows[k][rows["mask"]] for k in ("x", "y")}
        loss, grads = jax.value_and_grad(loss_fn)(p, rows)
        updates, opt_state = tx.update(grads, opt_state, p)
        p = optax.apply_updates(p, updates)
        losses.append({"loss": loss})
    assert_close(got[0].params, jax.device_get(p))
    assert_close(got[1], jax.device_get(losses))
    np.testing.assert_allclose(got[0].model_state, rows["x"].mean(0), rtol=1e-5, atol=1e-6)


def test_a_batch_of_which_nothing_counts_changes_no_parameter():
    ranks(2)
    step = jdp.train_step(masked_step, weight=lambda batch: batch["mask"].sum())
    s = state(jdp.replicated(optax.sgd(0.1)), model_state=np.zeros(5, np.float32))
    s, _ = step(s, {**batch(), "mask": np.zeros(24, bool)})
    assert_close(jax.device_get(s.params), training.params(), tolerance=0)


def test_a_weight_for_each_row_is_refused():
    ranks(2)
    step = jdp.train_step(masked_step, weight=lambda batch: batch["mask"])
    with pytest.raises(ValueError, match=r"bool\[12\].*JDP126"):
        step(state(), {**batch(), "mask": np.ones(24, bool)})


def test_metrics_are_averaged_by_one_collective_and_summed_and_joined():
    ranks(4)

    @jdp.eval_step
    def measure(p, batch):
        errors = training.predict(p, batch["x"]) - batch["y"]
        return {
            "mse": jnp.mean(errors**2),
            "mae": jnp.abs(errors).mean(),
            "bias": errors.mean(),
            "half": errors.mean().astype(jnp.bfloat16),
            "rows": jdp.rows({"error": errors[:, 0], "index": batch["index"]}),
            "large": jdp.sum_over_ranks((jnp.abs(errors) > 1).sum()),
            "histogram": jdp.sum_over_ranks(jnp.histogram(errors, 4, (-2, 2))[0]),
        }

    rows = {**batch(), "index": np.arange(24)}
    metrics = jax.device_get(measure(training.params(), rows))
    errors = np.asarray(training.predict(training.params(), rows["x"]) - rows["y"])
    np.testing.assert_allclose(metrics["mse"], (errors**2).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["mae"], np.abs(errors).mean(), rtol=1e-6)
    np.testing.assert_array_equal(metrics["rows"]["index"], np.arange(24))
    np.testing.assert_allclose(metrics["rows"]["error"], errors[:, 0], rtol=1e-5, atol=1e-6)
    assert metrics["large"] == (np.abs(errors) > 1).sum()
    np.testing.assert_array_equal(metrics["histogram"], np.histogram(errors, 4, (-2, 2))[0])
    assert metrics["half"].dtype == jnp.bfloat16
    # One for the four means, one for each of the two sums, one that finds overflows of integers.
    assert measure.lower(training.params(), rows).as_text().count("all_reduce") == 4


@pytest.mark.parametrize(
    "metric, message",
    [
        (lambda b: (b["x"] > 0).sum(), r"metrics\['m'\]` int32\[\].*sum_over_ranks"),
        (lambda b: b["x"], r"metrics\['m'\]` float32\[12, 5\].*jdp\.rows"),
        (lambda b: b["x"].mean(0), r"metrics\['m'\]` float32\[5\].*mean_over_ranks"),
    ],
)
def test_other_metrics_that_differ_between_ranks_are_refused(metric, message):
    ranks(2)
    step = jdp.train_step(lambda s, b: (plain_step(s, b)[0], {"m": metric(b)}))
    with pytest.raises(ValueError, match=message):
        step(state(), batch())


def test_rows_of_another_length_are_refused():
    ranks(2)
    step = jdp.eval_step(lambda s, b: jdp.rows(b["x"][:3]))
    with pytest.raises(ValueError, match=r"float32\[3, 5\].*12 here"):
        step(None, batch())


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda grads: (jnp.float32(0), grads), r" tuple .* 4 \(`\[0\]`, "),
        (lambda grads: {"w": grads["w"]}, r" dict .* 1 \(`\['w'\]`\); params"),
    ],
    ids=["with the loss", "of a part"],
)
def test_gradients_that_are_another_tree_than_params_are_named(wrong, message, tx):
    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients(wrong(jax.grad(loss_fn)(state.params, batch))), {}

    ranks(2)
    with pytest.raises(ValueError, match=message):
        step(state(jdp.replicated(tx)), batch())


def test_a_model_in_place_of_its_params_is_told_what_to_write():
    with pytest.raises(TypeError, match=r'a function.*model\.init\(key, x\)\["params"\]'):
        jdp.TrainState.create(loss_fn, sgd())


def test_the_repr_of_a_state_is_one_short_line_also_when_it_was_donated():
    ranks(2)
    p = {"w": np.ones((200, 300), np.float32), "b": np.ones(5, np.float32)}
    s = jdp.TrainState.create(p, sgd())
    assert "step=0" in repr(s) and "2 leaves, 60,005 numbers" in repr(s)
    assert len(repr(s)) < 200 and "\n" not in repr(s)
    jax.tree.map(lambda x: x.delete(), s)
    assert "2 leaves, 60,005 numbers" in repr(s)


@pytest.mark.parametrize(
    "take",
    [lambda seed: state(seed=seed), lambda seed: jdp.Sampler(8, 4, seed=seed)],
    ids=["state", "sampler"],
)
def test_a_random_key_as_seed_is_refused_with_what_to_write(take):
    with pytest.raises(TypeError, match=r"seed=0.*seed=int\(jax\.random\.bits\(key\)\)"):
        take(jax.random.key(0))
    take(int(jax.random.bits(jax.random.key(0))))
