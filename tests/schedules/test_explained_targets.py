"""`jdp.explain` for GPUs and TPUs that are not here: memory, names, time, and findings."""

import functools
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.training import step_of

import jdp
from benchmarks.gpu import programs
from jdp import collectives
from jdp.tools import explain, explain_command, targets
from jdp.tools.rate import GPUS

DESCRIBED = os.environ.get("JDP_TARGET_CONFIG")
DIM, NUM_LAYERS, ROWS = 1024, 4, 8 * 2048
LAYER = 4 * DIM * DIM


@pytest.fixture(scope="module")
def h200s():
    """h200s(n): the GPUs to compile for, here also with a plugin that does not describe them."""
    if DESCRIBED:
        text = Path(DESCRIBED).read_text()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(targets, "gpu_description", lambda name: text)
            yield "8xH200"
        return
    try:
        targets.gpu_description(GPUS["H200"].xla_name)
    except targets.MissingPluginError as reason:
        pytest.skip(str(reason))
    yield "8xH200"


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x))


def scanned_loss(scan, params, x):
    x, _ = scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.mean(jnp.square(x))


def report(on, tx, loss_fn=loss_fn, stacked=False, rates=None, num_rows=ROWS, accumulate=1):
    """The report of a chain of layers, each of which is one bucket of 4 MiB."""
    jdp.init(devices=jax.devices("cpu")[:1])
    shape = jax.ShapeDtypeStruct((DIM, DIM), jnp.float32)
    params = [shape] * NUM_LAYERS
    if stacked:
        params = jax.ShapeDtypeStruct((NUM_LAYERS, DIM, DIM), jnp.float32)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)  # noqa: E731

    step = step_of(loss_fn, accumulate=accumulate)

    state = jax.eval_shape(lambda: jdp.TrainState.create(zeros(), tx))
    rows = jax.ShapeDtypeStruct((num_rows, DIM), jnp.float32)
    return jdp.explain(step, state, rows, on=on, rates=rates)


@pytest.mark.parametrize("num", [16, 64, 256])
def test_hosts_share_no_memory(num, h200s):
    # In one domain of NVLink XLA sums by kernels that read the memory of all GPUs, and its
    # compiler ended the process for 64 of them.
    mesh = targets.target(f"{num}xH200", ("data",)).mesh
    summed = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    shape = jax.ShapeDtypeStruct((num,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    text = jax.jit(summed).lower(shape).compile().as_text()
    assert "all-reduce" in text and "collective_kernel" not in text and "__triton" not in text


def test_gradients_between_gpus_are_named_also_where_xla_packs_them(h200s):
    found = report(h200s, jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla))
    assert found.memory.parameters == NUM_LAYERS * LAYER
    named = [name for bucket in found.buckets for name in bucket.leaves]
    assert sorted(name for name in named if name != "a scalar") == [
        f"grads[{i}]" for i in range(NUM_LAYERS)
    ]
    # Two buckets of a layer are merged into one sum; the one of the last layers is first.
    large = [bucket for bucket in found.buckets if bucket.num_bytes >= LAYER]
    assert {bucket.num_bytes for bucket in large} == {2 * LAYER}
    assert all(bucket.num_merged == 2 for bucket in large)
    assert any(bucket.hidden_bytes for bucket in large)
    # The sum of the first layers begins after the last matmul.
    (merged,) = [finding for finding in found.findings if finding.kind == "merged-buckets"]
    assert "2 collectives" in merged.text and "8.0 MiB" in merged.text
    assert found.memory.limit == 151397597184
    assert found.rates["memory_bytes_per_s"].source.startswith("XLA's device description")


def test_small_sums_between_gpus_are_kernels_of_xla_with_a_start_of_their_own(h200s):
    # 2 buckets of 4 MiB are merged, and go by NCCL.
    found = report(h200s, jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla))
    algorithms = {bucket.num_bytes: bucket.algorithm for bucket in found.buckets}
    assert algorithms[2 * LAYER] == "xla" and algorithms[4] == "triton one-shot"
    (loss,) = [bucket for bucket in found.buckets if bucket.num_bytes == 4]
    assert loss.took_s == pytest.approx(found.rates["kernel_reduction_start_s"].value, rel=1e-3)


# XLA unrolls the loop of two micro-batches, and has two gathers of one in the traced step.
@pytest.mark.parametrize("accumulate", [1, 2])
def test_shards_of_equal_size_are_named_by_the_parameters_that_they_are_of(accumulate, h200s):
    tx = jdp.sharded(optax.adam(0.1), stage=3, min_size=1)
    found = report(h200s, tx, accumulate=accumulate)
    names = [f"[{i}]" for i in range(NUM_LAYERS)]
    gathered = [bucket.leaves for bucket in found.buckets if bucket.kind == "all-gather"]
    summed = [bucket.leaves for bucket in found.buckets if bucket.kind == "reduce-scatter"]
    # The forward pass takes them in their order.
    first = list(dict.fromkeys(gathered))
    assert first == [(f"state.params{name}",) for name in names]
    assert {*summed} == {(f"grads{name}",) for name in names}
    for leaves in (gathered, summed):
        assert max(Counter(leaves).values()) <= 2 * accumulate
    # XLA adds up the gradients of two micro-batches, and scatters the sum.
    assert max(Counter(summed).values()) == 1
    assert "reduction-per-micro-batch" not in {finding.kind for finding in found.findings}


def test_leaves_of_the_ring_between_gpus_have_names_and_scalars_have_bytes(h200s):
    programs.register_handlers()
    found = report(h200s, jdp.replicated(optax.sgd(0.1), all_reduce=collectives.split))
    assert {bucket.algorithm for bucket in found.buckets} == {"split"}
    layers = [(bucket.leaves, bucket.num_bytes) for bucket in found.buckets if bucket.leaves]
    # As the backward pass finishes them; the loss and its weight are scalars.
    large = [each for each in layers if each[1] == LAYER]
    assert large == [((f"grads[{i}]",), LAYER) for i in reversed(range(NUM_LAYERS))]
    assert all(num_bytes > 0 for _, num_bytes in layers)


def test_the_leaves_of_one_bucket_are_not_merged_buckets(h200s):
    tx = jdp.replicated(
        optax.sgd(0.1), all_reduce=collectives.xla, bucket_bytes=2 * NUM_LAYERS * LAYER
    )
    found = report(h200s, tx)
    assert {bucket.num_merged for bucket in found.buckets} == {1}  # the loss is in one of them
    assert "merged-buckets" not in {finding.kind for finding in found.findings}


def test_matmuls_are_counted_in_fused_kernels_too(h200s):
    found = report(h200s, jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla))
    # Forward, and backward but for the gradient of the batch.
    matmuls = (3 * NUM_LAYERS - 1) * 2 * (ROWS // 8) * DIM * DIM
    assert found.time.matmul_flops == pytest.approx(matmuls)


def test_a_tail_after_a_loop_is_found_and_not_where_layers_are_reduced_in_it(h200s):
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    plain = report(h200s, tx, functools.partial(scanned_loss, lax.scan), stacked=True)
    late = functools.partial(jdp.scan_layers, all_reduce=collectives.xla)
    hidden = report(h200s, tx, functools.partial(scanned_loss, late), stacked=True)
    tails = [[x.text for x in y.findings if x.kind == "tail-after-loop"] for y in (plain, hidden)]
    # The loss travels behind the gradients, and so it is what waits.
    assert "16.0 MiB" in tails[0][0] and " 0 us" not in tails[0][0]
    assert not tails[1]


def test_gradients_of_layers_that_are_packed_in_their_loop_have_names(h200s):
    def loss(params, x):
        def layer(x, layer):
            return jnp.tanh(x @ layer["w"] * layer["scale"]), None

        x, _ = jdp.scan_layers(layer, x, params, all_reduce=collectives.xla)
        return jnp.mean(x)

    shapes = {"w": (NUM_LAYERS, DIM, DIM), "scale": (NUM_LAYERS, DIM)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    state = jax.eval_shape(lambda: jdp.TrainState.create(jax.tree.map(jnp.zeros_like, params), tx))
    rows = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    found = jdp.explain(step_of(loss), state, rows, on=h200s)
    named = {name for bucket in found.buckets for name in bucket.leaves} - {"a scalar"}
    assert named == {f"grads['{name}'] of one iteration" for name in shapes}
    assert "reduction-per-micro-batch" not in {finding.kind for finding in found.findings}


def test_the_loop_of_micro_batches_is_not_one_over_layers(h200s):
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    found = report(h200s, tx, accumulate=4)
    assert any(bucket.exposed_bytes for bucket in found.buckets)
    assert "tail-after-loop" not in {finding.kind for finding in found.findings}


def test_two_hosts_have_a_slower_link(h200s):
    found = report("16xH200", jdp.sharded(optax.adam(1e-3), stage=3))
    assert found.num_ranks == 16
    assert found.memory.parameters == NUM_LAYERS * LAYER // 16
    assert found.memory.optimizer_state == 2 * NUM_LAYERS * LAYER // 16 + 4
    assert "host_link_bytes_per_s" in found.rates


def test_a_mesh_of_gpus_is_explained_as_the_name_of_its_gpus_is(h200s):
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    mesh = targets.target(h200s, ("data",)).mesh
    named, found = report(h200s, tx), report(mesh, tx)
    assert found.on == "8xNVIDIA H200 141GB HBM3e"
    assert (found.time, found.rates, found.memory) == (named.time, named.rates, named.memory)


@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_of_the_list_is_described(kind, h200s):
    if DESCRIBED:
        pytest.skip("one description stands for all")
    text = targets.gpu_description(GPUS[kind].xla_name)
    assert text.startswith("gpu_device_info {") and text.count("gpu_device_info {") == 1
    assert text.endswith(f'device_description_str: "{GPUS[kind].xla_name}"')


def test_shards_within_a_host_take_the_links_of_the_host(h200s):
    axes = ("outer", "inner")
    mesh = jax.make_mesh((1, 1), axes, devices=jax.devices("cpu")[:1])
    tx = jdp.sharded(optax.sgd(0.1), stage=3, axis_name=axes, over="inner")

    @jdp.train_step(axis_name=axes)
    def step(state, x):
        value_and_grad = jdp.value_and_grad(loss_fn, axis_name=axes)
        return state.apply_gradients(value_and_grad(state.params, x)[1]), {}

    params = [jax.device_put(np.zeros((DIM, DIM), np.float32), NamedSharding(mesh, P()))]
    state = jdp.TrainState.create(params, tx)
    rates = {"link_bytes_per_s": 1e9, "host_link_bytes_per_s": 1e6}
    rates |= {"reduction_start_s": 0.0, "host_reduction_start_s": 0.0}
    rows = jax.ShapeDtypeStruct((64, DIM), jnp.float32)
    found = jdp.explain(step, state, rows, on="16xH200", rates=rates)
    seconds = {x.kind: x.took_s for x in found.buckets if x.num_bytes >= LAYER // 8}
    # 8 ranks of a host gather a layer; 8 pairs of two hosts each sum an eighth of its gradient.
    assert seconds["all-gather"] == pytest.approx(LAYER * 7 / 8 / 1e9)
    assert seconds["all-reduce"] == pytest.approx(8 * LAYER / 8 / 1e6)


# The gradients of a model axis within hosts go between hosts, and those of one across hosts do not.
@pytest.mark.parametrize(("axes", "seconds"), [
    (("data", "model"), 4 * 2 * LAYER * 3 / 4 / 1e6), (("model", "data"), 2 * LAYER * 3 / 4 / 1e9),
])  # fmt: skip
def test_the_hosts_of_a_mesh_with_a_second_axis_are_those_of_its_devices(h200s, axes, seconds):
    devices = targets.target("16xH200", ("data",)).mesh.devices.reshape(4, 4)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    rates = {"link_bytes_per_s": 1e9, "host_link_bytes_per_s": 1e6}
    rates |= {"reduction_start_s": 0.0, "host_reduction_start_s": 0.0}
    found = report(mesh, tx, rates=rates)
    sums = [x for x in found.buckets if x.num_bytes >= LAYER]
    layers = sum(x.num_bytes for x in sums) / LAYER
    assert sum(x.took_s for x in sums) == pytest.approx(layers * seconds)


def test_shards_of_a_model_axis_are_exchanged_within_their_data_group(h200s):
    mesh = jdp.init(axes={"model": 4}, devices=jax.devices("cpu")[:8])
    specs = [P(None, "model"), P("model")] * (NUM_LAYERS // 2)
    zeros = np.zeros((DIM, DIM), np.float32)
    params = [jax.device_put(zeros, NamedSharding(mesh, spec)) for spec in specs]

    def on_device(params, x):
        for up, down in zip(params[::2], params[1::2], strict=True):
            x = lax.psum(jnp.tanh(x @ up) @ down, "model")
        return jnp.mean(jnp.square(x))

    loss = jax.shard_map(on_device, axis_names={"model"}, in_specs=(specs, P()), out_specs=P())
    rows = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    state = jdp.TrainState.create(params, jdp.sharded(optax.adam(1e-3), stage=3))
    found = jdp.explain(step_of(loss), state, rows, on=h200s)
    assert found.num_ranks == 2
    assert found.memory.parameters == NUM_LAYERS * LAYER // 8
    sent = Counter()
    for each in found.buckets:
        sent[each.kind] += each.num_bytes * (not each.is_of_author)
    on_device = NUM_LAYERS * LAYER // 4
    assert sent.pop("all-reduce") <= 4  # the loss
    assert sent == {"all-gather": on_device, "reduce-scatter": on_device}


def test_rows_of_experts_are_exchanged_without_padding(h200s):
    mesh = jdp.init(axes={"expert": 8}, devices=jax.devices("cpu")[:8])
    zeros = np.zeros((8, DIM, DIM), np.float32)
    params = jax.device_put(zeros, NamedSharding(mesh, P("expert")))

    def on_device(w, x):
        counts = jnp.full((8, 1), len(x) // 8)
        sent = dict(max_rows=2 * len(x), axis_name="expert")
        received, sizes, back = jdp.ragged_all_to_all(x, counts, **sent)
        y = back(lax.ragged_dot(received, w, sizes.sum(1)))
        return lax.pmean(jnp.mean(jnp.square(x - y)), "expert")

    specs = P("expert"), P("expert")
    loss = jax.shard_map(on_device, axis_names={"expert"}, in_specs=specs, out_specs=P())
    rows = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))
    found = jdp.explain(step_of(loss), state, rows, on=h200s)
    sent = [x.num_bytes for x in found.buckets if x.kind == "ragged-all-to-all"]
    assert sent == 3 * [ROWS // 8 * DIM * 4]  # there, back, and the gradient of the results
    assert "all-to-all" not in {x.kind for x in found.buckets if x.num_bytes > 1000}
    assert not found.findings


def _activations(report, axis, kind):
    """Bytes that a device sends along a further axis in a step."""
    sent = [x for x in report.buckets if x.axes == (axis,) and x.kind == kind]
    return sum(x.num_bytes * x.runs for x in sent)


# On 2 ranks; what is sent of an activation, with the sizes of the examples.
EXAMPLES = {
    # Two layers of two halves, forward and backward, the table's rows and their gradient; the
    # largest logit, the sum and the target of each token.
    "tensor_parallel": ("model", "all-reduce", (2 * 2 * 2 + 2) * 16 * 24 * 32 + 3 * 16 * 24),
    # Forward and backward in p + m - 1 ticks.
    "pipeline": ("pipe", "collective-permute", 2 * (4 + 8 - 1) * 4 * 16),
    # Two rings for two layers: keys and values, in the backward pass their gradients, too; with
    # documents and positions.
    "ring_attention": ("seq", "collective-permute", 2 * 4 * ((2 + 4) * 4 * 16 * 32 + 2 * 80)),
    # Tokens of two experts each: there, back, and the gradient of the results.
    "mixture_of_experts": ("expert", "ragged-all-to-all", 3 * 8 * 2 * 16),
    # In p + m - 1 ticks two layers of two halves: forward, recomputed, backward.
    "three_axes": ("model", "all-reduce", (2 + 4 - 1) * 2 * 2 * 3 * 4 * 16 * 32),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_send_the_activations_of_their_formulas(name, h200s):
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    found = explain.explain_call(
        *explain_command.first_call(str(script), "step", []), on=h200s, rates=None
    )
    axis, kind, num_sent = EXAMPLES[name]
    assert _activations(found, axis, kind) == 4 * num_sent
    assert not found.findings


@pytest.mark.parametrize("stage", [0, 2])
def test_quantized_gradients_have_a_byte_for_each_number_and_4_for_each_block(h200s, stage):
    wrap = functools.partial(jdp.sharded, stage=stage) if stage else jdp.replicated
    found = report(h200s, wrap(optax.sgd(0.1), all_reduce=collectives.quantized))
    sent = Counter()
    for each in found.buckets:
        sent[each.kind, each.dtype] += each.num_bytes
    once = NUM_LAYERS * (LAYER // 4 + LAYER // 256)
    assert sent["all-to-all", "u8"] == once
    assert sent["all-gather", "u8"] == (0 if stage else once)
    assert sent["all-reduce", "f32"] <= 4 and not sent["reduce-scatter", "f32"]


def test_a_ring_of_one_host_is_refused_on_two(h200s):
    programs.register_handlers()
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.split)
    with pytest.raises(ValueError, match=r"collectives\.split.*2 hosts.*collectives\.xla"):
        report("16xH200", tx)


@pytest.fixture(scope="module")
def tpus():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    return "v5e:2x4"


def test_gradients_between_tpus_are_named(tpus):
    found = report(tpus, jdp.replicated(optax.sgd(0.1)))
    (bucket,) = [bucket for bucket in found.buckets if bucket.num_bytes >= LAYER]
    assert {f"grads[{i}]" for i in range(NUM_LAYERS)} <= set(bucket.leaves)
    matmuls = (3 * NUM_LAYERS - 1) * 2 * (ROWS // 8) * DIM * DIM
    assert found.time.matmul_flops == pytest.approx(matmuls)


def test_each_gather_of_a_tpu_is_one_collective_also_where_matmuls_run_beside_it(tpus):
    found = report(tpus, jdp.sharded(optax.sgd(0.1), stage=3, min_size=1), num_rows=2048)
    gathers = [bucket for bucket in found.buckets if bucket.kind == "all-gather"]
    # In the forward pass each weight, in the backward pass each but what is still held.
    times = Counter(leaf for bucket in gathers for leaf in bucket.leaves)
    assert set(times) == {f"state.params[{i}]" for i in range(NUM_LAYERS)}
    assert set(times.values()) <= {1, 2} and len(gathers) == sum(times.values())
    # XLA may gather what matmuls take, in bfloat16.
    assert {bucket.num_bytes for bucket in gathers} <= {LAYER, LAYER // 2}
    assert any(bucket.hidden_bytes for bucket in gathers)
    assert "foreign-collective" not in [finding.kind for finding in found.findings]
    matmuls = (3 * NUM_LAYERS - 1) * 2 * (2048 // 8) * DIM * DIM
    assert found.time.matmul_flops == pytest.approx(matmuls)


def test_a_second_process_explains_for_tpus_at_the_same_time(tpus):
    targets.target(tpus, ("data",))  # this process has libtpu now
    script = f"from jdp.tools import targets; print(targets.target({tpus!r}, ('data',)).name)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert run.stdout.strip() == tpus, run.stderr


def test_a_loop_of_micro_batches_counts_as_often_as_it_runs_on_tpus(tpus):
    # XLA for TPUs writes no number of iterations next to a loop.
    tx = jdp.sharded(optax.sgd(0.1), stage=2)
    two, eight = (report(tpus, tx, num_rows=2048 * k, accumulate=k) for k in (2, 8))
    assert eight.time.matmul_flops == pytest.approx(4 * two.time.matmul_flops)
    assert not any("loop" in each for each in eight.unknown)
    for num, found in (2, two), (8, eight):
        findings = {finding.kind: finding.text for finding in found.findings}
        assert f"runs {num} times" in findings["reduction-per-micro-batch"]
        assert "tail-after-loop" not in findings


def test_a_reduce_scatter_that_a_tpu_runs_as_an_all_reduce_is_found(tpus):
    jdp.init(devices=jax.devices("cpu")[:1])
    sizes = {"tiled": 8 * 4096, "odd": 8 * 4001, "wide": (256, 512), "halves": (1024, 1024)}
    params = {name: np.zeros(size, np.float32) for name, size in sizes.items()}

    def loss(p, x):
        losses = [x @ p["tiled"].reshape(4096, 8), x[:, :4001] @ p["odd"].reshape(4001, 8)]
        losses += [x[:, :256] @ p["wide"], x[:, :1024] @ p["halves"].astype(jnp.bfloat16)]
        return sum(jnp.mean(each**2) for each in losses)

    tx = jdp.sharded(optax.sgd(0.1), stage=2, min_size=1)
    state, rows = jdp.TrainState.create(params, tx), np.zeros((64, 4096), np.float32)
    found = jdp.explain(step_of(loss), state, rows, on=tpus)
    (finding,) = [each for each in found.findings if each.kind == "whole-sum"]
    assert "reduce-scatter of `grads['odd']` as an all-reduce" in finding.text
    assert f"min_size={8 * 4001 + 1}" in finding.advice


def test_tiles_that_are_filled_up_are_found(tpus):
    jdp.init(devices=jax.devices("cpu")[:1])
    # The longest dim is in rows of 128, and of the others 3 are filled up to 4.
    params = np.zeros((65536, 3, 3), np.float32)
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))

    @jdp.train_step
    def step(state, x):
        grads = jax.grad(lambda p, x: jnp.mean(x @ p.reshape(65536, 9)))(state.params, x)
        return state.apply_gradients(grads), {}

    found = jdp.explain(step, state, np.zeros((8, 65536), np.float32), on=tpus)
    (padding,) = [finding for finding in found.findings if finding.kind == "padding"]
    assert padding.saved_bytes >= params.nbytes // 3


def test_a_step_that_xla_does_not_compile_for_its_memory_is_an_error_that_says_so(tpus):
    jdp.init(devices=jax.devices("cpu")[:1])
    params = jax.ShapeDtypeStruct((4 * DIM, 4 * DIM), jnp.float32)
    tx = jdp.replicated(optax.sgd(0.1))
    state = jax.eval_shape(lambda: jdp.TrainState.create(jnp.zeros(params.shape, params.dtype), tx))

    @jdp.train_step
    def step(state, x):
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w))(state.params)
        return state.apply_gradients(grads), {}

    rows = jax.ShapeDtypeStruct((2**24, 4 * DIM), jnp.float32)
    with pytest.raises(ValueError, match="memory.*v5e:2x4.*find_batch_size"):
        jdp.explain(step, state, rows, on=tpus)
    # The memory of a v5e is 16 GiB, and the limit more.
    found = jdp.find_batch_size(
        step, state, rows, on=tpus, limit_bytes=2**40, granularity=2**21, max_rows=2**23
    )
    assert found.num_bytes < 2**34 and found.next_rows is not None and found.next_bytes is None
