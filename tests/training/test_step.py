import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.training import (
    assert_close,
    batch,
    loss_fn,
    plain_step,
    predict,
    ranks,
    sgd,
    state,
    train,
)

import jdp
from jdp import collectives
from jdp.collectives.cpu import runtime as cpu_runtime

pytestmark = pytest.mark.optimized

# Programs that are right as they stand: each is the same training on any number of ranks.


def ema(state, batch):
    new, metrics = plain_step(state, batch)
    average = optax.incremental_update(new.params, state.model_state, 0.1)
    return new.replace(model_state=average), metrics


def clipped_weights(state, batch):
    new, metrics = plain_step(state, batch)
    return new.replace(params=jax.tree.map(lambda x: jnp.clip(x, -1, 1), new.params)), metrics


def recurrent(state, batch):
    def loss_fn(p):
        def cell(h, x):
            return jnp.tanh(x[:, None] @ p["w"][:1] + h), None

        h, _ = lax.scan(cell, jnp.zeros((batch["x"].shape[0], 4)), batch["x"].T)
        return jnp.mean((h @ p["v"] + p["b"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads), {"loss": loss}


def psum_in_the_loss(state, batch):
    def loss_fn(p):
        errors = (predict(p, batch["x"]) - batch["y"]) ** 2
        return lax.psum(errors.sum(), "data") / lax.psum(errors.size, "data")

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    # psum transposes to psum: each rank has the gradient of its share of the sum, times n.
    return state.apply_gradients(grads), {"loss": loss}


def contrastive(state, batch):
    def loss_fn(p):
        mine = jnp.tanh(batch["x"] @ p["w"])
        everyones = lax.all_gather(mine, "data", tiled=True)
        target = lax.axis_index("data") * mine.shape[0] + jnp.arange(mine.shape[0])
        scores = mine @ everyones.T * jnp.exp(p["b"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, target).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients({**grads, "v": jnp.zeros_like(grads["v"])}), {"loss": loss}


def three_steps_in_a_scan(state, batch):
    state, metrics = lax.scan(lambda s, _: plain_step(s, batch), state, None, length=3)
    return state, jax.tree.map(lambda x: jdp.mean_over_ranks(x), metrics)


def accumulated(state, batch):
    loss, grads = jdp.value_and_grad(loss_fn, accumulate=3)(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


def synced_for_a_metric(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    grads = jdp.sync_gradients(grads)
    norm = optax.tree.norm(grads)
    return state.apply_gradients(grads, synced=True), {"loss": loss, "norm": norm}


def guarded_by_the_mean_loss(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    mean = jdp.mean_over_ranks(loss)
    new = lax.cond(mean < 1.5, lambda: state.apply_gradients(grads), lambda: state)
    return new, {"loss": loss}


def rematerialised(state, batch):
    loss, grads = jax.value_and_grad(jax.checkpoint(loss_fn))(state.params, batch)
    return state.apply_gradients(grads), {"loss": loss}


PROGRAMS = [
    (plain_step, 2),
    (plain_step, 3),
    (plain_step, 8),
    (ema, 4),
    (clipped_weights, 3),
    (recurrent, 2),
    (psum_in_the_loss, 3),
    (three_steps_in_a_scan, 4),
    (accumulated, 8),
    (accumulated, 2),
    (synced_for_a_metric, 3),
    (guarded_by_the_mean_loss, 4),
    (rematerialised, 2),
]


@pytest.mark.parametrize(
    "program, n", PROGRAMS, ids=lambda x: x.__name__ if callable(x) else f"{x}ranks"
)
def test_equals_one_rank(program, n):
    def make_state():
        return state(model_state=training.params())

    step = jdp.train_step(program)
    one, all_ranks = train(1, step, make_state), train(n, step, make_state)
    assert_close(all_ranks, one)


@pytest.mark.filterwarnings("ignore:the loss does not depend on")
def test_contrastive_loss_equals_one_rank():
    step = jdp.train_step(contrastive)
    assert_close(train(4, step), train(1, step))


def test_equals_plain_jax_on_the_whole_batch():
    tx = optax.sgd(0.1, momentum=0.9)
    p = training.params()
    opt_state = tx.init(p)
    for i in range(4):
        updates, opt_state = tx.update(jax.grad(loss_fn)(p, batch(i)), opt_state, p)
        p = optax.apply_updates(p, updates)
    assert_close(train(3, jdp.train_step(plain_step))[0].params, jax.device_get(p))


def test_every_rank_holds_equal_bits():
    ranks(8)
    step, s = jdp.train_step(plain_step), state()
    for i in range(3):
        s, _ = step(s, batch(i))
    for leaf in jax.tree.leaves(s):
        first, *others = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_traces_and_compiles_once():
    ranks(2)
    traces, compiles = [], []

    @jdp.train_step
    def step(state, batch):
        traces.append(None)
        return plain_step(state, batch)

    def listen(event, duration_s, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiles.append(event)

    s, _ = step(state(), batch())  # eager operations of the set-up compile here as well
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for i in range(20):
            s, _ = step(s, batch(i))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (len(traces), len(compiles)) == (1, 0)


def test_another_shape_is_traced_and_proved_again():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        new, metrics = plain_step(state, batch)
        if batch["x"].shape[0] == 2:
            new = new.replace(model_state=batch["x"].sum())
        return new, metrics

    s, _ = step(state(model_state=np.float32(0)), batch())
    for _ in range(2):  # refused each time, not only the first
        with pytest.raises(ValueError, match=r"new state\.model_state"):
            step(s, batch(num_rows=4))
    step(s, batch())


def test_can_be_decorated_before_init_and_used_on_several_meshes():
    step = jdp.train_step(plain_step)
    states = {}
    for n in (2, 3):
        ranks(n)
        states[n] = state()
    for i in range(3):  # each state stays on its own mesh
        states = {n: step(s, batch(i))[0] for n, s in states.items()}
    assert [s.params["w"].sharding.mesh.size for s in states.values()] == [2, 3]
    assert_close(jax.device_get(states[3].params), jax.device_get(states[2].params))


def test_without_init_says_so(before_init):
    with pytest.raises(RuntimeError, match=r"jdp\.init\(\)"):
        jdp.train_step(plain_step)(state(), batch())


def test_runs_under_jit_and_scan_of_the_caller():
    ranks(3)
    step = jdp.train_step(plain_step)
    want = state()
    for i in range(3):
        want, metrics = step(want, batch(i))
    batches = jax.tree.map(lambda *x: np.stack(x), *[batch(i) for i in range(3)])
    got, losses = jax.jit(lambda s, b: lax.scan(step, s, b))(state(), batches)
    assert_close(jax.device_get(got), jax.device_get(want))
    np.testing.assert_allclose(losses["loss"][-1], metrics["loss"], rtol=1e-6)


def test_lower_gives_the_program():
    ranks(2)
    text = jdp.train_step(plain_step).lower(state(), batch()).as_text()
    assert "all_reduce" in text and "jit_plain_step" in text


def test_lower_takes_shapes():
    ranks(2)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    assert "all_reduce" in jdp.train_step(plain_step).lower(state(), shapes).as_text()


def test_one_rank_reduces_nothing():
    def num_reduced(num_ranks):
        ranks(num_ranks)
        s = state(sgd(all_reduce=jdp.collectives.xla))
        text = jdp.train_step(plain_step).lower(s, batch()).as_text()
        return text.count('"stablehlo.all_reduce"')

    assert num_reduced(1) == 0
    assert num_reduced(2) == len(jax.tree.leaves(state().params)) + 1  # and the loss


def test_keeps_the_name_and_the_docstring():
    @jdp.train_step(donate=False)
    def my_step(state, batch):
        """Mine."""

    assert (my_step.__name__, my_step.__doc__) == ("my_step", "Mine.")


def test_the_authors_exception_comes_through():
    @jdp.train_step
    def step(state, batch):
        raise ZeroDivisionError("mine")

    ranks(2)
    with pytest.raises(ZeroDivisionError, match="mine"):
        step(state(), batch())


def test_a_missing_argument_is_named():
    with pytest.raises(TypeError, match="'batch'"):
        jdp.train_step(plain_step)(None)


def test_a_method_is_told_where_to_decorate():
    class Trainer:
        @jdp.train_step
        def step(self, state, batch):
            return plain_step(state, batch)

        plain = jdp.train_step(plain_step)

    ranks(2)
    wanted = r"'batch'.*method of a pytree.*self\.step = jdp\.train_step\(self\._step\)"
    with pytest.raises(TypeError, match=wanted):
        Trainer().step(state(), batch())
    Trainer().plain(state(), batch())


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_inside_of_a_step_is_refused(n):
    inner = jdp.train_step(plain_step)
    ranks(n)
    with pytest.raises(TypeError, match="`plain_step` is called on a rank, by another step"):
        jdp.train_step(lambda state, batch: inner(state, batch))(state(), batch())


class Agent(flax.struct.PyTreeNode):
    """A state with its steps, as agents of reinforcement learning are written."""

    train: Any
    target: Any

    @jdp.train_step
    def update(self, batch):
        train, metrics = plain_step(self.train, batch)
        target = optax.incremental_update(train.params, self.target, 0.5)
        return self.replace(train=train, target=target), metrics

    @jdp.eval_step
    def measure(self, batch, scale=1.0):
        return {"difference": optax.tree.norm(optax.tree.sub(self.train.params, self.target))}


@pytest.mark.parametrize("n", [1, 3])
def test_a_method_of_a_pytree_takes_its_object_as_the_state(n):
    ranks(n)
    agent = Agent(train=state(), target=state().params)
    other, wanted = state(), state().params
    step = jdp.train_step(plain_step)
    for _ in range(3):
        agent, metrics = agent.update(batch())
        other, expected = step(other, batch())
        wanted = optax.incremental_update(other.params, wanted, 0.5)
    jax.tree.map(np.testing.assert_array_equal, agent.train.params, other.params)
    jax.tree.map(np.testing.assert_allclose, agent.target, wanted)
    assert metrics == expected
    apart = optax.tree.norm(optax.tree.sub(other.params, wanted))
    assert np.allclose(agent.measure(batch(), scale=2.0)["difference"], apart)
    assert jdp.evaluate(Agent.measure, agent, [batch()])["difference"] > 0
    with pytest.raises(TypeError, match=r"as an argument: Agent\.update, then the object"):
        jdp.check_step(agent.update, batch())


def test_a_step_without_metrics_is_told_what_to_return():
    ranks(2)
    step = jdp.train_step(lambda state, batch: state)
    with pytest.raises(TypeError, match=r" TrainState.*`\(state, metrics\)`"):
        step(state(), batch())


def test_further_arguments_are_the_same_on_every_rank():
    @jdp.train_step
    def step(state, batch, key, scale):
        noise = jax.random.normal(key, ())
        return state.replace(model_state=noise * scale), {}

    for n in (1, 3):
        ranks(n)
        new, _ = step(state(model_state=np.float32(0)), batch(), jax.random.key(7), 2.0)
        assert float(new.model_state) == 2 * float(jax.random.normal(jax.random.key(7), ()))


def test_a_text_as_a_further_argument_is_refused():
    @jdp.train_step
    def step(state, batch, how):
        raise AssertionError

    ranks(1)
    with pytest.raises(TypeError, match=r"`how` holds 'mean'.*functools\.partial\(fn, how="):
        step(state(), batch(), {"by": "mean"})


def test_a_weight_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r" 2\.0.*weight=lambda batch"):
        jdp.train_step(weight=2.0)(lambda state, batch: (state, {}))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"x": np.zeros((4, 5)), "y": np.zeros((2, 1))}, r"\['y'\]` .*2 rows .* 4\b"),
        ({"x": np.zeros((5, 5))}, r"\['x'\]` .*5 rows, .* 2 ranks"),
        ({"x": np.float32(1)}, r"\['x'\]` is a scalar"),
        ({"x": [[1.0, 2.0]] * 2}, r"\['x'\]\[0\]\[0\]` .* 1\.0.*np\.asarray"),
        ({"x": np.zeros((2, 5)), "name": ["a", "b"]}, r"\['name'\]\[0\]` .* 'a'.*np\.asarray"),
    ],
)
def test_refuses_a_batch_that_cannot_be_split(wrong, message):
    ranks(2)
    with pytest.raises(ValueError, match=message):
        jdp.train_step(plain_step)(state(), wrong)


def test_refuses_columns_that_are_no_numbers():
    ranks(2)
    with pytest.raises(TypeError, match=r"`batch\['name'\]` <U1\[2\] "):
        jdp.train_step(plain_step)(state(), {"name": np.array(["a", "b"])})


def test_refuses_a_mask_that_the_step_never_reads():
    ranks(2)
    masked = {**batch(), "mask": np.ones(24, bool)}
    with pytest.raises(ValueError, match=r"`batch\['mask'\]`.*JDP109"):
        jdp.train_step(plain_step)(state(), masked)
    weigh = jdp.train_step(plain_step, weight=lambda b: b["mask"].sum())
    with pytest.raises(ValueError, match=r"`batch\['mask'\]`.*JDP109"):
        weigh(state(), masked)


def test_refuses_a_mask_in_a_tuple_only_if_it_is_one():
    ranks(2)

    def step(s, b):
        return plain_step(s, {"x": b[0], "y": b[1]})

    rows = batch()
    labels = np.arange(24) % 2 == 0  # bool too, and of no interest to this step
    jdp.train_step(step)(state(), (rows["x"], rows["y"], labels))
    for made in jdp.batches((rows["x"], rows["y"]), 24, epochs=1):
        with pytest.raises(ValueError, match=r"`b\[2\]`.*JDP109"):
            jdp.train_step(step)(state(), made)


def test_reuses_the_state_that_goes_in_and_nothing_of_the_callers():
    ranks(2)
    mine = jax.tree.map(jnp.asarray, training.params())
    s = jdp.TrainState.create(mine, sgd())
    jdp.train_step(plain_step)(s, batch())
    assert s.params["w"].is_deleted()
    assert not mine["w"].is_deleted()
    np.testing.assert_array_equal(mine["w"], training.params()["w"])


def test_without_donation_the_state_stays():
    ranks(2)
    s = state()
    first, _ = jdp.train_step(plain_step, donate=False)(s, batch())
    again, _ = jdp.train_step(plain_step, donate=False)(s, batch())
    assert_close(jax.device_get(first), jax.device_get(again), tolerance=0)


DELETED = {
    "batch": lambda step, s, x: step(s, {"x": x, "y": x}),
    "params": lambda step, s, x: jdp.TrainState.create({"w": x}, s.tx),
    "model_state": lambda step, s, x: jdp.TrainState.create(s.params, s.tx, model_state=x),
    "state": lambda step, s, x: jdp.check_replicas(x),
    "state.params": lambda step, s, x: jdp.check_step(step, s.replace(params={"w": x}), batch()),
}


@pytest.mark.parametrize("named", DELETED)
def test_whatever_takes_a_donated_array_names_it(named):
    ranks(2)
    x = jnp.ones((24, 5))
    x.delete()
    with pytest.raises(ValueError, match=f"`{named}.*` "):
        DELETED[named](jdp.train_step(plain_step), state(), x)


def test_a_state_that_was_donated_is_named():
    ranks(2)
    step, s = jdp.train_step(plain_step), state()
    step(s, batch())
    with pytest.raises(ValueError, match=r"`state\.step`.*donate=False"):
        step(s, batch())


def test_leaves_that_share_a_buffer_are_copied_before_they_are_donated():
    ranks(2)
    step, s = jdp.train_step(ema), state()
    s = s.replace(model_state=s.params)
    assert_close(
        jax.device_get(step(s, batch())[0]),
        jax.device_get(step(state(model_state=training.params()), batch())[0]),
    )


def test_a_further_argument_may_be_part_of_the_state():
    ranks(2)

    @jdp.train_step
    def distil(state, batch, teacher):
        return plain_step(state, {"x": batch["x"], "y": predict(teacher, batch["x"])})

    s = state()
    _, metrics = distil(s, batch(), s.params)
    assert float(metrics["loss"]) == 0


def test_two_states_in_one_step():
    @jdp.train_step
    def step(states, batch):
        new_a, metrics_a = plain_step(states["a"], batch)
        new_b, metrics_b = plain_step(
            states["b"], {**batch, "y": predict(new_a.params, batch["x"])}
        )
        return {"a": new_a, "b": new_b}, {"a": metrics_a, "b": metrics_b}

    def make_state():
        return {"a": state(), "b": state(jdp.replicated(optax.sgd(0.01)))}

    assert_close(train(3, step, make_state), train(1, step, make_state))


def test_plain_tuple_of_parameters_and_optimizer_state():
    tx = sgd()

    @jdp.train_step
    def step(state, batch):
        p, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(p, batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        return (optax.apply_updates(p, updates), opt_state), {"loss": loss}

    def make_state():
        return training.params(), tx.init(training.params())

    assert_close(train(4, step, make_state), train(1, step, make_state))


def test_leaves_that_are_no_arrays_pass_through():
    class Unnamed:
        pass

    unnamed = Unnamed()

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        assert state["activation"] is jnp.tanh and state["other"] is unnamed
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], jdp.sync_gradients(grads))
        return {**state, "params": new}, {"loss": loss}

    def make_state():
        return {"activation": jnp.tanh, "other": unnamed, "params": training.params(), "z": "name"}

    one, three = train(1, step, make_state), train(3, step, make_state)
    assert three[0]["activation"] is jnp.tanh and three[0]["z"] == "name"
    assert_close(three[0]["params"], one[0]["params"])


def test_numbers_in_a_state_do_not_compile_twice():
    ranks(2)
    traces = []

    @jdp.train_step
    def step(state, batch):
        traces.append(None)
        return {"count": state["count"] + 1, "rate": state["rate"] * 0.5}, {}

    s = {"count": 0, "rate": 1.0}
    for _ in range(3):
        s, _ = step(s, batch())
    assert (len(traces), int(s["count"]), float(s["rate"])) == (1, 3, 0.125)


def two_dim_mesh(names=("data", "model"), shape=(2, 4)):
    return jax.make_mesh(
        shape, names, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: shape[0] * shape[1]]
    )


def test_weights_split_over_another_axis_stay_split_and_equal_one_rank():
    want, _ = train(1, jdp.train_step(plain_step))
    mesh = two_dim_mesh()
    jdp.init(mesh)
    split = {"w": P(None, "model"), "v": P("model", None), "b": P()}
    p = {k: jax.device_put(x, NamedSharding(mesh, split[k])) for k, x in training.params().items()}
    step, s, traces = jdp.train_step(plain_step), jdp.TrainState.create(p, sgd()), []
    for i in range(4):
        s, _ = step(s, batch(i))
        traces.append(s.params["w"].sharding.spec)
    assert traces == [P(None, "model")] * 4
    momentum = s.opt_state[0].trace["w"]
    assert momentum.sharding.is_equivalent_to(s.params["w"].sharding, 2)
    assert_close(jax.device_get(s.params), want.params)


def test_two_axes_may_form_the_data_axis():
    want, _ = train(1, jdp.train_step(plain_step))
    axis_name = ("replica", "fsdp")
    jdp.init(two_dim_mesh(axis_name), axis_name=axis_name)
    s = state(sgd(axis_name=axis_name, all_reduce=jdp.collectives.ring))
    step = jdp.train_step(plain_step, axis_name=axis_name)
    for i in range(4):
        s, metrics = step(s, batch(i))
    assert_close(jax.device_get(s.params), want.params)


def test_the_data_axis_may_have_another_name():
    ranks(3, axis_name="batch")
    step = jdp.train_step(plain_step, axis_name="batch")
    s, _ = step(state(sgd(axis_name="batch")), batch())
    want, _ = train(1, jdp.train_step(plain_step), num_steps=1)
    assert_close(jax.device_get(s.params), want.params)
    ranks(3, axis_name="batch")
    with pytest.raises(ValueError, match="axis_name=\"?'?batch"):
        step(state(sgd(axis_name="data")).replace(step=np.int32(0)), batch())


def test_a_state_split_over_the_data_axis_is_refused():
    mesh = ranks(2)
    s = {"w": jax.device_put(np.zeros(4), NamedSharding(mesh, P("data")))}
    with pytest.raises(ValueError, match=r"\['w'\].*'data'"):
        jdp.train_step(lambda s, b: (s, {}))(s, batch())


def test_parameters_on_another_mesh_are_refused():
    other = ranks(3)
    p = jax.device_put(training.params(), NamedSharding(other, P()))
    ranks(2)
    with pytest.raises(ValueError, match=" 3 devices .* 2 "):
        jdp.train_step(plain_step)(state().replace(params=p), batch())


def test_more_steps_than_xla_can_hold_in_flight():
    ranks(8)
    step, s = jdp.train_step(plain_step), state()
    for i in range(100):  # JAX 0.10 hangs at about 40 undrained steps
        s, metrics = step(s, batch(i % 3))
    assert np.isfinite(float(metrics["loss"]))


def explode(x):
    raise FloatingPointError("no such number")


@pytest.mark.parametrize("donate", [True, False])
def test_a_failure_while_a_step_runs_says_which_and_what_became_of_the_state(donate):
    ranks(1)

    @jdp.train_step(donate=donate)
    def step(state, batch, bad):
        value = lax.cond(
            bad,
            lambda: jax.pure_callback(explode, jax.ShapeDtypeStruct((), "float32"), batch["x"]),
            lambda: jnp.float32(0),
        )
        new, metrics = plain_step(state, batch)
        return new, {"loss": metrics["loss"] + value}

    s, _ = step(state(), batch(), False)
    advice = r".*jdp\.Checkpointer.*donate=False" if donate else "(?!.*Checkpointer)"
    why = "FloatingPointError: no such number at .*test_step.py:"
    with pytest.raises(RuntimeError, match=f"call 2 of `step`.*{why}{advice}.*JDP214"):
        s, _ = step(s, batch(), True)
        for _ in range(20):
            s, _ = step(s, batch(), False)


def test_defaults_and_keywords_reach_the_step():
    ranks(2)

    @jdp.train_step
    def step(state, batch, a=1.0, b=2.0):
        return state, {"both": jnp.float32(a) * 10 + b}

    s = {"x": np.zeros(2, np.float32)}
    s, metrics = step(s, batch(), b=5.0)
    assert float(metrics["both"]) == 15
    s, metrics = step(batch=batch(), state=s)
    assert float(metrics["both"]) == 12


def total(state, batch, a=1.0, *rest, b=2.0, **options):
    named = 1000.0 * sum(options.values()) if options else 0.0
    return state, {"total": jnp.float32(a + 10 * b + 100 * sum(rest) + named)}


TOTALS = {
    "defaults": ((), {}, 21),
    "by position": ((3.0,), {}, 23),
    "by keyword": ((), {"a": 3.0}, 23),
    "keyword only": ((), {"b": 4.0}, 41),
    "both": ((3.0,), {"b": 4.0}, 43),
    "further": ((3.0, 5.0, 6.0), {"b": 4.0}, 1143),
    "options": ((), {"c": 7.0, "b": 4.0, "d": 2.0}, 9041),
}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("how", TOTALS)
def test_arguments_are_given_as_to_any_function(how, num_ranks):
    args, named, want = TOTALS[how]
    ranks(num_ranks)
    s = {"x": np.zeros(2, np.float32)}
    step = jdp.train_step(total)
    for call in (step, jax.jit(step)):
        assert float(call(s, batch(), *args, **named)[1]["total"]) == want
    step = jdp.train_step(functools.partial(total, b=4.0))  # which a call may still change
    assert float(step(s, batch(), *args, **{"b": 2.0, **named})[1]["total"]) == want
    assert float(step(s, batch(), *args)[1]["total"]) == total(s, None, *args, b=4.0)[1]["total"]


def test_a_keyword_is_an_argument_and_a_default_part_of_the_program():
    ranks(2)
    traced = []

    @jdp.train_step
    def step(state, batch, *, scale=1.0, double=True, act=jnp.tanh):
        traced.append(scale)
        return state, {"scale": act(scale * (2 if double else 1) * 0.0) + scale}

    s = {"x": np.zeros(2, np.float32)}
    for scale in (2.0, 3.0):
        assert float(step(s, batch(), scale=scale)[1]["scale"]) == scale
    assert float(step(s, batch())[1]["scale"]) == 1
    assert len(traced) == 2  # one program with the argument, and one without


def test_a_keyword_that_is_wrong_is_named():
    ranks(2)
    s = {"x": np.zeros(2, np.float32)}

    @jdp.train_step
    def step(state, batch, *, act=jnp.tanh, double=True):
        return state, {"y": act(0.0) * (2 if double else 1)}

    with pytest.raises(TypeError, match=r"`act` holds .*tanh.*functools\.partial\(fn, act="):
        step(s, batch(), act=jnp.tanh)
    with pytest.raises(TypeError, match="(?s)`double` at test_step.py.*JDP127"):
        step(s, batch(), double=False)
    with pytest.raises(TypeError, match="'rate'"):
        step(s, batch(), rate=1.0)


def test_a_donated_keyword_is_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch, *, teacher):
        return state, {"y": teacher.sum()}

    teacher = jnp.ones(3)
    teacher.delete()
    with pytest.raises(ValueError, match="`teacher`"):
        step({"x": np.zeros(2, np.float32)}, batch(), teacher=teacher)


def test_what_functools_partial_sets_is_part_of_the_step():
    def scaled(state, batch, double=False):
        return state, {"scale": jnp.float32(2 if double else 1)}

    ranks(2)
    step = jdp.train_step(functools.partial(scaled, double=True))
    _, metrics = step({"x": np.zeros(2, np.float32)}, batch())
    assert float(metrics["scale"]) == 2


def test_arrays_that_lie_on_the_mesh_already_are_copied_before_they_are_donated():
    mesh = ranks(2)
    mine = jax.device_put(training.params(), NamedSharding(mesh, P()))
    first = jdp.TrainState.create(mine, sgd())
    second = jdp.TrainState.create(first.params, sgd())
    jdp.train_step(plain_step)(second, batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves((mine, first)))


def aligned(num, value):
    # As JAX wants it, to use the memory without a copy.
    memory = np.empty(4 * num + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + 4 * num].view(np.float32)
    array[:] = value
    return array


def test_a_batch_may_be_overwritten_as_soon_as_the_step_returns():
    ranks(1)
    rows = aligned(2**16, 1.0)

    @jdp.train_step
    def step(state, batch):
        for _ in range(50):
            state = state + jdp.mean_over_ranks(jnp.sort(batch).mean())
        return state, {"mean": batch.mean()}

    _, metrics = step(np.float32(0), rows)
    rows[:] = 5
    assert float(metrics["mean"]) == 1


def test_a_state_that_another_step_donated_is_named():
    ranks(2)
    first, second = jdp.train_step(plain_step), jdp.train_step(ema)
    s, _ = first(state(model_state=training.params()), batch())
    second(s, batch())
    with pytest.raises(ValueError, match=r"`state\.step`.*donate=False"):
        first(s, batch())


def test_a_further_argument_that_was_donated_is_named():
    ranks(2)

    @jdp.train_step
    def step(state, batch, teacher):
        return plain_step(state, {"x": batch["x"], "y": predict(teacher, batch["x"])})

    s = state()
    teacher = s.params
    s, _ = step(s, batch(), teacher)
    with pytest.raises(ValueError, match=r"`teacher\['b'\]`.*donate=False"):
        step(s, batch(), teacher)


@pytest.mark.parametrize("named", ["state", "teacher"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_the_caller_donated_is_named_also_where_a_view_keeps_shards(named, num_ranks):
    where = ranks(num_ranks)

    @jdp.eval_step
    def step(state, batch, teacher):
        return jdp.mean_over_ranks(batch.mean()) + teacher + state["x"]

    copies = NamedSharding(where, P())
    args = {"state": {"x": jnp.zeros(())}, "batch": jnp.zeros(num_ranks), "teacher": jnp.zeros(())}
    args = {name: jax.device_put(x, copies) for name, x in args.items()}
    args["batch"] = jax.device_put(args["batch"], NamedSharding(where, P("data")))
    for _ in range(3):
        assert step(*args.values()) == 0
    (donated,) = jax.tree.leaves(args[named])
    views = [np.asarray(shard.data) for shard in donated.addressable_shards[:-1]]
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    assert not donated.is_deleted()
    with pytest.raises(ValueError, match=f"`{named}.*was donated"):
        step(*args.values())
    assert len(views) == num_ranks - 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_batch_may_be_a_leaf_of_the_donated_state(num_ranks):
    where = ranks(num_ranks)
    tx = jdp.sharded(optax.sgd(1.0), stage=3, min_size=1)
    s = jdp.TrainState.create({"w": jnp.arange(12.0)}, tx)

    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: p["w"].sum() * batch.mean())(state.params)
        return state.apply_gradients(grads), {"mean": batch.mean()}

    other = jax.device_put(jnp.full(12, 2.0), NamedSharding(where, P("data")))
    means = []
    for rows in (None, other, other, None, None):
        s, metrics = step(s, s.params["w"] if rows is None else rows)
        means.append(float(metrics["mean"]))
    assert means == [5.5, 2, 2, -4, 0]


def test_a_step_may_be_a_partial_function():
    ranks(2)

    def step(scale, state, batch):
        return plain_step(state, batch)

    s, _ = jdp.train_step(functools.partial(step, 2.0))(state(), batch())
    assert int(s.step) == 1


def test_lower_takes_the_shapes_of_a_state():
    ranks(2)
    s, rows = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        for tree in (state(), batch())
    )
    assert "all_reduce" in jdp.train_step(plain_step).lower(s, rows).as_text()


def test_a_batch_without_rows_is_refused():
    ranks(2)
    with pytest.raises(ValueError, match=r"`batch\['x'\]` .*rows"):
        jdp.train_step(plain_step)(state(), batch(num_rows=0))


def test_init_says_how_to_ask_for_ranks():
    with pytest.raises(TypeError, match="cpu_ranks=4"):
        jdp.init(4)
    with pytest.raises(ValueError, match=r"devices=\[\]"):
        jdp.init(devices=[])


@pytest.mark.parametrize(
    "devices, error, text",
    [
        ([0, 0, 1], ValueError, "3 devices, 2 of them different"),
        (4, TypeError, "devices=4"),
        (["cpu"], TypeError, "not a list of devices"),
    ],
)
def test_each_rank_has_a_device_of_its_own(devices, error, text):
    if error is ValueError:
        devices = [jax.devices()[i] for i in devices]
    with pytest.raises(error, match=text):
        jdp.init(devices=devices)


@pytest.mark.parametrize(
    "axes, names, shape",
    [
        ({"model": 2}, "data", {"data": 4, "model": 2}),
        ({"model": 2, "data": 4}, "data", {"data": 4, "model": 2}),
        ({"pipe": 2, "model": 4}, "rows", {"rows": 1, "pipe": 2, "model": 4}),
        ({"fsdp": 2, "model": 2}, ("replica", "fsdp"), {"replica": 2, "fsdp": 2, "model": 2}),
    ],
)
def test_the_data_axis_is_outermost_and_takes_the_remaining_devices(axes, names, shape):
    for devices in (None, jax.devices()[::-1]):
        mesh = jdp.init(axes=axes, axis_name=names, devices=devices)
        assert dict(mesh.shape) == shape and [*mesh.shape] == [*shape]
        assert [*mesh.devices.flat] == (devices or jax.devices())


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"axes": {"model": 3}}, ValueError, "asks for 3 devices, but this mesh has 8"),
        ({"axes": {"data": 2, "model": 2}}, ValueError, "leave out 'data'"),
        ({"axes": {"model": 0}}, ValueError, r"axes\['model'\]"),
        ({"axes": {"model": 2.5}}, TypeError, r"axes\['model'\]"),
        ({"axes": ["model"]}, TypeError, "sizes by name"),
        ({"axis_name": ("a", "b")}, ValueError, "names 2 axes"),
        ({"axes": {"model": 2}, "mesh": True}, ValueError, "Remove axes="),
    ],
)
def test_axes_that_do_not_fit_are_refused(options, error, text):
    if "mesh" in options:
        options = options | {"mesh": jdp.init()}
    with pytest.raises(error, match=text):
        jdp.init(**options)


@pytest.mark.parametrize(
    "use",
    [
        lambda mesh, own, theirs: jdp.init(mesh),
        lambda mesh, own, theirs: jdp.TrainState.create({"w": theirs}, sgd()),
        lambda mesh, own, theirs: jdp.eval_step(lambda w, x: {"x": x.mean()})(theirs, batch()["x"]),
        lambda mesh, own, theirs: jdp.TrainState.create([own, theirs], sgd()),
    ],
)
def test_explicit_further_axes_are_refused_also_those_of_an_array(use):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    placed = [
        jax.device_put(np.ones((2, 2), "f"), NamedSharding(each, P(None, "model")))
        for each in (jdp.init(axes={"model": 2}), mesh)
    ]
    with pytest.raises(ValueError, match=r"'model' of this mesh is Explicit.*{'model': 2}"):
        use(mesh, *placed)


@pytest.mark.parametrize("timeout_s", ["10", True, (3,)])
def test_a_time_limit_is_a_number(timeout_s):
    with pytest.raises(TypeError, match="timeout_s=.*number of seconds"):
        jdp.init(timeout_s=timeout_s)


@pytest.mark.skipif(cpu_runtime.why_missing() is not None, reason="needs the native library")
def test_steps_in_one_jit_number_their_reductions_differently():
    ranks(2)
    num_calls = 3

    def make(scale):
        def step(state, batch):
            grads = jax.tree.map(lambda p: scale * p * batch["x"].mean(), state)
            return jdp.sync_gradients(grads, all_reduce=jdp.collectives.native), {}

        return jdp.train_step(step)

    steps = [make(float(i + 1)) for i in range(num_calls)]

    def both(state, batch):
        return [step(state, batch)[0] for step in steps]

    state = {"w": jnp.ones(3), "b": jnp.ones(())}
    traced = jax.jit(both).trace(state, batch())
    numbers = _numbers(traced.jaxpr)
    assert len(numbers) == len(set(numbers)) == num_calls
    want = batch()["x"].mean()
    for i, got in enumerate(jax.jit(both)(state, batch())):
        for leaf in jax.tree.leaves(got):
            np.testing.assert_allclose(leaf, (i + 1) * want, rtol=1e-5)


def _numbers(jaxpr):
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found += [eqn.params["number"]] if eqn.primitive.name == "jdp_all_reduce" else []
        for body in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: True):
            for each in body if isinstance(body, (tuple, list)) else (body,):
                if hasattr(getattr(each, "jaxpr", each), "eqns"):
                    found += _numbers(each)
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_a_leaf_of_the_state_may_be_the_batch(n):
    ranks(n)

    @jdp.train_step
    def step(state, batch):
        return {"x": jdp.sync_gradients(state["x"] * batch["x"].sum())}, {}

    state, want = {"x": jnp.arange(4.0)}, np.arange(4.0)
    for _ in range(2):
        state, _ = step(state, {"x": state["x"]})
        want = want * want.sum() / n
        np.testing.assert_array_equal(state["x"], want)


@pytest.mark.parametrize("all_reduce", [collectives.auto, collectives.xla, collectives.ring])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_tangent_of_a_mean_gradient_is_a_mean(n, all_reduce):
    ranks(n)

    @jdp.train_step
    def step(state, batch):
        def mean(w):
            return jdp.sync_gradients(w**2 * batch["x"].mean(), all_reduce=all_reduce)

        return jax.jvp(mean, (state,), (2 * state,))[1], {}

    rows = {"x": np.arange(6, dtype=np.float32)}
    np.testing.assert_allclose(step(jnp.ones(3), rows)[0], np.full(3, 10), rtol=1e-6)
