"""Where varying values come from though nothing says so: the host, the device, kernels."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import compute_on, io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata

from corpus.wrong import corpus
from corpus.wrong.corpus import local, numbers, right

SCALAR = jax.ShapeDtypeStruct((), np.float32)
COUNTER = itertools.count()
VECTOR = jax.ShapeDtypeStruct((4,), np.float32)

wrong = functools.partial(corpus.wrong, "varies", make=numbers)


def rank():
    return lax.axis_index("data").astype(np.float32)


@wrong("new state['a']")
def rank_itself(state, batch):
    return {**state, "a": state["a"] + rank()}, {}


@wrong("new state['a']")
def rank_times_zero_in_front_of_a_nan(state, batch):
    return {**state, "a": state["a"] + 0 * jnp.log(-rank())}, {}


@wrong("new state['a']")
def number_from_the_host(state, batch):
    return {**state, "a": io_callback(lambda: np.float32(next(COUNTER)), SCALAR)}, {}


@wrong("new state['a']")
def number_from_the_host_in_order(state, batch):
    def counted(a):
        return a + np.float32(next(COUNTER))

    return {**state, "a": io_callback(counted, SCALAR, state["a"], ordered=True)}, {}


@wrong("new state['a']")
def function_of_the_host_of_own_rows(state, batch):
    return {**state, "a": jax.pure_callback(lambda x: x, SCALAR, local(batch))}, {}


@right(make=numbers)
def function_of_the_host_of_the_state(state, batch):
    return {**state, "a": jax.pure_callback(lambda x: x, SCALAR, state["a"])}, {}


@wrong("new state['a']")
def random_number_of_the_device(state, batch):
    return {**state, "a": lax.rng_uniform(0.0, 1.0, ())}, {}


@wrong("new state['v']")
def random_bits_of_an_own_key(state, batch):
    key = jnp.full((4,), lax.axis_index("data"), jnp.uint32)
    _, bits = lax.rng_bit_generator(key, (4,))
    return {**state, "v": bits.astype(np.float32)}, {}


@wrong("new state['v']", since=(0, 11))
def memory_that_nobody_wrote(state, batch):
    return {**state, "v": jnp.empty(4)}, {}


@wrong("new state['a']")
def foreign_function_of_own_rows(state, batch):
    return {**state, "a": jax.ffi.ffi_call("some_target", SCALAR)(local(batch))}, {}


@wrong("new state['a']")
def foreign_function_with_a_side_effect(state, batch):
    call = jax.ffi.ffi_call("some_target", SCALAR, has_side_effect=True)
    return {**state, "a": call(state["a"])}, {}


# Kernels


@wrong("new state['v']")
def kernel_that_asks_for_its_rank(state, batch):
    def kernel(v, out):
        out[...] = v[...] + rank()

    return {**state, "v": pl.pallas_call(kernel, out_shape=VECTOR, interpret=True)(state["v"])}, {}


@wrong("new state['v']")
def kernel_over_own_rows(state, batch):
    def kernel(v, x, out):
        out[...] = v[...] + x[0, 0] + pl.program_id(0)

    call = pl.pallas_call(kernel, out_shape=VECTOR, grid=(1,), interpret=True)
    return {**state, "v": call(state["v"], batch["x"])}, {}


@right(make=numbers)
def kernel_over_the_state(state, batch):
    def kernel(v, x, out):
        out[...] = v[...] + x[0] + pl.program_id(0)

    call = pl.pallas_call(kernel, out_shape=VECTOR, grid=(1,), interpret=True)
    return {**state, "v": call(state["v"], state["v"])}, {}


@wrong("new state['v']")
def kernel_that_overwrites_its_operand(state, batch):
    def kernel(v, x, out):
        out[...] += x[0, 0]

    call = pl.pallas_call(kernel, out_shape=VECTOR, input_output_aliases={0: 0}, interpret=True)
    return {**state, "v": call(state["v"], batch["x"])}, {}


@wrong("new state['v']")
def kernel_whose_block_is_chosen_by_rank(state, batch):
    def kernel(v, out):
        out[...] = jnp.broadcast_to(v[...], (4,))

    block = pl.BlockSpec((1,), lambda i: (lax.axis_index("data"),))
    whole = pl.BlockSpec((4,), lambda i: (0,))
    call = pl.pallas_call(
        kernel, out_shape=VECTOR, grid=(1,), in_specs=[block], out_specs=whole, interpret=True
    )
    return {**state, "v": call(state["v"])}, {}


@wrong("new state['v']")
def state_of_a_kernel_without_a_kernel(state, batch):
    def add(ref):
        ref[...] += local(batch)

    return {**state, "v": pl.run_state(add)(state["v"])}, {}


# Bodies of other operations


@wrong("new state['v']")
def partitioned_by_hand(state, batch):
    shift = custom_partitioning(lambda v: v + rank())
    shift.def_partition(
        partition=lambda *args: None,
        infer_sharding_from_operands=lambda *args: None,
        sharding_rule="i -> i",
    )
    return {**state, "v": shift(state["v"])}, {}


@wrong("new state['a']")
def computed_on_the_host(state, batch):
    on_host = getattr(compute_on, "compute_on2", compute_on.compute_on)
    space = jax.memory.Space.Device
    double = on_host(lambda x: 2 * x, compute_type="device_host", out_memory_spaces=space)
    return {**state, "a": double(local(batch))}, {}


@wrong("new state['a']")
def kept_in_the_memory_of_the_host(state, batch):
    away = jax.device_put(local(batch), jax.memory.Space.Host)
    return {**state, "a": jax.device_put(away, jax.memory.Space.Device)}, {}


@wrong("new state['a']")
def under_metadata_for_the_compiler(state, batch):
    return {**state, "a": set_xla_metadata(local(batch), key="value")}, {}


@wrong("new state['a']")
def exported_and_called(state, batch):
    double = jax.export.export(jax.jit(lambda x: 2 * x))(SCALAR)
    return {**state, "a": double.call(local(batch))}, {}


@wrong("new state['a']")
def composite_operation(state, batch):
    double = lax.composite(lambda x: 2 * x, name="corpus.double")
    return {**state, "a": double(local(batch))}, {}
