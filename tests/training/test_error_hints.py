"""Mistakes in steps and their calls: the error, or a note on JAX's error, says what to write."""

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback
from support.training import batch, loss_fn, params, plain_step, ranks, sgd, state

import jdp


def notes(error, step, *args):
    """The notes of jdp on the error of a step."""
    with pytest.raises(error) as caught:
        step(*args)
    return [note for note in getattr(caught.value, "__notes__", []) if note.startswith("jdp: ")]


def with_mean_over(axis):
    def step(state, batch):
        grads = jax.grad(loss_fn)(state.params, batch)
        return state.apply_gradients(lax.pmean(grads, axis)), {}

    return jdp.train_step(step)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_axis_of_a_pmap_that_was_ported_is_named(num_ranks):
    ranks(num_ranks)
    (note,) = notes(NameError, with_mean_over("batch"), state(), batch())
    assert "'data'" in note and "jdp.init(axis_name='batch')" in note


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_of_all_devices_of_a_pmap_that_was_ported_have_a_note(make):
    def step(state, batch, keys):
        return plain_step(state.replace(params=drawn(state.params, keys)), batch)

    def drawn(params, keys):
        noise = jax.random.normal(jax.random.fold_in(keys, 0), ())
        return jax.tree.map(lambda x: x + noise, params)

    ranks(3)
    step, keys = jdp.train_step(step), jax.random.split(make(0), 3)
    (note,) = notes(ValueError, step, state(), batch(), keys)
    assert "state.key" in note and "lax.axis_index('data')" in note
    step(state(), batch(), make(0))


@pytest.mark.parametrize("error", [TypeError, flax.errors.ScopeParamShapeError])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_batch_with_a_dim_for_the_devices_of_a_pmap_has_a_note(num_ranks, error):
    ranks(num_ranks)
    layer = nn.Dense(2).init(jax.random.key(0), batch()["x"])

    @jdp.train_step
    def step(state, batch):
        x = batch["x"].reshape(len(batch["y"]), -1)
        if error is not TypeError:
            nn.Dense(2).apply(layer, x)
        return plain_step(state, {**batch, "x": x})

    sharded = jax.tree.map(lambda x: x.reshape(num_ranks, -1, *x.shape[1:]), batch())
    (note,) = notes(error, step, state(), sharded)
    assert "common_utils.shard" in note and "[rows, ...]" in note


@pytest.mark.parametrize("takes_batch", [True, False])
def test_a_weight_of_micro_batches_that_are_not_the_batch_of_the_step_is_named(takes_batch):
    def step(state, batch):
        loss = lambda p, x: loss_fn(p, x if takes_batch else {**batch, "x": x})  # noqa: E731
        rows = batch if takes_batch else batch["x"]
        grads = jdp.value_and_grad(loss, accumulate=2)(state.params, rows)[1]
        return state.apply_gradients(grads), {}

    ranks(2)
    step = jdp.train_step(weight=lambda batch: jnp.ones_like(batch["y"][:, 0]).sum())(step)
    if takes_batch:
        step(state(), batch())
        return
    (note,) = notes(TypeError, step, state(), batch())
    assert "accumulate=k)(state.params, batch)" in note and "(6, " in note


def test_the_error_of_another_name_has_no_note():
    def step(state, batch):
        raise NameError("name 'x' is not defined")

    ranks(2)
    assert notes(NameError, jdp.train_step(step), state(), batch()) == []


def constrained(x, axes, *, own_mesh):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    spec = jax.sharding.PartitionSpec(*axes)
    return lax.with_sharding_constraint(
        x, jax.sharding.NamedSharding(mesh, spec) if own_mesh else spec
    )


@pytest.mark.parametrize("prints", [jax.debug.print, jax.debug.callback])
def test_prints_of_ranks_in_order_have_a_note(prints):
    def step(state, batch):
        prints("{}" if prints is jax.debug.print else id, state.step, ordered=True)
        return plain_step(state, batch)

    ranks(2)
    (note,) = notes(ValueError, jdp.train_step(step), state(), batch())
    assert "ordered=True" in note and "jdp.rows" in note


def test_each_rank_calls_ordered_callbacks_in_the_order_of_the_program():
    calls = []

    def step(state, batch):
        rank = lax.axis_index("data")
        for i in range(3):
            io_callback(lambda *call: calls.append(call), None, rank, i, ordered=True)
        return plain_step(state, batch)

    ranks(2)
    step, now = jdp.train_step(step), state()
    for _ in range(3):
        now, _ = step(now, batch())
    jax.effects_barrier()
    for rank in range(2):
        assert [i for each, i in calls if each == rank] == [0, 1, 2] * 3


@pytest.mark.parametrize("own_mesh", [True, False])
def test_a_constraint_of_the_rows_is_named(own_mesh):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        return plain_step(
            state, jax.tree.map(lambda x: constrained(x, ["data"], own_mesh=own_mesh), batch)
        )

    (note,) = notes(ValueError, step, state(), batch())
    assert "Remove the constraint" in note


@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("unbox", [lambda tree: tree, nn.unbox])
@pytest.mark.parametrize("tx", [sgd(), jdp.sharded(optax.sgd(0.1), min_size=1)])
def test_a_module_of_flax_that_splits_its_parameters_trains_with_and_without_boxes(axis, unbox, tx):
    ranks(2)
    init = nn.with_partitioning(nn.initializers.ones, (None, axis))
    model = nn.Dense(4, kernel_init=init)
    params = unbox(model.init(jax.random.key(0), np.ones((2, 3), np.float32))["params"])

    @jdp.train_step
    def step(state, batch):
        loss_fn = lambda p, rows: model.apply({"params": p}, rows).mean()  # noqa: E731
        grads = jdp.value_and_grad(loss_fn)(state.params, batch)[1]
        return state.apply_gradients(grads), {}

    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    new, _ = step(jdp.TrainState.create(params, tx), rows)
    expected = 1 - 0.1 * np.repeat(rows.mean(0)[:, None] / 4, 4, axis=1)  # a mean of 4 columns
    np.testing.assert_allclose(nn.unbox(new.params)["kernel"], expected, rtol=1e-6)
    assert jax.tree.structure(new.params) == jax.tree.structure(params)


def test_a_python_choice_by_the_rank_is_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        if lax.axis_index("data") == 0:
            return plain_step(state, batch)
        return state, {"loss": 0.0}

    (note,) = notes(jax.errors.TracerBoolConversionError, step, state(), batch())
    assert "test_error_hints.py:" in note and "jax.process_index() == 0" in note


def test_a_formatted_value_is_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        new, metrics = plain_step(state, batch)
        print(f"{metrics['loss']:.3f}")
        return new, metrics

    (note,) = notes(TypeError, step, state(), batch())
    assert "metric" in note and "jax.debug.print" in note


def test_a_batch_of_two_arguments_is_one():
    ranks(2)
    step = jdp.train_step(plain_step)
    with pytest.raises(TypeError, match=r"Call plain_step\(state, \(x, y\)\).* x, y = batch"):
        step(state(), batch()["x"], batch()["y"])


class Table(dict):
    """As a DataFrame of pandas: a leaf to JAX, whose columns are arrays."""

    iloc = to_numpy = None

    @property
    def columns(self):
        return list(self)


class Column:
    iloc = None

    def __init__(self, values):
        self._values = values

    def to_numpy(self):
        return self._values


def test_a_table_is_the_dict_of_its_columns():
    ranks(2)
    step, rows = jdp.train_step(plain_step), batch()
    table = Table({name: Column(values) for name, values in rows.items()})
    found, expected = (step(state(), each) for each in (table, rows))
    jax.tree.map(np.testing.assert_array_equal, found[0].params, expected[0].params)


@jdp.train_step
def columns_step(state, x, y):
    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] + p["b"] - y) ** 2)

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_that_are_two_arguments_are_named_where_they_do_not_fit(num_ranks):
    ranks(num_ranks)
    columns = batch()
    (note,) = notes(TypeError, columns_step, state(), columns["x"], columns["y"])
    assert f"{num_ranks} ranks has {24 // num_ranks} rows of `x`" in note
    assert "all 24 of `y`" in note and "columns_step(state, (x, y))" in note


def test_rows_that_do_not_fit_the_model_have_no_note():
    ranks(2)
    assert notes(TypeError, jdp.train_step(plain_step), state(), {"x": np.ones((4, 3))}) == []


def test_a_gradient_of_the_whole_state_is_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(lambda state: loss_fn(state.params, batch))(state)
        return state.apply_gradients(grads), {}

    (note,) = notes(TypeError, step, state(), batch())
    assert "jax.value_and_grad(loss_fn)(state.params, batch)" in note


@pytest.mark.parametrize("momentum", [None, 0.9], ids=["no leaves", "rows"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_optimizer_state_as_the_batch_is_refused_whatever_its_leaves(momentum, num_ranks):
    ranks(num_ranks)
    tx = jdp.replicated(optax.sgd(0.1, momentum=momentum))

    @jdp.train_step
    def fit(params, opt_state, batch):
        raise AssertionError

    weights = {"w": np.ones(6, np.float32)}
    with pytest.raises(TypeError, match=r"`fit\(\(params, opt_state\), batch\)`"):
        fit(weights, tx.init(weights), batch())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_state_as_the_batch_is_told_from_rows(num_ranks):
    ranks(num_ranks)
    with pytest.raises(
        TypeError, match=r"`batch` holds a TrainState.*`plain_step\(state, batch\)`"
    ):
        jdp.train_step(plain_step)(batch(), state())


def test_a_loop_as_the_batch_is_told_from_rows():
    ranks(2)
    batches = jdp.batches(batch(), 8, num_steps=1)
    with pytest.raises(ValueError, match="`batch` is a Batches.*for batch in batches"):
        jdp.train_step(plain_step)(state(), batches)


@pytest.mark.parametrize("fn", ["data", 3, params()], ids=["axis", "number", "dict"])
@pytest.mark.parametrize("decorator", [jdp.train_step, jdp.eval_step])
def test_only_a_function_is_decorated(decorator, fn):
    with pytest.raises(TypeError, match="not a function.*def step"):
        decorator(fn)


@pytest.mark.parametrize("decorator", [jdp.train_step, jdp.eval_step])
def test_a_function_is_decorated_once(decorator):
    with pytest.raises(TypeError, match="`plain_step` is already decorated"):
        decorator(jdp.train_step(plain_step))


def test_a_step_of_one_argument_is_told_to_take_a_batch():
    with pytest.raises(TypeError, match=r"def step\(state, batch\)"):
        jdp.train_step(lambda state: (state, {}))(state(), batch())


def test_a_traced_value_is_called_an_array():
    ranks(2)
    with pytest.raises(TypeError, match="returned an array, but"):
        jdp.train_step(lambda state, batch: loss_fn(state.params, batch))(state(), batch())


def test_loss_and_gradients_in_the_other_order_are_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads, loss = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    with pytest.raises(ValueError, match=r"a single array.*\(loss, grads\), in this order"):
        step(state(), batch())


def test_an_nnx_model_as_params_is_told_how_to_be_split():
    from flax import nnx

    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = nnx.grad(lambda model: jnp.mean(model(batch["x"]) ** 2))(state.params)
        return state.apply_gradients(grads), {}

    made = jdp.TrainState.create(nnx.Linear(5, 1, rngs=nnx.Rngs(0)), sgd())
    with pytest.raises(ValueError, match=r"nnx\.split\(model, nnx\.Param\)"):
        step(made, batch())


def test_integers_among_parameters_are_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean(batch["x"]) * p["w"].sum() * p["n"])(state.params)
        return state.apply_gradients(grads), {}

    given = {"n": 3, "size": np.arange(2), "w": np.ones(2, "float32")}
    (note,) = notes(TypeError, step, jdp.TrainState.create(given, sgd()), batch())
    assert "`state.params['n']` is int32, and 1 more are not floats" in note
    assert "allow_int=True" in note


def test_an_array_of_objects_among_parameters_is_named():
    ranks(1)
    with pytest.raises(TypeError, match=r"`params\['w'\]` is an array of Python objects"):
        jdp.TrainState.create({"w": np.array([0.5, None])}, sgd())


@pytest.mark.parametrize("read", [lambda b: b.values[:, :2], lambda b: b @ jnp.ones(2), "x.sum"])
def test_a_batch_that_was_a_table_is_a_dict_of_columns(read):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        found = batch.x.sum() if isinstance(read, str) else read(batch)
        return state, {"found": jnp.sum(found)}

    (note,) = notes((AttributeError, TypeError), step, state(), batch())
    assert "`batch` is a dict of arrays" in note and "batch['x']" in note


def test_a_python_float_among_parameters_is_named(caplog):
    ranks(1)
    jdp.TrainState.create({"w": np.ones(2, "float32"), "dropout": 0.1}, sgd())
    assert "`params['dropout']` is the Python float 0.1 and trains" in caplog.text


@pytest.mark.parametrize(
    ("params", "shown"),
    [
        ({"w": [[0.1, 0.2], [0.3, 0.4]]}, "`params['w']` is a list of 4 Python floats"),
        ({"w": [np.ones(2, "float32"), 0.1]}, "`params['w'][1]` is the Python float 0.1"),
    ],
)
def test_a_list_of_python_floats_among_parameters_is_told_to_be_an_array(params, shown, caplog):
    ranks(1)
    jdp.TrainState.create(params, sgd())
    assert shown in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_list_of_rows_as_the_batch_is_told_to_be_stacked(num_ranks):
    ranks(num_ranks)
    rows = [{"x": np.ones(3, "float32"), "y": np.float32(1)} for _ in range(4)]
    step = jdp.train_step(lambda state, batch: (state, {}))
    with pytest.raises(ValueError, match=r"list of 4 dicts.*\n.*np\.stack\(x\), \*rows\)"):
        step(state(), rows)
    step(state(), jax.tree.map(lambda *x: np.stack(x), *rows))


def test_a_warning_of_a_step_is_of_the_line_that_calls_it():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(loss_fn)(state.params, batch)
        clipped = jax.tree.map(lambda g: g / jnp.sqrt((g**2).sum()), grads)
        return state.apply_gradients(clipped), {}

    with pytest.warns(UserWarning, match="JDP131") as caught:
        step(state(), batch())
    assert {warning.filename for warning in caught} == {__file__}
