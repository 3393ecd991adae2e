"""`local_sgd` and `diloco` against ranks that one device trains one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.per_rank import assert_equal_bits
from support.training import assert_close, batch, fetched, loss_fn, params, plain_step, ranks

import jdp
from jdp.training.state import optimizer_state

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)  # the default of `diloco`
INNER = {
    "adamw": optax.adamw(0.01),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.05, 5), momentum=0.9),
    "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
}
NUM_STEPS = 9
grad = training.gradient


def simulated(num_ranks, inner, outer, every, num_steps=NUM_STEPS):
    """Return the outer parameters and those of each rank; without `outer` the mean joins them."""
    shared = jax.tree.map(jnp.asarray, params())
    own, states = [shared] * num_ranks, [inner.init(shared)] * num_ranks
    outer_state = None if outer is None else outer.init(shared)
    losses = []
    for i in range(num_steps):
        rows = jax.tree.map(lambda x: x.reshape(num_ranks, -1, *x.shape[1:]), batch(i))
        found = []
        for r in range(num_ranks):
            mine = jax.tree.map(lambda x, r=r: x[r], rows)
            own[r], states[r], loss = updated(inner, own[r], states[r], mine)
            found.append(loss)
        losses.append(np.mean(found))
        if (i + 1) % every:
            continue
        mean = jax.tree.map(lambda *x: sum(x) / num_ranks, *own)
        if outer is not None:
            grads = jax.tree.map(jnp.subtract, shared, mean)
            updates, outer_state = outer.update(grads, outer_state, shared)
            mean = optax.apply_updates(shared, updates)
        shared, own = mean, [mean] * num_ranks
    return fetched((shared, jax.tree.map(lambda *x: jnp.stack(x), *own), losses))


def updated(inner, own, state, rows):
    loss, grads = jax.value_and_grad(loss_fn)(own, rows)
    updates, state = inner.update(grads, state, own)
    return optax.apply_updates(own, updates), state, loss


def streamed(num_ranks, outer, every):
    """Return what `simulated` does with "adamw", of fragments that are exchanged one in a step."""
    inner, shared = INNER["adamw"], jax.tree.map(jnp.asarray, params())
    own, states = [shared] * num_ranks, [inner.init(shared)] * num_ranks

    def at(x, i):
        return slice(i * -(-x.size // every), (i + 1) * -(-x.size // every))

    def part(tree, i):
        return jax.tree.map(lambda x: x.ravel()[at(x, i)], tree)

    def put(tree, new, i):
        return jax.tree.map(lambda x, y: x.ravel().at[at(x, i)].set(y).reshape(x.shape), tree, new)

    outer_states, losses = [outer.init(part(shared, i)) for i in range(every)], []
    for step in range(NUM_STEPS):
        i, found = step % every, []
        before, old = [part(x, i) for x in own], part(shared, i)
        for r in range(num_ranks):
            mine = jax.tree.map(lambda x, r=r: np.split(x, num_ranks)[r], batch(step))
            own[r], states[r], loss = updated(inner, own[r], states[r], mine)
            found.append(loss)
        losses.append(np.mean(found))
        grads = jax.tree.map(lambda x, *own: sum(x - y for y in own) / num_ranks, old, *before)
        updates, outer_states[i] = outer.update(grads, outer_states[i], old)
        new = optax.apply_updates(old, updates)
        shared = put(shared, new, i)
        own = [
            put(x, jax.tree.map(lambda n, b, x: x + n - b, new, b, part(x, i)), i)
            for x, b in zip(own, before, strict=True)
        ]
    return fetched((shared, jax.tree.map(lambda *x: jnp.stack(x), *own), losses))


def trained(num_ranks, tx, num_steps=NUM_STEPS, step=plain_step):
    state, metrics = training.train(
        num_ranks, jdp.train_step(step), lambda: training.state(tx), num_steps
    )
    return state.params, state.opt_state.own_params.value, [each["loss"] for each in metrics]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("name", "every"), [("adamw", 4), ("adamw", 1), ("momentum", 3), ("clip", 4)]
)
def test_steps_equal_those_of_each_rank_alone(num_ranks, name, every):
    tx = jdp.diloco(INNER[name], every=every)
    assert_close(trained(num_ranks, tx), simulated(num_ranks, INNER[name], OUTER, every))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("every", [1, 3, 4])  # 4 and 1 numbers, and 20 by 3, do not divide
def test_fragments_equal_those_of_each_rank_alone(num_ranks, every):
    tx = jdp.diloco(INNER["adamw"], every=every, streaming=True)
    assert_close(trained(num_ranks, tx), streamed(num_ranks, OUTER, every))


def test_each_fragment_has_an_outer_optimizer_without_numbers_of_others():
    outer = optax.chain(optax.clip_by_global_norm(0.02), optax.adam(0.1, eps=1e-3))
    tx = jdp.diloco(INNER["adamw"], outer, every=3, streaming=True)
    assert_close(trained(3, tx), streamed(3, outer, 3))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_local_sgd_averages_the_parameters(num_ranks):
    tx = jdp.local_sgd(INNER["momentum"], every=4)
    assert_close(trained(num_ranks, tx), simulated(num_ranks, INNER["momentum"], None, 4))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_sgd_joined_in_each_step_equals_replicated(num_ranks):
    step, sgd = jdp.train_step(plain_step), optax.sgd(0.1)
    local = training.train(
        num_ranks, step, lambda: training.state(jdp.diloco(sgd, optax.sgd(1.0), every=1))
    )
    every = training.train(num_ranks, step, lambda: training.state(jdp.replicated(sgd)))
    assert_close((local[0].params, local[1]), (every[0].params, every[1]), 1e-6)


def test_an_outer_optimizer_of_any_kind_gets_the_mean():
    outer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1))
    tx = jdp.diloco(INNER["adamw"], outer, every=3)
    assert_close(trained(3, tx), simulated(3, INNER["adamw"], outer, 3))


def test_micro_batches_and_own_clips_and_scanned_steps_stay_local():
    clip = optax.clip_by_global_norm(0.5)

    def step(state, batch):
        fn = jdp.value_and_grad(loss_fn, accumulate=2)
        loss, grads = fn(state.params, batch)
        grads, _ = clip.update(grads, clip.init(grads))
        return state.apply_gradients(grads), {"loss": loss}

    tx = jdp.diloco(optax.sgd(0.1), every=4)
    right = simulated(3, INNER["clip"], OUTER, 4)
    assert_close(trained(3, tx, step=step), right)
    ranks(3)
    decorated = jdp.train_step(step)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(batch, range(NUM_STEPS)))
    state, metrics = jax.jit(lambda *args: lax.scan(decorated, *args))(training.state(tx), stacked)
    found = state.params, state.opt_state.own_params.value, list(metrics["loss"])
    assert_close(fetched(found), right)


@pytest.mark.parametrize("dtype, largest", [(jnp.int8, 127), (jnp.int4, 7)])
def test_quantized_outer_gradients_have_equal_bits_and_round_as_their_blocks(dtype, largest):
    ranks(4)
    start = {"w": np.random.default_rng(0).normal(size=(71, 67)).astype("f")}

    def step(state, batch):
        grads = jax.grad(lambda p: jnp.mean((batch["x"] @ p["w"][:5]) ** 2))(state.params)
        return state.apply_gradients(grads), {}

    def run(**options):
        tx = jdp.diloco(optax.sgd(0.1), optax.sgd(1.0), every=2, **options)
        state, decorated = jdp.TrainState.create(start, tx), jdp.train_step(step)
        for i in range(2):
            state, _ = decorated(state, batch(i))
        jdp.check_replicas(state)
        assert_equal_bits(state.opt_state.own_params.value)
        return state.params["w"]

    quantized = functools.partial(jdp.collectives.quantized, dtype=dtype)
    exact, rounded = run(), run(all_reduce=quantized)
    error, moved = np.abs(exact - rounded).max(), np.abs(exact - start["w"]).max()
    assert 0 < error <= 2 * moved / largest


def test_leaves_of_a_fragment_are_quantized_as_one_array():
    ranks(4)
    start = {name: np.zeros(6000, np.float32) for name in "ab"}  # of 4096 numbers at least

    @jdp.train_step
    def step(state, batch):
        grads = jax.tree.map(lambda w: w - batch["x"].mean() * np.arange(6000), state.params)
        return state.apply_gradients(grads), {}

    def run(**options):
        tx = jdp.diloco(optax.sgd(0.1), optax.sgd(1.0), every=2, streaming=True, **options)
        state = jdp.TrainState.create(start, tx)
        plan = {each.dtype: each.num_bytes for each in step.communication_plan(state, batch())}
        for i in range(4):
            state, _ = step(state, batch(i))
        jdp.check_replicas(state)
        return plan, np.stack(list(state.params.values()))

    (_, exact), (plan, rounded) = run(), run(all_reduce=jdp.collectives.quantized)
    assert plan == {"u8": 6 * 1024 + 4 * 24}  # whole blocks for each rank, and their scales
    assert 0 < np.abs(exact - rounded).max() <= 4 * np.abs(exact).max() / 127


# Where ranks meet


def sizes_of_collectives(num_ranks, tx, step=plain_step):
    """Return the bytes of a step's collectives in each step, and in some."""
    ranks(num_ranks)
    plan = jdp.train_step(step).communication_plan(training.state(tx), batch())
    assert all(not each.is_of_author for each in plan)
    return [sum(x.num_bytes for x in plan if x.is_conditional is flag) for flag in (False, True)]


def test_no_collective_of_parameters_is_outside_of_the_condition():
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(params()))
    for tx in (jdp.local_sgd(INNER["adamw"], every=4), jdp.diloco(INNER["adamw"], every=4)):
        assert sizes_of_collectives(4, tx) == [4, num_bytes]  # 4: the loss
    assert sizes_of_collectives(4, jdp.replicated(INNER["adamw"])) == [num_bytes + 4, 0]


def test_each_step_sends_one_fragment_of_all_parameters():
    tx = jdp.diloco(INNER["adamw"], every=3, streaming=True)
    assert sizes_of_collectives(4, tx) == [4 * (1 + 7 + 2 + 1), 0]  # of 20, 4 and 1 numbers


def test_the_compiled_program_sums_parameters_in_its_condition_alone():
    mesh = ranks(4)
    xla = jdp.local_sgd(INNER["adamw"], every=4, all_reduce=jdp.collectives.xla)
    step, state = jdp.train_step(plain_step), training.state(xla)
    report = jdp.explain(step, state, batch(), on=mesh)
    assert "the outer gradient of ['w']" in str(report)
    bodies = step.lower(state, batch()).compile().as_text().split("\n\n")
    (entry,) = (body for body in bodies if "\nENTRY" in f"\n{body}")
    sums = [[line for line in x.splitlines() if " all-reduce(" in line] for x in (entry, *bodies)]
    assert len(sums[0]) == 1 and "f32[5,4]" not in sums[0][0]
    assert "f32[5,4]" in str(sums[1:])


def test_hosts_average_in_each_step_and_meet_in_some():
    axes = ("host", "data")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jdp.init(mesh, axis_name=axes)

    @jdp.train_step(axis_name=axes)
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        grads = jdp.sync_gradients(grads, axis_name="data")
        return state.apply_gradients(grads), {"loss": loss}

    state = training.state(jdp.diloco(INNER["adamw"], every=4, axis_name=axes))
    metrics = {}
    for i in range(NUM_STEPS):
        state, metrics = step(state, batch(i))
    right, own, losses = simulated(2, INNER["adamw"], OUTER, 4)
    assert_close(fetched((state.params, metrics["loss"])), (right, losses[-1]))
    found = fetched(state.opt_state.own_params.value)
    for name, value in found.items():
        assert_equal_bits([value[:4], value[4:]])
        assert_close(value[::4], own[name])


# What is between two steps


def test_evaluation_and_copies_read_the_outer_parameters():
    ranks(3)
    measure = jdp.eval_step(lambda state, batch: {"loss": loss_fn(state.params, batch)})
    state, step = training.state(jdp.local_sgd(INNER["adamw"], every=2)), jdp.train_step(plain_step)
    for i in range(3):
        state, _ = step(state, batch(i))
    assert int(state.opt_state.num_local) == 1
    right, *_ = simulated(3, INNER["adamw"], None, 2, num_steps=2)
    assert_close(jax.device_get(state.params), right)
    assert_close(jdp.evaluate(measure, state, [batch(7)]), {"loss": loss_fn(right, batch(7))})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_round_begins_anew_at_parameters_that_are_put_in_between_two_steps(streaming):
    ranks(2)
    tx = jdp.diloco(optax.sgd(0.1), optax.sgd(1.0), every=3, streaming=streaming)
    state, step = training.state(tx), jdp.train_step(plain_step)
    for i in range(2):
        state, _ = step(state, batch(i))
    state = state.replace(params=jax.tree.map(jnp.zeros_like, state.params))
    new = training.state(tx)
    new = new.replace(params=jax.tree.map(jnp.zeros_like, new.params))
    for i in range(4):
        (state, _), (new, _) = step(state, batch(i)), step(new, batch(i))
    assert_close(*(fetched((x.params, x.opt_state)) for x in (state, new)), tolerance=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_parameters_put_in_within_a_step_are_those_of_this_rank(streaming):
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        begun = state.params["b"][0]
        state = state.apply_gradients(grad(state, batch))
        mine = jax.tree.map(lambda x: x * 0 + batch["x"][0, 0], state.params)
        return state.replace(params=mine), {"begun": begun}

    tx = jdp.diloco(optax.sgd(0.1), optax.sgd(1.0), every=2, streaming=streaming)
    state, put = training.state(tx), [0.0]
    for i in range(5):
        state, metrics = step(state, batch(i))
        assert_close(metrics["begun"], np.mean(put), tolerance=1e-6)
        put = [rows[0, 0] for rows in np.split(batch(i)["x"], 2)]
        assert_close(state.opt_state.own_params.value["b"][:, 0], np.asarray(put), tolerance=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_state_is_made_in_parts_also_over_further_axes(streaming):
    mesh = ranks(8, axes={"model": 2})
    whole = jax.device_put(params(), NamedSharding(mesh, P()))
    split = {**whole, "w": jax.device_put(whole["w"], NamedSharding(mesh, P(None, "model")))}
    made = optimizer_state(jdp.diloco(optax.adam(0.1), every=2), split)
    for tree in (made.own_params.value, made.own_state.value[0].mu):
        assert tree["w"].sharding.spec == P("data", None, "model")
        assert tree["b"].sharding.spec == P("data")
    tx, step = jdp.diloco(INNER["adamw"], every=4, streaming=streaming), jdp.train_step(plain_step)
    state = jdp.TrainState.create(split, tx)
    for i in range(NUM_STEPS):
        state, _ = step(state, batch(i))
    right = streamed(4, OUTER, 4) if streaming else simulated(4, INNER["adamw"], OUTER, 4)
    assert_close(fetched((state.params, state.opt_state.own_params.value)), right[:2])


def test_frozen_parameters_are_equal_on_all_ranks_and_never_sent():
    tx = jdp.diloco(INNER["adamw"], every=2)
    ranks(3)
    trainable = {"w": True, "v": False, "b": True}
    state = training.state(tx, trainable=trainable)
    step = jdp.train_step(plain_step)
    assert sum(x.num_bytes for x in step.communication_plan(state, batch())) == 4 + 4 * 21
    for i in range(3):
        state, _ = step(state, batch(i))
    assert np.array_equal(state.params["v"], params()["v"])
    assert state.opt_state.own_params.value["v"] is None
    assert not np.array_equal(state.params["w"], params()["w"])


def test_an_average_of_outer_parameters_is_proved_and_one_of_own_is_refused():
    ranks(3)

    def step(read, state, batch):
        new = state.apply_gradients(grad(state, batch))
        mean = optax.incremental_update(read(new), state.model_state, 0.1)
        return new.replace(model_state=mean), {}

    def run(read):
        state = training.state(jdp.diloco(INNER["adamw"], every=1), model_state=params())
        return jdp.train_step(functools.partial(step, read))(state, batch())[0]

    state = run(lambda new: new.opt_state.outer_params)
    right = optax.incremental_update(jax.device_get(state.params), params(), 0.1)
    assert_close(fetched(state.model_state), right, 1e-6)
    with pytest.raises(ValueError, match=r"model_state\['w'\].*opt_state\.outer_params.*JDP101"):
        run(lambda new: new.params)


# What is refused


def reducing(reduce):
    return lambda state, batch: (state.apply_gradients(reduce(grad(state, batch))), {})


@jdp.train_step(weight=lambda batch: batch["x"].sum() ** 2)
def weighted(state, batch):
    return state.apply_gradients(grad(state, batch)), {}


def of_a_global_mean(state, batch):
    loss = jdp.global_mean(lambda params: loss_fn(params, batch))
    return state.apply_gradients(jax.grad(loss)(state.params)), {}


def by_the_transformation(state, batch):
    updates, opt_state = state.tx.update(grad(state, batch), state.opt_state, state.params)
    return state.replace(opt_state=opt_state), updates


def at_a_time_of_its_own(state, batch):
    count = (batch["x"].sum() > 0).astype(int)
    state = state.replace(opt_state=state.opt_state._replace(num_local=count))
    return state.apply_gradients(grad(state, batch)), {}


def of_scanned_layers(state, batch):
    def loss(params):
        x, _ = jdp.scan_layers(lambda x, w: (x * w.sum(), None), batch["x"], params["w"])
        return x.mean()

    return state.apply_gradients(jax.grad(loss)(state.params)), {}


REFUSED = {
    "synced": (
        lambda state, batch: (state.apply_gradients(grad(state, batch), synced=True), {}),
        r"own gradients, but synced=True.*jax\.grad\(loss_fn\).*JDP219",
    ),
    "sync_gradients": (reducing(jdp.sync_gradients), r"`grads\['w'\]` is reduced.*JDP219"),
    "pmean": (reducing(lambda grads: lax.pmean(grads, "data")), "JDP219"),
    "psum": (reducing(lambda grads: lax.psum(grads, "data")), "JDP219"),
    "global_mean": (of_a_global_mean, "JDP219"),
    "weight": (weighted, r"Remove weight= .*JDP220"),
    "update": (by_the_transformation, r"jdp\.TrainState\.create\(params, jdp\.diloco"),
    "count": (at_a_time_of_its_own, "JDP103"),
    "scan_layers": (of_scanned_layers, r"write late=False.*JDP105"),
}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_has_reduced_or_weighted_is_refused(num_ranks, name):
    ranks(num_ranks)
    step, text = REFUSED[name]
    step = step if step is weighted else jdp.train_step(step)
    with pytest.raises((ValueError, TypeError), match=text):
        step(training.state(jdp.diloco(INNER["adamw"], every=4)), batch())


def of_flax(tx):
    state = FlaxState.create(apply_fn=None, params=params(), tx=tx)
    return state, lambda state, batch: (state.apply_gradients(grads=grad(state, batch)), {})


def of_nnx(tx):
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))

    def step(pair, batch):
        grads = nnx.grad(lambda model: model(batch["x"]).mean())(pair[0])
        pair[1].update(pair[0], grads)
        return pair, {}

    return (model, nnx.Optimizer(model, tx, wrt=nnx.Param)), step


@pytest.mark.parametrize("make", [of_flax, of_nnx])
def test_states_of_flax_and_nnx_are_refused(make):
    ranks(2)
    state, step = make(jdp.diloco(optax.sgd(0.1), every=2))
    with pytest.raises(TypeError, match=r"only a jdp\.TrainState .*jdp\.TrainState\.create\("):
        jdp.train_step(step)(state, batch())


def test_an_update_outside_of_a_step_is_refused():
    ranks(2)
    with pytest.raises(TypeError, match=r"decorated with jdp\.train_step"):
        training.state(jdp.local_sgd(optax.sgd(0.1), every=2)).apply_gradients(params())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda tx: jdp.sharded(jdp.diloco(tx, every=2)), r"already in .*jdp\.diloco"),
        (lambda tx: jdp.diloco(jdp.sharded(tx), every=2), r"jdp\.diloco\(optax"),
        (lambda tx: jdp.local_sgd(jdp.local_sgd(tx, every=2), every=2), r"jdp\.local_sgd\(optax"),
        (lambda tx: jdp.diloco(tx, jdp.replicated(tx), every=2), r"jdp\.diloco\(optax"),
        (lambda tx: jdp.diloco(3, every=2), "not an optax transformation"),
        (lambda tx: jdp.local_sgd(tx, every=0), "every must be at least 1"),
        (lambda tx: jdp.local_sgd(tx, every=2.5), "every must be an integer"),
        (lambda tx: jdp.local_sgd(tx, every=2, all_reduce="xla"), r"all_reduce=jdp\.collectives"),
        (
            lambda tx: training.state(jdp.diloco(jdp.skip_nonfinite(tx), every=2)),
            r"optax\.apply_if_finite",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(make, text):
    ranks(2)
    with pytest.raises((TypeError, ValueError), match=text):
        make(optax.adam(0.1))


def test_moments_of_16_bits_are_refused_as_elsewhere():
    ranks(2)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params())
    with pytest.raises(ValueError, match="JDP130"):
        jdp.TrainState.create(half, jdp.diloco(optax.adamw(0.1), every=2))
    jdp.TrainState.create(half, jdp.diloco(optax.sgd(0.1), every=2))


def test_a_state_of_other_ranks_and_check_step_are_refused():
    ranks(4)
    state, step = training.state(jdp.diloco(optax.sgd(0.1), every=2)), jdp.train_step(plain_step)
    with pytest.raises(ValueError, match=r"4 times as many ranks .*jdp\.replicated\(tx\)"):
        jdp.check_step(step, state, batch())


def test_each_rank_skips_its_own_bad_updates():
    ranks(2)
    tx = jdp.local_sgd(optax.apply_if_finite(optax.sgd(0.1), 3), every=2)
    state, step = training.state(tx), jdp.train_step(plain_step)
    bad = {**batch(), "x": batch()["x"].copy()}
    bad["x"][-1] = np.nan  # a row of rank 1
    state, _ = step(state, bad)
    own = state.opt_state.own_params.value["w"]
    assert np.array_equal(own[1], params()["w"]) and not np.array_equal(own[0], own[1])
    assert state.opt_state.own_state.value.total_notfinite.tolist() == [0, 1]


# Checkpoints


def saved_and_restored(tmp_path, num_steps, num_ranks, inner, **options):
    """Train on 4 ranks, save, and return the saved state and the one restored on other ranks."""
    tx, step = jdp.diloco(inner, every=3, **options), jdp.train_step(plain_step)
    ranks(4)
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore(training.state(tx))
        for i in range(num_steps):
            state, _ = step(state, batch(i))
        ckpt.step(state)
    saved = fetched(state)
    ranks(num_ranks)
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        return saved, ckpt.restore(training.state(tx)), step


@pytest.mark.parametrize("streaming", [False, True])
def test_a_state_restored_on_as_many_ranks_continues_with_equal_bits(tmp_path, streaming):
    options = {"inner": optax.adamw(0.01), "streaming": streaming}
    saved, state, step = saved_and_restored(tmp_path, 4, 4, **options)
    assert_close(fetched(state), saved, tolerance=0)
    for i in range(4, NUM_STEPS):
        state, _ = step(state, batch(i))
    tx = jdp.diloco(**options, every=3)
    right = training.train(4, step, lambda: training.state(tx), NUM_STEPS)
    assert_close(fetched(state), right[0], tolerance=0)
    assert_close(jdp.load(tmp_path, part="params"), saved.params, tolerance=0)


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_on_other_ranks_a_state_continues_from_the_means_over_the_old_ones(tmp_path, num_ranks):
    inner = optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(3)), optax.adamw(0.01))
    saved, state, step = saved_and_restored(tmp_path, 4, num_ranks, inner)
    found = fetched(state)
    assert_close(found.params, saved.params, tolerance=0)
    old, new = (x.opt_state.own_params.value for x in (saved, found))
    for name, value in new.items():
        mean = old[name].astype(np.float64).mean(0).astype("f")
        assert np.array_equal(value, np.broadcast_to(mean, (num_ranks, *mean.shape)))
    counts = optax.tree.get_all_with_path(found.opt_state.own_state.value, "count")
    assert counts and all(np.array_equal(x, np.full(num_ranks, 4)) for _, x in counts)
    state, metrics = step(state, batch(4))
    assert np.isfinite(metrics["loss"])


def test_at_the_end_of_a_round_ranks_begin_at_the_outer_parameters(tmp_path):
    _, state, step = saved_and_restored(tmp_path, 3, 2, optax.sgd(0.1))
    state, _ = step(state, batch(3))
    own, shared = state.opt_state.own_params.value, state.params
    for r in range(2):
        mine = jax.tree.map(lambda x, r=r: np.split(x, 2)[r], batch(3))
        right = jax.tree.map(lambda p, g: p - 0.1 * g, shared, jax.grad(loss_fn)(shared, mine))
        assert_close(jax.tree.map(lambda x, r=r: x[r], own), right)


def test_a_synchronous_run_continues_with_local_steps(tmp_path):
    ranks(2)
    step, sgd = jdp.train_step(plain_step), optax.sgd(0.1)
    with jdp.Checkpointer(tmp_path) as ckpt:
        state = ckpt.restore(training.state(jdp.replicated(optax.adam(0.1))))
        state, _ = step(state, batch(0))
        ckpt.step(state)
    before = fetched(state.params)
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        state = ckpt.restore(training.state(jdp.local_sgd(sgd, every=1)), missing="keep")
    state, _ = step(state, batch(1))
    right = jax.tree.map(lambda p, g: p - 0.1 * g, before, jax.grad(loss_fn)(before, batch(1)))
    assert_close(fetched(state.params), right)


def test_two_states_meet_in_steps_of_their_own():
    ranks(3)
    states = [training.state(jdp.local_sgd(INNER["momentum"], every=k)) for k in (2, 3)]

    @jdp.train_step
    def step(states, batch):
        return [state.apply_gradients(grad(state, batch)) for state in states], {}

    for i in range(NUM_STEPS):
        states, _ = step(states, batch(i))
    for state, every in zip(states, (2, 3), strict=True):
        right, own, _ = simulated(3, INNER["momentum"], None, every)
        assert_close(fetched((state.params, state.opt_state.own_params.value)), (right, own))
