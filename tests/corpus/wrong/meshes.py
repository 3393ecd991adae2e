"""Meshes with further axes, data axes of other names and of several: all must agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdp
from corpus.wrong import corpus
from corpus.wrong.corpus import gradients, holding, local, sgd, training

BOTH = ("data", "model")
NUMBERS = holding(a=np.float32(1), v=np.arange(4, dtype=np.float32))


def mesh():
    return jax.make_mesh((2, 2), BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def on_two_axes():
    """The batch is split over "data"; "model" is the compiler's, or that of a nested shard_map."""
    jdp.init(mesh())
    return NUMBERS()


WHOLE = P()


def nested(f, *args, in_specs=WHOLE, out_specs=WHOLE):
    """Run on the ranks of "model", inside of a step over "data"."""
    return jax.shard_map(
        f, in_specs=in_specs, out_specs=out_specs, axis_names={"model"}, check_vma=False
    )(*args)


wrong = functools.partial(corpus.wrong, make=on_two_axes)
right = functools.partial(corpus.right, make=on_two_axes)


@wrong("varies", "new state['a']")
def forgotten_beside_another_axis(state, batch):
    return {**state, "a": local(batch)}, {}


@wrong("varies", "new state['a']")
def reduced_over_the_other_axis_only(state, batch):
    return {**state, "a": nested(lambda x: lax.pmean(x, "model"), local(batch))}, {}


@wrong("other axis", "new state['a']")
def rank_on_the_other_axis(state, batch):
    index = nested(lambda: lax.axis_index("model").astype(np.float32))
    return {**state, "a": state["a"] + index}, {}


@wrong("other axis", "new state['v']")
def shard_of_the_other_axis_called_whole(state, batch):
    def halves(v):
        return jnp.tile(v, 2)

    return {**state, "v": nested(halves, state["v"], in_specs=P("model"))}, {}


@right()
def shards_of_the_other_axis_put_together(state, batch):
    out = nested(lambda v: 2 * v, state["v"], in_specs=P("model"), out_specs=P("model"))
    return {**state, "v": out}, {}


@wrong("other axis", "new state['v']")
def scattered_over_the_other_axis_and_called_whole(state, batch):
    def scattered(v):
        return jnp.tile(lax.psum_scatter(v, "model", tiled=True), 2)

    return {**state, "v": nested(scattered, state["v"])}, {}


@wrong("other axis", "new state['a']")
def conditional_on_the_rank_on_the_other_axis(state, batch):
    def by_rank(a):
        return lax.cond(lax.axis_index("model") == 0, lambda: a, lambda: a + 1)

    return {**state, "a": nested(by_rank, state["a"])}, {}


@wrong("deadlock", "psum")
def sum_over_the_other_axis_on_some_of_its_ranks(state, batch):
    def by_rank(a):
        total = functools.partial(lax.psum, axis_name="model")
        return lax.cond(lax.axis_index("model") == 0, total, lambda a: a, a)

    return {**state, "a": nested(by_rank, state["a"])}, {}


@wrong("deadlock", "ppermute", "new state['a']")
def shift_along_the_other_axis_where_own_rows_say_so(state, batch):
    def by_rows(x, a):
        def shift(a):
            return lax.ppermute(a, "model", [(0, 1), (1, 0)])  # <- here

        return lax.cond(x > 0, shift, lambda a: a, a)

    return {**state, "a": nested(by_rows, local(batch), state["a"])}, {}


@right()
def sum_over_the_other_axis_where_own_rows_say_so(state, batch):
    # All ranks of "model" hold the same rows: they come to the sum together.
    def by_rows(x):
        return lax.cond(x > 0, lambda x: lax.pmean(x, "model"), lambda x: x, x)

    return {**state, "a": jdp.mean_over_ranks(nested(by_rows, local(batch)))}, {}


@wrong("varies", "new state['a']")
def result_of_a_nested_shard_map_kept_in_a_ref(state, batch):
    ref = jax.new_ref(state["a"])
    ref[...] = nested(lambda x: lax.pmean(x, "model"), local(batch))
    return {**state, "a": ref[...]}, {}


# Both axes split the batch


def on_both_axes():
    jdp.init(mesh(), axis_name=BOTH)
    return NUMBERS()


def training_on_both_axes():
    jdp.init(mesh(), axis_name=BOTH)
    return training(tx=sgd(axis_name=BOTH))


wrong = functools.partial(corpus.wrong, make=on_both_axes, axis_name=BOTH)
right = functools.partial(corpus.right, make=on_both_axes, axis_name=BOTH)


@wrong("varies", "new state['a']")
def reduced_over_one_of_two_data_axes(state, batch):
    return {**state, "a": lax.pmean(local(batch), "data")}, {}


@right()
def reduced_over_both_data_axes(state, batch):
    return {**state, "a": lax.pmean(local(batch), BOTH)}, {}


@right()
def reduced_over_one_data_axis_after_the_other(state, batch):
    return {**state, "a": lax.pmean(lax.pmean(local(batch), "data"), "model")}, {}


@wrong("varies", "new state['a']")
def rank_on_one_of_two_data_axes(state, batch):
    return {**state, "a": state["a"] * lax.axis_index("model")}, {}


@wrong("varies", "new state['a']")
def shifted_along_one_of_two_data_axes(state, batch):
    mean = lax.pmean(local(batch), BOTH)
    return {**state, "a": lax.ppermute(mean, "model", [(0, 1)])}, {}


@wrong("deadlock", "ppermute")
def shifted_along_one_data_axis_where_ranks_of_the_other_differ(state, batch):
    def shift(a):
        return lax.ppermute(a, "model", [(0, 1), (1, 0)])  # <- here

    differs = lax.axis_index("data") == 0
    return state, {"shifted": lax.cond(differs, shift, lambda a: a, state["a"])}


@right()
def summed_over_one_data_axis_where_ranks_of_the_other_differ(state, batch):
    def total(a):
        return lax.psum(a, "model")

    differs = lax.axis_index("data") == 0
    return state, {"summed": lax.cond(differs, total, lambda a: a, state["a"])}


@corpus.right(make=training_on_both_axes, axis_name=BOTH)
def reduced_over_one_of_two_axes_before_both(state, batch):
    return state.apply_gradients(lax.pmean(gradients(state, batch), "data")), {}


# The data axis has another name


def on_another_name():
    jdp.init(axis_name="batch", devices=jax.devices()[:4])
    return training(tx=sgd(axis_name="batch"))


wrong = functools.partial(corpus.wrong, make=on_another_name, axis_name="batch")
twice = functools.partial(corpus.twice, make=on_another_name, axis_name="batch")


@wrong("varies", "new state.params")
def forgotten_over_an_axis_of_another_name(state, batch):
    grads = gradients(state, batch)
    return state.replace(params=corpus.descend(state.params, grads)), {}


@twice("['w']", "['b']")
def reduced_twice_over_an_axis_of_another_name(state, batch):
    return state.apply_gradients(lax.pmean(gradients(state, batch), "batch")), {}
