"""Steps with `weight=` whose loss reaches over ranks train as one rank does on all rows."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from support.per_rank import per_rank
from support.ranks_rows import count_rows as count

import jdp

ROWS = 4  # of a rank
# How many rows of each rank count.
COUNTS = {2: (4, 1), 3: (3, 0, 1), 4: (2, 4, 0, 1)}
ranks = pytest.mark.parametrize("n", list(COUNTS))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def params():
    draw = np.random.default_rng(1).normal
    return {"w": draw(size=(3, 2)), "b": draw(size=2)}


def rows(n, bad=0.0):
    """The batch of n ranks; what does not count is `bad`."""
    draw = np.random.default_rng(0).normal
    mask = np.concatenate([np.arange(ROWS) < count for count in COUNTS[n]])
    x, y = draw(size=(n * ROWS, 3)), draw(size=(n * ROWS, 2))
    return {"x": np.where(mask[:, None], x, bad), "y": y, "mask": mask}


def predict(p, x):
    return jnp.tanh(x @ p["w"]) + p["b"]


def mean(values, batch):
    """The mean over the rows that count, 0 where none does."""
    mask = batch["mask"].reshape(-1, *[1] * (values.ndim - 1))
    return jnp.sum(jnp.where(mask, values, 0), axis=0) / jnp.maximum(count(batch), 1)


def masked(p, batch):
    return mean(((predict(p, batch["x"]) - batch["y"]) ** 2).sum(1), batch)


# Losses that reach over ranks. Where no axis is bound each of them is that of one rank.


def normalised(p, batch, average=jdp.mean_over_ranks):
    z = predict(p, batch["x"])
    centre = average(mean(z, batch))
    variance = average(mean((z - centre) ** 2, batch))
    return mean((((z - centre) * lax.rsqrt(variance + 0.1) - batch["y"]) ** 2).sum(1), batch)


def in_a_scan(p, batch):
    def body(carry, w):
        z = jnp.tanh(batch["x"] @ w * carry)
        return carry + jdp.mean_over_ranks(mean(z, batch)), None

    stacked = jnp.stack([p["w"], p["w"] ** 2])
    carry, _ = lax.scan(jax.checkpoint(body), p["b"], stacked)
    return mean(((batch["x"][:, :2] * carry - batch["y"]) ** 2).sum(1), batch)


def under_vmap(p, batch):
    def of_model(scale):
        return normalised({**p, "w": scale * p["w"]}, batch)

    return jnp.mean(jax.vmap(of_model)(jnp.array([1.0, 0.5])))


def by_totals(p, batch):
    z = predict(p, batch["x"])
    total, num = jdp.sum_over_ranks((mean(z, batch) * count(batch), count(batch)))
    return mean(((z - total / num) ** 2 * batch["y"]).sum(1), batch)


def by_another_weight(p, batch):
    z = predict(p, batch["x"])
    centre = jdp.mean_over_ranks(mean(z, batch), weight=count(batch) ** 2)
    return mean((z - centre) ** 4, batch).sum()


def one_of_another_weight(p, batch):
    # The same on one rank: what counts there are the squares of the parts' counts.
    z, parts = predict(p, batch["x"]), batch["mask"].reshape(-1, ROWS).sum(1)
    each = jnp.where(batch["mask"][:, None], z, 0).reshape(-1, ROWS, 2).sum(1)
    means = each / jnp.maximum(parts, 1)[:, None]
    centre = (parts**2) @ means / (parts**2).sum()
    return mean((z - centre) ** 4, batch).sum()


def adapted(p, batch, **options):
    """MAML: the loss after a step of the whole batch."""
    grads = jdp.sync_gradients(jax.grad(masked)(p, batch), **options)
    return masked(jax.tree.map(lambda x, g: x - 0.3 * g, p, grads), {**batch, "y": batch["y"] ** 2})


def adapted_twice(p, batch):
    for _ in range(2):
        grads = jdp.sync_gradients(jax.grad(normalised)(p, batch))
        p = jax.tree.map(lambda x, g: x - 0.3 * g, p, grads)
    return normalised(p, batch)


def adapted_by_the_sum(p, batch):
    return adapted(p, batch, mean=False)


def one_of_the_sum(p, batch):
    grads = jax.grad(masked)(p, batch)
    p = jax.tree.map(lambda x, g: x - 0.3 * count(batch) * g, p, grads)
    return masked(p, {**batch, "y": batch["y"] ** 2})


def with_a_penalty(p, batch):
    """Differentiated twice, both times over ranks."""
    slope = jax.grad(lambda w: normalised({**p, "w": w}, batch))(p["w"])
    return normalised(p, batch) + jnp.sum(jdp.mean_over_ranks(slope) ** 2)


def layer(x, w):
    return jnp.tanh(x @ w), None


def adapted_layers(p, batch, late=True):
    """MAML through gradients that the backward loop has averaged."""

    def loss(layers):
        carry, _ = jdp.scan_layers(layer, batch["x"], layers, late=late)
        return mean(((carry[:, :2] - batch["y"]) ** 2).sum(1), batch)

    layers = jnp.stack([jnp.pad(p["w"], ((0, 0), (0, 1))), p["w"] @ p["w"].T])
    grads = jax.grad(loss)(layers)
    layers -= 0.3 * jdp.sync_gradients(grads)
    carry = jnp.tanh(jnp.tanh(batch["x"] @ layers[0]) @ layers[1])
    return mean(((carry[:, :2] + p["b"] - batch["y"]) ** 2).sum(1), batch)


def forward_over_reverse(p, batch):
    """A Hessian-vector product, of which each rank hands on its own part."""
    slope = jax.grad(lambda w: normalised({**p, "w": w}, batch))
    return jnp.sum(jdp.mean_over_ranks(jax.jvp(slope, (p["w"],), (p["w"],))[1]) ** 2)


LOSSES = {
    "batch statistics": (normalised, normalised),
    "batch statistics, jitted": (jax.jit(normalised), normalised),
    "batch statistics, rematerialized": (jax.checkpoint(normalised), normalised),
    "in a scan": (in_a_scan, in_a_scan),
    "under vmap": (under_vmap, under_vmap),
    "totals": (by_totals, by_totals),
    "another weight": (by_another_weight, one_of_another_weight),
    "MAML": (adapted, adapted),
    "MAML, ring": (lambda p, b: adapted(p, b, all_reduce=jdp.collectives.ring), adapted),
    "MAML, psum": (lambda p, b: adapted(p, b, all_reduce=jdp.collectives.xla), adapted),
    "MAML of two steps": (adapted_twice, adapted_twice),
    "MAML by the sum": (adapted_by_the_sum, one_of_the_sum),
    "MAML of late layers": (adapted_layers, functools.partial(adapted_layers, late=False)),
    "forward over reverse": (forward_over_reverse, forward_over_reverse),
    "a penalty on the slope": (with_a_penalty, with_a_penalty),
}


def step_of(loss, weight=count, **options):
    @jdp.train_step(weight=weight)
    def step(state, batch):
        value, grads = jdp.value_and_grad(loss, **options)(state.params, batch)
        return state.apply_gradients(grads), {"loss": value}

    return step


def trained(n, step, batch):
    """The loss, and the gradient as every rank has it."""
    jdp.init(devices=jax.devices()[:n])
    state = jdp.TrainState.create(params(), jdp.replicated(optax.sgd(1.0)))
    new, metrics = step(state, batch)
    per_rank = [
        jax.tree.map(lambda x, r=r: np.asarray(x.addressable_shards[r].data), new.params)
        for r in range(n)
    ]
    for rank in per_rank[1:]:
        jax.tree.map(np.testing.assert_array_equal, rank, per_rank[0])
    return metrics["loss"], jax.tree.map(lambda old, new: old - new, params(), per_rank[0])


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)


@pytest.mark.parametrize(
    ("n", "loss", "on_one"),
    [
        *(pytest.param(4, *LOSSES[name], id=name) for name in LOSSES),
        *(pytest.param(n, f, f, id=f"{n} ranks") for n in (2, 3) for f in (normalised, adapted)),
    ],
)
def test_a_loss_over_ranks_has_the_gradient_of_one_rank(n, loss, on_one):
    want = jax.value_and_grad(on_one)(params(), rows(n))
    assert_equal(trained(n, step_of(loss), rows(n)), want)


@pytest.mark.parametrize("loss", [normalised, adapted, by_totals])
def test_micro_batches_weigh_by_their_own_shares(loss):
    # Each micro-batch has statistics of its own: its rows of all ranks.
    n, k = 4, 2
    batch = rows(n)

    def on_one(p):
        split = jax.tree.map(lambda x: x.reshape(n, k, ROWS // k, *x.shape[1:]), batch)
        parts = [
            jax.tree.map(lambda x, i=i: x[:, i].reshape(-1, *x.shape[3:]), split) for i in range(k)
        ]
        return sum(count(part) * loss(p, part) for part in parts) / count(batch)

    got = trained(n, step_of(loss, accumulate=k), batch)
    assert_equal(got, jax.value_and_grad(on_one)(params()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", [normalised, in_a_scan, by_totals, by_another_weight, adapted])
def test_what_weighs_nothing_adds_nothing_even_nan(loss, accumulate):
    clean = rows(3)
    counts = clean["mask"].reshape(3 * accumulate, -1).any(1)
    is_bad = ~np.repeat(counts, ROWS // accumulate)
    bad = {**clean, "x": np.where(is_bad[:, None], np.nan, clean["x"])}
    assert is_bad.sum() >= 4
    step = step_of(loss, accumulate=accumulate)
    jax.tree.map(np.testing.assert_array_equal, trained(3, step, bad), trained(3, step, clean))


def test_a_batch_of_which_nothing_counts_has_a_gradient_of_zero():
    batch = {**rows(2), "mask": np.zeros(2 * ROWS, bool)}
    loss, grads = trained(2, step_of(normalised), batch)
    assert loss == 0 and not any(np.any(x) for x in jax.tree.leaves(grads))


# Collectives of the author's own


def gathered(p, batch):
    """Every row that counts against the rows of all ranks."""
    z = predict(p, batch["x"])
    others, counts = lax.all_gather((z, batch["mask"]), "data", tiled=True)
    scores = jnp.where(counts, z @ others.T, -1e30)
    return mean(jax.nn.logsumexp(scores, axis=1) - (z * batch["y"]).sum(1), batch)


def against_all(p, batch):
    z = predict(p, batch["x"])
    scores = jnp.where(batch["mask"], z @ z.T, -1e30)
    return mean(jax.nn.logsumexp(scores, axis=1) - (z * batch["y"]).sum(1), batch)


def summed_by_psum(p, batch):
    z, weight = predict(p, batch["x"]), count(batch)
    centre = lax.psum(mean(z, batch) * weight, "data") / lax.psum(weight, "data")
    return mean(((z - centre) ** 4).sum(1), batch)


def by_pmean(p, batch):
    return normalised(p, batch, average=lambda x: lax.pmean(x, "data"))


def by_neighbours(p, batch):
    n = lax.axis_size("data")
    shared = lax.ppermute(
        mean(predict(p, batch["x"]), batch), "data", [(i, (i + 1) % n) for i in range(n)]
    )
    return mean(((predict(p, batch["x"]) - shared) ** 2).sum(1), batch)


def by_all_to_all(p, batch):
    n = lax.axis_size("data")
    there = lax.all_to_all(predict(p, batch["x"])[: n * (ROWS // n)], "data", 0, 0, tiled=True)
    return masked(p, batch) + jnp.sum(there**2)


def by_scattered_sums(p, batch):
    return masked(p, batch) + jnp.sum(
        lax.psum_scatter(jnp.tile(p["b"], 2) * count(batch), "data", tiled=True) ** 2
    )


def by_a_rule(p, batch):
    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "data"),))
    return masked({**p, "b": scaled(p["b"])}, batch)


def by_a_sum_of_ours(p, batch):
    ((total,),) = jdp.collectives.native([[p["b"] * count(batch)]], "data")
    return masked(p, batch) + jnp.sum(total**2)


def in_a_nested_loop(p, batch):
    def body(carry, w):
        return jax.jit(jax.checkpoint(summed_by_psum))({**p, "w": w * carry}, batch), None

    return lax.scan(body, jnp.ones(()), jnp.stack([p["w"], p["w"]]))[0]


RAW = {
    "all_gather": gathered,
    "psum": summed_by_psum,
    "pmean": by_pmean,
    "ppermute": by_neighbours,
    "all_to_all": by_all_to_all,
    "psum_scatter": by_scattered_sums,
    "a backward rule": by_a_rule,
    "native": by_a_sum_of_ours,
    "in a loop": in_a_nested_loop,
    "jitted": jax.jit(summed_by_psum),
    "rematerialized": jax.checkpoint(summed_by_psum),
    "under vmap": lambda p, b: jax.vmap(lambda s: summed_by_psum({**p, "w": p["w"] * s}, b))(
        jnp.ones(2)
    ).sum(),
    "under cond": lambda p, b: lax.cond(p["b"].sum() < 9, summed_by_psum, masked, p, b),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", list(RAW.values()), ids=list(RAW))
def test_a_collective_whose_transpose_does_not_weigh_is_refused_by_line(loss, accumulate):
    with pytest.raises(
        ValueError, match=r"at test_weighted_gradients.py:\d+ .*jdp.train_step\(weight=\).*JDP124"
    ):
        trained(2, step_of(loss, accumulate=accumulate), rows(2))


def test_weights_of_micro_batches_alone_are_refused_too():
    for loss in (summed_by_psum, normalised):
        with pytest.raises(ValueError, match=r"jdp\.value_and_grad\(weight="):
            trained(2, own_weight(loss), rows(2))


def own_weight(loss):
    @jdp.train_step
    def step(state, batch):
        value, grads = jdp.value_and_grad(loss, accumulate=2, weight=count)(state.params, batch)
        return state.apply_gradients(grads), {"loss": value}

    return step


def undifferentiated(p, batch):
    """Collectives of what is counted, stopped or reported, also where it is computed again."""

    @jax.checkpoint
    def loss(p):
        num = lax.psum(count(batch), "data")
        centre = lax.stop_gradient(lax.psum(mean(predict(p, batch["x"]), batch), "data"))
        others = lax.all_gather(batch["y"].mean(0), "data").mean(0)
        return mean(((predict(p, batch["x"]) - centre - others) ** 2).sum(1), batch) / num

    return lax.scan(lambda carry, s: (carry + s * loss(p), None), 0.0, jnp.arange(2.0))[0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_collectives_that_are_not_differentiated_are_allowed(accumulate):
    trained(2, step_of(undifferentiated, accumulate=accumulate), rows(2))
    trained(2, step_of(jax.jit(undifferentiated), accumulate=accumulate), rows(2))


@pytest.mark.parametrize(
    ("loss", "on_one"), [(gathered, against_all), (summed_by_psum, None), (by_pmean, None)]
)
@ranks
def test_without_a_weight_the_advised_loss_is_exact_whatever_it_reduces_by(n, loss, on_one):
    """The advice of the refusal: the mean over ranks of this loss is that of the rows."""
    batch = rows(n)
    if loss is by_pmean:
        batch["mask"][:] = np.tile(np.arange(ROWS) < 3, n)

    def advised(p, batch):
        return loss(p, batch) * count(batch) / jdp.mean_over_ranks(count(batch) * 1.0)

    oracle = on_one or (normalised if loss is by_pmean else one_centre)
    want = jax.value_and_grad(oracle)(params(), batch)
    assert_equal(trained(n, step_of(advised, weight=None), batch), want)


def one_centre(p, batch):
    z = predict(p, batch["x"])
    return mean(((z - mean(z, batch)) ** 4).sum(1), batch)


@pytest.mark.parametrize("weight", [None, count])
@pytest.mark.parametrize(
    "loss", [normalised, adapted, jax.jit(in_a_scan), undifferentiated, masked]
)
def test_a_weight_that_the_loss_did_not_know_is_refused(loss, weight):
    @jdp.train_step(weight=weight)
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        grads = jdp.sync_gradients(grads, weight=count(batch) ** 2)
        return state.apply_gradients(grads, synced=True), {"loss": value}

    if loss in (undifferentiated, masked):  # nothing in them was differentiated over ranks
        trained(2, step, rows(2))
        return
    with pytest.raises(ValueError, match=r"jdp\.sync_gradients\(weight=\).*JDP124"):
        trained(2, step, rows(2))


@pytest.mark.parametrize("inner", [normalised, masked])
def test_micro_batches_in_an_inner_gradient_are_refused_where_ranks_meet_in_them(inner):
    def loss(p, batch):
        _, grads = jdp.value_and_grad(inner, accumulate=2)(p, batch)
        grads = jdp.sync_gradients(grads)
        return masked(jax.tree.map(lambda x, g: x - 0.3 * g, p, grads), batch)

    if inner is normalised:
        with pytest.raises(ValueError, match="accumulate= and micro_batch_rows=.*JDP124"):
            trained(2, step_of(loss), rows(2))
        return

    def on_one(p, batch):
        grads = jax.grad(masked)(p, batch)
        return masked(jax.tree.map(lambda x, g: x - 0.3 * g, p, grads), batch)

    assert_equal(trained(4, step_of(loss), rows(4)), jax.value_and_grad(on_one)(params(), rows(4)))


def test_an_inner_gradient_may_have_a_weight_of_its_own():
    squared = functools.partial(adapted_by_square, on_ranks=True)
    want = jax.value_and_grad(adapted_by_square)(params(), rows(4))
    assert_equal(trained(4, step_of(squared), rows(4)), want)


def adapted_by_square(p, batch, on_ranks=False):
    """MAML, where ranks count by the square of their rows in the inner gradient."""
    if on_ranks:
        grads = jdp.sync_gradients(jax.grad(masked)(p, batch), weight=count(batch) ** 2)
    else:
        parts = [jax.tree.map(lambda x, i=i: x[i : i + ROWS], batch) for i in range(0, 16, ROWS)]
        counts = np.array(COUNTS[4]) ** 2
        many = [jax.grad(masked)(p, part) for part in parts]
        grads = jax.tree.map(
            lambda *g: jnp.tensordot(counts, jnp.stack(g), 1) / counts.sum(), *many
        )
    return masked(jax.tree.map(lambda x, g: x - 0.3 * g, p, grads), batch)


def with_batch_norm(p, batch):
    """Statistics of all rows, whether they count or not."""
    norm = nn.BatchNorm(
        use_running_average=False,
        axis_name="data",
        use_scale=False,
        use_bias=False,
        dtype=float,
        force_float32_reductions=False,
    )
    z = predict(p, batch["x"])
    stats = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
    z, _ = norm.apply({"batch_stats": stats}, z, mutable=["batch_stats"])
    return mean(((z - batch["y"]) ** 2).sum(1), batch)


def test_batch_norm_of_flax_is_refused_by_weight_and_exact_without():
    def advised(p, batch):
        return with_batch_norm(p, batch) * count(batch) / jdp.mean_over_ranks(count(batch) * 1.0)

    def on_one(p, batch):
        return jax.vmap(with_batch_norm, in_axes=(None, 0), axis_name="data")(p, batch)[0]

    with pytest.raises(ValueError, match=r"`psum` at .*JDP124"):
        trained(2, step_of(with_batch_norm), rows(2))
    whole = jax.tree.map(lambda x: x[None], rows(4))
    want = jax.value_and_grad(on_one)(params(), whole)
    assert_equal(trained(4, step_of(advised, weight=None), rows(4)), want)


def test_a_global_mean_of_a_loss_over_ranks_is_exact():
    @jdp.train_step(weight=count)
    def step(state, batch):
        loss = jdp.global_mean(lambda p: normalised(p, batch))
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads, synced=True), {"loss": value}

    assert_equal(trained(4, step, rows(4)), jax.value_and_grad(normalised)(params(), rows(4)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_typed_shard_map_refuses_what_it_would_differentiate_without_weights(check_vma):
    batch = jax.tree.map(lambda x: x.reshape(2, ROWS, *x.shape[1:]), rows(2))
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])

    def on_rank(batch):
        loss, grads = jdp.value_and_grad(normalised, accumulate=2, weight=count)(params(), batch)
        return jdp.sync_gradients(grads, weight=count(batch))

    if check_vma:
        with pytest.raises(ValueError, match="check_vma=True.*check_vma=False"):
            per_rank(mesh, on_rank, batch, check_vma=True)
        return
    got = per_rank(mesh, on_rank, batch)

    def on_one(p):
        halves = [
            jax.tree.map(lambda x, i=i: x[:, i : i + 2].reshape(4, *x.shape[2:]), batch)
            for i in (0, 2)
        ]
        return sum(count(half) * normalised(p, half) for half in halves) / count(rows(2))

    want = jax.grad(on_one)(params())
    for rank in (0, 1):
        assert_equal(jax.tree.map(lambda x, r=rank: x[r], got), want)


# Several axes


AXES = ("a", "b")


def on_two_axes(loss, reduce, weight=count, axis_name=AXES):
    """The loss and the gradient of a step over 2 x 2 ranks, of which every rank has the same."""
    devices = jax.devices()[:4]
    jdp.init(jax.make_mesh((2, 2), AXES, (AxisType.Auto,) * 2, devices=devices), axis_name=AXES)

    @jdp.train_step(axis_name=axis_name, weight=weight)
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(reduce(grads, batch), synced=True), {"loss": value}

    tx = jdp.replicated(optax.sgd(1.0), axis_name=AXES)
    new, metrics = step(jdp.TrainState.create(params(), tx), rows(4))
    got = jax.tree.map(lambda old, new: old - new, params(), jax.device_get(new.params))
    return metrics["loss"], got


def over_both(p, batch):
    return normalised(p, batch, lambda x: jdp.mean_over_ranks(x, axis_name=("b", "a")))


def by_reversed_axes(grads, batch):
    return jdp.sync_gradients(grads, axis_name=("b", "a"))


def axis_by_axis(grads, batch):
    grads = jdp.sync_gradients(grads, axis_name="a", weight=count(batch))
    weight = jdp.sum_over_ranks(count(batch), axis_name="a")
    return jdp.sync_gradients(grads, axis_name="b", weight=weight)


@pytest.mark.parametrize("axis_name", [AXES, ("b", "a")])
@pytest.mark.parametrize("all_reduce", [jdp.collectives.auto, jdp.collectives.ring])
def test_the_order_of_the_axes_does_not_count(all_reduce, axis_name):
    def sync(grads, batch):
        return jdp.sync_gradients(grads, axis_name=("b", "a"), all_reduce=all_reduce)

    want = jax.value_and_grad(normalised)(params(), rows(4))
    assert_equal(on_two_axes(over_both, sync, axis_name=axis_name), want)


def test_one_axis_after_the_other_is_exact_where_each_has_its_weight():
    want = jax.value_and_grad(masked)(params(), rows(4))
    assert_equal(on_two_axes(masked, axis_by_axis), want)


@pytest.mark.parametrize("part", ["a", "b"])
def test_a_part_of_the_axes_has_no_weight_of_the_step(part):
    def sync(grads, batch):
        return jdp.sync_gradients(jdp.sync_gradients(grads, axis_name=part), axis_name=AXES)

    def mean_of_part(p, batch):
        return normalised(p, batch, lambda x: jdp.mean_over_ranks(x, axis_name=part))

    for name, loss, reduce in (
        ("jdp.sync_gradients", masked, sync),
        ("jdp.mean_over_ranks", mean_of_part, by_reversed_axes),
    ):
        with pytest.raises(ValueError, match=rf"{name}\(axis_name='{part}'\).*\('a', 'b'\)"):
            on_two_axes(loss, reduce)


def test_without_a_weight_one_axis_after_the_other_is_the_mean_over_both():
    def one_after_the_other(grads, batch):
        return jdp.sync_gradients(jdp.sync_gradients(grads, axis_name="b"), axis_name="a")

    def plain(p, batch):
        return jnp.mean((predict(p, batch["x"]) - batch["y"]) ** 2) + 0 * count(batch)

    want = jax.value_and_grad(plain)(params(), rows(4))
    assert_equal(on_two_axes(plain, one_after_the_other, weight=None), want)


def test_sums_and_means_over_a_part_have_the_gradient_of_the_weighted_loss():
    """Ranks of one "a" share a centre: on one rank, that of the halves of the batch."""

    def centred(p, batch):
        z = predict(p, batch["x"])
        options = {"axis_name": "b"}
        total, num = jdp.sum_over_ranks((mean(z, batch) * count(batch), count(batch)), **options)
        middle = jdp.mean_over_ranks(mean(z, batch), weight=count(batch) ** 2, **options)
        return mean(((z - total / num) ** 2 * (z - middle) ** 2).sum(1), batch)

    def on_one(p):
        batch, losses = rows(4), []
        for i in (0, 1):
            half = jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], batch)
            z, counts = predict(p, half["x"]), np.array(COUNTS[4][2 * i : 2 * i + 2])
            sums = jnp.where(half["mask"][:, None], z, 0).reshape(2, ROWS, 2).sum(1)
            middle = counts @ sums / (counts**2).sum()
            centre = sums.sum(0) / counts.sum()
            losses.append(mean(((z - centre) ** 2 * (z - middle) ** 2).sum(1), half) * counts.sum())
        return sum(losses) / count(batch)

    assert_equal(on_two_axes(centred, by_reversed_axes), jax.value_and_grad(on_one)(params()))
