"""The report of a step says what XLA allocates, and which leaves each collective takes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from support.training import step_of

import jdp
from benchmarks.harness import models

DIM, ROWS = 64, 16


def scanned_loss(params, batch):
    x = params["bytes"][batch["text"]]

    def layer(x, p):
        x = x + models.attention(p, x * p["norm1"])
        return x + jax.nn.gelu((x * p["norm2"]) @ p["up"]) @ p["down"], None

    x, _ = jdp.scan_layers(layer, x, params["blocks"])
    return jnp.mean(jnp.square(x))


@functools.cache
def problem(name):
    if name == "mlp":
        found = models.mlp(width=DIM, num_layers=3, num_rows=ROWS)
        return found.params, found.batch, found.loss_fn
    found = models.transformer(dim=DIM, num_layers=2, num_rows=ROWS, length=8)
    if name == "transformer":
        return found.params, found.batch, found.loss_fn
    blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *found.params["blocks"])
    return {"bytes": found.params["bytes"], "blocks": blocks}, found.batch, scanned_loss


def optimizer(stage, **options):
    tx = optax.adam(1e-3)
    return jdp.sharded(tx, stage=stage, **options) if stage else jdp.replicated(tx, **options)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def bytes_here(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("name", "stage", "ranks"),
    [
        ("mlp", 0, 1),
        ("mlp", 2, 4),
        ("transformer", 0, 4),
        ("transformer", 1, 2),
        ("transformer", 3, 4),
        ("scanned", 0, 2),
        ("scanned", 3, 2),
        ("scanned", 1, 4),
    ],
)
def test_memory_is_what_xla_allocates_and_what_lies_on_a_rank(name, stage, ranks):
    params, batch, loss_fn = problem(name)
    jdp.init(devices=jax.devices()[:ranks])
    state = jdp.TrainState.create(params, optimizer(stage))
    step = step_of(loss_fn)
    xla = step.lower(state, batch).compile().memory_analysis()
    # From shapes alone, of a state that lies nowhere.
    memory = jdp.explain(step, shapes(state), shapes(batch), on=f"cpu:{ranks}").memory
    assert memory.parameters == bytes_here(state.params)
    assert memory.optimizer_state == bytes_here(state.opt_state)
    rows = {key: x[: ROWS // ranks] for key, x in batch.items()}
    assert memory.batch == sum(x.nbytes for x in rows.values())
    assert memory.arguments == xla.argument_size_in_bytes
    assert memory.temporary == xla.temp_size_in_bytes
    assert memory.outputs + memory.saved_by_donation == xla.output_size_in_bytes
    assert memory.total == pytest.approx(
        xla.argument_size_in_bytes
        + xla.output_size_in_bytes
        - xla.alias_size_in_bytes
        + xla.temp_size_in_bytes,
        rel=0.02,
    )
    assert min(memory.activations, memory.gradients, memory.temporaries) >= 0


def test_the_activations_of_a_chain_are_its_layers():
    # At the begin of the way back: an array of [4096, 64] of each of 8 layers, and 2 cotangents,
    # of which one has taken the place of the last array.
    params = [np.zeros((DIM, DIM), np.float32)] * 8
    jdp.init(devices=jax.devices()[:1])
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    found = jdp.explain(step_of(loss_fn), state, np.zeros((4096, DIM), np.float32))
    layer = 4096 * DIM * 4
    assert found.memory.activations == pytest.approx(7 * layer, rel=0.02)
    assert found.memory.gradients == pytest.approx(2 * layer, rel=0.02)


def mlp_report(stage=0, ranks=2, **options):
    params, batch, loss_fn = problem("mlp")
    jdp.init(devices=jax.devices()[:ranks])
    state = jdp.TrainState.create(params, optimizer(stage, **options))
    return jdp.explain(step_of(loss_fn), state, batch)


def test_each_gradient_is_in_the_bucket_that_reduces_it():
    layer = 4 * (DIM * DIM + DIM)
    found = mlp_report(bucket_bytes=layer)
    assert [bucket.num_bytes for bucket in found.buckets] == [layer, layer, layer + 4]
    leaves = [{f"grads[{i}]['w']", f"grads[{i}]['b']"} for i in (2, 1, 0)]
    leaves[-1].add("a scalar")  # the loss
    assert [set(bucket.leaves) for bucket in found.buckets] == leaves
    assert {(x.kind, x.algorithm, x.dtype, x.runs) for x in found.buckets} == {
        ("all-reduce", "native", "f32", 1)
    }
    assert not any(bucket.is_of_author for bucket in found.buckets)


def test_shards_are_gathered_and_scattered_by_name():
    found = mlp_report(stage=3, ranks=4)
    gathered = {x for bucket in found.buckets if bucket.kind == "all-gather" for x in bucket.leaves}
    scattered = [x for b in found.buckets if b.kind == "reduce-scatter" for x in b.leaves]
    assert {f"state.params[{i}]['w']" for i in range(3)} <= gathered
    # Biases and the loss stay whole, and go along.
    gradients = [f"grads[{i}]['{name}']" for i in range(3) for name in ("b", "w")]
    assert sorted(scattered) == sorted(["a scalar", *gradients])


def test_time_on_cpus_is_all_exposed_and_adds_up():
    found = mlp_report()
    assert all(bucket.hidden_bytes == 0 for bucket in found.buckets)
    assert found.time.likely_s == pytest.approx(found.time.computing_s + found.time.exposed_s)
    assert found.time.low_s < found.time.likely_s < found.time.high_s


def test_a_given_rate_is_what_the_prediction_takes():
    params, batch, loss_fn = problem("mlp")
    jdp.init(devices=jax.devices()[:2])
    state = jdp.TrainState.create(params, optimizer(0))
    rates = dict(link_bytes_per_s=1e6, reduction_start_s=0.0, operation_start_s=0.0)
    found = jdp.explain(step_of(loss_fn), state, batch, rates=rates)
    # 2 (n - 1) / n times the bytes of gradients and loss, over 1 MB/s.
    sent = 3 * 4 * (DIM * DIM + DIM) + 4
    assert found.time.exposed_s == pytest.approx(sent / 1e6)
    assert found.rates["link_bytes_per_s"].source == "given"


@pytest.mark.parametrize(
    ("rates", "error", "match"),
    [
        ({"speed": 1.0}, ValueError, "'speed'.*matmul_flops"),
        ({"matmul_flops": float("nan")}, ValueError, "nan.*FLOP/s"),
        ({"matmul_flops": float("inf")}, ValueError, "inf.*FLOP/s"),
        ({"matmul_flops": 0}, ValueError, "matmul_flops=0.*more than 0"),
        ({"operation_start_s": -1e-9}, ValueError, "-1e-09.*at least 0"),
        ({"matmul_flops": "1e9"}, TypeError, "'1e9'.*FLOP/s"),
        ({"matmul_flops": None}, TypeError, "None.*FLOP/s"),
        ([("matmul_flops", 1e9)], TypeError, "dict"),
    ],
)
def test_a_rate_that_is_not_possible_is_refused_before_the_step_is_compiled(rates, error, match):
    with pytest.raises(error, match=match):
        jdp.explain(None, None, None, rates=rates)


def test_a_matmul_in_a_loop_counts_once_per_iteration():
    jdp.init(devices=jax.devices()[:1])
    state = jdp.TrainState.create({"w": np.zeros((DIM, DIM), np.float32)}, optimizer(0))

    @jdp.train_step
    def step(state, x):
        x = lax.scan(lambda x, _: (jnp.tanh(x @ state.params["w"]), None), x, length=11)[0]
        return state, {"mean": x.mean()}

    found = jdp.explain(step, state, np.zeros((32, DIM), np.float32))
    assert found.time.matmul_flops == 11 * 2 * 32 * DIM * DIM


def test_a_library_whose_operations_are_not_counted_is_named_and_a_sort_is_not():
    jdp.init(devices=jax.devices()[:1])

    @jdp.eval_step
    def step(state, x):
        random = jax.random.normal(jax.random.key(0), x.shape)
        largest = lax.top_k(x + random, 2)[0].sum()
        return {"least": jnp.linalg.cholesky(state).sum() + largest}

    found = jdp.explain(step, np.eye(8, dtype=np.float32), np.zeros((4, 8), np.float32))
    (text,) = found.unknown
    assert "potrf" in text and text in str(found)


def test_json_has_the_numbers_of_the_report():
    found = mlp_report()
    values = json.loads(found.to_json())
    assert values["memory"]["parameters"] == found.memory.parameters
    assert values["memory"]["total"] == found.memory.total
    assert [x["leaves"] for x in values["buckets"]] == [[*x.leaves] for x in found.buckets]
    assert values["rates"]["matmul_flops"]["unit"] == "FLOP/s"
    assert "predicted" in str(found) and "parameters" in str(found)


def test_nothing_is_donated_and_the_mesh_stays():
    params, batch, loss_fn = problem("mlp")
    mesh = jdp.init(devices=jax.devices()[:2])
    state = jdp.TrainState.create(params, optimizer(0))
    step = step_of(loss_fn)
    jdp.explain(step, state, batch, on="cpu:4")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    state, _ = step(state, batch)
    assert jax.tree.leaves(state)[0].sharding.mesh == mesh


def test_a_state_of_shapes_alone_is_explained():
    params, batch, loss_fn = problem("mlp")
    jdp.init(devices=jax.devices()[:1])
    state = jax.eval_shape(lambda: jdp.TrainState.create(params, optimizer(2)))
    found = jdp.explain(step_of(loss_fn), state, shapes(batch), on="cpu:4")
    assert found.num_ranks == 4
    assert found.memory.parameters == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize("state", [{}, None, {"scale": 1.0}], ids=["empty", "none", "number"])
def test_a_state_without_arrays_is_explained_for_the_ranks_that_are_asked_for(state):
    jdp.init(devices=jax.devices()[:2])

    @jdp.train_step
    def step(state, x):
        return state, {"mean": x.mean()}

    found = jdp.explain(step, state, np.zeros((16, 8), np.float32), on="cpu:4")
    assert (found.num_ranks, found.memory.batch) == (4, 16 // 4 * 8 * 4)
    (bucket,) = found.buckets
    assert (bucket.kind, bucket.leaves, bucket.num_bytes) == ("all-reduce", ("a scalar",), 4)


@pytest.mark.filterwarnings("error")
def test_arrays_of_64_bits_have_32_on_the_devices():
    jdp.init(devices=jax.devices()[:2])
    found = jdp.explain(
        step_of(lambda params, batch: jnp.mean((batch["x"] @ params) * batch["y"][:, None])),
        jdp.TrainState.create(np.zeros((8, 4)), optimizer(0)),
        {"x": np.zeros((16, 8)), "y": np.arange(16)},
        on="cpu:4",
    )
    assert (found.memory.parameters, found.memory.batch) == (8 * 4 * 4, 4 * (8 + 1) * 4)


def test_a_gather_that_xla_drops_gives_its_name_to_no_other():
    # Stage 2 of scanned layers gathers the whole state in its trace, and XLA only the parameters.
    jdp.init(devices=jax.devices()[:3])

    def loss_fn(params, x):
        return jnp.mean(jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0])

    state = jdp.TrainState.create(np.ones((5, 48, 48), np.float32), optimizer(2))
    found = jdp.explain(step_of(loss_fn, accumulate=2), state, np.ones((12, 48), np.float32))
    gathered = [bucket.leaves for bucket in found.buckets if bucket.kind == "all-gather"]
    assert gathered and not [name for leaves in gathered for name in leaves if "opt_state" in name]


def test_state_of_ranks_grows_with_the_ranks_and_of_rows_does_not():
    jdp.init(devices=jax.devices()[:2])

    @jdp.train_step
    def step(state, x):
        own, rows = state["own"].value, state["rows"].value
        return {"own": jdp.per_rank(own + x.sum()), "rows": jdp.per_rank(rows + x)}, {}

    state = {"own": jdp.per_rank(jnp.zeros((2, 8))), "rows": jdp.per_rank(jnp.zeros((16, 8)))}
    found = jdp.explain(step, state, np.zeros((16, 8), np.float32), on="cpu:4")
    assert found.memory.other_state == 4 * (1 * 8 + 4 * 8)


# Parameters [4, 3] and statistics [3]; two moments of Adam, its count and that of nnx.Optimizer.
@pytest.mark.parametrize("is_split", [True, False])
def test_parameters_of_nnx_modules_are_parameters(is_split):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((4, 3)))
            self.mean = nnx.BatchStat(jnp.zeros(3))

    jdp.init(devices=jax.devices()[:2])
    model = Model()
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer(0), wrt=nnx.Param)))

    @jdp.train_step
    def step(state, x):
        model, tx = nnx.merge(graph, state) if is_split else state
        grads = nnx.grad(lambda model: jnp.mean((x @ model.w) ** 2))(model)
        tx.update(model, grads)
        return nnx.state((model, tx)) if is_split else (model, tx), {}

    state = state if is_split else nnx.merge(graph, state)
    memory = jdp.explain(step, state, np.ones((2, 4), np.float32)).memory
    assert (memory.parameters, memory.other_state) == (48, 12)
    assert memory.optimizer_state == 2 * 48 + 8


def of_one_device():
    params, batch, loss_fn = problem("mlp")
    jdp.init(devices=jax.devices()[:1])
    return jdp.TrainState.create(params, optimizer(0)), batch, loss_fn


def test_rows_that_cannot_be_split_are_an_error_with_the_numbers():
    state, batch, loss_fn = of_one_device()
    with pytest.raises(ValueError, match=r"batch\['x'\].*16.*3 ranks"):
        jdp.explain(step_of(loss_fn), state, batch, on="cpu:3")


@pytest.mark.parametrize("on", ["8xT1000", "gpu", "cpu:x", "cpu:0", "0xH200", "v5e", "cpu:4 "])
def test_an_unknown_target_is_an_error_that_lists_the_forms(on):
    state, batch, loss_fn = of_one_device()
    with pytest.raises(ValueError, match="8xH200.*v5e:2x4.*cpu:4"):
        jdp.explain(step_of(loss_fn), state, batch, on=on)


@pytest.mark.parametrize(
    ("on", "error", "match"),
    [
        (4, TypeError, "on=4.*8xH200.*cpu:4"),
        (jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), ValueError, "'x'.*'data'"),
    ],
)
def test_devices_that_are_no_target_are_an_error(on, error, match):
    state, batch, loss_fn = of_one_device()
    with pytest.raises(error, match=match):
        jdp.explain(step_of(loss_fn), state, batch, on=on)


def test_a_function_that_is_not_decorated_is_refused():
    with pytest.raises(TypeError, match="train_step"):
        jdp.explain(lambda state, batch: None, {}, {})
