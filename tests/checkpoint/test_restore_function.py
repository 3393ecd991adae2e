"""A function in place of the state is traced where there is something to restore, else called."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.launched import Launcher
from support.training import ranks

import jdp

HERE = "test_restore_function"
WRAPPERS = {
    "replicated": jdp.replicated,
    "stage 1": jdp.sharded,
    "stage 3": functools.partial(jdp.sharded, stage=3),
    "diloco": functools.partial(jdp.diloco, every=2),
}


def makes(how="replicated", num_ranks=1):
    """A function that makes a state with each kind of leaf, and how often it ran to its end."""
    runs = []

    def make():
        key = jax.random.key(7)
        params = {
            "w": jax.random.normal(key, (12, 12)),
            "host": np.arange(12.0),  # float64
            "small": jnp.zeros((), jnp.bfloat16),
        }
        numbers = jnp.arange(2.0 * num_ranks).reshape(num_ranks, 2)
        own = jdp.per_rank([numbers, jax.random.split(key, num_ranks)])
        model_state = {"key": key, "own": own, "number": 3}
        tx = WRAPPERS[how](optax.adam(0.5, b2=0.9))
        state = jdp.TrainState.create(params, tx, model_state=model_state, seed=5)
        runs.append(isinstance(state.params["w"], jax.core.Tracer))
        return state

    return make, runs


def described(state):
    def text(leaf):
        weak = getattr(leaf, "weak_type", False)
        return f"{leaf.dtype}{leaf.shape} {weak} {leaf.sharding} {leaf.committed}"

    return [*map(text, jax.tree.leaves(state))]


def values(state):
    def value(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tolist()

    return [*map(value, jax.tree.leaves(state))]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("how", WRAPPERS)
def test_the_restored_state_lies_as_the_made_one_and_was_not_made(tmp_path, how, n):
    ranks(n)
    make, runs = makes(how, n)
    with jdp.Checkpointer(tmp_path) as ckpt:
        made = ckpt.restore(make)
        assert runs == [False]
        assert values(made) == values(make())
        changed = made.replace(params=jax.tree.map(lambda x: x + 1, made.params))
        ckpt.step(changed)
    runs.clear()
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(make)
        assert runs == [True] and ckpt.steps == 1
    assert described(state) == described(changed) == described(make())
    assert values(state) == values(changed)


def test_a_state_outside_of_a_train_state_keeps_its_types(tmp_path):
    def make():
        weak = {"weak": jnp.asarray(1.5), "many": jnp.full(2, 1.5)}
        return {"w": jnp.ones(3) * 2, "host": np.ones(2), "n": 1, "key": jax.random.key(3)} | weak

    with jdp.Checkpointer(tmp_path) as ckpt:
        made = ckpt.restore(make)
        ckpt.step(jax.tree.map(lambda x: x + 1, {**made, "key": 0}) | {"key": made["key"]})
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(functools.partial(make))
    assert jax.random.bits(state["key"]) == jax.random.bits(made["key"])
    assert [type(x) for x in jax.tree.leaves(state)] == [type(x) for x in jax.tree.leaves(made)]
    assert (state["w"].committed, state["weak"].weak_type, state["n"]) == (False, True, 2)
    assert state["w"].tolist() == [3.0] * 3 and float(state["weak"]) == 2.5


def placing(how):
    """A function whose shapes do not tell all of its arrays."""
    mesh = ranks(2)
    split = jax.NamedSharding(mesh, jax.P("data"))
    outer = jax.device_put(jnp.arange(4.0), split)

    def make():
        if how.startswith("captured"):
            return {"x": jax.jit(lambda: outer * 1)() if how.endswith("in a jit") else outer + 0}
        x = jnp.arange(4.0)
        if how == "reads a value":
            return {"x": x if float(x.sum()) else None}
        if how == "device_put":
            return {"x": jax.device_put(x, split)}
        if how == "in a jit":
            return {"x": jax.jit(lambda x: jax.lax.with_sharding_constraint(x, split))(x)}
        return {"x": jax.jit(lambda: jnp.arange(4.0), out_shardings=split)()}

    return make


@pytest.mark.parametrize(
    "how",
    ["reads a value", "device_put", "in a jit", "out_shardings", "captured", "captured in a jit"],
)
def test_a_state_that_shapes_do_not_tell_is_made(tmp_path, how):
    make = placing(how)
    with jdp.Checkpointer(tmp_path) as ckpt:
        made = ckpt.restore(make)
        ckpt.step(jax.tree.map(lambda x: x + 1, made))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(make)
    assert state["x"].sharding == made["x"].sharding and state["x"].tolist() == [1, 2, 3, 4]


def test_an_average_beside_a_state_lies_as_its_parameters(tmp_path):
    ranks(2)

    def make():
        state = jdp.TrainState.create({"w": jnp.ones((64, 256))}, WRAPPERS["stage 3"](optax.sgd(1)))
        return state, state.params["w"] * 1

    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.step(ckpt.restore(make))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state, average = ckpt.restore(make)
    assert average.sharding == state.params["w"].sharding


@pytest.mark.parametrize("how", ["jit", "object"])
def test_what_can_be_called_and_is_no_tree_is_a_function(tmp_path, how):
    class Maker:
        def __call__(self):
            return {"w": jnp.ones(2)}

    make = jax.jit(Maker()) if how == "jit" else Maker()
    for resume in (False, True):
        with jdp.Checkpointer(tmp_path, resume=resume) as ckpt:
            state = ckpt.restore(make)
            ckpt.step(jax.tree.map(lambda x: x + 1, state))
    assert state["w"].tolist() == [2.0, 2.0]


def test_missing_leaves_have_the_values_that_the_function_makes(tmp_path):
    ranks(1)
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.step(ckpt.restore({"a": jnp.ones(2)}))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(lambda: {"a": jnp.zeros(2), "b": jnp.ones(1) * 7}, missing="keep")
    assert (state["a"].tolist(), state["b"].tolist()) == ([1.0, 1.0], [7.0])


def test_an_error_of_the_function_is_raised_as_it_is(tmp_path):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'key'"):
        jdp.Checkpointer(tmp_path).restore(lambda key: {"w": key})


def test_a_module_that_can_be_called_is_a_state(tmp_path):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    with jdp.Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(model) is model


def trained(folder, num_steps):
    """Train a model of Flax, whose optimizer is split over all processes, from what is saved."""
    jdp.init()
    model, runs = nn.Dense(6), []

    def make():
        params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        runs.append(isinstance(params["kernel"], jax.core.Tracer))
        return jdp.TrainState.create(params, jdp.sharded(optax.adam(0.1), stage=3))

    @jdp.train_step
    def step(state, batch):
        def loss_fn(params):
            return (model.apply({"params": params}, batch) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads), {"loss": loss}

    rows = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    batches = jdp.batches(rows, 12, num_steps=5)
    with batches, jdp.Checkpointer(folder, resume=True) as ckpt:
        state = ckpt.restore(make, batches)
        for batch in batches:
            state, metrics = step(state, batch)
            ckpt.step(state, batches)
            if ckpt.steps == num_steps:
                break
    return runs[-1], ckpt.steps, float(metrics["loss"])


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
def test_processes_restore_the_shards_that_each_of_them_needs(tmp_path):
    losses = {}
    for folder, lives in {"whole": [(2, 5)], "in parts": [(2, 3), (3, 4), (1, 5)]}.items():
        with Launcher() as launcher:
            for generation, (num, end) in enumerate(lives):
                processes = launcher.processes(
                    num, f"{HERE}:trained", tmp_path / folder, end, generation=generation
                )
                results = [process.result() for process in processes]
                assert [(traced, steps) for traced, steps, _ in results] == [
                    (generation > 0, end)
                ] * num
                losses[folder] = results[0][2]
    assert losses["in parts"] == pytest.approx(losses["whole"], rel=1e-5)
