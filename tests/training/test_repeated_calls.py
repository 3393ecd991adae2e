"""A call like the last one is not prepared again; any other is, and all compute the same."""

import copy
import dataclasses
import gc
import random
import sys
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import ranks

import jdp
from jdp.training.compiled_step import CompiledStep
from jdp.training.step import Step

ROWS = np.arange(24, dtype=np.float32)  # their mean differs with any 8 that are left out


@pytest.fixture
def prepared(monkeypatch):
    """The names of the steps whose arguments were looked at, one for each call."""
    names, bound = [], Step.bound

    def counted(self, *args):
        names.append(self.__name__)
        return bound(self, *args)

    monkeypatch.setattr(Step, "bound", counted)
    return names


@jdp.train_step
def step(state, batch, scale=1.0):
    # Whole numbers: sums of them are exact in any order.
    grads = jax.grad(lambda p: (batch["x"] * scale).mean() * p["w"].sum())(state.params)
    return state.apply_gradients(grads), {"sum": batch["x"].mean()}


@jdp.eval_step
def evaluated(state, batch):
    return {"w": state.params["w"].sum() + 0 * batch["x"].mean()}


def made():
    return jdp.TrainState.create({"w": jnp.arange(4.0)}, jdp.replicated(optax.sgd(1.0)))


def placed(mesh, rows=ROWS):
    return {"x": jax.device_put(rows, jax.NamedSharding(mesh, jax.P("data")))}


def values(state):
    """The parameter on each device."""
    return [np.asarray(shard.data).tolist() for shard in state.params["w"].addressable_shards]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_calls_that_go_on_with_the_state_are_prepared_once(n, prepared):
    batch, state = placed(ranks(n)), made()
    step, evaluated = map(copy.copy, (globals()["step"], globals()["evaluated"]))
    for i in range(5):
        state, metrics = step(state, batch)
        assert metrics["sum"] == ROWS.mean()
        assert values(state) == [[k - (i + 1) * ROWS.mean() for k in range(4)]] * n
    assert prepared == ["step"]
    for _ in range(3):
        assert evaluated(state, batch)["w"] == 6 - 4 * 5 * ROWS.mean()
    assert prepared == ["step", "evaluated"]


def test_an_evaluation_of_a_new_state_is_prepared(prepared):
    batch, state = placed(ranks(2)), made()
    assert evaluated(state, batch)["w"] == evaluated(state, batch)["w"] == 6
    state = jax.tree.map(lambda x: x + 1, state)
    assert evaluated(state, batch)["w"] == 10
    assert len(prepared) == 2


CHANGES = {
    "rows of the host": lambda mesh: ({"x": ROWS.copy()},),
    "rows that lie elsewhere": lambda mesh: ({"x": jnp.asarray(ROWS)},),
    "rows on all devices": lambda mesh: (
        {"x": jax.device_put(ROWS, jax.NamedSharding(mesh, jax.P()))},
    ),
    "fewer rows": lambda mesh: (placed(mesh, ROWS[:12]),),
    "a further argument": lambda mesh: (placed(mesh), 2.0),
    "an array on one device": lambda mesh: (placed(mesh), jax.device_put(2.0, jax.devices()[0])),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_other_arguments_are_placed_and_count(change, n):
    mesh, state, w = ranks(n), made(), np.arange(4.0)
    other = CHANGES[change](mesh)
    scale = float(other[1]) if len(other) > 1 else 1.0
    for args, mean in ((0, 0), (other, 1), (0, 0), (other, 1), (other, 1)):
        state, _ = step(state, *(args or (placed(mesh),)))
        w = w - (np.asarray(other[0]["x"]).mean() * scale if mean else ROWS.mean())
        assert values(state) == [w.tolist()] * n


@pytest.mark.parametrize("value", [np.ones(4, "float32"), np.ones(6, "float32"), "placed"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_leaf_that_is_exchanged_within_the_state_counts(value, n):
    mesh, state = ranks(n), made()
    batch = placed(mesh)
    for _ in range(3):
        state, _ = step(state, batch)
    if isinstance(value, str):
        value = jax.device_put(np.ones(4, "float32"), jax.NamedSharding(mesh, jax.P()))
    state.params["w"] = value  # a dict may change, though a TrainState is frozen
    for _ in range(2):
        state, _ = step(state, batch)
    assert values(state) == [[1 - 2 * ROWS.mean()] * len(state.params["w"])] * n


def test_a_row_that_is_a_leaf_of_the_state_is_not_donated_with_it(prepared):
    everywhere = jax.NamedSharding(ranks(1), jax.P())  # as the state lies
    batch = {"x": jax.device_put(ROWS, everywhere)}
    state = jdp.TrainState.create({"w": jnp.ones(24)}, jdp.replicated(optax.sgd(1.0)))
    for _ in range(2):
        state, _ = step(state, batch)
    kept = state.params["w"]
    new, _ = step(state, {"x": kept})
    assert len(prepared) == 2  # the first call, and this one
    assert values(new) == [[0.0] * 24]  # all rows were the parameter, and so was their mean


@pytest.mark.parametrize("called", [step, evaluated])
def test_an_argument_that_is_gone_is_named(called):
    batch, state = placed(ranks(2)), made()
    returned = called(state, batch)
    state = returned[0] if called is step else state
    gone = jax.tree.map(jnp.copy, batch)
    gone["x"].delete()
    with pytest.raises(ValueError, match=r"`batch\['x'\]` was donated"):
        called(state, gone)
    state.params["w"].delete()
    with pytest.raises(ValueError, match=r"`state.params\['w'\]` was donated"):
        called(state, batch)


def test_keys_that_cannot_be_sorted_have_their_error_in_later_calls_too():
    batch, state = placed(ranks(1)), made()
    state, _ = step(state, batch)
    with pytest.raises(TypeError, match="keys of one type"):
        step(state, {"x": batch["x"], 1: batch["x"]})
    state, _ = step(state, batch)
    assert values(state) == [[k - 2 * ROWS.mean() for k in range(4)]]


def test_a_program_for_another_mesh_in_between_changes_nothing():
    one, state = ranks(1), made()
    state, _ = step(state, placed(one))
    other = ranks(2)
    step.lower(jax.device_put(state, jax.NamedSharding(other, jax.P())), placed(other))
    state, _ = step(state, placed(other))  # the rows follow the state
    assert values(state) == [[k - 2 * ROWS.mean() for k in range(4)]]


def test_a_call_inside_of_a_jit_between_two_calls_is_traced():
    mesh = ranks(2)
    batch, state = placed(mesh), made()
    state, _ = step.without_donation()(state, batch)
    kept = step.without_donation()
    state, _ = kept(state, batch)
    inner, _ = jax.jit(lambda s, b: kept(s, b))(state, batch)
    inner_rows, _ = jax.jit(lambda b: kept(state, b))(batch)
    after, _ = kept(state, batch)
    assert values(inner) == values(inner_rows) == values(after)
    assert values(after) == [[k - 3 * ROWS.mean() for k in range(4)]] * 2


def test_arrays_that_differ_in_more_than_their_values_are_placed():
    mesh, state = ranks(2), made()
    on_one = jax.device_put(2.0, jax.devices()[0])
    for scale in (jnp.asarray(2.0), on_one):  # JAX may move the first, not the second
        state, _ = step(state, placed(mesh), scale)
    assert values(state) == [[k - 4 * ROWS.mean() for k in range(4)]] * 2
    state, _ = step(state, placed(mesh) | {"y": placed(mesh)["x"]})
    with pytest.raises(ValueError, match="row i of every leaf must belong together"):
        step(state, placed(mesh) | {"y": placed(mesh, ROWS[:12])["x"]})


@pytest.mark.optimized
@pytest.mark.parametrize("seed", range(4))
def test_any_series_of_calls_ends_with_the_exact_parameters(seed):
    draw, meshes = random.Random(seed), {n: ranks(n) for n in (1, 2, 3)}
    n, w = 1, np.arange(4.0)
    mesh, state = ranks(n), made()
    kept = step.without_donation()
    for _ in range(30):
        change = draw.choice([None] * 6 + [*CHANGES, "mesh", "names", "kept", "host", "evaluated"])
        called, args, names = step, (placed(mesh),), {}
        if change in CHANGES:
            args = CHANGES[change](mesh)
        elif change == "mesh":
            n = draw.choice([1, 2, 3])
            mesh = ranks(n)
            state = jax.device_put(jax.device_get(state), jax.NamedSharding(mesh, jax.P()))
            args = (placed(meshes[draw.choice([1, 2, 3])]),)
        elif change == "names":
            names = {"scale": 2.0}
        elif change == "kept":
            called = kept
        elif change == "host":
            state = jax.device_get(state)
        if change == "evaluated":
            assert evaluated(state, *args)["w"] == w.sum()
            continue
        state, _ = called(state, *args, **names)
        scale = names.get("scale", args[1] if len(args) > 1 else 1.0)
        w = w - np.asarray(args[0]["x"]).mean() * float(scale)
        assert values(state) == [w.tolist()] * n, change


def test_a_state_without_arrays_follows_init():
    @jdp.eval_step
    def count(state, batch):
        return {"rows": 1.0 * batch["x"].shape[0]}

    batch = placed(ranks(2))
    for n in (2, 2, 3, 3):
        ranks(n)
        assert count({}, batch)["rows"] == 24 / n


def test_a_leaf_that_an_evaluation_does_not_read_may_not_be_gone():
    batch = placed(ranks(2))
    state = {"w": jnp.ones(4), "other": jnp.ones(4)}
    state = jax.device_put(state, jax.NamedSharding(batch["x"].sharding.mesh, jax.P()))

    @jdp.eval_step
    def mean(state, batch):
        return {"mean": batch["x"].mean() + 0 * state["w"].sum()}

    for _ in range(2):
        assert mean(state, batch)["mean"] == ROWS.mean()
    state["other"].delete()
    with pytest.raises(ValueError, match=r"`state\['other'\]` was donated"):
        mean(state, batch)


@pytest.mark.parametrize("called", [step.without_donation(), evaluated])
def test_a_step_keeps_no_array_that_it_was_given(called):
    batch, state = placed(ranks(2)), made()
    state, _ = step(state, batch)
    for _ in range(3):
        called(state, batch)
    gone = [weakref.ref(state.params["w"]), weakref.ref(batch["x"])]
    del state, batch
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_call_with_arrays_inside_of_a_jit_is_part_of_its_program():
    batch, state = placed(ranks(2)), made()
    kept = step.without_donation()
    inner = jax.jit(lambda: kept(state, batch)[0].params["w"] * 1)()
    shape = jax.eval_shape(lambda: evaluated(state, batch))["w"]
    assert inner.tolist() == [k - ROWS.mean() for k in range(4)] and shape.shape == ()
    for _ in range(10):  # more than are in flight
        state, _ = step(state, batch)
    inner = jax.jit(lambda: kept(state, batch)[0].params["w"] * 1)()
    state, _ = step(state, batch)
    assert inner.tolist() == values(state)[0] == [k - 11 * ROWS.mean() for k in range(4)]


def test_threads_that_call_one_step_on_two_meshes_get_their_own_programs():
    given, wrong = {}, []
    for n in (2, 4):
        mesh = ranks(n)
        given[n] = jax.device_put(made(), jax.NamedSharding(mesh, jax.P())), placed(mesh)
        evaluated(*given[n])

    def call(n):
        try:
            for _ in range(500):
                found = evaluated(*given[n])["w"]
                if found != 6 or len(found.sharding.device_set) != n:
                    wrong.append((n, found))
        except Exception as error:
            wrong.append((n, error))

    threads = [threading.Thread(target=call, args=(n,)) for n in given]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not wrong


@pytest.mark.parametrize("n", [1, 2])
def test_a_leaf_of_a_train_state_that_an_evaluation_does_not_read_may_not_be_gone(n):
    batch, state = placed(ranks(n)), made()
    evaluated(state, batch)
    evaluated(state, batch)
    state.seed.delete()
    with pytest.raises(ValueError, match=r"`state.seed` was donated"):
        evaluated(state, batch)


def test_an_array_that_the_author_puts_into_a_state_is_copied():
    """As `state.opt_state.hyperparams["learning_rate"] = rate` of Optax's documentation."""
    mesh = ranks(2)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    state = jdp.TrainState.create({"w": jnp.arange(4.0)}, jdp.replicated(tx))
    rate, rows = jnp.float32(0.5), np.full(4, 2.0, np.float32)
    for _ in range(3):
        state, _ = step(state, placed(mesh))
    for _ in range(2):
        state.opt_state.hyperparams["learning_rate"] = rate
        state.params["w"] = rows
        state, _ = step(state, placed(mesh))
    rows[:] = 7.0  # the author uses it again
    assert not rate.is_deleted()
    assert values(state) == [[2.0 - 0.5 * ROWS.mean()] * 4] * 2


@pytest.mark.parametrize("n", [1, 2, 4])
def test_another_argument_may_be_a_leaf_of_the_state_now_and_then(n, capfd):
    batch, state, rate = placed(ranks(n)), made(), jnp.ones(4)

    @jdp.train_step
    def toward(state, batch, target):
        grads = jax.grad(lambda p: ((p["w"] - target) ** 2).sum() * batch["x"].mean())(state.params)
        return state.apply_gradients(grads), {}

    for i in range(30):
        state, _ = toward(state, batch, state.params["w"] if i % 3 else rate)
    assert np.isfinite(values(state)).all() and "donated" not in capfd.readouterr().err


def test_a_state_in_a_new_container_is_known(prepared):
    batch, state = placed(ranks(2)), made()
    for _ in range(4):
        state, _ = step(dataclasses.replace(state), batch)
        state = jax.tree.map(lambda leaf: leaf, state)
    assert prepared == ["step"]


def test_a_step_that_is_dropped_leaves_no_program():
    batch, state = placed(ranks(2)), made()
    own = jdp.train_step(lambda state, batch: (state, {}))
    state, _ = own(state, batch)
    [program] = own._compiled_steps.values()
    dropped = weakref.ref(program)
    del own, program
    gc.collect()
    assert dropped() is None


def test_the_executable_is_asked_first_and_other_kinds_are_prepared(prepared):
    batch, state = placed(ranks(2)), made()
    own = copy.copy(step)
    for _ in range(4):
        state, _ = own(state, batch)
    [program] = own._compiled_steps.values()
    assert prepared == ["step"] and program.hits._cache_size() == 1
    state, _ = own(state, placed(ranks(2), ROWS[:12]))  # JAX has no executable: prepared, then kept
    before = len(prepared)
    for rows in (ROWS, ROWS[:12], ROWS, ROWS[:12]):
        state, _ = own(state, placed(ranks(2), rows))
    assert len(prepared) == before and program.hits._cache_size() == 2
    state, _ = own(state, {"x": ROWS.copy()})
    assert len(prepared) > before
    assert values(state)[0][0] == -(7 * ROWS.mean() + 3 * ROWS[:12].mean())


def test_without_the_function_of_jax_each_call_is_prepared(monkeypatch, prepared):
    monkeypatch.setattr("jdp.jax_compat.with_miss", lambda *args: None)
    batch, state = placed(ranks(2)), made()
    own = copy.copy(step)
    for _ in range(3):
        state, _ = own(state, batch)
    assert values(state) == [[k - 3 * ROWS.mean() for k in range(4)]] * 2
    assert prepared == ["step"]


@pytest.mark.parametrize("fails_in", ["the first call", "a later call"])
def test_calls_after_one_that_failed_in_the_trace_are_as_fast_as_others(fails_in, monkeypatch):
    misses, compile_new = [], CompiledStep._compile
    monkeypatch.setattr(
        CompiledStep, "_compile", lambda self, *args: misses.append(1) or compile_new(self, *args)
    )
    mesh, scale, state = ranks(2), {"factor": 1.0}, made()

    @jdp.train_step
    def own(state, batch):
        grads = jax.grad(lambda p: (batch * scale["factor"]).mean() * p["w"].sum())(state.params)
        return state.apply_gradients(grads), {}

    for _ in range(3 if fails_in == "a later call" else 0):
        state, _ = own(state, placed(mesh)["x"])
    scale.clear()
    with pytest.raises(KeyError):
        own(state, placed(mesh, ROWS[:18])["x"])
    scale["factor"] = 1.0
    for _ in range(2):
        state, _ = own(state, placed(mesh, ROWS[:18])["x"])
    misses.clear()
    for _ in range(3):
        state, _ = own(state, placed(mesh, ROWS[:18])["x"])
    assert not misses


def test_a_leaf_that_a_view_kept_in_part_is_refused_and_the_state_stays():
    batch, state = placed(ranks(2)), made()
    for _ in range(4):
        before, (state, _) = state, step(state, batch)
        view = np.asarray(state.params["w"])
    kept, state.params["w"] = state.params["w"], before.params["w"]
    with pytest.raises(ValueError, match=r"`state.params\['w'\]` was donated"):
        step(state, batch)
    state.params["w"] = kept
    state, _ = step(state, batch)
    assert values(state) == [[k - 5 * ROWS.mean() for k in range(4)]] * 2 and view[0] < 0


@pytest.mark.parametrize("n", [1, 2])
def test_a_variable_at_two_places_is_refused_in_later_calls_too(n):
    nnx = pytest.importorskip("flax.nnx")
    batch, names = placed(ranks(n)), ("w", "v")
    params = nnx.State({name: nnx.Param(jnp.ones(4)) for name in names})
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(1.0)))

    @jdp.train_step(donate=False)
    def both(state, batch):
        def loss(p):
            return sum(p[name][...].sum() for name in names) * batch["x"].mean()

        return state.apply_gradients(jax.grad(loss)(state.params)), {}

    for _ in range(3):
        state, _ = both(state, batch)
    state.params["v"] = state.params["w"]
    with pytest.raises(ValueError, match="are one Param of nnx"):
        both(state, batch)


@pytest.mark.parametrize("n", [1, 2])
def test_calls_without_jit_between_others_compute_the_same(n):
    batch, state = placed(ranks(n)), made()
    for i in range(6):
        with jax.disable_jit(i in (3, 4)):
            state, _ = step(state, batch)
    assert values(state) == [[k - 6 * ROWS.mean() for k in range(4)]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_threads_that_compile_one_step_at_once_get_its_results(n):
    mesh, found = ranks(n), []
    given = [(made(), placed(mesh, ROWS[: 6 * k])) for k in (1, 2, 3, 4)]
    kept = step.without_donation()

    def call(i):
        found.append((i, [values(kept(*given[i])[0])[0][0] for _ in range(9)]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(i, [-ROWS[: 6 * i + 6].mean()] * 9) for i in range(4)]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("donate", [True, False])
def test_an_array_of_the_host_may_change_after_each_call(n, donate):
    batch, state = placed(ranks(n)), {"x": jnp.zeros(1 << 20)}
    room = np.zeros((1 << 20) + 16, np.float32)
    host = room[-room.ctypes.data % 64 // 4 :][: 1 << 20]  # JAX copies others at once
    on_devices = jax.device_put(jnp.zeros(1 << 20), jax.NamedSharding(ranks(n), jax.P()))

    @jdp.train_step(donate=donate)
    def slow(state, batch, delta):
        late = jax.lax.fori_loop(0, 50, lambda _, x: jnp.sin(x) + x @ x, jnp.zeros((200, 200)))
        return {"x": state["x"] + delta + late[0, 0]}, {}

    for i in range(12):
        host[:] = 1
        state, _ = slow(state, batch, on_devices if i % 4 else host)
        host[:] = 100
    assert {*np.asarray(state["x"]).tolist()} == {3.0}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("donate", "number"), [(True, 0), (False, 0), (True, 4), (False, 4)])
def test_a_nan_that_jax_looks_for_is_an_error_that_names_the_step(donate, number, n):
    mesh = ranks(n)

    @jdp.train_step(donate=donate)
    def logarithm(state, batch):
        return {"w": state["w"] + 1}, {"log": jnp.log(batch["x"]).mean()}

    state = {"w": jnp.zeros(4)}
    with jax.debug_nans(True):
        for _ in range(number):
            state, _ = logarithm(state, placed(mesh, ROWS + 1))
        with pytest.raises(FloatingPointError, match="encountered in logarithm"):
            logarithm(state, placed(mesh, -ROWS - 1))
