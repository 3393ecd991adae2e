"""Placing a state leaves little behind with its arrays, of which a model may have thousands."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.training import ranks

from jdp.step_spec import StepSpec
from jdp.training import placing

NUM_LEAVES = 100


def is_kept(_):
    return 0


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_an_array_of_a_state_keeps_two_objects_on_any_number_of_ranks(num_ranks):
    mesh = ranks(num_ranks)
    spec = StepSpec(is_kept, ("data",), None, donate=True, returns_state=True)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    state = jax.device_put([np.full(3, i, "float32") for i in range(NUM_LEAVES)], whole)
    placing.place_state(state, mesh, spec)  # what it imports or caches is there now
    state = jax.device_put([jnp.copy(leaf) for leaf in state], whole)
    gc.collect()
    before = len(gc.get_objects())
    placed = placing.place_state(state, mesh, spec)
    gc.collect()
    # A view of its data on the first device, and the sharding of that.
    assert len(gc.get_objects()) - before < 2.5 * NUM_LEAVES
    assert all(new is old for new, old in zip(placed, state, strict=True))
