"""Stages 1 and 2 write new parameters into the memory of the old ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdp
from jdp import jax_compat

pytestmark = pytest.mark.optimized

SHAPES = {"a": (16, 8), "b": (24, 16)}  # 2 and 4 ranks split the first dim of both
CALL = re.compile(r"jdp_all_gather.*?output_to_operand_aliasing=({.*?\)})")


def trained(stage, ranks, *, donate=True, guarded=False):
    """Return a step of stage 1, 2 or of `replicated` (0), its state and its batch."""
    jdp.init(devices=jax.devices()[:ranks])
    tx = optax.sgd(0.5, momentum=0.5)
    tx = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    params = {
        name: jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) % 7 / 64
        for name, shape in SHAPES.items()
    }

    def loss_fn(p, x):
        return jnp.square(jnp.tanh(x @ p["b"]) @ p["a"]).mean()

    @jdp.train_step(donate=donate)
    def step(state, batch):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        new = state.apply_gradients(grads)
        if guarded:
            is_good = jnp.isfinite(jdp.mean_over_ranks(loss))
            new = jax.tree.map(lambda x, old: jnp.where(is_good, x, old), new, state)
        return new, {"loss": loss}

    batch = jnp.arange(8 * 24, dtype=jnp.float32).reshape(8, 24) % 5
    return step, jdp.TrainState.create(params, tx), batch


def num_overwritten(stage, **options):
    """Return how many parameters the gathers of a compiled step overwrite, and its copies."""
    step, state, batch = trained(stage, 2, **options)
    text = step.lower(state, batch).compile().as_text()
    found = CALL.findall(text)
    assert found
    copies = [line for line in text.splitlines() if re.search(r"= f32\[\d+,\d+\]\S* copy\(", line)]
    return sum(aliases.count("(") - 1 for aliases in found), copies


@pytest.mark.skipif(jax_compat.CPU_COPIES_SLICES, reason="XLA would copy what is overwritten")
@pytest.mark.parametrize("stage", [1, 2])
def test_new_parameters_overwrite_the_old_ones_without_a_copy(stage):
    assert num_overwritten(stage) == (len(SHAPES), [])


@pytest.mark.parametrize("options", [{"guarded": True}, {"donate": False}], ids=str)
def test_parameters_that_are_needed_later_are_not_overwritten(options):
    assert num_overwritten(1, **options)[0] == 0


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("stage, ranks", [(1, 2), (2, 4)])
def test_every_rank_has_the_parameters_of_replicated(stage, ranks, guarded):
    results = []
    for each in (0, stage):
        step, state, batch = trained(each, ranks, guarded=guarded)
        for _ in range(3):
            state, _ = step(state, batch)
        results.append(state.params)
    for name in SHAPES:
        expected = np.asarray(results[0][name])
        for shard in results[1][name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected)
