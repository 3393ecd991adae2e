"""The split of a step's memory is exact where it can be counted by hand."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import ShapeDtypeStruct
from support.training import step_of

import jdp
from jdp.tools import memory as step_memory
from jdp.tools.hlo import HloProgram

DIM, ROWS = 256, 64  # rows of a rank
MATRIX = 4 * DIM * DIM


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def memory(ranks, stage, **options):
    jdp.init(devices=jax.devices()[:ranks])
    adam = optax.adam(1e-3)
    tx = jdp.sharded(adam, stage=stage) if stage else jdp.replicated(adam)
    matrix = ShapeDtypeStruct((DIM, DIM), jnp.float32)
    state = jax.eval_shape(
        lambda params: jdp.TrainState.create(params, tx), {"w": matrix, "v": matrix}
    )
    rows = ShapeDtypeStruct((ROWS * ranks, DIM), jnp.float32)
    return jdp.explain(step_of(loss_fn, **options), state, rows).memory


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (4, 0), (2, 1), (4, 1)])
def test_sums_over_micro_batches_are_gradients(ranks, stage, accumulate):
    found = memory(ranks, stage, accumulate=accumulate)
    # In the loop: both sums, the gradient of one matrix that is added next, and one cotangent.
    layer = 4 * DIM * (ROWS // accumulate)
    assert found.gradients == 2 * MATRIX + MATRIX + layer
    assert found.activations == layer  # after tanh
    assert found.temporaries < MATRIX + 2 * layer


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_that_travel_with_the_loss_are_not_results_of_the_step(ranks):
    # Both gradients, and the cotangent of which the second one is made.
    assert memory(ranks, 0).gradients == 2 * MATRIX + 4 * DIM * ROWS
    # Both gradients, which are one bucket, and this rank's parts of them.
    assert memory(ranks, 1).gradients == 2 * MATRIX + 2 * MATRIX // ranks


def live(body, *, others=""):
    return step_memory.fullest(
        HloProgram(f"HloModule step\n\n{others}ENTRY %main {{\n{body}\n}}\n")
    )


def test_a_result_leaves_alone_what_is_reduced_with_it():
    found = live("""  %x = f32[8,8]{1,0} parameter(0)
  %loss = f32[] fusion(%x), kind=kLoop, calls=%f, metadata={op_name="jvp()/mean"}
  %dot = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="transpose(jvp())/dot"}
  %sum = (f32[8,8]{1,0}, f32[]) custom-call(%x, %dot, %loss), custom_call_target="jdp_all_reduce", output_to_operand_aliasing={{0}: (1, {}), {1}: (2, {})}
  %mean = f32[] get-tuple-element(%sum), index=1
  %gradient = f32[8,8]{1,0} get-tuple-element(%sum), index=0
  %new = f32[8,8]{1,0} fusion(%x, %gradient), kind=kLoop, calls=%f, metadata={op_name="sub"}
  ROOT %results = (f32[8,8]{1,0}, f32[]) tuple(%new, %mean)""")  # noqa: E501
    assert found == (0, 256, 0)


def test_what_a_start_reads_is_in_memory_until_its_done():
    found = live("""  %x = f32[8,8]{1,0} parameter(0)
  %dot = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="transpose(jvp())/dot"}
  %begun = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%dot), dimensions={0}
  %tanh = f32[4,8]{1,0} tanh(%x), metadata={op_name="jvp()/tanh"}
  %part = f32[2,8]{1,0} reduce-scatter-done(%begun)
  ROOT %new = f32[2,8]{1,0} fusion(%part, %tanh), kind=kLoop, calls=%f, metadata={op_name="sub"}""")
    assert found == (128, 256 + 64, 0)


def test_all_reduces_that_run_meanwhile_take_the_memory_of_their_results():
    found = live("""  %x = f32[8,8]{1,0} parameter(0)
  %begun = f32[8,8]{1,0} all-reduce-start(%x), to_apply=%add
  %sum = f32[8,8]{1,0} all-reduce-done(%begun)
  ROOT %new = f32[] fusion(%sum, %x), kind=kLoop, calls=%f, metadata={op_name="sub"}""")
    assert found == (0, 256, 0)


@pytest.mark.parametrize(
    "op", ["all-gather(%x)", 'custom-call(%x), custom_call_target="jdp_all_gather"']
)
def test_parameters_that_are_gathered_are_not_gradients(op):
    found = live(f"""  %x = f32[2,8]{{1,0}} parameter(0)
  %whole = f32[8,8]{{1,0}} {op}
  %tanh = f32[8,8]{{1,0}} tanh(%whole), metadata={{op_name="jvp()/tanh"}}
  ROOT %sum = f32[] fusion(%tanh, %whole), kind=kLoop, calls=%f""")
    assert found == (256, 0, 256)


def test_an_update_that_reads_parameters_and_gradients_is_not_a_gradient():
    found = live("""  %x = f32[8,8]{1,0} parameter(0)
  %dot = f32[8,8]{1,0} dot(%x, %x), metadata={op_name="transpose(jvp())/dot"}
  %scaled = f32[8,8]{1,0} multiply(%dot, %dot), metadata={op_name="jit(clip)/mul"}
  %update = f32[9,8]{1,0} fusion(%x, %scaled), kind=kLoop, calls=%f, metadata={op_name="mul"}
  ROOT %new = f32[8,8]{1,0} fusion(%x, %update), kind=kLoop, calls=%f, metadata={op_name="sub"}""")
    assert found == (0, 256, 288)
