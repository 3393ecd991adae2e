"""A step with `virtual_ranks` ends with the same bits on any number of ranks."""

import functools
import os
import subprocess
import sys
from itertools import cycle, islice
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support import training
from support.training import assert_close, ranks

import jdp
from jdp.training import virtual_ranks

V, ROWS = 8, 48


def draw(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape)
    return (values / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)


def regression(seed):
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(ROWS, 13)).astype(np.float32)
    return {"x": x, "y": draws.normal(size=(ROWS, 3)).astype(np.float32)}


def mlp(params, batch):
    hidden = jax.nn.gelu(batch["x"] @ params["w"] + params["b"])
    return ((hidden @ params["v"] - batch["y"]) ** 2).mean()


PARAMS = {"w": draw(13, 37), "b": np.zeros(37, np.float32), "v": draw(37, 3)}
HALVES = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)


def adam():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


def of_mlp(loss_fn=mlp, params=PARAMS, tx=None, **options):
    """(state, step, batches) of a loss."""
    wrap = options.pop("wrap", jdp.replicated)
    tx = wrap(adam() if tx is None else tx, **options.pop("reduction", {}))
    accumulate = options.pop("accumulate", None)
    options = {"virtual_ranks": V, **options}

    @jdp.train_step(**options)
    def step(state, batch):
        if accumulate:
            loss, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, batch)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        norm = optax.tree.norm(state.params)
        return state.apply_gradients(grads), {"loss": loss, "norm": norm}

    return jdp.TrainState.create(params, tx), step, map(regression, range(4))


def dropout():
    params = {"w": draw(13, 37), "b": np.zeros(37, np.float32), "v": draw(37, 3)}

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        def loss_fn(params):
            key = jax.random.fold_in(state.key, lax.axis_index("data"))
            hidden = jax.nn.gelu(batch["x"] @ params["w"] + params["b"])
            kept = jax.random.bernoulli(key, 0.8, hidden.shape)
            return ((jnp.where(kept, hidden / 0.8, 0) @ params["v"] - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    state = jdp.TrainState.create(params, jdp.replicated(adam()), seed=3)
    return state, step, map(regression, range(4))


class ConvNet(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.Conv(features, (3, 3))(x)
            x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


def convolutions(axis_name=None):
    def images(seed):
        draws = np.random.default_rng(seed)
        x = draws.normal(size=(ROWS, 8, 8, 3)).astype(np.float32)
        return {"x": x, "y": draws.integers(0, 10, ROWS).astype(np.int32)}

    model = ConvNet(axis_name)
    variables = ConvNet().init(jax.random.key(0), images(0)["x"][:2])

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        def loss_fn(params):
            given = {"params": params, "batch_stats": state.model_state}
            logits, new = model.apply(given, batch["x"], mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            return losses.mean(), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        stats = jdp.mean_over_ranks(stats)
        return state.apply_gradients(grads).replace(model_state=stats), {"loss": loss}

    state = jdp.TrainState.create(
        variables["params"], jdp.replicated(adam()), model_state=variables["batch_stats"]
    )
    return state, step, map(images, range(3))


def transformer(layers="unrolled", **options):
    dim, heads, depth = 32, 4, 3

    def texts(seed):
        return np.random.default_rng(seed).integers(0, 61, (ROWS, 12)).astype(np.int32)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def layer(x, p):
        q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(dim / heads)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    shapes = {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 99), "down": (99, dim)}
    stacked = {name: draw(depth, *shape) * np.sqrt(depth) for name, shape in shapes.items()}

    def loss_fn(params, text):
        x = params["table"][text]
        if layers == "unrolled":
            for i in range(depth):
                x = layer(x, {name: p[i] for name, p in params["layers"].items()})
        elif layers == "jdp":
            x, _ = jdp.scan_layers(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            body = jax.checkpoint(layer) if layers == "remat" else layer
            x, _ = lax.scan(lambda x, p: (body(x, p), None), x, params["layers"])
        logits = norm(x) @ params["table"].T
        labels = text[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], labels).mean()

    params = {"table": draw(61, dim) * 8, "layers": stacked}
    state, step, _ = of_mlp(loss_fn, params, **options)
    return state, step, map(texts, range(3))


def weighted():
    def loss_fn(params, batch):
        errors = ((mlp_rows(params, batch)) ** 2).mean(-1)
        return (errors * batch["mask"]).sum() / batch["mask"].sum()

    def mlp_rows(params, batch):
        return jax.nn.gelu(batch["x"] @ params["w"] + params["b"]) @ params["v"] - batch["y"]

    state, step, batches = of_mlp(loss_fn, weight=lambda batch: batch["mask"].sum())
    masks = [np.arange(ROWS) < n for n in (ROWS, 29, 3, 1)]  # virtual ranks without a row
    return state, step, [b | {"mask": mask} for b, mask in zip(batches, masks, strict=True)]


def collectives():
    """The author's own: of values that differ between ranks, also in a scan."""

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        def loss_fn(params):
            features = batch["x"] @ params["w"]
            everyone = lax.all_gather(features, "data", tiled=True)
            return jax.nn.logsumexp(features @ everyone.T / 9, axis=-1).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        shifted = lax.ppermute(batch["x"], "data", [(i, (i + 1) % V) for i in range(V)])
        parts = lax.psum_scatter(batch["x"].repeat(2, 0)[:8], "data", tiled=True)

        def body(total, x):
            return total + lax.psum(jnp.sin(total) * x, "data"), lax.pmax(x, "data")

        total, most = lax.scan(body, jnp.float32(0), batch["x"][:5, 0])
        metrics = {
            "loss": loss,
            "shifted": (shifted * batch["x"]).sum(),
            "parts": jdp.sum_over_ranks((parts**2).sum()),
            "total": total,
            "most": most.sum(),
            "rows": jdp.rows(batch["x"].sum(-1)),
        }
        return state.apply_gradients(grads), metrics

    state = jdp.TrainState.create({"w": draw(13, 7)}, jdp.replicated(adam()))
    return state, step, map(regression, range(3))


def of_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(13, 31, rngs=rngs)
            self.norm = nnx.BatchNorm(31, rngs=rngs)
            self.cell = nnx.GRUCell(31, 17, rngs=rngs)
            self.last = nnx.Linear(17, 3, rngs=rngs)

        def __call__(self, x):
            x = self.norm(self.first(x))
            carry = self.cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
            for _ in range(3):
                carry, _ = self.cell(carry, x)
            return self.last(carry)

    graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        def loss_fn(params):
            model = nnx.merge(graphdef, params, state.model_state, copy=True)
            loss = ((model(batch["x"]) - batch["y"]) ** 2).mean()
            return loss, nnx.split(model, nnx.Param, ...)[2]

        (loss, rest), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads)
        return state.replace(model_state=jdp.mean_over_ranks(rest)), {"loss": loss}

    state = jdp.TrainState.create(params, jdp.replicated(adam()), model_state=rest)
    return state, step, map(regression, range(3))


def of_linen_state():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(nn.LayerNorm()(nn.Dense(31)(x)))

    model = Model()
    params = model.init(jax.random.key(0), regression(0)["x"])["params"]
    tx = jdp.replicated(adam())
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        def loss_fn(params):
            return ((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return state, step, map(regression, range(3))


def of_nnx_optimizer():
    model = nnx.Linear(13, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jdp.replicated(adam()), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        loss_fn = nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())
        loss, grads = loss_fn(model)
        optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1], {"loss": loss}

    return state, step, map(regression, range(3))


def of_equinox():
    """With a tree in place of a state, and `pmean` in place of an optimizer of jdp."""
    model, tx = eqx.nn.MLP(13, 3, 17, 2, key=jax.random.key(0)), adam()

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        def loss_fn(model):
            return ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean()

        model, opt_state = state
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        arrays = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = tx.update(lax.pmean(grads, "data"), opt_state, arrays)
        return (eqx.apply_updates(model, updates), opt_state), {"loss": loss}

    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    return (model, opt_state), step, map(regression, range(3))


def evaluation():
    @jdp.eval_step(virtual_ranks=V)
    def measure(params, batch):
        return {"loss": mlp(params, batch), "rows": jdp.rows(batch["x"] @ params["w"])}

    return PARAMS, lambda params, batch: (params, measure(params, batch)), map(regression, range(2))


def measured(fn):
    """An evaluation of `fn(weights, rows)`."""

    def make():
        @jdp.eval_step(virtual_ranks=V)
        def measure(params, batch):
            return {"mean": fn(params["w"], batch["x"])}

        return PARAMS, lambda params, b: (params, measure(params, b)), map(regression, range(2))

    return make


def clipped_by_hand():
    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        loss, grads = jax.value_and_grad(mlp)(state.params, batch)
        grads = jdp.sync_gradients(grads)
        metrics = {"loss": loss, "norm": optax.tree.norm(grads)}
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g / (1 + norm), grads)
        return state.apply_gradients(grads, synced=True), metrics

    state = jdp.TrainState.create(PARAMS, jdp.replicated(optax.adam(0.01)))
    return state, step, map(regression, range(3))


def ratios(w, x):
    x = x.astype(jnp.float16)
    return jdp.rows(x * 100 / (x.max(-1, keepdims=True) * 10_000))


def loss_of_all(w, x):
    return jnp.log(jdp.global_mean(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w))


def tiny_sums(w, x):
    """Sums of normal numbers that cancel to subnormal ones, which XLA's threads take as 0."""
    x = jnp.tanh(jnp.tile(x[0], 100)) * 3e-38
    parts = lax.psum_scatter(x[: 8 * V], "data", tiled=True)
    return lax.psum(x, "data"), lax.all_gather(parts, "data")


def sent_to_some(w, x):
    return jdp.rows(lax.ppermute(x, "data", [(i, i + 1) for i in range(V - 1)]))


def exchanged(w, x):
    num, x = len(x), x[0, :8, None] * jnp.arange(1.0, 17) * w[0, 0]  # [8, 16]
    ways = [(0, 0, True), (1, 0, True), (0, 1, True), (0, 1, False), (0, 0, False)]
    sent = [lax.all_to_all(x, "data", *dims, tiled=tiled) for *dims, tiled in ways]
    sent.append(lax.all_to_all(x > 0, "data", 0, 0))
    return [jdp.rows(jnp.repeat(each[None], num, 0)) for each in sent]


def branches(w, x):
    def doubled(x):
        return 2 * lax.psum(x, "data")

    return lax.cond(w[0, 0] > 0, doubled, lambda x: lax.psum(x, "data"), x.sum())


def normalised(w, x):
    mean, var = jdp.batch_norm_statistics(x)
    return ((x - mean) / jnp.sqrt(var + 1e-5) @ w).sum()


WIDER = {"w": draw(13, 400), "b": np.zeros(400, np.float32), "v": draw(400, 3)}
WIDE = {"w": draw(13, 40), "b": np.zeros(40, np.float32), "v": draw(40, 3)}
STEPS = {
    "constants": measured(lambda w, x: (x * (jnp.arange(13) / 12) + x / 9).sum()),
    "shared divisor": measured(lambda w, x: (w[0] / (w[1, 0] + 2)) @ (w[1] / (w[1, 0] + 2))),
    "branches": measured(branches),
    "negative zeros": measured(lambda w, x: jdp.rows(jnp.copysign(0.0, x))),
    "statistics of all rows": measured(normalised),
    "clipped by hand": clipped_by_hand,
    "mlp": of_mlp,
    "bfloat16 sent": lambda: of_mlp(reduction={"reduce_dtype": jnp.bfloat16}),
    "bfloat16": lambda: of_mlp(params=HALVES, tx=optax.sgd(0.1, momentum=0.9)),
    "not donated": lambda: of_mlp(donate=False),
    "accumulated": lambda: of_mlp(accumulate=3),
    "weighted": weighted,
    "dropout": dropout,
    "convolutions": convolutions,
    "synchronized statistics": lambda: convolutions("data"),
    "transformer": transformer,
    "scan": lambda: transformer("scan"),
    "remat": lambda: transformer("remat"),
    "jdp.scan_layers": lambda: transformer("jdp"),
    "collectives": collectives,
    "nnx": of_nnx,
    "nnx.Optimizer": of_nnx_optimizer,
    "linen's TrainState": of_linen_state,
    "Equinox": of_equinox,
    "float16": measured(ratios),
    "loss of all ranks": measured(loss_of_all),
    "subnormal sums": measured(tiny_sums),
    "sent to some": measured(sent_to_some),
    "all to all": measured(exchanged),
    "quantized": lambda: of_mlp(params=WIDER, reduction={"all_reduce": jdp.collectives.quantized}),
    "evaluation": evaluation,
}


def trained(name, n, num_steps=None):
    """The bits of all states and metrics on n ranks."""
    ranks(n)
    state, step, batches = STEPS[name]() if name in STEPS else name()
    found = []
    batches = batches if num_steps is None else islice(cycle(batches), num_steps)
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(jax.tree.map(np.asarray, metrics))
    found.append([np.asarray(x) for x in jax.tree.leaves(state) if eqx.is_array(x)])
    return found


def require_equal_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


@pytest.mark.optimized  # XLA's optimizations decide about the bits
@pytest.mark.all_sets
@pytest.mark.parametrize("name", STEPS)
def test_bits_are_equal_on_any_number_of_ranks(name):
    want = trained(name, V)
    for n in (1, 2, 3):
        require_equal_bits(trained(name, n), want)


@pytest.mark.thorough
@pytest.mark.optimized
@pytest.mark.all_sets
@pytest.mark.parametrize("name", ["accumulated", "synchronized statistics", "scan", "dropout"])
def test_a_thousand_steps_have_equal_bits(name):
    want = trained(name, V, 1000)
    for n in (1, 2, 3, 4, 6):
        require_equal_bits(trained(name, n, 1000), want)


@pytest.mark.optimized
@pytest.mark.parametrize("n", [4, 5, 6, 7])
def test_bits_are_equal_where_ranks_have_unequally_many_virtual_ranks(n):
    require_equal_bits(trained("weighted", n), trained("weighted", V))


SHARDED = {
    "adam": lambda wrap: of_mlp(params=WIDE, tx=optax.adamw(1e-2), wrap=wrap),
    "clip": lambda wrap: of_mlp(params=WIDE, wrap=wrap),
    "accumulated": lambda wrap: of_mlp(params=WIDE, accumulate=2, wrap=wrap),
    "layers": lambda wrap: transformer("jdp", wrap=wrap),
}


@pytest.mark.optimized
@pytest.mark.all_sets
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_shards_have_equal_bits_on_ranks_that_divide_the_virtual_ones(name, stage):
    wrap = functools.partial(jdp.sharded, stage=stage, min_size=1)
    want = trained(lambda: SHARDED[name](wrap), V)
    for n in (1, 2, 4):
        require_equal_bits(trained(lambda: SHARDED[name](wrap), n), want)
    if name == "adam":  # whose update has no norm of all parameters
        state = trained(lambda: SHARDED[name](jdp.replicated), 4)[-1]
        require_equal_bits(want[-1], state)


def test_all_to_all_between_virtual_ranks_is_that_between_ranks():
    step = jdp.eval_step(lambda params, batch: exchanged(params["w"], batch["x"]))
    ranks(V)
    want = [step(PARAMS, regression(seed)) for seed in range(2)]
    want = jax.tree.map(np.asarray, want)
    for n in (2, 4, V):
        require_equal_bits(trained("all to all", n)[:2], want)


@pytest.mark.parametrize("n, num_bytes", [(V, 1), (4, 2)])
def test_8_bits_are_sent_between_virtual_ranks_as_between_ranks(n, num_bytes):
    ranks(n)
    state, step, batches = STEPS["quantized"]()
    plan = step.communication_plan(state, next(iter(batches)))
    of_blocks = [each for each in plan if each.leaves[0].dtype == "u8"]
    assert [each.kind for each in of_blocks] == ["all-to-all", "all-gather"]
    assert all(each.leaves[0].path == "grads['w']" for each in of_blocks)
    sent, gathered = (each.num_bytes for each in of_blocks)
    assert sent == num_bytes * gathered  # subtrees of two virtual ranks or one


def test_a_step_trains_as_one_without_virtual_ranks_does_on_as_many_ranks():
    got = trained("mlp", 3)
    ranks(V)
    state, _, batches = of_mlp()

    @jdp.train_step
    def plain(state, batch):
        loss, grads = jax.value_and_grad(mlp)(state.params, batch)
        norm = optax.tree.norm(state.params)
        return state.apply_gradients(grads), {"loss": loss, "norm": norm}

    want = []
    for batch in batches:
        state, metrics = plain(state, batch)
        want.append(metrics)
    want.append(jax.tree.leaves(state))
    assert_close(got, training.fetched(want))


FORMS = {
    "NCHW": dict(x=(2, 4, 7, 6), k=(8, 2, 3, 2), groups=2, dims=("NCHW", "OIHW", "NCHW")),
    "CWN": dict(x=(4, 9, 2), k=(3, 6, 4), groups=1, dims=("CWN", "WOI", "NCW"), dilation=2),
    "HWNC": dict(
        x=(5, 6, 2, 3), k=(2, 2, 3, 6), groups=1, dims=("HWNC", "HWIO", "CNHW"), strides=2
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_convolutions_of_any_dims_have_the_gradients_of_plain_jax(name):
    form = FORMS[name]
    num_spatial = len(form["x"]) - 2
    strides, dilation = ([form.get(key, 1)] * num_spatial for key in ("strides", "dilation"))

    def loss_fn(kernel, x):
        y = lax.conv_general_dilated(
            x, kernel, strides, "SAME", rhs_dilation=dilation, dimension_numbers=form["dims"],
            feature_group_count=form["groups"],
        )  # fmt: skip
        return jnp.sin(y).sum() * (1 + jnp.arange(y.size).reshape(y.shape) * jnp.sin(y)).mean()

    rows, kernel = draw(V, *form["x"]), draw(*form["k"], seed=1)
    ranks(2)

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        grads = jax.grad(loss_fn, (0, 1))(state, batch[0])
        return state, {"kernel": jdp.sum_over_ranks(grads[0]), "x": jdp.rows(grads[1][None])}

    _, found = step(kernel, rows)
    of_kernel, of_x = jax.vmap(jax.grad(loss_fn, (0, 1)), (None, 0))(kernel, rows)
    assert_close(training.fetched(found), {"kernel": of_kernel.sum(0), "x": of_x})


@pytest.mark.parametrize("n", [1, 2, 4])
def test_state_of_ranks_belongs_to_virtual_ranks(n):
    ranks(n)

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        seen = state["seen"].value + batch["x"].sum(-1)[:1]  # one value for each virtual rank
        return {"seen": jdp.per_rank(seen)}, {"most": jdp.max_over_ranks(seen.max())}

    state, metrics = step({"seen": jdp.per_rank(jnp.zeros(V))}, regression(0))
    want = regression(0)["x"].sum(-1)[:: ROWS // V]
    np.testing.assert_allclose(state["seen"].value, want, rtol=1e-6)
    assert metrics["most"] == np.asarray(state["seen"].value).max()


@pytest.mark.parametrize("n, kinds", [(2, ["all-reduce"]), (3, ["all-to-all", "all-gather"])])
def test_the_plan_names_the_gradients_that_are_sent(n, kinds):
    ranks(n)
    state, step, batches = of_mlp()
    sent = step.communication_plan(state, next(iter(batches)))
    assert {leaf.path for leaf in sent[0].leaves} == {"grads['w']", "grads['v']", "grads['b']", ""}
    assert [each.kind for each in sent] == kinds


def test_one_virtual_rank_is_the_plain_step(monkeypatch):
    monkeypatch.setattr(virtual_ranks, "mapped", None)
    got = trained(lambda: of_mlp(virtual_ranks=1), 1)
    require_equal_bits(got, trained(lambda: of_mlp(virtual_ranks=None), 1))
    ranks(2)
    state, step, batches = of_mlp(virtual_ranks=1)
    with pytest.raises(ValueError, match="Use at most 1 ranks"):
        step(state, next(iter(batches)))


def one_minus_square(x):
    return (1 + x) * (1 - x)


EQUAL = {
    "literals of other types": (lambda x: x / 2.5, lambda x: x / np.float32(2.5)),
    "equal arrays": (lambda x: x + np.arange(3.0), lambda x: x + np.array([0.0, 1.0, 2.0])),
    "order of factors": (lambda x: x * jnp.sin(x), lambda x: jnp.sin(x) * x),
    "copies": (jnp.sin, lambda x: jnp.sin(checkpoint_name(lax.reshape(x, (3,)), "x"))),
    "factors of one": (jnp.sin, lambda x: jnp.sin(1 * x / 1)),
    "squares": (lambda x: x * x, jnp.square),
    "powers": (lambda x: 1 / (x * x * x), lambda x: x**-3),
    "slope of tanh": (one_minus_square, getattr(lax, "one_minus_square", one_minus_square)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_operations_that_are_equal_to_xla_are_computed_once(name):
    x = np.float32([0.1, 0.2, 0.7])
    same = virtual_ranks._canonical(jax.make_jaxpr(lambda x: [f(x) for f in EQUAL[name]])(x))
    assert same.outs[0] is same.outs[1]


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1.0, 1 + 2**-23), (np.nan, np.inf)])
def test_other_constants_stay_two(pair):
    traced = jax.make_jaxpr(lambda x: [x + np.float32(y) for y in pair])(np.float32(1))
    first, second = virtual_ranks._canonical(traced).outs
    assert first is not second


def read(n):
    ranks(n)
    batches = jdp.batches(regression(0), 11, epochs=1, virtual_ranks=V)
    return [jax.tree.map(np.asarray, batch) for batch in batches]


def test_batches_are_padded_to_a_multiple_of_the_virtual_ranks():
    want = read(V)
    assert want[0]["x"].shape == (16, 13) and sum(b["mask"].sum() for b in want) == ROWS
    for n in (1, 2, 3, 6):
        require_equal_bits(read(n), want)


SHARED = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jdp

jdp.init(cpu_ranks=int(sys.argv[1]))
x = np.random.default_rng(0).normal(size=(8192, 64)).astype("f")

@jdp.eval_step(virtual_ranks=8)
def measure(state, batch):
    return {"product": jdp.mean_over_ranks(batch.T @ jnp.tanh(batch))}

print(np.asarray(measure({}, x)["product"]).tobytes().hex())
"""


def test_processes_with_other_numbers_of_devices_have_equal_bits_with_one_nproc():
    def run(num_devices, **more):
        environment = {**os.environ, "PYTHONPATH": str(Path(jdp.__file__).parents[1]), **more}
        command = [sys.executable, "-c", SHARED, str(num_devices)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    first, second = run(1, NPROC="8"), run(8, NPROC="8")
    assert first.stdout == second.stdout and "NPROC" not in first.stderr + second.stderr
    assert "Set NPROC=8" in run(1, NPROC="").stderr


@pytest.mark.parametrize("n", [1, 2, 3])
def test_callbacks_run_once_on_each_rank_or_for_each_virtual_rank(n):
    ranks(n)
    seen = []

    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        jax.debug.callback(lambda x: seen.append("uniform"), state["w"])
        jax.debug.callback(lambda x: seen.append("varying"), batch["x"].sum())
        return {"w": state["w"] + 1}, {}

    state, _ = step({"w": jnp.zeros(3)}, regression(0))
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert (seen.count("uniform"), seen.count("varying")) == (n, V)


def refused(n, state, step, batch, match):
    ranks(n)
    with pytest.raises(ValueError, match=match):
        step(state, batch)


def test_what_virtual_ranks_cannot_run_is_refused():
    ranks(3)
    state, step, batches = of_mlp()
    batch = next(iter(batches))
    few = jdp.train_step(step.spec.fn, virtual_ranks=2)
    refused(3, state, few, batch, "the mesh has 3 ranks, and a virtual rank is not split")
    rows = {name: x[:44] for name, x in batch.items()}
    refused(3, state, step, rows, "44 rows, .* 8 virtual ranks.*mask=True, virtual_ranks=8")
    shards = jdp.TrainState.create(PARAMS, jdp.sharded(adam()))
    refused(3, shards, step, batch, "8 shards cannot be divided among 3 ranks")
    own = jdp.train_step(lambda state, batch: (state, {}), virtual_ranks=V)
    refused(3, jdp.per_rank(jnp.zeros(24)), own, batch, "Use a number of ranks that divides 8")
    refused(2, jdp.per_rank(jnp.zeros(4)), own, batch, "4 does not divide by 8")
    jdp.init(axes={"model": 2})
    state, step, _ = of_mlp()
    with pytest.raises(ValueError, match="further axes"):
        step(state, batch)
    with pytest.raises(ValueError, match="takes one data axis"):
        jdp.train_step(step.spec.fn, virtual_ranks=2, axis_name=("a", "b"))
    with pytest.raises(ValueError, match="at least 1"):
        jdp.eval_step(step.spec.fn, virtual_ranks=0)


def test_a_collective_over_groups_of_ranks_is_refused_by_line():
    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        groups = [[i, i + 1] for i in range(0, V, 2)]
        near = lax.psum(batch["x"].sum(), "data", axis_index_groups=groups)
        return state, {"near": jdp.sum_over_ranks(near)}

    refused(2, {"w": jnp.zeros(3)}, step, regression(0), r"test_virtual_ranks.py:\d+ .*JDP218")


def test_a_collective_without_a_form_for_virtual_ranks_is_refused():
    @jdp.train_step(virtual_ranks=V)
    def step(state, batch):
        counts = jnp.zeros((V, 1), jnp.int32)
        rows, *_ = jdp.ragged_all_to_all(batch["x"], counts, max_rows=9)
        return state, {"sum": jdp.sum_over_ranks(rows.sum())}

    where = r"test_virtual_ranks.py:\d+ calls `jdp.ragged_all_to_all`.*JDP218"
    refused(2, {"w": jnp.zeros(3)}, step, regression(0), where)


def test_a_native_sum_is_refused():
    tx = {"reduction": {"all_reduce": jdp.collectives.native}}
    ranks(2)
    state, step, batches = of_mlp(**tx)
    refused(2, state, step, next(iter(batches)), "sums over virtual ranks")


SCRIPT = """
import os, sys
from pathlib import Path
import jax
import numpy as np
import jdp
sys.path.insert(0, TESTS)
from training.test_virtual_ranks import long_run

jdp.init()
folder = Path(__file__).parent
state, step, batches = long_run(NUM_STEPS, STAGE)
last, dies_at = map(int, (folder / "part").read_text().split())
dies = jax.process_index() == 0 and not (folder / f"died {dies_at}").exists()
with jdp.Checkpointer(folder / "run", commit_every=1, save_every=1000) as ckpt:
    state = ckpt.restore(state, batches)
    for batch in batches:
        state, _ = step(state, batch)
        ckpt.step(state, batches)
        if ckpt.steps == dies_at and dies:
            (folder / f"died {dies_at}").touch()
            os._exit(7)
        if ckpt.steps == last:
            break
print("bits", jdp.check_replicas(state))
"""


def long_run(num_steps, stage=0):
    wrap = functools.partial(jdp.sharded, stage=stage, min_size=1) if stage else jdp.replicated
    state, step, _ = of_mlp(params=WIDE, wrap=wrap)
    return state, step, jdp.batches(regression(0), 24, num_steps=num_steps, seed=2)


def random_parts(num_steps, num_parts, seed):
    """Parts of a run: (processes, last step, step of a death)."""
    draws = np.random.default_rng(seed)
    ends = [*np.sort(draws.choice(np.arange(1, num_steps), num_parts - 1, False)), num_steps]
    starts = [0, *ends[:-1]]
    return [
        (int(draws.integers(1, 5)), int(end), int(draws.integers(start + 1, end + 1)))
        for start, end in zip(starts, ends, strict=True)
    ]


@pytest.mark.optimized
@pytest.mark.processes
@pytest.mark.all_sets
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("parts", "stage"),
    [
        ([(2, 5, 3), (3, 8, 0), (1, 10, 0)], 0),
        ([(2, 5, 3), (4, 8, 0), (1, 10, 0)], 3),
        pytest.param(random_parts(1000, 8, seed=1), 0, marks=pytest.mark.thorough),
    ],
    ids=["10 steps", "10 steps of shards", "1000 steps"],
)
def test_bits_are_equal_after_deaths_and_on_other_numbers_of_processes(
    jdp_run, tmp_path, parts, stage
):
    ranks(1)
    num_steps = parts[-1][1]
    state, step, batches = long_run(num_steps, stage)
    for batch in batches:
        state, _ = step(state, batch)
    want = jdp.check_replicas(state)
    script = SCRIPT.replace("TESTS", repr(str(Path(__file__).parents[1])))
    script = script.replace("NUM_STEPS", str(num_steps)).replace("STAGE", str(stage))
    output = ""
    for num_processes, last, dies_at in parts:
        (tmp_path / "part").write_text(f"{last} {dies_at}")
        flags = f"--nproc-per-node={num_processes}", "--standbys=0", "--max-restarts=1", "--resume"
        run = jdp_run(*flags, script=script)
        run.deadline_s = 120.0
        assert run.wait() == 0, run.output
        output = run.output
    assert f"bits {want}" in output
