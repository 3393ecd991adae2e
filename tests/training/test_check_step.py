import threading
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.per_rank import planted
from support.training import batch, gradient, loss_fn, plain_step, predict, ranks, state

import jdp
from jdp.training import check_step


def test_a_right_step_passes_and_changes_nothing(capsys):
    ranks(4)
    s, rows = state(), batch()
    found = jdp.check_step(jdp.train_step(plain_step), s, rows)
    assert found.cause is None and found.num_ranks == 4
    assert len(found.leaves) == len(jax.tree.leaves(s))
    assert not s.params["w"].is_deleted()
    out = capsys.readouterr().out
    assert "state." in out and "metrics['loss']" in out


def test_arguments_by_keyword_are_passed_on():
    ranks(3)
    seen = []

    def fit(state, batch, power, *, scale, summed=0.0):
        seen.append((power.shape, scale.shape, summed))
        mean = jax.grad(loss_fn)(state.params, batch)
        total = jax.grad(lambda p: jnp.sum((predict(p, batch["x"]) - batch["y"]) ** 2))
        part = jax.tree.map(lambda a, b: scale**power * a + summed * b, mean, total(state.params))
        return state.apply_gradients(part), {}

    step, power, scale = jdp.train_step(fit), jnp.float32(2), jnp.float32(0.5)
    assert (
        jdp.check_step(step, state(), batch(num_rows=24), power, scale=scale, num_steps=1).cause
        is None
    )
    assert set(seen) == {((), (), 0.0)}
    with pytest.raises(ValueError, match=r" 3 ranks .*\de[+-]\d\d"):
        jdp.check_step(step, state(), batch(num_rows=24), power, scale=scale, summed=jnp.float32(1))
    with pytest.raises(TypeError, match="'scale'"):
        jdp.check_step(step, state(), batch(num_rows=24), power)
    scale.delete()
    with pytest.raises(ValueError, match="`scale` "):
        jdp.check_step(step, state(), batch(num_rows=24), power, scale=scale)


@pytest.mark.filterwarnings("ignore:.*divides the gradients")
def test_a_division_by_the_number_of_devices_is_found():
    num = jax.device_count()
    ranks(num)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(jax.tree.map(lambda g: g / jax.device_count(), grads)), {}

    with pytest.raises(ValueError, match=rf"{num} times smaller.*divides by the number of devices"):
        jdp.check_step(step, state(), batch(num_rows=3 * num))
    assert jax.device_count() == num


def test_one_rank_is_refused_since_any_step_would_pass():
    ranks(1)
    with pytest.raises(ValueError, match=r"has 1[.].*cpu_ranks=4"):
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


def clipped_alone(state, batch):
    grads = jax.grad(loss_fn)(state.params, batch)
    grads, _ = optax.clip_by_global_norm(0.01).update(grads, optax.EmptyState())
    return state.apply_gradients(grads), {}


def noisy_alike(state, batch):
    noise = jax.random.normal(state.shared_key, batch["x"].shape)
    grads = jax.grad(loss_fn)(state.params, {**batch, "x": batch["x"] + noise})
    return state.apply_gradients(grads), {}


def noisy(state, batch):
    noise = jax.random.normal(state.key, batch["x"].shape)
    grads = jax.grad(loss_fn)(state.params, {**batch, "x": batch["x"] + noise})
    return state.apply_gradients(grads), {}


@pytest.mark.filterwarnings("ignore:.*JDP131")
@pytest.mark.parametrize(
    "program, cause",
    [
        (summed_loss, r"\.mean\(\), not \.sum\(\)"),
        (summed_gradient, r"replicated\(mean=False\)"),
        (clipped_alone, "clip_by_global_norm"),
        (local_masked_mean, "(?!.*clip_by).* weight="),
        (noisy, r"state\.shared_key"),
        (noisy_alike, r"test_check_step\.py:\d+ .*fold_in\(key, jax\.lax\.axis_index"),
    ],
)
def test_says_what_the_analysis_cannot_see(program, cause):
    ranks(3)
    plain_sgd = state(jdp.replicated(optax.sgd(0.1)))
    with pytest.raises(ValueError, match=f" 3 ranks .*{cause}"):
        jdp.check_step(jdp.train_step(program), plain_sgd, batch())


def test_a_masked_mean_is_not_taken_for_clipping_of_each_rank_if_the_mean_gradient_is_clipped():
    ranks(3)
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r" 3 ranks (?!.*no common ratio).* weight="):
        jdp.check_step(jdp.train_step(local_masked_mean), state(jdp.replicated(tx)), batch())


def logits_step(change):
    """A classifier with a number `t` that is added to all logits: its gradient is rounding."""

    def step(state, batch):
        def loss(p):
            logits = batch["x"] @ p["w"] + p["t"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        return state.apply_gradients(change(jax.grad(loss)(state.params))), {}

    return jdp.train_step(step)


@pytest.mark.filterwarnings("ignore:.*JDP131")
@pytest.mark.parametrize("name", ["adam", "nadam"])
@pytest.mark.parametrize("clips", [False, True])
def test_rounding_that_an_optimizer_makes_large_is_told_from_clipping(name, clips):
    ranks(3)
    tx = getattr(optax, name)(0.1)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 3)).astype("float32"), "t": 0.0}
    s = jdp.TrainState.create(params, jdp.replicated(tx))
    rows = {"x": rng.normal(size=(24, 5)).astype("float32"), "y": rng.integers(0, 3, 24)}
    clip = lambda grads: jax.tree.map(lambda g: jnp.clip(g, -0.02, 0.02), grads)  # noqa: E731
    with pytest.raises(ValueError, match=" 3 ranks ") as error:
        jdp.check_step(logits_step(clip if clips else lambda grads: grads), s, rows, num_steps=3)
    assert ("optax.sgd" in str(error.value)) != clips
    assert ("clip" in str(error.value)) == clips


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
    with pytest.raises(ValueError, match=r"\(`state\.model_state\['(mean|var)'\]`\)"):
        jdp.check_step(jdp.train_step(step), s, batch())


class Masked(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x, mask):
        options = {"use_running_average": False, "momentum": 0.5, "axis_name": self.axis_name}
        return nn.BatchNorm(**options)(nn.Dense(3)(x), mask=mask[:, None])


@pytest.mark.parametrize(
    "axis_name, num_rows, cause",
    [(None, 15, "axis_name="), ("data", 15, "mask="), ("data", 24, None)],
)
def test_tells_statistics_of_one_rank_from_those_of_a_mask(axis_name, num_rows, cause):
    model = Masked(axis_name)
    rows = {**batch(), "mask": np.arange(24) < num_rows}
    variables = Masked().init(jax.random.key(0), rows["x"], rows["mask"])

    def step(state, batch):
        def loss(p):
            variables = {"params": p, "batch_stats": state.model_state}
            x, new = model.apply(variables, batch["x"], batch["mask"], mutable=["batch_stats"])
            errors = ((x - batch["y"]) ** 2).mean(-1) * batch["mask"]
            counted = jdp.mean_over_ranks(batch["mask"].mean())
            return errors.mean() / counted, new["batch_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads)
        return state.replace(model_state=jdp.mean_over_ranks(stats)), {}

    ranks(2)
    stats = variables["batch_stats"]
    s = jdp.TrainState.create(variables["params"], training.sgd(), model_state=stats)
    if cause is None:
        jdp.check_step(jdp.train_step(step), s, rows)
        return
    with pytest.raises(ValueError, match=rf"\(`state\.model_state\S+`\).* {cause}") as error:
        jdp.check_step(jdp.train_step(step), s, rows)
    assert ("axis_name=" in str(error.value)) == (axis_name is None)


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


def test_a_state_leaf_that_is_not_of_batch_statistics_is_not_called_that():
    def step(state, batch):
        hidden = jdp.mean_over_ranks(batch["x"].max())
        return state.apply_gradients(gradient(state, batch)).replace(model_state={"h": hidden}), {}

    ranks(2)
    with pytest.raises(ValueError, match=r"`state.model_state\['h'\]`") as error:
        jdp.check_step(jdp.train_step(step), state(model_state={"h": jnp.float32(0)}), batch())
    assert "axis_name=" not in str(error.value)


def norm_of(grads):
    return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))


# What a step reports of its own rows, and what is said of it.
METRICS = {
    "sum": (lambda g, batch: jnp.sum(batch["x"] ** 2), "jdp.sum_over_ranks(x)"),
    "count": (lambda g, batch: jnp.float32(len(batch["x"])), "jdp.sum_over_ranks(x)"),
    "norm": (lambda g, batch: norm_of(g), "jdp.sync_gradients(grads)"),
    "maximum": (lambda g, batch: batch["x"].max(), "jdp.max_over_ranks"),
    "whole sum": (lambda g, batch: jax.lax.psum(batch["x"].mean(), "data"), "jdp.mean_over_ranks"),
}


@pytest.mark.filterwarnings("ignore:.*JDP131")
@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_that_is_not_that_of_the_whole_batch_is_named(kind):
    of, advice = METRICS[kind]

    @jdp.train_step
    def step(state, batch):
        grads = gradient(state, batch)
        return state.apply_gradients(grads), {"ok": batch["y"].mean(), "odd": of(grads, batch)}

    ranks(4)
    with pytest.raises(ValueError, match=r"`metrics\['odd'\]` is .* 4\. ") as error:
        jdp.check_step(step, state(), batch())
    assert advice in str(error.value)
    assert "metrics['ok']" not in str(error.value)


def test_metrics_that_are_those_of_the_whole_batch_pass_and_rows_are_in_order():
    @jdp.train_step
    def step(state, batch):
        grads = jdp.sync_gradients(gradient(state, batch))
        reported = {
            "norm": norm_of(grads),
            "maximum": jdp.max_over_ranks(batch["x"].max()),
            "count": jdp.sum_over_ranks(len(batch["x"])),
            "nan": jnp.float32(jnp.nan),
            "rows": jdp.rows({"x": batch["x"], "b": batch["x"][:, 0] > 0}),
        }
        return state.apply_gradients(grads, synced=True), reported

    for num_ranks in (2, 3, 8):
        ranks(num_ranks)
        found = jdp.check_step(step, state(), batch())
        assert [leaf.difference <= leaf.allowed for leaf in found.metrics] == [True] * 6
        assert found.num_steps == 2


def test_rows_in_another_order_are_found():
    def on_one(state, batch):
        return state.apply_gradients(gradient(state, batch)), {"rows": jdp.rows(batch["x"])}

    ranks(2)
    with pytest.raises(ValueError, match=r"metrics\['rows'\]"):
        jdp.check_step(step_of_two(on_one), state(), batch())


def step_of_two(on_one):
    def step(state, batch):
        new, reported = on_one(state, batch)
        if jax.lax.axis_size("data") == 2:
            swap = [(0, 1), (1, 0)]
            reported = {"rows": jdp.rows(jax.lax.ppermute(batch["x"], "data", swap))}
        return new, reported

    return jdp.train_step(step)


def test_a_rank_that_drifts_alone_is_found():
    kind, lock, calls = jax.ShapeDtypeStruct((), jnp.float32), threading.Lock(), []

    def third_call_is_odd(step):
        with lock:
            calls.append(step)
            return np.float32(len(calls) == 3)  # of three ranks one; the first call is of one rank

    @jdp.train_step
    def step(state, batch):
        new = state.apply_gradients(gradient(state, batch))
        seen = jax.pure_callback(third_call_is_odd, kind, new.step)
        return new.replace(params={**new.params, "b": new.params["b"] + seen}), {}

    ranks(3)
    with pytest.raises(ValueError, match=r" 3 ranks .* `state\.params\['b'\]`, rank \d"):
        jdp.check_step(step, state(), batch())


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_each_rank_is_compared(make_mesh, odd):
    mesh = make_mesh(3)
    x = np.arange(4, dtype=np.float32)
    many = {"w": planted(mesh, x, x + np.float32([0, 0, 5, 0]), {odd})}
    (found,) = check_step.compare("state", {"w": x}, {"w": x}, many, 1e-5)
    assert (found.difference, found.rank, found.change_all) == (5.0, odd, 5.0)
    whole = {"w": planted(mesh, x, x, ())}
    (found,) = check_step.compare("state", {"w": x}, {"w": x}, whole, 1e-5)
    assert (found.difference, found.rank) == (0.0, None)


def test_further_arguments_on_the_mesh_are_moved_as_well():
    ranks(4)
    s = state()
    teacher = jax.tree.map(jnp.copy, s.params)

    @jdp.train_step
    def distil(state, batch, teacher, temperature, key):
        target = predict(teacher, batch["x"]) / temperature + jax.random.normal(key)
        grads = jax.grad(lambda p: jnp.mean((predict(p, batch["x"]) - target) ** 2))(state.params)
        return state.apply_gradients(grads), {}

    found = jdp.check_step(distil, s, batch(), teacher, 2.0, jax.random.key(1))
    assert found.cause is None
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(teacher))


def test_what_is_wrong_from_the_second_step_on_is_found():
    def step(state, batch):
        scale = jnp.where(state.step == 1, jax.lax.axis_size("data"), 1)
        return state.apply_gradients(jax.tree.map(lambda g: g * scale, gradient(state, batch))), {}

    ranks(2)
    assert jdp.check_step(jdp.train_step(step), state(), batch(), num_steps=1).num_steps == 1
    with pytest.raises(ValueError, match=" 2 steps"):
        jdp.check_step(jdp.train_step(step), state(), batch())
    with pytest.raises(ValueError, match="num_steps .*1.*0"):
        jdp.check_step(jdp.train_step(step), state(), batch(), num_steps=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_digits_of_parameters_of_16_bits_are_no_difference(dtype):
    def step(state, batch, scale=1):
        def loss_of(p):
            errors = predict(p, batch["x"].astype(dtype)) - batch["y"].astype(dtype)
            return jnp.mean(errors.astype(jnp.float32) ** 2) * scale

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    ranks(4)
    low = jax.tree.map(lambda x: x.astype(dtype), training.params())
    s = jdp.TrainState.create(low, jdp.replicated(optax.sgd(0.1)))
    found = jdp.check_step(jdp.train_step(step), s, batch(), tolerance=1e-8)
    if dtype == "bfloat16":  # float16 may come out equal
        assert max(leaf.difference for leaf in found.leaves) > 1e-6
    with pytest.raises(ValueError, match=r"\b4 .*\.mean\(\), not \.sum\(\)"):
        jdp.check_step(jdp.train_step(lambda s, b: step(s, b, len(b["x"]))), s, batch())


def test_digits_do_not_explain_ranks_that_differ(make_mesh):
    mesh, x = make_mesh(2), jnp.ones(2, jnp.bfloat16)
    many = {"w": planted(mesh, x, x + jnp.array([0, 0.0078125], jnp.bfloat16), {1})}
    (found,) = check_step.compare("state", {"w": x}, {"w": x}, many, 1e-5)
    assert check_step.beyond([found]) and found.rank == 1


def test_arithmetic_of_16_bits_is_named_where_differences_are_small():
    def step(state, batch):
        def loss_of(p):
            low, b = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, batch))
            return loss_fn(low, b).astype(jnp.float32)

        return state.apply_gradients(jax.grad(loss_of)(state.params)), {}

    ranks(4)
    with pytest.raises(ValueError, match="bfloat16 .* tolerance="):
        jdp.check_step(jdp.train_step(step), state(), batch(), tolerance=1e-6)
    jdp.check_step(jdp.train_step(step), state(), batch(), tolerance=1e-2)


def noise(how):
    if how == "number":
        return np.float32(np.random.normal())
    if how == "time":
        return jnp.float32(time.perf_counter_ns() % 1_000_003)
    return jnp.asarray(np.random.normal(size=3).astype(np.float32))


@pytest.mark.filterwarnings("ignore:`step` ")
@pytest.mark.parametrize("how", ["number", "time", "array"])
def test_a_constant_that_differs_from_trace_to_trace_is_named(how):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        drawn = noise(how)
        loss = lambda p, x: jnp.mean((x @ (p + drawn)) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    start = jdp.TrainState.create(np.ones(3, np.float32), jdp.replicated(optax.sgd(0.1)))
    where = "an array of the step" if how == "array" else "test_check_step.py:"
    with pytest.raises(
        ValueError, match=rf"(?s)changes from trace to trace: .*{where}.*state\.key"
    ):
        jdp.check_step(step, start, np.eye(4, 3, dtype=np.float32))
