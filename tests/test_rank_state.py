"""State that belongs to a rank or to its rows: `jdp.per_rank`."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from support import training
from support.training import assert_close, fetched

import jdp

ROWS, WIDTH = 24, 3  # rows divide by 1, 2, 3, 4 and 8


def recurrent_params():
    draw = np.random.default_rng(1).normal
    return {
        "w": draw(size=(WIDTH, WIDTH)).astype(np.float32),
        "u": draw(size=(5, WIDTH)).astype(np.float32),
    }


def truncated_loss(params, hidden, batch):
    hidden = jnp.tanh(hidden @ params["w"] + batch["x"] @ params["u"])
    return jnp.mean((hidden.sum(-1, keepdims=True) - batch["y"]) ** 2), hidden


def start(**kwargs):
    own = {"hidden": jdp.per_rank(np.zeros((ROWS, WIDTH), np.float32)), **kwargs}
    return jdp.TrainState.create(recurrent_params(), training.sgd(), model_state=own)


def truncated(state, batch):
    """One step of truncated backpropagation: the hidden state of each row is carried on."""
    hidden = jax.lax.stop_gradient(state.model_state["hidden"].value)
    differentiate = jax.value_and_grad(truncated_loss, has_aux=True)
    (loss, hidden), grads = differentiate(state.params, hidden, batch)
    own = state.model_state | {"hidden": jdp.per_rank(hidden)}
    return state.apply_gradients(grads).replace(model_state=own), {"loss": loss}


def by_hand(num_steps):
    """The same training in plain JAX, over all rows at once."""
    params, tx = recurrent_params(), optax.sgd(0.1, momentum=0.9)
    opt_state, hidden = tx.init(params), np.zeros((ROWS, WIDTH), np.float32)
    for i in range(num_steps):
        differentiate = jax.grad(truncated_loss, has_aux=True)
        grads, hidden = differentiate(params, hidden, training.batch(i, ROWS))
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
    return params, hidden


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_hidden_states_of_rows_are_carried_as_one_device_does(num_ranks):
    state, _ = training.train(num_ranks, jdp.train_step(truncated), start)
    params, hidden = by_hand(4)
    assert_close(state.params, params)
    np.testing.assert_allclose(state.model_state["hidden"].value, hidden, rtol=1e-5, atol=1e-5)


def test_the_parts_lie_on_their_ranks_and_no_rank_holds_the_whole():
    training.ranks(4)
    state, _ = jdp.train_step(truncated)(start(), training.batch(0, ROWS))
    shards = state.model_state["hidden"].value.addressable_shards
    starts = [(shard.index[0].start, shard.data.shape) for shard in shards]
    assert starts == [(6 * r, (6, WIDTH)) for r in range(4)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_error_feedback_keeps_what_each_rank_did_not_send(num_ranks):
    """Whole numbers, so that the sums are exact: each rank sends its gradient rounded to tens."""
    training.ranks(num_ranks)
    x = np.arange(24, dtype=np.float32) * 7 % 31
    residual = jdp.per_rank(np.zeros((num_ranks, 1), np.float32))
    state = {"w": jnp.zeros(1), "residual": residual}

    @jdp.train_step
    def step(state, batch):
        wanted = batch.sum(keepdims=True) + state["residual"].value[0]
        sent = 10 * jnp.round(wanted / 10)
        left = jdp.per_rank((wanted - sent)[None])
        return {"w": state["w"] + jdp.sum_over_ranks(sent), "residual": left}, {}

    w, left = 0.0, np.zeros(num_ranks)
    for _ in range(3):
        wanted = x.reshape(num_ranks, -1).sum(1) + left
        sent = 10 * np.round(wanted / 10)
        w, left = w + sent.sum(), wanted - sent
        state, _ = step(state, x)
    assert state["w"].tolist() == [w]
    assert state["residual"].value[:, 0].tolist() == left.tolist()
    assert float(state["w"][0] + left.sum()) == 3 * x.sum()  # nothing is lost


def test_it_stands_beside_leaves_that_are_no_arrays_and_beside_keys():
    training.ranks(2)
    keys = jdp.per_rank(jax.random.split(jax.random.key(0), 2))
    state = {"act": jnp.tanh, "keys": keys, "nested": [jdp.per_rank({"a": np.arange(4.0)})]}

    @jdp.train_step
    def step(state, batch):
        drawn = jax.random.uniform(state["keys"].value[0])
        nested = [jdp.per_rank({"a": state["act"](state["nested"][0].value["a"]) + drawn})]
        return state | {"nested": nested}, {}

    after, _ = step(state, np.zeros(2))
    after, _ = step(after, np.zeros(2))
    drawn = np.repeat([float(jax.random.uniform(key)) for key in keys.value], 2)
    want = np.tanh(np.tanh(np.arange(4.0)) + drawn) + drawn
    np.testing.assert_allclose(after["nested"][0].value["a"], want, rtol=1e-6)


def test_a_tree_of_no_arrays_goes_through_a_step():
    training.ranks(2)
    state = {"own": jdp.per_rank({"later": None}), "w": jnp.zeros(())}
    step = jdp.train_step(lambda state, batch: (state | {"w": state["w"] + 1}, {}))
    for _ in range(2):
        state, _ = step(state, np.zeros(2))
    assert state["own"].value == {"later": None} and float(state["w"]) == 2


def test_what_the_rest_of_the_state_takes_from_it_must_be_reduced():
    training.ranks(2)

    @jdp.train_step
    def leaks(state, batch):
        return {"own": state["own"], "w": state["w"] + state["own"].value.sum()}, {}

    @jdp.train_step
    def unwraps(state, batch):
        return {"own": state["own"].value, "w": state["w"]}, {}

    state = {"own": jdp.per_rank(np.arange(4.0)), "w": jnp.zeros(())}
    with pytest.raises(ValueError, match=r"new state\['w'\].*JDP101"):
        leaks(state, np.zeros(2))
    with pytest.raises(ValueError, match=r"new state\['own'\].*JDP101"):
        unwraps(state, np.zeros(2))


def test_state_of_rows_that_is_not_declared_is_told_of_per_rank():
    training.ranks(2)

    @jdp.train_step
    def step(state, batch):
        return state.replace(model_state=batch["x"]), {}

    state = jdp.TrainState.create({"w": np.ones(2)}, training.sgd(), model_state=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"new state\.model_state.*jdp\.per_rank\(x\).*JDP101"):
        step(state, {"x": np.zeros((4, 3))})


@pytest.mark.parametrize(
    "value, what", [(np.zeros(3), " 3 .* 2 "), (np.float32(1), r"value\[None\]")]
)
def test_a_value_that_cannot_be_split_is_refused_by_path(value, what):
    training.ranks(2)
    step = jdp.train_step(lambda state, batch: (state, {}))
    with pytest.raises(ValueError, match=rf"\['own'\]\.value.*{what}"):
        step({"own": jdp.per_rank(value)}, np.zeros(2))
    shrinks = jdp.train_step(lambda state, batch: ({"own": jdp.per_rank(batch.sum())}, {}))
    with pytest.raises(ValueError, match=r"\['own'\]\.value.*value\[None\]"):
        shrinks({"own": jdp.per_rank(np.zeros(2))}, np.zeros(2))


X = np.ones((2, 2), np.float32)
USES = {
    "operator": lambda own: own + X,
    "operator from the right": lambda own: X @ own,
    "operator of a JAX array": lambda own: jnp.ones(2) - own,
    "sign": lambda own: -own,
    "comparison": lambda own: own > 0,
    "if": lambda own: 1 if own else 0,
    "index": lambda own: own[0],
    "loop": lambda own: [*own],
    "shape": lambda own: own.shape,
    "method": lambda own: own.mean(),
    "function of JAX": jnp.tanh,
    "function of a list": lambda own: jnp.concatenate([own, X]),
    "function of NumPy": np.tanh,
    "float": float,
}


@pytest.mark.parametrize("use", USES)
def test_taken_for_an_array_it_says_what_to_write(use):
    with pytest.raises((TypeError, AttributeError), match=r"per_rank.*\.value"):
        USES[use](jdp.per_rank(X))


def test_it_is_copied_and_pickled_as_any_object():
    own = jdp.per_rank({"a": X})
    for twin in (copy.copy(own), copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        np.testing.assert_array_equal(twin.value["a"], X)


@pytest.mark.parametrize("others", [{}, {"act": jnp.tanh}], ids=["alone", "beside a function"])
def test_every_message_names_it_with_value(others):
    training.ranks(2)
    name = r"`(new )?state\['own'\]\.value\['a'\]`"

    def refused(returned, value=X):
        state = {"own": jdp.per_rank({"a": value}), "w": jnp.zeros(()), **others}
        fn = lambda state, batch: ({**state, **returned(state)}, {})  # noqa: E731
        return jdp.check_step(jdp.train_step(fn), state, np.zeros(2))

    with pytest.raises(ValueError, match=r"new state\['w'\]`.*" + name + ".*JDP101"):
        refused(lambda state: {"w": state["own"].value["a"].sum()})
    with pytest.raises(ValueError, match=r"\['own'\]\.value\['a'\]` float32\[3\]"):
        refused(lambda state: {}, np.zeros(3, np.float32))
    assert any(leaf.path == "state['own'].value['a']" for leaf in refused(lambda state: {}).leaves)


def test_what_is_not_an_array_is_refused_in_it_by_path():
    training.ranks(2)
    step = jdp.train_step(lambda state, batch: (state, {}))
    with pytest.raises(TypeError, match=r"\['own'\]\.value\['act'\]`.*jdp\.per_rank"):
        step({"own": jdp.per_rank({"act": jnp.tanh, "x": X})}, np.zeros(2))


def test_parameters_of_one_rank_are_refused():
    training.ranks(2)
    params = {"w": np.ones(2, np.float32), "own": jdp.per_rank(np.ones(2, np.float32))}
    with pytest.raises(ValueError, match=r"params\['own'\]\.value"):
        jdp.TrainState.create(params, training.sgd())


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_with_several_data_axes_the_parts_are_those_of_the_batch(axes):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "model"), axis_types=(AxisType.Auto,) * 3)
    jdp.init(mesh, axis_name=axes)
    x = np.arange(8.0, dtype=np.float32)

    @jdp.train_step(axis_name=axes)
    def step(state, batch):
        return {"seen": jdp.per_rank(10 * state["seen"].value + batch)}, {}

    state = {"seen": jdp.per_rank(x)}
    for _ in range(2):
        state, _ = step(state, x)
    assert state["seen"].value.tolist() == (111 * x).tolist()
    assert jdp.check_replicas(state, axis_name=axes)


def test_a_loop_of_the_authors_carries_it():
    training.ranks(4)
    step = jdp.train_step(truncated, donate=False)
    batches = [training.batch(i, ROWS) for i in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    state = start()
    together, _ = jax.jit(lambda s: jax.lax.scan(step, s, stacked))(state)
    for batch in batches:
        state, _ = step(state, batch)
    assert_close(fetched(together), fetched(state))


def test_an_eval_step_reads_it_and_every_rank_is_looked_at():
    training.ranks(3)
    state = {"own": jdp.per_rank(np.arange(6.0, dtype=np.float32)), "w": jnp.ones(())}
    measure = jdp.eval_step(lambda s, b: {"rows": jdp.rows(s["own"].value + b), "w": s["w"]})
    assert measure(state, np.ones(6, np.float32))["rows"].tolist() == [1, 2, 3, 4, 5, 6]
    assert jdp.check_replicas(state)


# Restoring: on as many ranks as before and on others.


def saved(tmp_path, own, num_ranks):
    training.ranks(num_ranks)
    step = jdp.train_step(lambda s, b: ({"own": jdp.per_rank(s["own"].value + b)}, {}))
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore({"own": own})
        state, _ = step(state, np.arange(len(own.value), dtype=np.float32)[:, None])
        ckpt.step(state)


def restored(tmp_path, own, num_ranks):
    training.ranks(num_ranks)
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore({"own": own})
        step = jdp.train_step(lambda s, b: ({"own": jdp.per_rank(s["own"].value + b)}, {}))
        state, _ = step(state, np.zeros((len(state["own"].value), 1), np.float32))
        return np.asarray(state["own"].value)[:, 0].tolist()


@pytest.mark.parametrize("num_ranks", [1, 4, 2, 3])
def test_state_of_rows_is_restored_on_any_number_of_ranks(tmp_path, num_ranks):
    zeros = jdp.per_rank(np.zeros((12, 1), np.float32))
    saved(tmp_path, zeros, 4)
    assert restored(tmp_path, zeros, num_ranks) == list(range(12))


def test_state_of_a_rank_is_resized_by_its_rule_or_refused(tmp_path):
    def add_up(saved, like):
        return np.zeros(like.shape, like.dtype) + saved.sum(0) / like.shape[0]

    saved(tmp_path, jdp.per_rank(np.zeros((4, 1), np.float32)), 4)
    with pytest.raises(ValueError, match=r"\['own'\]\.value.*float32\[4, 1\].*\[2, 1\] here"):
        restored(tmp_path, jdp.per_rank(np.zeros((2, 1), np.float32)), 2)
    wrong = jdp.per_rank(np.zeros((2, 1), np.float32), resize=lambda saved, like: saved)
    with pytest.raises(ValueError, match=r"resize= returned float32\[4, 1\]"):
        restored(tmp_path, wrong, 2)
    own = jdp.per_rank(np.zeros((2, 1), np.float32), resize=add_up)
    assert restored(tmp_path, own, 2) == [3.0, 3.0]


def test_a_rule_does_not_compile_a_step_again():
    training.ranks(2)
    traces = []

    @jdp.train_step
    def step(state, batch):
        traces.append(1)
        return {"own": jdp.per_rank(state["own"].value)}, {}

    state, _ = step({"own": jdp.per_rank(np.zeros(2), resize=lambda s, like: s)}, np.zeros(2))
    first = len(traces)
    step(state, np.zeros(2))
    assert len(traces) == first


def train_in_processes():
    jdp.init()
    step = jdp.train_step(truncated)
    state = start()
    together = [training.batch(i, ROWS) for i in range(3)]
    rows = jax.tree.map(lambda *x: np.concatenate(x), *together)
    for batch in jdp.batches(rows, ROWS, num_steps=3, shuffle=False):
        state, _ = step(state, batch)
    assert jdp.check_replicas(state)
    parts = state.model_state["hidden"].value.addressable_shards
    return (fetched(state.params), {part.index[0].start: np.asarray(part.data) for part in parts})


def test_several_processes_hold_their_parts(processes):
    params, hidden = by_hand(3)
    for theirs, parts in processes(2).run(train_in_processes):
        assert_close(theirs, params)
        for first, part in parts.items():
            want = hidden[first : first + len(part)]
            np.testing.assert_allclose(part, want, rtol=1e-5, atol=1e-5)
