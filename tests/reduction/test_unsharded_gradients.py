"""At stages 2 and 3 the author sees means, also of the gradients that stay whole."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support.training import ranks, step_of

import jdp
from jdp import collectives

RATE = 2.0**-10
# Row i has the gradient i in every element of every leaf, so that all means are exact.
ROWS = {"x": np.arange(48, dtype=np.float32) * 48, "weight": np.arange(48) % 3 > 0}
SIZES = {"w": (24, 8), "b": (7,), "c": (), "v": (8, 48), "d": (7,)}
LONG = SIZES | {"long": (16_385, 1)}  # 4 bytes more than may go along


def loss_fn(params, batch):
    kept = jnp.where(batch["weight"] > 0, batch["x"], 0).sum() / batch["weight"].sum()
    return kept * sum(leaf.sum() for leaf in jax.tree.leaves(params))


def state_of(sizes=SIZES, *, trainable=None, **options):
    params = {name: jnp.zeros(shape) for name, shape in sizes.items()}
    tx = jdp.sharded(optax.sgd(RATE), **{"min_size": 8, **options})
    return jdp.TrainState.create(params, tx, trainable=trainable)


def largest_difference(grads, want):
    """Of any element of any gradient, as this rank sees it."""
    return jnp.stack([jnp.abs(x - want).max() for x in jax.tree.leaves(grads)]).max()


def stepping(want, *, weight=None, **options):
    """A step that returns how far its gradients are from `want` on the rank where they are most."""

    @jdp.train_step(weight=weight)
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn, **options)(state.params, batch)
        of_ranks = jax.lax.pmax(largest_difference(grads, want), "data")
        return state.apply_gradients(grads), {"loss": loss, "difference": of_ranks}

    return step


def assert_trained(params, want, num_steps=1):
    """Every rank has the parameters of one device."""
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            got = np.asarray(shard.data, np.float32)
            np.testing.assert_array_equal(got, np.full(got.shape, -want * RATE * num_steps))


def rows(weighed=False):
    weight = ROWS["weight"] if weighed else np.ones(48)
    return {"x": ROWS["x"], "weight": weight.astype(np.float32)}


@pytest.mark.parametrize(
    ("n", "stage", "sizes", "options"),
    [
        (1, 2, SIZES, {}),
        (2, 2, SIZES, {}),
        (2, 2, SIZES, {"all_reduce": collectives.xla}),
        (8, 2, SIZES, {"reduce_dtype": jnp.float32}),
        (3, 2, LONG, {}),
        (2, 3, LONG, {"all_reduce": collectives.ring}),
        (3, 3, SIZES, {}),
        (8, 3, SIZES, {"keep_gathered": True}),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_gradient_is_the_mean_on_every_rank(n, stage, sizes, options, accumulate):
    ranks(n)
    want, state = ROWS["x"].mean(), state_of(sizes, stage=stage, **options)
    step = stepping(want, accumulate=accumulate)
    for i in range(2):
        state, metrics = step(state, rows())
        # On one rank a gradient is that of all rows however it is reduced.
        assert float(metrics["difference"]) == 0
        assert_trained(state.params, want, num_steps=i + 1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_count_by_their_weights(stage, accumulate):
    ranks(3)
    batch = rows(weighed=True)
    want = ROWS["x"][ROWS["weight"]].mean()
    step = stepping(want, weight=lambda batch: batch["weight"].sum(), accumulate=accumulate)
    state, metrics = step(state_of(stage=stage), batch)
    assert float(metrics["difference"]) <= 1e-4 * want
    for leaf in jax.tree.leaves(state.params):
        np.testing.assert_allclose(leaf, np.full(leaf.shape, -want * RATE), rtol=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_over_a_part_of_the_axes_they_are_means_over_all_ranks(stage):
    mesh = jax.make_mesh(
        (2, 2), ("outer", "inner"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    axes = ("outer", "inner")
    jdp.init(mesh, axis_name=axes)
    want = ROWS["x"].mean()

    @jdp.train_step(axis_name=axes)
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn, axis_name=axes)(state.params, batch)
        difference = jax.lax.pmax(largest_difference(grads, want), axes)
        return state.apply_gradients(grads), {"loss": loss, "difference": difference}

    state = state_of(stage=stage, over="inner", axis_name=axes)
    state, metrics = step(state, rows())
    assert float(metrics["difference"]) == 0
    assert_trained(state.params, want)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_norm_by_hand_is_that_of_one_device_and_no_warning(stage):
    ranks(3)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda x: x * jnp.minimum(1, 8 / norm), grads)
        return state.apply_gradients(grads), {"loss": loss, "norm": norm}

    state, metrics = step(state_of(stage=stage), rows())
    want = ROWS["x"].mean() * np.sqrt(sum(np.prod(shape) for shape in SIZES.values()))
    np.testing.assert_allclose(metrics["norm"], want, rtol=1e-6)
    for leaf in jax.tree.leaves(state.params):
        clipped = -RATE * 8 / want * ROWS["x"].mean()
        np.testing.assert_allclose(leaf, np.full(leaf.shape, clipped), rtol=1e-6)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("sizes", "num_more"), [(SIZES, 0), (LONG, 1)])
def test_gradients_and_loss_take_one_call_if_they_are_small(stage, sizes, num_more):
    ranks(2)
    text = step_of(loss_fn).lower(state_of(sizes, stage=stage), rows()).as_text()
    calls = re.findall(r"stablehlo.custom_call @jdp_(all_reduce|reduce_scatter)\(", text)
    assert sorted(calls) == ["all_reduce"] * num_more + ["reduce_scatter"]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("doubled", "options"),
    [("b", {}), ("w", {}), ("wbcvd", {}), ("wbcvd", {"synced": True})],
    ids=str,
)
def test_gradients_may_be_changed_and_handed_on_as_means(stage, doubled, options):
    ranks(3)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        grads |= {name: grads[name] * 2 for name in doubled}
        return state.apply_gradients(grads, **options), {"loss": loss}

    state, _ = step(state_of(stage=stage), rows())  # a warning is an error in tests
    for name, leaf in state.params.items():
        assert_trained([leaf], ROWS["x"].mean() * (2 if name in doubled else 1))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_mean_is_not_summed_once_more(stage):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        _, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        whole = {"b": grads["b"]}
        return state.replace(params={**state.params, **jdp.sync_gradients(whole, mean=False)}), {}

    with pytest.raises(ValueError, match=r"grads\['b'\].* already the mean over ranks"):
        step(state_of(stage=stage), rows())


def test_gradients_of_single_rows_stay_those_of_the_rank():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        def of_row(x):
            def loss_fn(params, x):
                return x * sum(leaf.sum() for leaf in jax.tree.leaves(params))

            return jdp.value_and_grad(loss_fn)(state.params, x)[1]

        grads = jax.tree.map(lambda x: x.mean(0), jax.vmap(of_row)(batch["x"]))
        return state.apply_gradients(grads), {}

    state, _ = step(state_of(stage=2), rows())
    assert_trained(state.params, ROWS["x"].mean())


NOTHING_IS_SPLIT = {
    "all are small": {"min_size": 4096},
    "those that are large do not train": {"trainable": {name: name in "bcd" for name in SIZES}},
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", NOTHING_IS_SPLIT.values(), ids=NOTHING_IS_SPLIT)
def test_they_are_means_where_nothing_is_split(stage, accumulate, options):
    ranks(3)
    shifted = rows() | {"x": ROWS["x"] - 1000}  # negative on the first rank
    want, names = shifted["x"].mean(), "bcd" if "trainable" in options else SIZES

    @jdp.train_step
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, batch)
        own = {name: grads[name] for name in names}
        of_ranks = jax.lax.pmax(largest_difference(own, want), "data")
        # The sign of a mean is not the mean of the signs.
        grads = jax.tree.map(jnp.sign, grads)
        return state.apply_gradients(grads), {"loss": loss, "difference": of_ranks}

    state, metrics = step(state_of(stage=stage, **options), shifted)
    assert float(metrics["difference"]) == 0
    assert_trained({name: state.params[name] for name in names}, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_in_a_tree_of_small_leaves_alone_they_are_means(stage):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        small = {name: state.params[name] for name in "bcd"}
        _, grads = jdp.value_and_grad(loss_fn)(small, batch)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        return state.apply_gradients({**zeros, **grads}, synced=True), {}

    state, _ = step(state_of(stage=stage), rows())
    assert_trained({name: state.params[name] for name in "bcd"}, ROWS["x"].mean())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("unread", ["b", "bcd"])
def test_a_leaf_that_the_loss_does_not_read_takes_no_call(stage, unread):
    ranks(2)

    def loss_of_others(params, batch):
        return loss_fn({name: x for name, x in params.items() if name not in unread}, batch)

    state, step = state_of(stage=stage), step_of(loss_of_others)
    with pytest.warns(UserWarning, match="does not depend on"):
        text = step.lower(state, rows()).as_text()
        state, _ = step(state, rows())
    assert re.findall(r"@jdp_(all_reduce|reduce_scatter)\(", text) == ["reduce_scatter"]
    for name, leaf in state.params.items():
        assert_trained([leaf], 0 if name in unread else ROWS["x"].mean())


@pytest.mark.parametrize("stage", [2, 3])
def test_they_are_not_sent_by_sync_gradients(stage):
    ranks(2)

    def stepping(average):
        @jdp.train_step
        def step(state, batch):
            loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
            grads = average(grads)
            return state.apply_gradients(grads, synced=True), {"norm": optax.tree.norm(grads)}

        return step

    texts = [
        stepping(average).lower(state_of(stage=stage), rows()).as_text()
        for average in (lambda grads: grads, jdp.sync_gradients)
    ]
    of_jdp = [re.findall(r"@jdp_(all_reduce|reduce_scatter|all_gather)\(", x) for x in texts]
    assert of_jdp[0] == of_jdp[1]
    state, metrics = stepping(jdp.sync_gradients)(state_of(stage=stage), rows())
    assert_trained(state.params, ROWS["x"].mean())


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["b", "w"])
def test_another_weight_is_refused_where_it_would_do_nothing(stage, name):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        _, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        weight = jnp.where(batch["x"][0] > 0, 3.0, 1.0)
        changed = jdp.sync_gradients({name: grads[name] * 2}, weight=weight)
        return state.apply_gradients({**grads, **changed}, synced=True), {}

    with pytest.raises(ValueError, match=rf"grads\['{name}'\].* another weight= has no effect"):
        step(state_of(stage=stage), rows())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_in_an_eval_step_gradients_are_those_of_the_rank(stage):
    ranks(3)

    @jdp.eval_step
    def measure(state, batch):
        _, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        own = batch["x"].mean()
        return {"difference": jax.lax.pmax(largest_difference(grads, own), "data")}

    tx = jdp.sharded(optax.sgd(RATE), stage=stage, min_size=8) if stage else None
    params = {name: jnp.zeros(shape) for name, shape in SIZES.items()}
    state = jdp.TrainState.create(params, tx or jdp.replicated(optax.sgd(RATE)))
    assert float(measure(state, rows())["difference"]) == 0


def in_a_scan(differentiate, params, batch):
    return jax.lax.scan(lambda c, _: (c, differentiate(params, batch)[1]), 0, None, length=1)[1]


def in_a_cond(differentiate, params, batch):
    grads = lambda: differentiate(params, batch)[1]  # noqa: E731
    return jax.lax.cond(params["c"] > -1, grads, grads)


PLACES = {
    "jit": lambda f, params, batch: jax.jit(f)(params, batch)[1],
    "checkpoint": lambda f, params, batch: jax.checkpoint(f)(params, batch)[1],
    "scan": lambda f, params, batch: jax.tree.map(lambda x: x[0], in_a_scan(f, params, batch)),
    "cond": in_a_cond,
    "copies": lambda f, params, batch: f(jax.tree.map(lambda x: x * 1, params), batch)[1],
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("grads_of", PLACES.values(), ids=PLACES)
def test_in_a_function_of_the_author_they_stay_local_and_are_averaged_later(stage, grads_of):
    ranks(3)

    @jdp.train_step
    def step(state, batch):
        grads = grads_of(jdp.value_and_grad(loss_fn), state.params, batch)
        difference = jax.lax.pmax(largest_difference(grads, batch["x"].mean()), "data")
        return state.apply_gradients(grads), {"difference": difference}

    state, metrics = step(state_of(stage=stage), rows())
    assert float(metrics["difference"]) == 0
    assert_trained(state.params, ROWS["x"].mean())
