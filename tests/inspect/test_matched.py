"""Which leaves a collective of XLA's takes, where several arrays have the same size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.training import step_of

import jdp
from jdp import collectives
from jdp.inspect import matched, transfers
from jdp.inspect.costs import Costs
from jdp.inspect.hlo import HloProgram
from jdp.inspect.planned import Planned, SentLeaf

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


# As XLA for TPUs writes it: sums in another order than planned, and parameters that a copy brings.
BROUGHT = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p0: f32[8,4], p1: f32[8,4], x: f32[8,4], y: f32[8,4]) -> (f32[8,4], f32[8,4]) {
  %p0 = f32[8,4] parameter(0), metadata={op_name="args[0].params['a']"}
  %p1 = f32[8,4] parameter(1), metadata={op_name="args[0].params['b']"}
  %x = f32[8,4] parameter(2), metadata={op_name="args[1][0]"}
  %y = f32[8,4] parameter(3), metadata={op_name="args[1][1]"}
  %start = (f32[8,4], f32[8,4], u32[]) copy-start(%p0)
  %done = f32[8,4] copy-done(%start)
  %sum = (f32[8,4], f32[8,4]) all-reduce(%x, %y), replica_groups={{0,1}}, to_apply=%add
  %sum.y = f32[8,4] get-tuple-element(%sum), index=1
  %sum.x = f32[8,4] get-tuple-element(%sum), index=0
  %new.a = f32[8,4] add(%done, %sum.y)
  %new.b = f32[8,4] add(%p1, %sum.x)
  ROOT %out = (f32[8,4], f32[8,4]) tuple(%new.a, %new.b)
}
"""


def test_parameters_that_a_copy_brings_name_their_gradients():
    program = HloProgram(BROUGHT)
    entry = program.computations[program.entry]
    shapes = {one.name: one.shape for one in entry}
    (one,) = [one for one in entry if transfers.collective_in(one, Costs(program.computations))]
    sums = transfers.transfer_of(one, one, program.entry, shapes)
    leaves = [SentLeaf(f"grads['{name}']", "f32", 32) for name in "ab"]
    plan = [Planned("all-reduce", None, leaves, "", is_of_author=False)]
    (found,) = matched.match(program, [sums], plan)
    assert [leaf.path for leaf in found.leaves] == ["grads['b']", "grads['a']"]
