"""`communication_plan`: what a step asks for, beside the exact sizes and the compiled program."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.training import ranks, step_of

import jdp

WRAPPERS = {
    "replicated": jdp.replicated,
    "xla": functools.partial(jdp.replicated, all_reduce=jdp.collectives.xla),
    "stage 1": jdp.sharded,
    "stage 2": functools.partial(jdp.sharded, stage=2),
    "stage 3": functools.partial(jdp.sharded, stage=3),
}
N = 4
SHAPES = {"w": (64, 256), "head": (256, 32), "odd": (5,), "half": (128, 64)}
SPLIT = {"w", "head", "half"}  # dims that N divides, and large enough
ROWS = np.ones((8, 64), np.float32)


def made(how):
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    params["half"] = params["half"].astype(jnp.bfloat16)
    return jdp.TrainState.create(params, WRAPPERS[how](optax.sgd(0.1)))


def loss_fn(params, batch):
    outputs = jnp.tanh(batch @ params["w"]) @ params["head"]
    half = (batch @ params["half"].T[:, :64].T).astype(jnp.float32)
    return jnp.mean(outputs**2) + half.mean() + params["odd"].sum()


def sizes(plan, kind, start):
    """The elements of each array of a kind, by the parameter at the end of its path."""
    found = Counter()
    for each in plan:
        for leaf in each.leaves if each.kind == kind else ():
            if leaf.path.startswith(start):
                found[leaf.path.split("'")[1]] += leaf.num_elements
    return found


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", WRAPPERS)
def test_each_gradient_is_in_it_once_with_its_exact_size(how, accumulate):
    ranks(N)
    plan = step_of(loss_fn, accumulate=accumulate).communication_plan(made(how), ROWS)
    whole = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    summed, scattered = (sizes(plan, kind, "grads") for kind in ("all-reduce", "reduce-scatter"))
    assert summed + scattered == whole
    assert SPLIT <= {*(scattered if how.startswith("stage") else summed)}
    # Where XLA would copy a slice of a parameter, jdp does not gather into it.
    gathered = sizes(plan, "all-gather", "state.params") + sizes(plan, "all-gather", "the update")
    assert gathered == ({name: whole[name] for name in SPLIT} if how.startswith("stage") else {})
    assert any(each.num_loops for each in plan) == (accumulate == 2 and how[-1] in "23")
    assert {each.algorithm for each in plan} == {"xla" if how == "xla" else "native"}
    assert not any(each.is_of_author for each in plan)
    for each in plan:
        own = {leaf.dtype: 2 if leaf.dtype == "bf16" else 4 for leaf in each.leaves}
        assert each.num_bytes == sum(own[x.dtype] * x.num_elements for x in each.leaves)
        assert not any("half" in x.path and x.dtype != "bf16" for x in each.leaves)
        assert str(each).startswith(f"{each.kind} of ")


@pytest.mark.parametrize("how", ["replicated", "stage 1", "stage 2", "stage 3"])
def test_native_calls_are_those_of_the_compiled_program(how):
    mesh = ranks(N)
    state, step = made(how), step_of(loss_fn)
    plan = step.communication_plan(state, ROWS)
    report = jdp.explain(step, state, jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype), on=mesh)
    planned = Counter((each.kind, each.dtype, each.num_bytes) for each in plan)
    compiled = Counter((each.kind, each.dtype, each.num_bytes) for each in report.buckets)
    assert planned == compiled


def test_a_collective_of_the_author_has_its_line():
    ranks(2)

    @jdp.train_step
    def step(state, batch):
        total = jax.lax.psum(batch.sum(), "data")
        return {"x": state["x"] + total}, {}

    (one,) = step.communication_plan({"x": jnp.zeros(())}, ROWS)
    assert (one.kind, one.algorithm, one.num_bytes, one.is_of_author) == (
        "all-reduce",
        "xla",
        4,
        True,
    )
    assert one.line.startswith("test_communication_plan.py:")


def test_keys_are_sent_as_their_words():
    ranks(3)

    @jdp.eval_step
    def step(state, batch, keys):
        return {"bits": jax.random.normal(jax.lax.all_gather(keys, "data", tiled=True)[0])}

    keys = jax.random.split(jax.random.key(0), 3)
    (one,) = [c for c in step.communication_plan({}, ROWS[:6], keys) if c.kind == "all-gather"]
    assert (one.dtype, one.num_bytes) == ("u32", 3 * 3 * 8) and "72 bytes" in str(one)


def test_a_step_that_is_refused_has_none():
    ranks(2)
    step = jdp.train_step(lambda state, batch: ({"x": state["x"] + batch.sum()}, {}))
    with pytest.raises(ValueError, match="JDP101"):
        step.communication_plan({"x": jnp.zeros(())}, ROWS)


@pytest.mark.parametrize("num_rows", [512, 4096])  # 4096 ids are sent in rounds
@pytest.mark.parametrize("size", [64, 63])  # 63 numbers a row: the table is split over its rows
@pytest.mark.parametrize("is_native", [True, False])
def test_lookups_in_a_sharded_table_exchange_ids_and_rows(num_rows, size, is_native):
    mesh = ranks(N)
    options = {} if is_native else {"all_reduce": jdp.collectives.xla}
    tx = jdp.sharded(optax.sgd(0.1), stage=3, **options)
    state = jdp.TrainState.create({"table": jnp.ones((num_rows, size))}, tx)

    @jdp.train_step
    def step(state, ids):
        def loss_fn(params):
            return jdp.sharded_embedding(params["table"], ids).mean()

        return state.apply_gradients(jax.grad(loss_fn)(state.params)), {}

    ids = np.arange(num_rows, dtype=np.int32)
    plan = step.communication_plan(state, ids)
    shape = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    report = jdp.explain(step, state, shape, on=mesh)
    planned = Counter((each.kind, each.dtype, each.num_bytes, each.num_loops > 0) for each in plan)
    compiled = [(each.kind, each.dtype, each.num_bytes, each.runs > 1) for each in report.buckets]
    assert planned == Counter(compiled), (plan, report.buckets)
