"""Which leaves a collective of XLA's takes, where several arrays have the same size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import step_of

import jdp
from jdp import collectives
from jdp.tools import hlo_matching, transfers
from jdp.tools.compiled import compile_step
from jdp.tools.costs import Costs
from jdp.tools.hlo import HloProgram
from jdp.training.communication_plan import PlannedCollective, SentLeaf

DIM = 128


def normalised_loss(params, x):
    for layer in params:
        x = x @ layer["w"]
        mean, var = jdp.batch_norm_statistics(x)
        x = jnp.tanh((x - mean) * jax.lax.rsqrt(var + 1e-5) * layer["scale"] + layer["bias"])
    return jnp.mean(jnp.square(x))


def test_statistics_of_a_batch_norm_have_no_names_of_gradients():
    jdp.init(devices=jax.devices()[:2])
    one = np.ones(DIM, np.float32)
    params = [{"w": np.eye(DIM, dtype=np.float32), "scale": one, "bias": one} for _ in range(2)]
    tx = jdp.replicated(optax.adam(1e-3), all_reduce=collectives.xla)
    state = jdp.TrainState.create(params, tx)
    rows = jax.ShapeDtypeStruct((16, DIM), jnp.float32)
    found = jdp.explain(step_of(normalised_loss), state, rows)
    named = [name for bucket in found.buckets for name in bucket.leaves if "grads" in name]
    expected = [f"grads[{i}]['{name}']" for i in range(2) for name in ("bias", "scale", "w")]
    assert sorted(named) == expected


def test_shards_of_16_bits_that_a_cpu_gathers_as_integers_have_names():
    jdp.init(devices=jax.devices()[:2])
    params = {"w": jnp.ones((3, DIM, DIM), jnp.bfloat16)}
    state = jdp.TrainState.create(params, jdp.sharded(optax.sgd(0.1), stage=3))

    def loss(params, x):
        x, _ = jdp.scan_layers(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])
        return jnp.mean(jnp.square(x))

    rows = jax.ShapeDtypeStruct((16, DIM), jnp.bfloat16)
    found = jdp.explain(step_of(loss), state, rows)
    gathered = {bucket.leaves for bucket in found.buckets if bucket.kind == "all-gather"}
    assert gathered == {("state.params['w']",)}


ADD = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

"""

# As XLA for TPUs writes it: sums in another order than planned, and parameters that a copy brings.
BROUGHT = """
ENTRY %main (p0: f32[8,4], p1: f32[8,4], x: f32[8,4], y: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %p0 = f32[8,4] parameter(0), metadata={op_name="args[0].params['a']"}
  %p1 = f32[8,4] parameter(1), metadata={op_name="args[0].params['b']"}
  %x = f32[8,4] parameter(2), metadata={op_name="args[1][0]"}
  %y = f32[8,4] parameter(3), metadata={op_name="args[1][1]"}
  %start.0 = (f32[8,4], f32[8,4], u32[]) copy-start(%p0)
  %start.1 = (f32[8,4], f32[8,4], u32[]) copy-start(%p1)
  %done.0 = f32[8,4] copy-done(%start.0)
  %done.1 = f32[8,4] copy-done(%start.1)
  %sum = (f32[8,4], f32[8,4]) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add
  %sum.y = f32[8,4] get-tuple-element(%sum), index=1
  %sum.x = f32[8,4] get-tuple-element(%sum), index=0
  %new.a = f32[8,4] add(%done.0, %sum.y)
  %new.b = f32[8,4] add(%done.1, %sum.x)
  ROOT %out = (f32[8,4], f32[8,4]) tuple(%new.a, %new.b)
}
"""


# Micro-batches in a loop: its second sum is of what is added to the first parameter after it.
LOOP = """
%body (carry: (f32[32], f32[32], f32[16], f32[16])) -> (f32[32], f32[32], f32[16], f32[16]) {
  %carry = (f32[32], f32[32], f32[16], f32[16]) parameter(0)
  %x = f32[32] get-tuple-element(%carry), index=0
  %y = f32[32] get-tuple-element(%carry), index=1
  %s = f32[16] get-tuple-element(%carry), index=2
  %t = f32[16] get-tuple-element(%carry), index=3
  %gather = f32[32] all-gather(%t), replica_groups={{0,1}}, dimensions={0}
  %sum.x = f32[32] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %sum.y = f32[32] all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  %total.x = f32[32] add(%x, %sum.x)
  %total.y = f32[32] add(%y, %sum.y)
  ROOT %next = (f32[32], f32[32], f32[16], f32[16]) tuple(%total.x, %total.y, %s, %t)
}

%condition (carry: (f32[32], f32[32], f32[16], f32[16])) -> pred[] {
  %carry = (f32[32], f32[32], f32[16], f32[16]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p0: f32[32], p1: f32[32], p2: f32[16], p3: f32[16]) -> (f32[32], f32[32]) {
  %p0 = f32[32] parameter(0), metadata={op_name="args[0].params['a']"}
  %p1 = f32[32] parameter(1), metadata={op_name="args[0].params['b']"}
  %p2 = f32[16] parameter(2), metadata={op_name="args[0].params['c']"}
  %p3 = f32[16] parameter(3), metadata={op_name="args[0].params['d']"}
  %zero = f32[32] broadcast()
  %first = (f32[32], f32[32], f32[16], f32[16]) tuple(%zero, %zero, %p2, %p3)
  %loop = (f32[32], f32[32], f32[16], f32[16]) while(%first), condition=%condition, body=%body
  %total.0 = f32[32] get-tuple-element(%loop), index=0
  %total.1 = f32[32] get-tuple-element(%loop), index=1
  %new.a = f32[32] add(%p0, %total.1)
  %new.b = f32[32] add(%p1, %total.0)
  ROOT %out = (f32[32], f32[32]) tuple(%new.a, %new.b)
}
"""


# As XLA for TPUs writes two reduce-scatters: a kernel, whose tiles 125 rows do not fill, with an
# exchange after it, and a sum that it slices.
SCATTERS = """%all-reduce-scatter.1 (input: f32[1000]) -> f32[128] {
  %input = f32[1000] parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[1024] pad(%input, %zero), padding=0_24
  %all-reduce.1 = f32[1024] all-reduce(%pad), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %begin = u32[] constant(0)
  ROOT %part = f32[128] dynamic-slice(%all-reduce.1, %begin), dynamic_slice_sizes={128}
}

ENTRY %main (x: f32[1000], y: f32[64]) -> (f32[128], f32[21], f32[8]) {
  %x = f32[1000] parameter(0), metadata={op_name="args[1][0]"}
  %y = f32[64] parameter(1), metadata={op_name="args[1][1]"}
  %kernel = f32[128] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %end = f32[21] slice(%kernel), slice={[107:128]}
  %exchange = f32[21] collective-permute(%end), source_target_pairs={{0,1},{1,2}}
  %sum = f32[64] all-reduce(%y), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %own = f32[8] slice(%sum), slice={[0:8]}
  ROOT %out = (f32[128], f32[21], f32[8]) tuple(%kernel, %exchange, %own)
}
"""


def matches_of(text, computation, plan):
    """The collectives of a computation, and what is known of them."""
    program = HloProgram(ADD + text)
    inside = program.computations[computation]
    shapes = {one.name: one.shape for one in inside}
    costs = Costs(program.computations)
    held = [(one, transfers.collective_in(one, costs)) for one in inside]
    sent = [transfers.transfer_of(one, inner, computation, shapes) for one, inner in held if inner]
    return sent, hlo_matching.match(program, sent, plan)


def names_of(text, computation, plan):
    _, found = matches_of(text, computation, plan)
    return [[leaf.path for leaf in each.leaves] for each in found]


def planned(kind, *paths, num=32, num_loops=0):
    leaves = [SentLeaf(path, "f32", num) for path in paths]
    return PlannedCollective(kind, "xla", leaves, "", False, num_loops, None, leaves)


def test_parameters_that_a_copy_brings_name_their_gradients():
    plan = [planned("all-reduce", "grads['a']", "grads['b']")]
    assert names_of(BROUGHT, "main", plan) == [["grads['b']", "grads['a']"]]


def test_a_parameter_that_a_tpu_copies_in_slices_names_its_gradient():
    halves = """%half.0 = ((f32[8,4]), f32[4,4], s32[]) slice-start(%p1), slice={[0:4], [0:4]}
  %half.1 = ((f32[8,4]), f32[4,4], s32[]) slice-start(%p1), slice={[4:8], [0:4]}
  %got.0 = f32[4,4] slice-done(%half.0)
  %got.1 = f32[4,4] slice-done(%half.1)
  %done.1 = f32[8,4] custom-call(%got.0, %got.1), custom_call_target="ConcatBitcast\""""
    text = BROUGHT.replace("%done.1 = f32[8,4] copy-done(%start.1)", halves)
    assert halves in text
    plan = [planned("all-reduce", "grads['a']", "grads['b']")]
    assert names_of(text, "main", plan) == [["grads['b']", "grads['a']"]]


# As XLA for TPUs sends float16: two of them in a u32, of 12 numbers and 4 of padding.
HALVES = """%or (a: u32[], b: u32[]) -> u32[] {
  %a = u32[] parameter(0)
  %b = u32[] parameter(1)
  ROOT %c = u32[] or(%a, %b)
}

ENTRY %main (p: f16[12], x: f16[12]) -> f16[12] {
  %p = f16[12] parameter(0), metadata={op_name="args[0].params['a']"}
  %x = f16[12] parameter(1), metadata={op_name="args[1]"}
  %padded = f16[16] custom-call(%x), custom_call_target="ZeroCrop"
  %words = u32[2,4] bitcast(%padded)
  %sum = u32[2,4] all-reduce(%words), replica_groups={{0,1}}, to_apply=%or
  %halves = f16[12] bitcast(%sum)
  ROOT %new = f16[12] add(%p, %halves)
}
"""


def test_float16_that_a_tpu_sends_as_words_has_its_dtype_and_name():
    leaf = SentLeaf("grads['a']", "f16", 12)
    plan = [PlannedCollective("all-reduce", "xla", [leaf], "", False, 0, None, [leaf])]
    ((sent,), (found,)) = matches_of(HALVES, "main", plan)
    assert found.leaves == [leaf] and sent.num_bytes == 32


def test_parameters_outside_of_a_loop_name_what_it_gathers_and_sums():
    plan = [
        planned("all-gather", "state.params['c']", "state.params['d']", num=16, num_loops=1),
        planned("all-reduce", "grads['a']", "grads['b']", num_loops=1),
    ]
    expected = [["state.params['d']"], ["grads['b']"], ["grads['a']"]]
    assert names_of(LOOP, "body", plan) == expected


def test_parameters_whose_paths_end_alike_are_told_apart():
    def loss_fn(params, x):
        for w in (params["w"], params["a"]["w"], params["b"]["a"]["w"]):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    @jdp.train_step
    def step(state, x):
        return state.apply_gradients(jax.grad(loss_fn)(state.params, x)), {}

    jdp.init(devices=jax.devices()[:2])
    w = np.ones((DIM, DIM), np.float32)
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    state = jdp.TrainState.create({"w": w, "a": {"w": w}, "b": {"a": {"w": w}}}, tx)
    report = jdp.explain(step, state, np.ones((4, DIM), np.float32))
    sent = sorted(leaf for bucket in report.buckets for leaf in bucket.leaves)
    assert sent == ["grads['a']['w']", "grads['b']['a']['w']", "grads['w']"]


def test_reduce_scatters_that_xla_sums_and_slices_have_names_and_are_not_of_the_author():
    plan = [
        planned("reduce-scatter", "grads['rows']", num=1000),
        planned("reduce-scatter", "grads['w']", num=64),
    ]
    sent, found = matches_of(SCATTERS, "main", plan)
    assert [each.kind for each in sent] == ["reduce-scatter", "collective-permute", "all-reduce"]
    names = [[leaf.path for leaf in each.leaves] for each in found]
    assert names == [["grads['rows']"], [""], ["grads['w']"]]
    assert not any(each.is_of_author for each in found)


# A body that XLA has unrolled once, the sums after its loop, and nothing that names a parameter.
UNROLLED = """%body (carry: (f32[32], f32[32])) -> (f32[32], f32[32]) {
  %carry = (f32[32], f32[32]) parameter(0)
  %x = f32[32] get-tuple-element(%carry), index=0
  %y = f32[32] get-tuple-element(%carry), index=1
  %sum.0 = f32[32] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %sum.1 = f32[32] all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  ROOT %next = (f32[32], f32[32]) tuple(%sum.0, %sum.1)
}

%condition (carry: (f32[32], f32[32])) -> pred[] {
  %carry = (f32[32], f32[32]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[32], b: f32[32]) -> (f32[32], f32[32]) {
  %a = f32[32] parameter(0), metadata={op_name="args[1][0]"}
  %b = f32[32] parameter(1), metadata={op_name="args[1][1]"}
  %init = (f32[32], f32[32]) tuple(%a, %b)
  ROOT %loop = (f32[32], f32[32]) while(%init), condition=%condition, body=%body
}
"""


def test_a_collective_in_a_loop_is_not_named_by_one_that_is_planned_outside_of_all_loops():
    plan = [
        planned("all-reduce", "grads['head']"),
        planned("all-reduce", "grads['l']", num_loops=1),
    ]
    assert names_of(UNROLLED, "body", plan) == [["grads['l']"], ["grads['l']"]]


# As XLA for TPUs gathers small arrays: a rank's part is written into zeros, and all are added up.
GATHERING_SUM = """%placed (zeros: f32[32], part: f32[16], place: s32[]) -> f32[32] {
  %zeros = f32[32] parameter(0)
  %part = f32[16] parameter(1)
  %place = s32[] parameter(2)
  ROOT %written = f32[32] dynamic-update-slice(%zeros, %part, %place)
}

ENTRY %main (a: f32[16], x: f32[32], zeros: f32[32], place: s32[]) -> (f32[32], f32[32]) {
  %a = f32[16] parameter(0), metadata={op_name="args[0].params['a']"}
  %x = f32[32] parameter(1), metadata={op_name="args[1]"}
  %zeros = f32[32] parameter(2)
  %place = s32[] parameter(3)
  %whole = f32[32] fusion(%zeros, %a, %place), kind=kLoop, calls=%placed
  ROOT %sum = (f32[32], f32[32]) all-reduce(%whole, %x), replica_groups={{0,1}}, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("gathered", "expected"),
    [("state.params['a']", "state.params['a']"), ("grads['a']", "the update of ['a']")],
)
def test_a_parameter_that_a_tpu_gathers_by_a_sum_is_not_named_as_a_gradient(gathered, expected):
    plan = [
        planned("all-gather", "state.params['c']", gathered, num=16),
        planned("reduce-scatter", "grads['b']"),
    ]
    assert names_of(GATHERING_SUM, "main", plan) == [[expected, "grads['b']"]]


# Clipped gradients: the norm of all of them meets each parameter.
CLIPPED = """ENTRY %main (b: f32[32], x: f32[32], y: f32[32]) -> (f32[32], f32[2,32]) {
  %b = f32[32] parameter(0), metadata={op_name="args[0].params['b']"}
  %x = f32[32] parameter(1), metadata={op_name="args[1][0]"}
  %y = f32[32] parameter(2), metadata={op_name="args[1][1]"}
  %sum.x = f32[32] all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %sum.y = f32[32] all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
  %zero = f32[] constant(0)
  %norm = f32[] reduce(%sum.x, %zero), dimensions={0}, to_apply=%add
  %every = f32[32] broadcast(%norm), dimensions={}
  %scaled = f32[32] multiply(%sum.y, %every)
  %new = f32[32] add(%b, %scaled)
  %stacked = f32[2,32] broadcast(%sum.x), dimensions={1}
  ROOT %out = (f32[32], f32[2,32]) tuple(%new, %stacked)
}
"""


def test_the_norm_of_a_gradient_does_not_lead_to_the_parameters_of_others():
    plan = [planned("all-reduce", "grads['a']", "grads['b']")]
    assert names_of(CLIPPED, "main", plan) == [["grads['a']"], ["grads['b']"]]


def test_updates_of_layers_that_are_reduced_in_their_loop_are_gathered_as_updates():
    jdp.init(devices=jax.devices()[:2])
    params = {"w": jnp.ones((4, DIM, DIM))}
    tx = jdp.sharded(optax.adam(0.1), stage=1, all_reduce=collectives.xla)
    state = jdp.TrainState.create(params, tx)

    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        x, _ = jdp.scan_layers(layer, x, params["w"], late=True, all_reduce=collectives.xla)
        return jnp.mean(jnp.square(x))

    rows = jax.ShapeDtypeStruct((16, DIM), jnp.float32)
    traced = compile_step(step_of(loss), (state, rows), {}, None).traced
    gathered = [each.operands[0].path for each in traced.collectives if each.kind == "all-gather"]
    assert gathered == ["grads['w']"]


SCRIPT = """
@jdp.train_step
def step(state, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(state.params)
    return state.apply_gradients(grads), {}
"""


def test_lines_are_of_this_script_where_the_compilation_cache_has_an_older_one():
    jdp.init(devices=jax.devices()[:2])
    tx = jdp.replicated(optax.sgd(0.1), all_reduce=collectives.xla)
    state = jdp.TrainState.create(np.ones((8, 8), np.float32), tx)
    lines = []
    for new_lines in ("", "\n\n\n"):
        names = {"jdp": jdp, "jax": jax, "jnp": jnp}
        exec(compile(new_lines + SCRIPT, "script.py", "exec"), names)
        found = jdp.explain(names["step"], state, np.ones((4, 8), np.float32))
        lines += [bucket.line for bucket in found.buckets]
    assert lines == ["script.py:5", "script.py:8"]
