"""Layers under scan_layers train like layers under lax.scan on one device."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import layer_forms
from support.layer_forms import assert_close, count_of, counted, layer, mean_loss, squares

import jdp
from jdp import collectives
from jdp.analysis import step_refusals
from jdp.reduction import step_context

NUM_LAYERS, WIDTH, RATE = 4, 5, 0.1
late = functools.partial(jdp.scan_layers, late=True)
parameters = functools.partial(layer_forms.parameters, NUM_LAYERS, WIDTH, 0.4, 1.0)
rows = functools.partial(layer_forms.rows, 24, WIDTH)  # 24 divides by 1, 2, 3 and 8 ranks
plainly = functools.partial(layer_forms.plainly, RATE)
step_of = functools.partial(layer_forms.step_of, scan=late)


def state_of(mesh, params, **options):
    jdp.init(devices=list(mesh.devices.flat))
    tx = jdp.replicated(optax.sgd(RATE), all_reduce=collectives.xla, **options)
    return jdp.TrainState.create(params, tx)


def trained(mesh, loss_fn, params, batch, num_steps=2, **options):
    state, step = state_of(mesh, params), step_of(loss_fn, **options)
    for _ in range(num_steps):
        state, _ = step(state, batch)
    return state.params


def num_reductions(mesh, loss_fn, params=None, **options):
    """All-reduces in the program, those of a loop's body once."""
    text = step_of(loss_fn, **options).lower(state_of(mesh, params or parameters()), rows())
    return len(re.findall(r"stablehlo\.all_reduce", text.as_text()))


# One model, in all the forms in which layers are written


def rematerialised_outside(scan, params, batch):
    return jax.checkpoint(functools.partial(squares, scan))(params, batch["x"]).mean()


def jitted(scan, params, batch):
    return jax.jit(functools.partial(squares, scan))(params, batch["x"]).mean()


def nested(scan, params, batch):
    grouped = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params["layers"])
    x, _ = scan(lambda x, group: scan(layer, x, group), batch["x"], grouped)
    return jnp.square(x @ params["out"] - 1).mean()


def used_elsewhere(scan, params, batch):
    # By every rank in the same way, by each in its own, and in a second scan.
    twice = {**params, "layers": jax.tree.map(lambda w: 2 * w, params["layers"])}
    again = (squares(scan, params, batch["x"]) * squares(scan, twice, batch["x"])).mean()
    tied = jnp.square(batch["x"] @ params["layers"]["w"][1]).mean()
    return again + tied + jnp.square(params["layers"]["b"]).sum()


def one_layer(scan, params, batch):
    first = jax.tree.map(lambda w: w[:1], params["layers"])
    return squares(scan, {**params, "layers": first}, batch["x"]).mean()


def no_layer(scan, params, batch):
    none = jax.tree.map(lambda w: w[:0], params["layers"])
    return squares(scan, {**params, "layers": none}, batch["x"]).mean()


def hessian_product(scan, params, batch):
    def product(x):
        # Of each row by itself: the gradient of many would be a mean over ranks already.
        gradient = jax.grad(lambda x: squares(scan, params, x))
        return jnp.square(jax.jvp(gradient, (x,), (x,))[1]).sum()

    return jax.vmap(product)(batch["x"]).mean()


def models(scan, params, batch, shared=()):
    """A loss over three models, of which each has its own gradient."""

    def of_model(scale):
        scaled = {name: x if name in shared else scale * x for name, x in params["layers"].items()}
        return squares(scan, {**params, "layers": scaled}, batch["x"]).mean()

    return jax.vmap(of_model)(jnp.array([1.0, 0.5, -0.3])).sum()


def stacked_models(scan, params, batch):
    """The same, with the models along the second dim of the parameters."""
    scales = jnp.array([1.0, 0.5, -0.3])

    def product(x):
        return jnp.stack([scale * x for scale in scales], axis=1)

    def of_model(layers):
        return squares(scan, {**params, "layers": layers}, batch["x"]).mean()

    many = jax.tree.map(product, params["layers"])
    return jnp.mean(jax.vmap(of_model, in_axes=1)(many) * jnp.arange(1.0, 4.0))


def models_of_shared_biases(scan, params, batch):
    return models(scan, params, batch, shared=("b",))


def slopes_of_models(scan, params, batch):
    """grad of vmap of grad."""

    def of_model(scale):
        scaled = {**params, "layers": jax.tree.map(lambda x: scale * x, params["layers"])}
        return jnp.square(jax.grad(lambda x: squares(scan, scaled, x).sum())(batch["x"])).mean()

    return jax.vmap(of_model)(jnp.array([1.0, 0.5])).sum()


FORMS = [
    *layer_forms.FORMS,
    rematerialised_outside,
    jitted,
    nested,
    used_elsewhere,
    one_layer,
    no_layer,
    hessian_product,
    models,
    stacked_models,
    models_of_shared_biases,
    slopes_of_models,
]
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


@every_form
def test_every_form_trains_like_lax_scan_on_one_device(form, make_mesh):
    # Rows are independent of each other in all forms, so that the batch can be split.
    want = plainly(form, parameters(), rows())
    assert_close(trained(make_mesh(3), form, parameters(), rows()), want, 3e-6)


def test_trains_like_lax_scan_on_any_number_of_ranks(mesh):
    want = plainly(mean_loss, parameters(), rows())
    assert_close(trained(mesh, mean_loss, parameters(), rows()), want)


@pytest.mark.parametrize("scan", [jdp.scan_layers, functools.partial(late, late=False)])
def test_it_is_lax_scan_on_a_cpu(scan, make_mesh):
    assert num_reductions(make_mesh(2), mean_loss, scan=scan) == num_reductions(
        make_mesh(2), mean_loss, scan=lax.scan
    )


def test_the_ring_reduces_layers_too(make_mesh):
    scan = functools.partial(late, all_reduce=collectives.ring)
    want = plainly(mean_loss, parameters(), rows())
    assert_close(trained(make_mesh(3), mean_loss, parameters(), rows(), scan=scan), want)


def test_leaves_of_several_dtypes_keep_theirs(make_mesh):
    to_train = functools.partial(trained, make_mesh(2))
    layer_forms.assert_dtypes_are_kept(to_train, plainly, parameters(), rows())


# Weights and micro-batches


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_weights_count_as_in_the_whole_batch(accumulate, make_mesh):
    want = plainly(counted, parameters(), rows())
    got = trained(
        make_mesh(3), counted, parameters(), rows(), weight=count_of, accumulate=accumulate
    )
    assert_close(got, want, 3e-6)


def test_a_rank_of_weight_0_contributes_nothing_even_nan(make_mesh):
    batch = rows()
    batch["count"][:8] = 0
    clean = {name: x[8:] for name, x in batch.items()}
    batch["x"][:8] = np.nan
    want = plainly(counted, parameters(), clean)
    got = trained(make_mesh(3), counted, parameters(), batch, weight=count_of)
    assert_close(got, want, 3e-6)


@pytest.mark.parametrize("form", [jitted, rematerialised_outside])
def test_a_loss_that_jax_has_traced_before_meets_no_old_weight(form, make_mesh):
    loss = jax.jit(lambda p, b: form(late, p, b))
    got = trained(
        make_mesh(2), lambda scan, p, b: loss(p, b), parameters(), rows(), weight=lambda b: 3.0
    )
    assert_close(got, plainly(form, parameters(), rows()), 3e-6)


def test_micro_batches_are_reduced_once_after_the_last(make_mesh):
    counts = [
        num_reductions(make_mesh(2), mean_loss, scan=scan, accumulate=4)
        for scan in (late, lax.scan)
    ]
    assert counts[0] == counts[1]
    want = plainly(mean_loss, parameters(), rows())
    assert_close(trained(make_mesh(2), mean_loss, parameters(), rows(), accumulate=4), want)


def test_micro_batches_of_your_own_are_reduced_in_each(make_mesh):
    def loss_fn(scan, params, batch):
        parts = batch["x"].reshape(2, -1, WIDTH)
        add = lambda total, x: (total + squares(scan, params, x).mean(), None)  # noqa: E731
        return lax.scan(add, 0.0, parts)[0] / 2

    want = plainly(loss_fn, parameters(), rows())
    assert_close(trained(make_mesh(3), loss_fn, parameters(), rows()), want, 3e-6)


# What is sent


def test_the_mean_of_a_layer_is_not_sent_again(make_mesh):
    # Plainly w, b, out and the metric; w and b are now one in the loop, and two after it.
    assert num_reductions(make_mesh(2), mean_loss, scan=lax.scan) == 4
    assert num_reductions(make_mesh(2), mean_loss) == 5
    assert num_reductions(make_mesh(2), nested) == 5
    # What is in two loops; and w again, which each rank uses elsewhere in its own way.
    assert num_reductions(make_mesh(2), used_elsewhere) == 2 * 3 + 3


def test_a_sum_over_ranks_is_not_a_mean_of_them(make_mesh):
    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(functools.partial(mean_loss, late))(state.params, batch)
        grads["out"] = lax.psum(grads["out"], "data")
        return state.apply_gradients(grads), {}

    with pytest.raises(ValueError, match=r"`\['out'\]`.*JDP121"):
        step(state_of(make_mesh(2), parameters()), rows())


@pytest.mark.filterwarnings("ignore:the step reduces gradients, and returns")
def test_the_sum_of_gradients_is_that_of_all_ranks(make_mesh):
    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(functools.partial(mean_loss, late))(state.params, batch)
        return state, {"sum": jdp.sync_gradients(grads, mean=False)}

    _, found = step(state_of(make_mesh(3), parameters()), rows())
    want = jax.grad(functools.partial(mean_loss, lax.scan))(parameters(), rows())
    assert_close(found["sum"], jax.tree.map(lambda g: 3 * g, want), 3e-6)


def test_a_weight_that_the_layers_did_not_know_is_refused(make_mesh):
    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(functools.partial(counted, late))(state.params, batch)
        return state, jdp.sync_gradients(grads, weight=batch["count"].sum())

    with pytest.raises(ValueError, match=r"sync_gradients\(weight=\).*JDP124"):
        step(state_of(make_mesh(2), parameters()), rows())


def test_params_that_differ_from_rank_to_rank_are_refused(make_mesh):
    def loss_fn(scan, params, batch):
        masked = jax.tree.map(lambda w: w * batch["x"].mean(), params["layers"])
        return squares(scan, {**params, "layers": masked}, batch["x"]).mean()

    with pytest.raises(ValueError, match=r"`params\['b'\]`.*JDP105"):
        trained(make_mesh(2), loss_fn, parameters(), rows())


def test_layers_that_some_ranks_skip_are_refused(make_mesh):
    def loss_fn(scan, params, batch):
        mean = lambda params: squares(scan, params, batch["x"]).mean()  # noqa: E731
        return lax.cond(batch["x"].sum() > 0, mean, lambda params: 0.0, params)

    with pytest.raises(ValueError, match="JDP103"):
        trained(make_mesh(2), loss_fn, parameters(), rows())


# Outside of a train step


@pytest.mark.parametrize("again", [lambda g: lax.pmean(g, "data"), jdp.sync_gradients])
@pytest.mark.parametrize("check_vma", [False, True])
def test_in_a_shard_map_of_your_own_the_mean_may_be_taken_again(check_vma, again, make_mesh):
    def on_rank(params, x):
        fn = jdp.value_and_grad(lambda params, x: squares(late, params, x).mean())
        return again(fn(params, x)[1])

    mapped = jax.shard_map(
        on_rank, mesh=make_mesh(3), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    want = jax.grad(functools.partial(mean_loss, lax.scan))(parameters(), rows())
    assert_close(jax.jit(mapped)(parameters(), rows()["x"]), want, 3e-6)


def test_outside_of_any_axis_it_is_lax_scan():
    scans = [lambda p, x, scan=scan: scan(layer, x, p["layers"]) for scan in (late, lax.scan)]
    programs = [str(jax.make_jaxpr(scan)(parameters(), rows()["x"])) for scan in scans]
    assert programs[0] == programs[1]


def test_an_evaluation_reduces_nothing_but_its_metrics(make_mesh):
    state = state_of(make_mesh(2), parameters())

    def reductions(scan):
        measure = jdp.eval_step(lambda params, batch: {"loss": mean_loss(scan, params, batch)})
        return measure.lower(state.params, rows()).as_text().count("stablehlo.all_reduce")

    assert reductions(late) == reductions(lax.scan)


def test_a_flax_block_is_a_layer(make_mesh):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))

    block = Block()
    init = lambda key: block.init(key, rows()["x"])["params"]  # noqa: E731
    blocks = jax.vmap(init)(jax.random.split(jax.random.key(0), NUM_LAYERS))

    def loss_fn(scan, params, batch):
        f = jax.checkpoint(lambda x, p: (block.apply({"params": p}, x), None))
        return jnp.square(scan(f, batch["x"], params)[0] - 1).mean()

    want = plainly(loss_fn, blocks, rows())
    assert_close(trained(make_mesh(3), loss_fn, blocks, rows()), want, 3e-6)


# One verdict for all platforms: a CPU and a GPU take different programs


def by_default(change=lambda grads: grads, form=mean_loss):
    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(functools.partial(form, jdp.scan_layers))(state.params, batch)
        return state.apply_gradients(change(grads)), {}

    return step


def refusal(step, mesh, platform, monkeypatch):
    monkeypatch.setattr(step_context, "platform", lambda: platform)
    with pytest.raises(ValueError) as caught:
        step.lower(state_of(mesh, parameters()), rows())
    return str(caught.value)


def layers_over_ranks(reduce, **options):
    def change(grads):
        return {**grads, "layers": jax.tree.map(lambda g: reduce(g, "data"), grads["layers"])}

    return by_default(change, **options)


def varying_params(scan, params, batch):
    masked = jax.tree.map(lambda w: w * batch["x"].mean(), params["layers"])
    return squares(scan, {**params, "layers": masked}, batch["x"]).mean()


def skipped_by_some(scan, params, batch):
    mean = lambda params: squares(scan, params, batch["x"]).mean()  # noqa: E731
    return lax.cond(batch["x"].sum() > 0, mean, lambda params: 0.0, params)


@jdp.train_step
def in_forward_mode(state, batch):
    loss_fn = functools.partial(mean_loss, jdp.scan_layers, batch=batch)
    return state, {"slope": jax.jvp(loss_fn, (state.params,), (state.params,))[1]}


def linearized_slope(scan, params, batch):
    _, push = jax.linearize(functools.partial(mean_loss, scan, batch=batch), params)
    return jnp.sin(push(params))


def jitted_slope(scan, params, batch):
    f = jax.jit(functools.partial(mean_loss, scan, batch=batch))
    return jnp.sin(jax.jvp(f, (params,), (params,))[1])


WRONG_ON_ONE_PLATFORM = {
    "forward mode": (in_forward_mode, "late=False"),
    "jvp that is differentiated": (by_default(form=layer_forms.along_the_parameters), "late=False"),
    "linearize that is differentiated": (by_default(form=linearized_slope), "late=False"),
    "jit in a jvp that is differentiated": (by_default(form=jitted_slope), "late=False"),
    "psum": (layers_over_ranks(lax.psum), "JDP121"),
    "params that vary": (by_default(form=varying_params), "as xs="),
    "skipped by some ranks": (by_default(form=skipped_by_some), "JDP103"),
    # Each program is wrong in its own way.
    "both": (layers_over_ranks(lax.psum, form=varying_params), "JDP121"),
}


@pytest.mark.parametrize("name", WRONG_ON_ONE_PLATFORM)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_one_platform_refuses_all_refuse_with_the_same_text(
    name, num_ranks, make_mesh, monkeypatch
):
    step, text = WRONG_ON_ONE_PLATFORM[name]
    on_cpu, on_gpu = (
        refusal(jdp.train_step(step.__wrapped__), make_mesh(num_ranks), platform, monkeypatch)
        for platform in ("cpu", "gpu")
    )
    assert on_cpu == on_gpu
    assert text in on_cpu


def test_a_mean_of_the_gradient_is_taken_on_all_platforms(make_mesh, monkeypatch):
    step = layers_over_ranks(lax.pmean)
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(step_context, "platform", lambda p=platform: p)
        jdp.train_step(step.__wrapped__).lower(state_of(make_mesh(2), parameters()), rows())


@every_form
def test_a_form_that_the_default_takes_on_one_platform_it_takes_on_all(
    form, make_mesh, monkeypatch
):
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(step_context, "platform", lambda p=platform: p)
        by_default(form=form).lower(state_of(make_mesh(2), parameters()), rows())


def test_the_proof_of_other_platforms_leaves_nothing_in_the_program(make_mesh):
    assert num_reductions(make_mesh(2), mean_loss, scan=jdp.scan_layers) == num_reductions(
        make_mesh(2), mean_loss, scan=functools.partial(late, late=False)
    )


# One verdict for any number of ranks: on one rank layers that would reduce late do not


def reducing(change, *, synced=False, form=mean_loss):
    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(functools.partial(form, late))(state.params, batch)
        return state.apply_gradients(change(grads), synced=synced), {}

    return step


def of_all(reduce):
    return lambda grads: jax.tree.map(lambda g: reduce(g, "data"), grads)


def of_layers(reduce):
    return lambda grads: {**grads, "layers": of_all(reduce)(grads["layers"])}


def of_the_rest(reduce):
    return lambda grads: {**grads, "out": reduce(grads["out"], "data")}


@jdp.train_step
def late_in_forward_mode(state, batch):
    loss_fn = functools.partial(mean_loss, late, batch=batch)
    return state, {"slope": jax.jvp(loss_fn, (state.params,), (state.params,))[1]}


WRONG_IF_LATE = {
    "sum of a layer": (reducing(of_layers(lax.psum)), "JDP122"),
    "sum as the mean": (reducing(of_all(lax.psum), synced=True), "JDP122"),
    "local as the mean": (reducing(of_layers(lax.pmean), synced=True), "JDP101"),
    "params that vary": (reducing(lambda g: g, form=varying_params), "as xs="),
    "skipped by some ranks": (reducing(lambda g: g, form=skipped_by_some), "JDP103"),
    "forward mode": (late_in_forward_mode, "late=False"),
    "jvp that is differentiated": (
        reducing(lambda g: g, form=layer_forms.along_the_parameters),
        "late=False",
    ),
}
RIGHT_IF_LATE = {
    "means as means": reducing(of_all(lax.pmean), synced=True),
    "mean of a layer": reducing(of_layers(lax.pmean)),
    "mean of the rest": reducing(of_the_rest(lax.pmean), synced=True),
    "mean by hand": reducing(
        of_all(lambda g, axis: lax.psum(g / lax.axis_size(axis), axis)), synced=True
    ),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", WRONG_IF_LATE)
def test_what_is_wrong_on_more_ranks_is_refused_on_one(name, num_ranks, make_mesh):
    step, text = WRONG_IF_LATE[name]
    with pytest.raises(ValueError) as caught:
        jdp.train_step(step.__wrapped__)(state_of(make_mesh(num_ranks), parameters()), rows())
    assert text in str(caught.value)
    assert re.search(r"(test_scanned_layers|layer_forms)\.py:\d", str(caught.value))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", RIGHT_IF_LATE)
def test_what_is_right_on_more_ranks_is_taken_on_one(name, num_ranks, make_mesh):
    step = jdp.train_step(RIGHT_IF_LATE[name].__wrapped__)
    state, _ = step(state_of(make_mesh(num_ranks), parameters()), rows())
    want = plainly(mean_loss, parameters(), rows(), num_steps=1)
    assert_close(state.params, want, 3e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_part", [False, True], ids=["whole", "part of another program"])
def test_a_loss_that_is_jitted_by_itself_is_proved_in_both_forms(
    is_part, num_ranks, make_mesh, monkeypatch
):
    forms = []

    def analyse(step, **options):
        forms.append("averaged" in str(step))
        return analysed(step, **options)

    analysed = step_refusals.analyse
    monkeypatch.setattr(step_refusals, "analyse", analyse)
    loss = jax.jit(functools.partial(mean_loss, jdp.scan_layers))
    for _ in range(2):  # JAX keeps what it traced of the loss

        @jdp.train_step
        def step(state, batch):
            return state.apply_gradients(jax.grad(loss)(state.params, batch)), {}

        lowered = jax.jit(lambda *args, step=step: step(*args)).lower if is_part else step.lower
        text = lowered(state_of(make_mesh(num_ranks), parameters()), rows()).as_text()
        assert forms == [False, True]
        assert "optimization_barrier" not in text
        forms.clear()
