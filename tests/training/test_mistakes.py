"""Mistakes that people make when they port a program: each error names the mistake itself."""

import dataclasses
import linecache
import os
import random
import re
import threading
import time
import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.training import batch, loss_fn, plain_step, ranks, sgd, state

import jdp


def swapped(state, batch):
    return plain_step(state, batch)[::-1]


def loss_first(state, batch):
    new, metrics = plain_step(state, batch)
    return metrics["loss"], new


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("fit", [swapped, loss_first], ids=["metrics", "loss"])
def test_a_state_that_is_returned_second_is_told_from_one_that_differs(num_ranks, fit):
    ranks(num_ranks)
    with pytest.raises(TypeError, match=rf"`{fit.__name__}`.*\(metrics, state\).*`return state, "):
        jdp.train_step(fit)(state(), batch())


def test_a_state_and_metrics_may_look_alike():
    ranks(2)
    step = jdp.train_step(lambda state, batch: (state + 1, 2 * state))
    new, metrics = step(jnp.float32(3), np.ones(2))
    assert (float(new), float(metrics)) == (4, 6)


def test_the_state_may_change_its_structure():
    ranks(2)
    step = jdp.train_step(lambda state, batch: ({**state, "more": state["w"]}, {}))
    assert step({"w": jnp.ones(2)}, np.ones(2))[0].keys() == {"w", "more"}


@pytest.mark.parametrize("returned", [(1, 2, 3), None], ids=["three values", "nothing"])
def test_how_many_values_a_step_returned_is_named(returned):
    ranks(2)
    match = "3 values" if returned else "NoneType"
    with pytest.raises(TypeError, match=rf"{match}.*`\(state, metrics\)`"):
        jdp.train_step(lambda state, batch: returned)(state(), batch())


@dataclasses.dataclass
class Rows:
    x: Any


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"a": rows}], ids=["", "['a']"])
def test_a_batch_that_jax_does_not_open_is_named(wrap):
    ranks(2)
    with pytest.raises(ValueError, match=r"`batch(\['a'\])?` .*Rows.*register_dataclass"):
        jdp.train_step(plain_step)(state(), wrap(Rows(np.ones(4))))


def test_a_model_and_an_optimizer_are_one_state():
    ranks(2)
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, sgd(), wrt=nnx.Param)

    @jdp.train_step
    def fit(model, optimizer, batch):
        raise AssertionError

    with pytest.raises(TypeError, match=r"`optimizer` .*Optimizer.*`fit\(\(model, optimizer\), "):
        fit(model, optimizer, batch())


def test_an_nnx_model_and_its_optimizer_are_a_state_as_they_are():
    ranks(2)

    def made():
        model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, sgd(), wrt=nnx.Param)

    def fit(state, batch):
        model, optimizer = state
        loss = lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)
        return (model, optimizer), {}

    (model, optimizer), _ = jdp.train_step(fit)(made(), batch())
    want, _ = fit(made(), batch())
    np.testing.assert_allclose(model.kernel[...], want[0].kernel[...], rtol=1e-6)
    assert int(optimizer.step[...]) == 1


class Module(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: Any
    heads: Any


class Pair(NamedTuple):
    w: Any
    b: Any


def module():
    return Module(eqx.nn.Linear(3, 2, key=jax.random.key(0)), eqx.nn.Dropout(0.5))


@pytest.mark.parametrize(
    "params, path",
    [
        (module, r"\.dropout\.p` is 0\.5"),
        (lambda: [Model(np.ones(2), 4)], r"\[0\]\.heads` is 4"),
        (lambda: Model(np.ones(2), True), r"\.heads` is True"),
    ],
    ids=["Equinox", "dataclass", "flag"],
)
def test_a_number_of_a_module_is_not_a_parameter(params, path):
    with pytest.raises(TypeError, match=rf"`params{path}.*eqx\.partition.*static"):
        jdp.TrainState.create(params(), sgd())


def test_numbers_elsewhere_are_parameters():
    ranks(1)
    for params in ({"w": 1.0}, Pair(1.0, 2.0), [Pair(1.0, 2)], Model(np.ones(2), np.float32(4))):
        made = jdp.TrainState.create(params, sgd())
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made.params))


def test_a_partitioned_module_trains():
    ranks(2)
    params, static = eqx.partition(module(), eqx.is_inexact_array)

    @jdp.train_step
    def fit(state, batch):
        def loss(params):
            model = eqx.combine(params, static)
            return jnp.mean(jax.vmap(model.linear)(batch["x"]) ** 2)

        return state.apply_gradients(jax.grad(loss)(state.params)), {}

    new, _ = fit(jdp.TrainState.create(params, sgd()), {"x": np.ones((4, 3), np.float32)})
    assert int(new.step) == 1


def test_a_number_of_a_state_that_chooses_the_program_is_named():
    ranks(2)

    @jdp.train_step
    def fit(state, batch):
        return state, {"y": [1.0, 2.0][state.heads]}

    with pytest.raises(TypeError, match=r"(?s)`state\.heads`.*eqx\.partition.*JDP127"):
        fit(Model(np.ones(2), 1), np.ones(4))


def nnx_statistics():
    graph, made = nnx.split(nnx.BatchNorm(5, rngs=nnx.Rngs(0)))

    def fit(state, batch):
        model = nnx.merge(graph, state)
        model(batch["x"])
        return nnx.state(model), {}

    return made, fit


@pytest.mark.parametrize("is_eval", [True, False])
def test_an_evaluation_that_updates_batch_statistics_is_a_warning(is_eval):
    ranks(2)
    model = nnx.BatchNorm(5, axis_name="data", rngs=nnx.Rngs(0))
    if is_eval:
        model.eval()
    measure = jdp.eval_step(lambda model, batch: {"m": model(batch["x"]).mean()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure(model, batch())
    told = [each for each in caught if "updates batch statistics of `model`" in str(each.message)]
    assert [each.filename for each in told] == [] if is_eval else [__file__]


def equinox_statistics():
    norm, made = eqx.nn.make_with_state(eqx.nn.BatchNorm)(5, axis_name="rows", mode="batch")

    def fit(state, batch):
        new = jax.vmap(norm, axis_name="rows", in_axes=(0, None), out_axes=(0, None))
        return new(batch["x"], state)[1], {}

    return made, fit


@pytest.mark.parametrize("make", [nnx_statistics, equinox_statistics], ids=["nnx", "Equinox"])
def test_batch_statistics_of_a_library_are_told_from_parameters(make):
    ranks(2)
    made, fit = make()
    with pytest.raises(ValueError, match=r"jdp\.mean_over_ranks\(stats\).*axis_name=.*JDP101"):
        jdp.train_step(fit)(made, batch())


def test_statistics_that_a_good_step_stores_are_not_blamed_on_the_choice():
    ranks(2)
    name = "batch_norm/~/mean_ema"  # as Haiku names it

    def fit(state, batch):
        new = {name: batch["x"].mean(0)}
        is_good = jnp.isfinite(jdp.sum_over_ranks(batch["x"].sum()))
        return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, state), {}

    depends = r"depends on `batch\['x'\]` \(this rank's rows\)\."
    with pytest.raises(ValueError, match=rf"{depends}.*jdp\.mean_over_ranks\(stats\).*JDP101"):
        jdp.train_step(fit)({name: np.zeros(5, "f")}, batch())


def test_an_integer_beside_batch_statistics_is_named():
    ranks(2)
    stats = {"mean": np.zeros(5, "f"), "count": np.int32(1)}
    with pytest.raises(TypeError, match=r"int32\[\], at x\['count'\].*jax\.tree\.map"):
        jdp.train_step(lambda state, batch: (jdp.mean_over_ranks(state), {}))(stats, batch())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("value_and_grad", [jax.value_and_grad, jdp.value_and_grad])
def test_a_new_state_that_is_dropped_is_a_warning_that_names_the_leaves(value_and_grad, stage):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = value_and_grad(loss_fn)(state.params, batch)[1]
        state.apply_gradients(grads)
        return state, {}

    tx = jdp.sharded(optax.adam(0.1), stage=stage, min_size=1) if stage else sgd()
    with pytest.warns(UserWarning, match=r"`new state\.params\['b'\]`.*unchanged.*apply_gradient"):
        step(state(tx), batch())


@pytest.mark.parametrize("is_swapped", [False, True])
def test_swapped_arguments_of_an_optimizer_of_nnx_are_a_warning(is_swapped):
    ranks(2)
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    graph, values = nnx.split((model, nnx.Optimizer(model, sgd(), wrt=nnx.Param)))

    @jdp.train_step
    def step(values, batch):
        model, optimizer = nnx.merge(graph, values, copy=True)
        grads = nnx.grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(*((grads, model) if is_swapped else (model, grads)))
        return nnx.state((model, optimizer)), {}

    if is_swapped:
        with pytest.warns(UserWarning, match=r"kernel.*unchanged.*optimizer\.update\(model, grads"):
            step(values, batch())
    else:
        step(values, batch())  # warnings are errors here


def test_a_step_may_train_one_of_two_models_with_equal_names():
    ranks(2)

    @jdp.train_step
    def step(states, batch):
        one, other = states
        grads = jax.grad(loss_fn)(one.params, batch)
        return (one.apply_gradients(grads), other), {}

    step((state(), state()), batch())


def only_a_statistic(state, batch):
    grads = jdp.sync_gradients(jax.grad(loss_fn)(state["p"], batch))
    return {**state, "norm": state["norm"] + optax.tree.norm(grads)}, {}


def one_leaf_by_hand(state, batch):
    grads = jdp.sync_gradients(jax.grad(loss_fn)(state["p"], batch))
    p = {**state["p"], "w": state["p"]["w"] - 0.1 * grads["w"]}
    return {**state, "p": p}, {}


@pytest.mark.parametrize("fit", [only_a_statistic, one_leaf_by_hand])
def test_gradients_that_reach_a_state_are_no_mistake(fit):
    ranks(2)
    jdp.train_step(fit)({"p": state().params, "norm": jnp.float32(0)}, batch())


def test_parameters_that_are_one_array_are_named_too():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(state.params)
        jax.jit(lambda state: state.apply_gradients(grads))(state)
        return state, {}

    with pytest.warns(UserWarning, match="`new state.params` unchanged"):
        step(jdp.TrainState.create(jnp.ones(5), sgd()), batch())


RANK, WORLD_SIZE = 0, jax.device_count()
TEXT = os.getenv("WORLD_SIZE", str(WORLD_SIZE))
NUM_PROCESSES = int(TEXT)
INVERSE = 1 / NUM_PROCESSES
DIVISIONS = [
    ({"loss": lambda x, s: x / jax.device_count()}, "the gradients"),
    ({"loss": lambda x, s: x / WORLD_SIZE}, "the gradients"),
    ({"grad": lambda g: g / WORLD_SIZE}, "the gradients"),
    ({"metric": lambda m: m / WORLD_SIZE}, r"`metrics\['m'\]`"),
    ({"metric": lambda m: jax.lax.psum(m, "data") / WORLD_SIZE}, None),
    ({"loss": lambda x, s: x / (WORLD_SIZE**2 / WORLD_SIZE)}, None),
    ({"loss": lambda x, s: x * (1 + s.step / WORLD_SIZE)}, None),
    ({"loss": lambda x, s: x / WORLD_SIZE, "mean": False}, None),
    ({"loss": lambda x, s: x / 8.0}, None),
    ({"loss": lambda x, s: x / float(os.environ.get("WORLD_SIZE", 1))}, "the gradients"),
    ({"loss": lambda x, s: x / int(os.getenv("WORLD_SIZE"))}, "the gradients"),
    ({"grad": lambda g: g / NUM_PROCESSES}, "the gradients"),
    ({"grad": lambda g: g * (1.0 / jax.device_count())}, "the gradients"),
    ({"grad": lambda g: INVERSE * g}, "the gradients"),
    ({"loss": lambda x, s: x * 0.125}, None),
    ({"loss": lambda x, s: x * (1 + s.step * (1 / WORLD_SIZE))}, None),
]


@pytest.mark.parametrize("how, what", DIVISIONS)
def test_a_division_of_a_mean_by_the_number_of_devices_is_a_warning(how, what, monkeypatch):
    ranks(WORLD_SIZE)
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    same = lambda x, *_: x  # noqa: E731

    def fit(state, batch):
        loss = lambda p: how.get("loss", same)(loss_fn(p, batch), state)  # noqa: E731
        loss, grads = jax.value_and_grad(loss)(state.params)
        grads = jax.tree.map(how.get("grad", same), grads)
        return state.apply_gradients(grads), {"m": how.get("metric", same)(batch["x"].mean())}

    s, rows = state(sgd(mean=how.get("mean", True))), batch(num_rows=WORLD_SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jdp.train_step(fit)(s, rows)
    told = [str(each.message) for each in caught if "divides" in str(each.message)]
    assert len(told) == (what is not None)
    assert what is None or re.match(rf"test_mistakes\.py:\d+ divides {what} by", told[0])


def noise():
    return np.random.rand()  # DRAWN


class Noise:
    def __init__(self):
        self.own = {"random": np.random.default_rng(0)}["random"]

    def __call__(self):
        return np.random.normal()  # OBJECT

    def draw(self):
        return self.own.normal()  # METHOD


NOISE, HELD = Noise(), {"draw": np.random.rand}


def locally_imported():
    import numpy.random as own  # noqa: PLC0415

    return own.normal()  # LOCAL


DRAWS = {
    "numpy": lambda: np.random.rand(),
    "another function": lambda: noise(),
    "python": lambda: random.random(),
    "jitted": jax.jit(lambda: jnp.float32(random.uniform(0, 1))),
    "generator": lambda: RANDOM.normal(),
    "new generator": lambda: np.random.default_rng().normal(),
    "clock": lambda: float(time.time()),
    "an object": lambda: NOISE(),
    "a method": lambda: NOISE.draw(),
    "a local import": locally_imported,
    "unknown": lambda: HELD["draw"](),
}
RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("how", DRAWS)
def test_a_number_that_python_draws_in_a_step_is_a_warning_at_its_line(how, num_ranks):
    ranks(num_ranks)
    draw = DRAWS[how]
    fit, s = lambda state, batch: (state, {"x": draw() + batch["x"].mean() * 0}), state()
    step = jdp.train_step(donate=False)(fit)
    with pytest.warns(UserWarning, match=r"(?s)`<lambda>` .*(key|argument)") as caught:
        first, second = (float(step(s, batch())[1]["x"]) for _ in range(2))
    assert first == second and len(caught) == 1
    assert caught[0].filename == __file__
    line = linecache.getline(__file__, caught[0].lineno)
    wanted = {"another function": "DRAWN", "generator": "RANDOM", "clock": "time"}
    wanted |= {"an object": "OBJECT", "a method": "METHOD", "a local import": "LOCAL"}
    wanted |= {"unknown": "fit,"}
    assert wanted.get(how, "random.") in line
    assert ("(from numpy.random)" in str(caught[0].message)) == (how == "unknown")


def test_numbers_that_a_thread_of_the_dataset_draws_are_no_mistake():
    ranks(2)
    augment = lambda: (np.random.rand(), random.random(), NOISE.draw())  # noqa: E731
    threads = [threading.Thread(target=augment) for _ in range(9)]

    def fit(state, batch):
        thread = threads.pop()
        thread.start()  # as one that augments rows while a step is traced
        thread.join()
        return state, {"x": jax.random.normal(state.key)}

    jdp.train_step(fit)(state(), batch())


def test_a_generator_that_is_seeded_in_a_step_is_no_draw():
    ranks(2)

    def fit(state, batch):
        np.random.seed(3)
        np.random.default_rng(3).normal()
        called = jax.pure_callback(
            lambda: np.float32(time.time() + RANDOM.random()), jnp.float32(0)
        )
        return state, {"x": called}

    jdp.train_step(fit)(state(), batch())
