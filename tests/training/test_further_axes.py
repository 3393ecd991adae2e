"""Training on meshes with further axes: each parameter against one device, and what is sent."""

import collections
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.optimizers import OPTIMIZERS

import jdp
from jdp.distributed.mesh import current_mesh
from jdp.tools import hlo, transfers
from jdp.tools.compiled import compile_step

NUM_ROWS, NUM_STEPS = 16, 3
SPECS = {
    "embedding": P("model"),
    "up": P(None, "model"),
    "bias": P("model"),
    "down": P("model"),
    "head": P(),
    "odd": P(None, "model"),
}
MESHES = {"2 x 4": {"model": 4}, "4 x 2": {"model": 2}, "2 x 2 x 2": {"model": 2, "pipe": 2}}


def params():
    draw = np.random.default_rng(0).normal
    return {
        "embedding": draw(size=(24, 8)).astype("f"),
        "up": draw(size=(8, 16)).astype("f") / 3,
        "bias": draw(size=16).astype("f"),
        "down": draw(size=(16, 8)).astype("f") / 4,
        "head": draw(size=(8, 5)).astype("f") / 3,
        "odd": draw(size=(7, 8)).astype("f"),
    }


def batch(step=0):
    draw = np.random.default_rng(step)
    y, z = (draw.normal(size=(NUM_ROWS, n)).astype("f") for n in (5, 7))
    return {"ids": draw.integers(0, 24, NUM_ROWS), "y": y, "z": z}


def block(up, bias, down, x):
    """A block on this device's columns and rows; a complete one without an axis."""
    return jnp.tanh(x @ up + bias) @ down


def by_hand(up, bias, down, x):
    """The same, where the author communicates."""
    specs = SPECS["up"], SPECS["bias"], SPECS["down"], P()

    def on_device(*args):
        return jax.lax.psum(block(*args), "model")

    return jax.shard_map(on_device, axis_names={"model"}, in_specs=specs, out_specs=P())(
        up, bias, down, x
    )


def loss_fn(block, p, rows):
    x = p["embedding"][rows["ids"]] + rows["z"] @ p["odd"]
    x = x + block(p["up"], p["bias"], p["down"], x)
    return jnp.mean((x @ p["head"] - rows["y"]) ** 2)


def on_mesh(axes, given=None, specs=SPECS):
    mesh, given = jdp.init(axes=axes), params() if given is None else given
    return {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in given.items()}


def one_device(tx, num_steps=NUM_STEPS):
    p = params()
    state = tx.init(p)
    for i in range(num_steps):
        grads = jax.grad(functools.partial(loss_fn, block))(p, batch(i))
        updates, state = tx.update(grads, state, p)
        p = optax.apply_updates(p, updates)
    return p


def step_of(block, differentiate=jdp.value_and_grad, **options):
    @jdp.train_step
    def step(state, rows):
        loss, grads = differentiate(functools.partial(loss_fn, block), **options)(
            state.params, rows
        )
        return state.apply_gradients(grads), {"loss": loss}

    return step


def optimizer(stage, tx):
    return jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)


def train(step, state):
    place = NamedSharding(current_mesh(), P("data"))
    for i in range(NUM_STEPS):
        state, _ = step(state, jax.device_put(batch(i), place))
    assert jdp.check_replicas(state)
    return state


def assert_equal(got, want, rtol=2e-5):
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=rtol, err_msg=name)


NAMES = (
    "momentum contrib.muon contrib.prodigy contrib.schedule_free multi_steps optax.adabelief "
    "optax.adafactor optax.adagrad optax.adam optax.adamax optax.adamw optax.chain optax.fromage "
    "optax.lamb optax.lars optax.lion optax.adan optax.novograd optax.radam "
    "optax.rmsprop optax.sgd optax.yogi"
).split()
CASES = [*itertools.product(range(4), MESHES)]


def _cases():
    for i, name in enumerate(NAMES):
        for j, (stage, mesh) in enumerate(CASES):
            marks = [] if j == i % len(CASES) else pytest.mark.thorough
            yield pytest.param(name, stage, mesh, marks=marks)


@pytest.mark.parametrize(("name", "stage", "mesh"), [*_cases()])
def test_each_parameter_is_that_of_one_device(name, stage, mesh):
    tx = OPTIMIZERS[name]()
    given = on_mesh(MESHES[mesh])
    state = train(step_of(by_hand), jdp.TrainState.create(given, optimizer(stage, tx)))
    assert_equal(state.params, one_device(tx))
    for name, spec in SPECS.items():
        kept = state.params[name].sharding.spec
        assert [part for part in kept if part == "model"] == [*filter(None, spec)]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "step",
    [
        step_of(block),
        step_of(by_hand, jax.value_and_grad),
        step_of(by_hand, accumulate=2),
        step_of(by_hand, micro_batch_rows=4),
    ],
    ids=["compiler", "jax", "accumulate", "micro-batches"],
)
def test_ways_to_differentiate(step, stage):
    tx = optax.sgd(0.1, momentum=0.9)
    state = jdp.TrainState.create(on_mesh({"model": 4}), optimizer(stage, tx))
    assert_equal(train(step, state).params, one_device(tx), rtol=1e-5)


def sent(step, state, num_model=4):
    """Count `(kind, elements of the result)` of exchanges among devices of equal "model" index."""
    parsed, _ = hlo.parse(step.lower(state, batch()).compile().as_text())
    found = collections.Counter()
    for one in itertools.chain(*parsed.values()):
        groups = transfers.replica_groups(one)
        if one.op in EXCHANGES and len({i % num_model for i in groups[0]}) == 1:
            for shape in hlo.elements(one.shape):
                found[one.op, hlo.num_elements(shape)] += 1
    return found


EXCHANGES = "all-gather", "reduce-scatter", "collective-permute", "all-to-all"


def of_linen(given, tx):
    @jdp.train_step
    def step(state, rows):
        grads = jdp.value_and_grad(functools.partial(loss_fn, by_hand))(state.params, rows)[1]
        return state.apply_gradients(grads=grads), {}

    state = train_state.TrainState.create(apply_fn=None, params=given, tx=tx)
    return step, state, lambda state: state.params


def of_nnx(given, tx):
    class Model(nnx.Module):
        def __init__(self):
            for name, value in given.items():
                setattr(self, name, nnx.Param(value))

    @jdp.train_step
    def step(state, rows):
        model, optimizer = state
        graph, weights = nnx.split(model)

        def loss(weights, rows):
            held = nnx.merge(graph, weights, copy=True)
            return loss_fn(by_hand, {name: getattr(held, name)[...] for name in SPECS}, rows)

        optimizer.update(model, jdp.value_and_grad(loss)(weights, rows)[1])
        return state, {}

    def params_of(state):
        return {name: getattr(state[0], name)[...] for name in SPECS}

    model = Model()
    return step, (model, nnx.Optimizer(model, tx, wrt=nnx.Param)), params_of


@pytest.mark.parametrize("library", [of_linen, of_nnx])
def test_states_of_flax_exchange_the_same(library):
    tx = optax.adam(0.1)
    step, state, params_of = library(on_mesh({"model": 4}), optimizer(3, tx))
    kinds = collections.Counter(kind for kind, _ in sent(step, state).elements())
    assert kinds == {"all-gather": 4, "reduce-scatter": 4}
    params = params_of(train(step, state))
    assert_equal(params, one_device(tx))
    assert params["up"].sharding.spec == P("data", "model")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_model", [2, 4])
def test_only_shards_of_a_model_axis_are_exchanged_over_the_data_axis(num_model, stage):
    num_data = 8 // num_model
    given = on_mesh({"model": num_model})
    state = jdp.TrainState.create(given, optimizer(stage, optax.adam(0.1)))
    on_device = {k: x.size // (num_model if any(SPECS[k]) else 1) for k, x in given.items()}
    split = ["embedding", "up", "down", "head"]  # the only dim of the others is not free
    want = collections.Counter(("all-gather", on_device[name]) for name in split)
    want += collections.Counter(("reduce-scatter", on_device[name] // num_data) for name in split)
    assert sent(step_of(by_hand), state, num_model) == want
    first = state.opt_state[0].mu
    for name, x in first.items():
        share = x.addressable_shards[0].data.size
        assert share == on_device[name] // (num_data if name in split else 1), name


def test_the_plan_names_each_gradient_with_the_bytes_of_its_shard():
    state = jdp.TrainState.create(on_mesh({"model": 4}), optimizer(3, optax.adam(0.1)))
    plan = step_of(by_hand).communication_plan(state, batch())
    found = {each.leaves[0].path: each for each in plan if each.kind == "reduce-scatter"}
    num_bytes = {path: each.num_bytes for path, each in found.items()}
    want = {"embedding": 192, "up": 128, "down": 128, "head": 160}
    assert num_bytes == {f"grads[{name!r}]": size for name, size in want.items()}
    assert all(each.line.startswith("test_further_axes.py:") for each in plan)


@pytest.mark.parametrize("is_typed", [True, False])
def test_a_forgotten_sum_over_the_model_axis_is_refused(is_typed):
    def forgets(up, bias, down, x):
        specs = SPECS["up"], SPECS["bias"], SPECS["down"], P()
        return jax.shard_map(
            block, axis_names={"model"}, in_specs=specs, out_specs=P(), check_vma=is_typed
        )(up, bias, down, x)

    state = jdp.TrainState.create(on_mesh({"model": 4}), jdp.replicated(optax.sgd(0.1)))
    with pytest.raises(ValueError) as error:
        step_of(forgets)(state, batch())
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", ())])
    assert re.search("out_specs" if is_typed else "along the mesh axis 'model'.*JDP101", text)


SPLIT = "up", "bias", "down"


def split_on(axes):
    given = on_mesh(axes, {name: params()[name] for name in SPLIT})
    return jdp.TrainState.create(given, jdp.replicated(optax.sgd(0.1)))


def mapped(on_device, **options):
    specs = {name: SPECS[name] for name in SPLIT}, P()
    return jax.shard_map(on_device, axis_names={"model"}, in_specs=specs, out_specs=P(), **options)


def loss_of_rows(p, rows, reduce=jax.lax.psum):
    x = jnp.concatenate([rows["y"], rows["y"][:, :3]], 1)
    y = reduce(block(p["up"], p["bias"], p["down"], x), "model")
    return jnp.mean((y - x) ** 2)


def summed_twice(p, rows):
    return jax.lax.psum(loss_of_rows(p, rows), "model")


def averaged_parts(p, rows):
    return loss_of_rows(p, rows, jax.lax.pmean)


def of_split(on_device, **options):
    @jdp.train_step
    def step(state, rows):
        loss, grads = jdp.value_and_grad(mapped(on_device, **options))(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss}

    return step


@pytest.mark.parametrize("is_typed", [True, False])
@pytest.mark.parametrize("axes", [{"model": 4}, {"model": 2, "pipe": 2}, {"model": 8}])
def test_check_step_finds_a_wrong_scale_along_a_further_axis(axes, is_typed):
    state = split_on(axes)
    one, num = {"num_steps": 1}, axes["model"]
    jdp.check_step(of_split(loss_of_rows, check_vma=is_typed), state, batch(), **one)
    for wrong in (summed_twice, averaged_parts):
        step = of_split(wrong, check_vma=is_typed)
        found = rf"another result on {num} devices along 'model' than on one: .*{num} times"
        with pytest.raises(ValueError, match=found):
            jdp.check_step(step, state, batch(), **one)
        if num < 8:
            jdp.check_step(step, state, batch(), axes="data", **one)


def test_check_step_refuses_axes_along_which_nothing_can_be_compared():
    state = split_on({"model": 8})
    step = of_split(lambda p, rows: loss_of_rows(p | {"bias": p["bias"].reshape(2)}, rows))
    with pytest.raises(ValueError, match=r"axes=\('pipe',\) has \['pipe'\], and .*'model'"):
        jdp.check_step(step, state, batch(), axes=("pipe",))
    with pytest.raises(ValueError, match="needs at least 2 ranks"):
        jdp.check_step(step, state, batch(), axes="data")
    with pytest.raises(ValueError, match="does not run on one device along 'model'.*axes="):
        jdp.check_step(step, state, batch())


def of_stages(nested):
    def on_stage(p, x):
        # XLA does not get these, because nothing reads the results.
        if nested:
            jax.shard_map(lambda p: p, axis_names={"model"}, in_specs=P(), out_specs=P())(p)
        else:
            jax.lax.axis_index("pipe")
        return jax.lax.psum(jnp.tanh(x @ p[0]), "pipe")

    def loss_fn(p, rows):
        model = jax.shard_map(
            on_stage, axis_names={"pipe"}, in_specs=(P("pipe"), P()), out_specs=P()
        )
        return jnp.mean(model(p, rows["z"]) ** 2)

    @jdp.train_step
    def step(state, rows):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, rows)
        return state.apply_gradients(grads), {"loss": loss}

    return step


# Ranks, axes, and whether "model" in "pipe", or the index along "pipe", would abort the process.
ORDERS = [
    (2, {"model": 2, "pipe": 2}, False, False),
    (1, {"pipe": 2, "model": 2}, False, False),
    (1, {"model": 2, "pipe": 2}, True, True),
    (2, {"seq": 1, "model": 2, "pipe": 2}, True, False),
    (2, {"model": 2, "pipe": 2, "seq": 1}, True, False),
    (1, {"seq": 1, "pipe": 2, "model": 2}, False, True),
]


@pytest.mark.parametrize("nested", [True, False])
def test_axes_nested_in_another_order_than_the_mesh_s_are_refused(nested):
    step, tx = of_stages(nested), jdp.replicated(optax.sgd(0.1))
    for num_data, axes, *aborts in ORDERS:
        jdp.init(axes=axes, devices=jax.devices()[: 4 * num_data])
        state = jdp.TrainState.create(np.ones((2, 7, 7), "f") / 9, tx)
        if aborts[not nested] and jax.__version_info__ >= (0, 11):
            found = r"test_further_axes.py:.*jdp.init\(axes={'pipe': 2, .*JDP132"
            with pytest.raises(ValueError, match=found):
                step(state, batch())
        else:
            assert step(state, batch())[1]["loss"] < 1


def test_a_step_is_explained_for_other_devices_with_the_same_further_axes():
    state = jdp.TrainState.create(on_mesh({"model": 2}), optimizer(3, optax.adam(0.1)))
    compiled = compile_step(step_of(by_hand), (state, batch()), {}, "cpu:4")
    assert dict(compiled.where.mesh.shape) == {"data": 2, "model": 2}
    assert compiled.args[0].params["up"].sharding.spec == P("data", "model")
    report = jdp.explain(step_of(by_hand), state, batch())
    axes = {(each.kind, each.axes) for each in report.buckets}
    assert axes >= {(kind, ("data",)) for kind in ("all-gather", "reduce-scatter")}
    assert ("all-reduce", ("model",)) in axes
    assert "reduce-scatter along data (xla)" in str(report)
    assert "foreign-collective" not in {each.kind for each in report.findings}
    with pytest.raises(ValueError, match="further axes {'model': 2}, whose sizes do not divide 3"):
        compile_step(step_of(by_hand), (state, batch()), {}, "cpu:3")


def test_the_first_optimizer_state_is_split_as_its_parameters():
    def init(params):  # of shapes alone
        return {name: jnp.zeros(x.shape) for name, x in params.items()}

    def update(grads, state, params=None):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, grads)
        return jax.tree.map(lambda m: -0.1 * m, state), state

    tx = optax.GradientTransformation(init, update)
    given = on_mesh({"model": 4})
    state = jdp.TrainState.create(given, optimizer(1, tx))
    assert state.opt_state["up"].sharding.spec == P("data", "model")
    assert state.opt_state["bias"].sharding.spec == P("model")
    assert {kind for kind, _ in sent(step_of(by_hand), state)} <= {*EXCHANGES[:2]}
    assert_equal(train(step_of(by_hand), state).params, one_device(tx), rtol=1e-5)


def first_in_a_step():
    """SGD with momentum, whose trace is None before the first update."""

    def update(grads, trace, params=None):
        trace = grads if trace is None else jax.tree.map(lambda m, g: 0.9 * m + g, trace, grads)
        return jax.tree.map(lambda m: -0.1 * m, trace), trace

    return optax.GradientTransformation(lambda params: None, update)


@pytest.mark.parametrize("stage", range(4))
def test_leaves_that_first_appear_in_a_step(stage):
    @jdp.train_step
    def step(state, rows):
        _, grads = jdp.value_and_grad(functools.partial(loss_fn, by_hand))(state.params, rows)
        new, total = state.apply_gradients(grads), state.model_state
        total = new.params if total is None else jax.tree.map(jnp.add, total, new.params)
        return new.replace(model_state=total), {}

    state = jdp.TrainState.create(on_mesh({"model": 4}), optimizer(stage, first_in_a_step()))
    state = train(step, state)
    *before, last = (one_device(optax.sgd(0.1, momentum=0.9), i + 1) for i in range(NUM_STEPS))
    assert_equal(state.params, last)
    assert_equal(state.model_state, jax.tree.map(lambda *x: sum(x), *before, last))


def test_axes_of_size_1_split_nothing():
    state = jdp.TrainState.create(on_mesh({"model": 1}), optimizer(3, optax.adam(0.1)))
    assert state.params["bias"].addressable_shards[0].data.shape == (2,)
    assert_equal(train(step_of(by_hand), state).params, one_device(optax.adam(0.1)))


def trained_across(num_model):
    state = jdp.TrainState.create(on_mesh({"model": num_model}), optimizer(3, optax.adam(0.1)))
    params = train(step_of(by_hand), state).params
    return multihost_utils.process_allgather(params, tiled=True)


@pytest.mark.parametrize("num_model", [2, 4])  # of the devices of one process, and of two
def test_two_processes_train_as_one_device(processes, num_model):
    for params in processes(2).run(trained_across, num_model):
        assert_equal(params, one_device(optax.adam(0.1)))


def test_layers_of_a_scan_are_gathered_as_shards():
    draw = np.random.default_rng(0).normal
    specs = {"up": P(None, None, "model"), "down": P(None, "model")}
    layers = {"up": draw(size=(3, 8, 16)) / 3, "down": draw(size=(3, 16, 8)) / 4}
    layers = {name: value.astype("f") for name, value in layers.items()}

    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    def loss(scan, p, rows):
        return jnp.mean(scan(layer, rows["x"], p)[0] ** 2)

    rows = {"x": draw(size=(NUM_ROWS, 8)).astype("f")}
    tx = optax.sgd(0.1, momentum=0.9)
    want, kept = layers, tx.init(layers)
    for _ in range(NUM_STEPS):
        updates, kept = tx.update(jax.grad(loss, 1)(jax.lax.scan, want, rows), kept)
        want = optax.apply_updates(want, updates)

    step = training.step_of(functools.partial(loss, jdp.scan_layers))
    given = on_mesh({"model": 4}, layers, specs)
    for stage in (1, 2, 3):
        state = jdp.TrainState.create(given, optimizer(stage, tx))
        parsed, _ = hlo.parse(step.lower(state, rows).compile().as_text())
        gathers = [one for one in itertools.chain(*parsed.values()) if one.op == "all-gather"]
        groups = [transfers.replica_groups(one)[0] for one in gathers]
        assert all(len({i % 4 for i in group}) == 1 for group in groups)
        for _ in range(NUM_STEPS):
            state, _ = step(state, rows)
        assert_equal(state.params, want, rtol=1e-5)
    assert state.params["up"].sharding.spec == P(None, "data", "model")
