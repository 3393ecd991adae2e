"""`jdp.sharded` splits the optimizer's state in a state of Flax or nnx."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxTrainState
from support.training import assert_close, batch, fetched, loss_fn, params, ranks

import jdp
from jdp.reduction import shard_registry

NUM_STEPS = 4


def clipped_sgd():
    # The norm is over all parts: clipping by that of one rank's part would be seen.
    return optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.3, momentum=0.9))


def wide_params():
    # 24 rows are split over 2, 3 and 8 ranks; `b` of one number stays whole.
    draw = np.random.default_rng(1).normal
    return params() | {"w": draw(size=(5, 24)).astype("f"), "v": draw(size=(24, 1)).astype("f")}


class Flax:
    def state(self, tx):
        return FlaxTrainState.create(apply_fn=None, params=wide_params(), tx=tx)

    def step(self, state, batch):
        grads = jdp.value_and_grad(loss_fn)(state.params, batch)[1]
        return state.apply_gradients(grads=grads), {}

    def params(self, state):
        return state.params

    def momentum(self, state):
        return state.opt_state[1][0].trace["v"]


class Model(nnx.Module):
    def __init__(self):
        self.w, self.v, self.b = (nnx.Param(jnp.asarray(x)) for x in wide_params().values())

    def values(self):
        return {"w": self.w[...], "v": self.v[...], "b": self.b[...]}


class Nnx:
    def state(self, tx):
        model = Model()
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def step(self, state, batch):
        model, optimizer = state
        grads = nnx.grad(lambda model: loss_fn(model.values(), batch))(model)
        optimizer.update(model, grads)
        return (model, optimizer), {}

    def params(self, state):
        return state[0].values()

    def momentum(self, state):
        return state[1].opt_state[1][0].trace["v"][...]


@flax.struct.dataclass
class OwnState:
    weights: Any
    opt_state: Any
    tx: Any = flax.struct.field(pytree_node=False)


class WithoutParameters:
    """An optimizer that is not handed the parameters."""

    def state(self, tx):
        return OwnState(wide_params(), tx.init(wide_params()), tx)

    def step(self, state, batch):
        grads = jax.grad(loss_fn)(state.weights, batch)
        updates, opt_state = state.tx.update(grads, state.opt_state)
        weights = optax.apply_updates(state.weights, updates)
        return state.replace(weights=weights, opt_state=opt_state), {}

    def params(self, state):
        return state.weights

    def momentum(self, state):
        return state.opt_state[1][0].trace["v"]


def trained(library, tx, decorate):
    state = library.state(tx)
    step = decorate(library.step)
    for i in range(NUM_STEPS):
        state = step(state, batch(i))[0]
    return state


@pytest.mark.parametrize(
    "library, n, stage",
    [(Flax, 3, 1), (Flax, 2, 2), (Nnx, 8, 1), (Nnx, 3, 2), (WithoutParameters, 3, 1)],
)
def test_a_state_of_a_library_trains_as_one_device_with_the_optimizer_state_split(
    library, n, stage
):
    made = library()
    want = fetched(made.params(trained(made, clipped_sgd(), lambda step: step)))
    ranks(n)
    state = trained(made, jdp.sharded(clipped_sgd(), stage=stage, min_size=2), jdp.train_step)
    assert_close(fetched(made.params(state)), want, 1e-6)
    momentum = made.momentum(state)
    assert {shard.data.size for shard in momentum.addressable_shards} == {24 // n}
    assert len(momentum.addressable_shards) == n
    for leaf, value in zip(*map(jax.tree.leaves, (made.params(state), want)), strict=True):
        for shard in leaf.addressable_shards:  # on every rank
            np.testing.assert_allclose(shard.data, value[shard.index], rtol=1e-6, atol=1e-6)


def test_gradients_of_a_state_of_flax_are_split_from_stage_2_on():
    seen = []

    class Recorded(Flax):
        def step(self, state, batch):
            grads = jdp.value_and_grad(loss_fn, accumulate=2)(state.params, batch)[1]
            is_split = shard_registry.known(grads["v"]) is not None
            seen.append((is_split, id(grads["v"]) in shard_registry.means()))
            return state.apply_gradients(grads=grads), {}

    want = fetched(trained(Flax(), clipped_sgd(), lambda step: step).params)
    ranks(3)
    for stage in (1, 2, 3):
        tx = jdp.sharded(clipped_sgd(), stage=stage, min_size=2)
        assert_close(fetched(trained(Recorded(), tx, jdp.train_step).params), want, 1e-6)
        assert set(seen) == {(stage >= 2, stage >= 2)}
        seen.clear()


def test_gradients_that_are_means_already_are_not_averaged_again():
    class Synced(WithoutParameters):
        def step(self, state, batch):
            grads = jdp.sync_gradients(jax.grad(loss_fn)(state.weights, batch))
            updates, opt_state = state.tx.update(grads, state.opt_state, synced=True)
            weights = optax.apply_updates(state.weights, updates)
            return state.replace(weights=weights, opt_state=opt_state), {}

    ranks(3)
    tx = jdp.sharded(clipped_sgd(), min_size=2)
    got, want = (trained(each(), tx, jdp.train_step) for each in (Synced, WithoutParameters))
    assert_close(fetched(got.weights), fetched(want.weights), 1e-6)


def test_a_split_state_of_flax_continues_on_another_number_of_ranks(tmp_path):
    tx = jdp.sharded(clipped_sgd(), min_size=2)
    states = {}
    for n, num_steps in ((3, 2), (2, 4), (1, 4)):
        ranks(n)
        batches = jdp.batches(batch(), 12, num_steps=num_steps)
        directory = tmp_path / ("alone" if n == 1 else "together")
        with jdp.Checkpointer(directory, resume=True) as checkpointer:
            state = checkpointer.restore(Flax().state(tx), batches)
            step = jdp.train_step(Flax().step)
            for each in batches:
                state = step(state, each)[0]
                checkpointer.step(state, batches)
        states[n] = fetched((state.params, state.opt_state))
    assert_close(states[2], states[1], 1e-6)


def test_a_step_of_flax_with_one_optimizer_that_is_not_sharded_keeps_its_state_whole():
    ranks(2)
    pair = (
        Flax().state(jdp.sharded(clipped_sgd(), min_size=2)),
        Flax().state(jdp.replicated(clipped_sgd())),
    )

    @jdp.train_step
    def step(pair, batch):
        return tuple(Flax().step(each, batch)[0] for each in pair), {}

    for i in range(NUM_STEPS):
        pair = step(pair, batch(i))[0]
    assert_close(fetched(pair[0].params), fetched(pair[1].params), 1e-6)
    sizes = [each.opt_state[1][0].trace["v"].addressable_shards[0].data.size for each in pair]
    assert sizes == [12, 24]


@pytest.mark.parametrize("library", [Flax, Nnx])
def test_each_rank_updates_its_part(library):
    ranks(2)
    made = library()
    state = made.state(jdp.sharded(clipped_sgd(), min_size=2))
    found = jdp.explain(jdp.train_step(made.step), state, batch())
    sent = [bucket.kind for bucket in found.buckets for _ in bucket.leaves]
    # Gradients of `w` and `v` are scattered, with `b`, and their updates gathered. The norm has two
    # parts.
    kinds = "reduce-scatter", "all-gather", "all-reduce"
    assert [sent.count(kind) for kind in kinds] == [3, 2, 2]


@pytest.mark.parametrize("library", [Flax, Nnx])
def test_check_step_allows_for_the_digits_of_reduce_dtype(library):
    ranks(3)
    made = library()
    tx = jdp.sharded(clipped_sgd(), min_size=2, reduce_dtype=jnp.bfloat16)
    found = jdp.check_step(jdp.train_step(made.step), made.state(tx), batch())
    assert max(leaf.difference for leaf in found.leaves) > 1e-5  # float32 would be closer
