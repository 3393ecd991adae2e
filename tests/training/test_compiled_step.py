"""What a call of a compiled step does in Python; behaviour is in `test_step.py`."""

import contextlib
import gc
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.python_calls import python_calls
from support.training import ranks

import jdp
from jdp.distributed import in_flight
from jdp.training.compiled_step import CompiledStep

pytestmark = pytest.mark.optimized


def test_a_compiled_step_takes_the_fast_path_of_jit():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients({"w": batch.mean(0)}), {}

    state = jdp.TrainState.create({"w": jnp.zeros(3)}, jdp.replicated(optax.sgd(0.1)))
    batch = jnp.ones((4, 3))
    first, (state, _) = python_calls(step, state, batch)
    later, _ = python_calls(step, state, batch)
    # What JAX calls in Python where its C++ does not know a signature, or has seen it fail once.
    assert "cache_miss" in first
    assert "cache_miss" not in later


def frames_of_jdp():
    """The functions of jdp that the caller runs below, outermost first."""
    frame, names = sys._getframe(1), []
    while frame:
        if frame.f_globals["__name__"].startswith("jdp."):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names[::-1]


# JAX records the whole Python stack for each operation that it traces.
def test_a_first_trace_of_the_author_is_below_few_frames():
    ranks(2)
    found = []

    @jdp.train_step
    def step(state, batch):
        found.append(frames_of_jdp())
        return state.apply_gradients({"w": batch.mean(0)}), {}

    state = jdp.TrainState.create({"w": jnp.zeros(3)}, jdp.replicated(optax.sgd(0.1)))
    step(state, jnp.ones((4, 3)))
    own = ["Step.__call__", "Step.run", "Step._run"]
    step_and_program = [*own, "CompiledStep.__call__", "CompiledStep._run"]
    trace = ["_trace", "meshless.<locals>.on_rank", "RankProgram._on_rank"]
    passes = ["CompiledStep._build_first", "probe", *trace]
    assert found == [[*step_and_program, *passes]]  # and not below `on_mesh`, in a second trace


def test_a_program_with_a_bare_partition_spec_has_no_operation_of_its_trace_without_a_mesh():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        total = jax.lax.psum(batch.sum(), "data")
        where = jax.sharding.PartitionSpec()
        return state + jax.lax.with_sharding_constraint(total, where), {}

    given = jnp.zeros(()), jnp.ones((4, 3))
    assert str(step.trace(*given).jaxpr).count(" = psum") == 1
    assert step(*given)[0] == 12
    with pytest.raises(ValueError, match=r"`step` .* at test_compiled_step.py:\d+, and virtual"):
        jdp.train_step(step.spec.fn, virtual_ranks=4)(*given)


def on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    return jdp.init(mesh)


@pytest.mark.parametrize("init", [lambda: ranks(1), lambda: ranks(3), on_an_explicit_mesh])
@pytest.mark.parametrize("is_set", [False, True])
def test_the_author_is_traced_once_for_each_set_of_shapes(init, is_set):
    mesh, num_traces = init(), 0

    @jdp.train_step
    def step(state, batch, scale, key):
        nonlocal num_traces
        num_traces += 1
        noise = jax.random.normal(key, (3,))
        return state.apply_gradients({"w": scale * batch.mean(0) + noise}), {}

    state = jdp.TrainState.create({"w": np.zeros(3)}, jdp.replicated(optax.sgd(0.1)))
    found = []
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        for num_rows in (12, 12, 24, 24):
            batch = np.ones((num_rows, 3), np.float32)
            state, _ = step(state, batch, 2.0, jax.random.key(num_rows))
            found.append(num_traces)
        step.lower(state, batch, 2.0, jax.random.key(0))
    assert [*found, num_traces] == [1, 1, 2, 2, 2]


def train_as_on_gpus():
    """The state after two steps of a program that is tuned as one for GPUs is, and its options."""
    jdp.init()

    @jdp.train_step
    def step(state, batch):
        return state.apply_gradients({"w": batch.mean(0)}), {}

    made, new_jit, new = [], CompiledStep._new_jit, CompiledStep.__init__

    def untuned(self, *args, **options):
        new(self, *args, **options)
        self._is_tuned = False

    def noted(self, options=None):
        made.append(options)
        return new_jit(self, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledStep, "__init__", untuned)
        patch.setattr(CompiledStep, "_new_jit", noted)
        w = jnp.zeros(4 * 2**20)  # 16 MiB of gradients
        state = jdp.TrainState.create({"w": w}, jdp.replicated(optax.sgd(1.0)))
        for batch in jdp.batches(np.ones((4, w.size), np.float32), 4, num_steps=2):
            state, _ = step(state, batch)
    return float(state.params["w"][0]), made


@pytest.mark.processes
def test_a_step_of_several_processes_is_tuned_by_the_bytes_that_it_sends(processes):
    options = {"xla_gpu_all_reduce_combine_threshold_bytes": 8 * 2**20}
    assert processes(2).run(train_as_on_gpus) == [(-2.0, [None, options])] * 2


# A table that the step closes over is part of its program, and as large as the author likes.
def table_of_a_dropped_step():
    table = jnp.arange(4.0)

    @jdp.train_step
    def step(state, batch):
        grads = {"w": state.params["w"] * table * batch.mean()}
        return state.apply_gradients(grads), {}

    state = jdp.TrainState.create({"w": np.ones(4, np.float32)}, jdp.replicated(optax.sgd(0.1)))
    step(state, np.ones(4, np.float32))
    in_flight.drain()
    return weakref.ref(table)


def test_a_dropped_step_leaves_nothing_of_its_program():
    ranks(2)
    table = table_of_a_dropped_step()
    jax.clear_caches()
    gc.collect()
    assert table() is None
