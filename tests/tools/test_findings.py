"""Each finding comes for a program with the fault, and not for one that does without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from support.training import step_of

import jdp

DIM, ROWS = 256, 16


def rows():
    return np.ones((ROWS, DIM), np.float32)


def loss_fn(params, x):
    return jnp.mean(jnp.square(x @ params["w"].astype(jnp.float32)))


def kinds(step, *, tx=None, dtype=np.float32, ranks=2):
    jdp.init(devices=jax.devices()[:ranks])
    params = {"w": np.ones((DIM, DIM), dtype)}
    state = jdp.TrainState.create(params, tx or jdp.replicated(optax.sgd(0.1)))
    return {finding.kind: finding for finding in jdp.explain(step, state, rows()).findings}


@jdp.train_step
def plain(state, x):
    return state.apply_gradients(jax.grad(loss_fn)(state.params, x)), {}


def test_a_plain_step_has_no_findings():
    assert not kinds(plain)


def micro_batches(once):
    @jdp.train_step
    def step(state, x):
        def body(total, x):
            grads = jax.grad(loss_fn)(state.params, x)
            grads = grads if once else jdp.sync_gradients(grads)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        total, _ = lax.scan(body, zeros, x.reshape(4, -1, DIM))
        grads = jax.tree.map(lambda g: g / 4, total)
        return state.apply_gradients(grads, synced=not once), {}

    return step


def test_a_reduction_in_the_loop_of_micro_batches():
    found = kinds(micro_batches(once=False))["reduction-per-micro-batch"]
    assert "4 times" in found.text and "256.0 KiB" in found.text
    assert not kinds(micro_batches(once=True))


@pytest.mark.parametrize("names", ["w", "wb"])
def test_layers_that_are_reduced_in_their_loop_have_names_and_are_no_fault(names):
    jdp.init(devices=jax.devices()[:2])

    def layer(x, layer):
        return jnp.tanh(x @ layer["w"] + layer.get("b", 0)), None

    def loss(params, x):
        x, _ = jdp.scan_layers(layer, x, params, late=True)
        return jnp.mean(x)

    shapes = {"w": (4, DIM, DIM), "b": (4, DIM)}
    layers = {name: np.ones(shapes[name], np.float32) for name in names}
    state = jdp.TrainState.create(layers, jdp.replicated(optax.sgd(0.1)))
    found = jdp.explain(step_of(loss), state, rows())
    reduced = [{*bucket.leaves} - {"a scalar"} for bucket in found.buckets]
    expected = {f"grads['{name}'] of one iteration" for name in names}
    assert [leaves for leaves in reduced if leaves] == [expected, expected]  # one behind the loop
    assert max(bucket.runs for bucket in found.buckets) > 1 and not found.findings


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradient_of_parameters_that_are_one_array_has_a_name(stage):
    jdp.init(devices=jax.devices()[:3])
    sizes = [DIM * DIM, DIM]  # packed and split as jax.flatten_util does

    def loss(vector, x):
        w, b = jnp.split(vector, [sizes[0]])
        return jnp.mean(jnp.tanh(x @ w.reshape(DIM, DIM) + b))

    tx = jdp.sharded(optax.sgd(0.1), stage=stage) if stage else jdp.replicated(optax.sgd(0.1))
    state = jdp.TrainState.create(np.ones(sum(sizes), np.float32), tx)
    found = jdp.explain(step_of(loss), state, np.ones((12, DIM), np.float32))
    summed = [set(x.leaves) for x in found.buckets if x.kind in ("all-reduce", "reduce-scatter")]
    assert set.union(*summed) - {"a scalar"} == {"grads"}


def test_a_gather_of_the_batch():
    @jdp.train_step
    def gathering(state, x):
        every = lax.all_gather(x, "data", tiled=True)
        grads = jax.grad(loss_fn)(state.params, every)
        return state.apply_gradients(grads), {}

    @jdp.train_step
    def embeddings(state, x):
        every = lax.all_gather(x @ state.params["w"], "data", tiled=True)
        grads = jax.grad(lambda p: loss_fn(p, x))(state.params)
        return state.apply_gradients(grads), {"mean": jdp.mean_over_ranks(every.mean())}

    found = kinds(gathering)
    assert "`x`" in found["gather-of-the-batch"].text
    assert "16.0 KiB" in found["gather-of-the-batch"].text
    assert "gather-of-the-batch" not in kinds(embeddings)


def test_a_replicated_optimizer_state_and_the_bytes_that_sharding_saves():
    found = kinds(plain, tx=jdp.replicated(optax.adam(1e-3)), ranks=4)
    finding = found["replicated-optimizer-state"]
    assert finding.saved_bytes == 2 * 4 * DIM * DIM * 3 // 4
    assert not kinds(plain, tx=jdp.sharded(optax.adam(1e-3), stage=1), ranks=4)
    assert not kinds(plain, tx=jdp.diloco(optax.adam(1e-3), every=2), ranks=4)


def test_gradients_of_16_bits_in_float32_on_the_wire():
    @jdp.train_step
    def widened(state, x):
        grads = jax.grad(loss_fn)(state.params, x)
        return state.apply_gradients(jax.tree.map(lambda g: g.astype(jnp.float32), grads)), {}

    found = kinds(widened, dtype=jnp.bfloat16)
    assert "grads['w']" in found["wide-wire"].text and "256.0 KiB" in found["wide-wire"].text
    assert "wide-wire" not in kinds(plain, dtype=jnp.bfloat16)


def test_a_gradient_is_not_taken_for_that_of_a_deeper_parameter_of_the_same_name():
    @jdp.train_step
    def step(state, x):
        def loss(p, x):
            return loss_fn(p, x) + loss_fn(p["body"], x)

        return state.apply_gradients(jax.grad(loss)(state.params, x)), {}

    jdp.init(devices=jax.devices()[:2])
    wide, narrow = np.ones((DIM, DIM), np.float32), np.ones((DIM, DIM), jnp.bfloat16)
    params = {"w": wide, "body": {"w": narrow}}
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))
    assert not jdp.explain(step, state, rows()).findings


@pytest.mark.parametrize(
    "call", [lambda x: jax.debug.callback(lambda x: None, x), lambda x: jax.debug.print("{}", x)]
)
def test_a_callback_to_the_host(call):
    @jdp.train_step
    def calling(state, x):
        grads = jax.grad(loss_fn)(state.params, x)
        call(optax.tree.norm(grads))
        return state.apply_gradients(grads), {}

    assert "test_findings.py" in kinds(calling)["host-callback"].text


def test_a_collective_of_the_authors():
    @jdp.train_step
    def own(state, x):
        grads = jax.grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads), {"most": lax.pmax(jnp.max(x), "data")}

    @jdp.train_step
    def metric(state, x):
        grads = jax.grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads), {"mean": jdp.mean_over_ranks(jnp.max(x))}

    assert "test_findings.py" in kinds(own)["foreign-collective"].text
    assert not kinds(metric)


def test_several_collectives_of_the_authors_are_one_finding():
    @jdp.train_step
    def own(state, x):
        grads = jax.grad(loss_fn)(state.params, x)
        most, least = lax.pmax(jnp.max(x), "data"), lax.pmin(jnp.min(x), "data")
        return state.apply_gradients(grads), {"most": most, "least": least}

    jdp.init(devices=jax.devices()[:2])
    state = jdp.TrainState.create({"w": np.ones((DIM, DIM))}, jdp.replicated(optax.sgd(0.1)))
    (found,) = jdp.explain(own, state, rows()).findings
    assert found.kind == "foreign-collective" and "2 x all-reduce" in found.text


def test_random_streams_of_nnx_are_not_taken_for_an_optimizer():
    @jdp.train_step
    def step(pair, x):
        state, streams = pair
        return (plain.__wrapped__(state, x)[0], streams), {}

    jdp.init(devices=jax.devices()[:2])
    state = jdp.TrainState.create({"w": np.ones((DIM, DIM))}, jdp.replicated(optax.sgd(0.1)))
    assert not jdp.explain(step, (state, nnx.Rngs(0)), rows()).findings


# Where the last micro-batch is behind the loop, as on GPUs and TPUs, XLA has no loop of two.
@pytest.mark.parametrize(("stage", "accumulate"), [(2, 4), (3, 2)])
def test_micro_batches_of_sharded_gradients_name_the_stage_that_reduces_once(stage, accumulate):
    @jdp.train_step
    def step(state, x):
        _, grads = jdp.value_and_grad(loss_fn, accumulate=accumulate)(state.params, x)
        return state.apply_gradients(grads), {}

    tx = optax.sgd(0.1)
    found = kinds(step, tx=jdp.sharded(tx, stage=stage))["reduction-per-micro-batch"]
    assert f"grads['w'] (256.0 KiB) runs {accumulate} times" in found.text
    assert "(test_findings.py:" in found.text
    assert "stage=1" in found.advice
    assert "reduction-per-micro-batch" not in kinds(step, tx=jdp.sharded(tx, stage=1))


@pytest.mark.parametrize(("stage", "accumulate"), [(2, 1), (2, 3), (3, 1), (3, 3)])
def test_layers_that_are_reduced_for_each_micro_batch_are_found_and_layers_alone_are_not(
    stage, accumulate
):
    jdp.init(devices=jax.devices()[:2])

    def loss(params, x):
        x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.mean(x @ params["v"]["w"])

    params = {"w": np.ones((4, DIM, DIM), np.float32), "v": {"w": np.ones((DIM, DIM), np.float32)}}
    state = jdp.TrainState.create(params, jdp.sharded(optax.adam(0.1), stage=stage))
    step = step_of(loss, accumulate=accumulate)
    found = jdp.explain(step, state, np.ones((12, DIM), np.float32))
    summed = [each.leaves for each in found.buckets if each.kind == "reduce-scatter"]
    assert {*summed} == {("grads['w'] of one iteration",), ("grads['v']['w']",)}
    named = [each.text for each in found.findings if each.kind == "reduction-per-micro-batch"]
    assert [f"runs {accumulate} times" in text for text in named] == [True] * (accumulate > 1)


def test_two_gradients_of_one_step_are_not_micro_batches():
    @jdp.train_step
    def sharpness_aware(state, x):  # Foret et al. 2021
        grads = jdp.sync_gradients(jax.grad(loss_fn)(state.params, x))
        moved = jax.tree.map(lambda w, g: w + 0.1 * g, state.params, grads)
        return state.apply_gradients(jax.grad(loss_fn)(moved, x)), {}

    assert not kinds(sharpness_aware)


def test_statistics_of_a_batch_norm_in_each_micro_batch_are_not_gradients():
    def loss(params, x):
        mean, var = jdp.batch_norm_statistics(x @ params["w"])
        return jnp.mean((x - mean) * lax.rsqrt(var + 1e-5) * params["scale"])

    jdp.init(devices=jax.devices()[:2])
    params = {"w": np.ones((DIM, DIM), np.float32), "scale": np.ones(DIM, np.float32)}
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=jdp.collectives.xla)
    state = jdp.TrainState.create(params, tx)
    found = jdp.explain(step_of(loss, accumulate=4), state, rows())
    assert any(bucket.runs > 1 for bucket in found.buckets)
    assert "reduction-per-micro-batch" not in {finding.kind for finding in found.findings}
