"""Loops with a `shard_map` or `pmap` of the author's own, for `jdp.uniformity`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jdp
from corpus.wrong.corpus import descend, local, loss_fn, params, rows, sgd


class Loop(NamedTuple):
    """A function of `(params, batch)`, and what `uniformity` must make of it.

    Attributes:
      name: what it shows.
      f: the function.
      outcome: a tree of "uniform" and "varying"; of a wrong one a regular expression.
      is_right: whether it must pass.
      axis_name: the data axis.
      by_rank: whether its batch has a first dim of ranks, as for `pmap`.
    """

    name: str
    f: Callable
    outcome: Any
    is_right: bool
    axis_name: str = "data"
    by_rank: bool = False

    def arguments(self) -> tuple:
        batch = rows()
        if self.by_rank:
            batch = jax.tree.map(lambda x: np.reshape(x, (4, 2, *x.shape[1:])), batch)
        return params(), batch


LOOPS: list[Loop] = []


WHOLE = P()


def mapped(*, outcome, is_right, out_specs=WHOLE, check_vma=False, axis_name="data"):
    """Record a function that runs on every rank of a shard_map."""
    mesh = jax.sharding.AbstractMesh((4,), (axis_name,), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P(axis_name)), "out_specs": out_specs}

    def note(on_rank):
        f = jax.shard_map(on_rank, mesh=mesh, check_vma=check_vma, **specs)
        LOOPS.append(Loop(on_rank.__name__, f, outcome, is_right, axis_name))
        return on_rank

    return note


def pmapped(*, outcome, is_right, out_axes=0):
    """Record a function that runs on every rank of a pmap."""

    def note(on_rank):
        f = jax.pmap(on_rank, axis_name="data", in_axes=(None, 0), out_axes=out_axes)
        LOOPS.append(Loop(on_rank.__name__, f, outcome, is_right, by_rank=True))
        return on_rank

    return note


ALL_UNIFORM = {"w": "uniform", "b": "uniform"}
may_differ = "`output{}` float32.*may differ from rank to rank along 'data'".format

right = functools.partial(mapped, is_right=True)
wrong = functools.partial(mapped, is_right=False)


@right(outcome=ALL_UNIFORM)
def synced_gradients(p, batch):
    return descend(p, jdp.sync_gradients(jax.grad(loss_fn)(p, batch)))


@wrong(outcome=may_differ(r"\['b'\]"))
def own_gradients(p, batch):
    return descend(p, jax.grad(loss_fn)(p, batch))


@right(outcome=ALL_UNIFORM)
def pmean_and_no_library(p, batch):
    return descend(p, lax.pmean(jax.grad(loss_fn)(p, batch), "data"))


@right(outcome=ALL_UNIFORM)
def wrapped_optimizer(p, batch):
    tx = sgd()
    updates, _ = tx.update(jax.grad(loss_fn)(p, batch), tx.init(p), p)
    return jax.tree.map(jnp.add, p, updates)


@right(outcome=ALL_UNIFORM)
def pmean_and_a_wrapped_optimizer(p, batch):
    tx = sgd()
    grads = lax.pmean(jax.grad(loss_fn)(p, batch), "data")
    updates, _ = tx.update(grads, tx.init(p), p)
    return jax.tree.map(jnp.add, p, updates)


@wrong(outcome=r" own_loops.py:\d+ .*synced=True.* 4 times .*JDP121")
def sum_handed_to_a_wrapped_optimizer(p, batch):
    tx = sgd()
    grads = lax.psum(jax.grad(loss_fn)(p, batch), "data")
    updates, _ = tx.update(grads, tx.init(p), p, synced=True)
    return jax.tree.map(jnp.add, p, updates)


@wrong(outcome=r"`\['b'\]`.* own_loops.py:\d+: .*JDP121")
def psum_and_a_wrapped_optimizer(p, batch):
    tx = sgd()
    grads = lax.psum(jax.grad(loss_fn)(p, batch), "data")
    updates, _ = tx.update(grads, tx.init(p), p)
    return jax.tree.map(jnp.add, p, updates)


@right(outcome=("uniform", "varying"), out_specs=(P(), P("data")))
def own_rows_put_together(p, batch):
    return jdp.mean_over_ranks(local(batch)), batch["y"]


@wrong(outcome=may_differ(r"\[1\]"))
def own_rows_called_whole(p, batch):
    return jdp.mean_over_ranks(local(batch)), batch["y"]


@wrong(outcome=r"`psum` at own_loops.py:\d+ over 'data' .*JDP103")
def sum_on_some_ranks(p, batch):
    return lax.cond(local(batch) > 0, lambda: lax.psum(p["b"], "data"), lambda: p["b"])


@right(outcome="uniform")
def sum_where_all_agree(p, batch):
    mean = lax.pmean(local(batch), "data")
    return lax.cond(mean > 0, lambda: lax.psum(p["b"], "data"), lambda: p["b"])


@right(outcome=ALL_UNIFORM, check_vma=True)
def gradients_that_types_have_summed(p, batch):
    return descend(p, jax.tree.map(lambda g: g / 4, jax.grad(loss_fn)(p, batch)))


@wrong(outcome=r"jax\.lax\.pmean\(x, 'data'\) of the loss.*JDP101")
def own_loss_skips_the_update(p, batch):
    loss, grads = jax.value_and_grad(loss_fn)(p, batch)
    new = descend(p, lax.pmean(grads, "data"))
    return jax.tree.map(lambda a, b: jnp.where(loss < 2, a, b), new, p)


@right(outcome=ALL_UNIFORM)
def mean_loss_skips_the_update(p, batch):
    loss, grads = jax.value_and_grad(loss_fn)(p, batch)
    new = descend(p, lax.pmean(grads, "data"))
    loss = lax.pmean(loss, "data")
    return jax.tree.map(lambda a, b: jnp.where(loss < 2, a, b), new, p)


@wrong(outcome=r"jax\.random\.fold_in\(key, .*JDP101")
def own_key_returned(p, batch):
    return jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))


@right(outcome=("uniform", "uniform"))
def own_key_drawn_from(p, batch):
    key = jax.random.key(0)
    noise = jax.random.normal(jax.random.fold_in(key, jax.lax.axis_index("data")))
    return lax.pmean(noise, "data"), key


# What the types of check_vma=True accept.
@wrong(outcome=may_differ(""), check_vma=True)
def decided_by_rank_in_a_typed_shard_map(p, batch):
    return lax.cond(local(batch) > 0, lambda: p["b"], lambda: p["b"] + 1)


@wrong(outcome=r"'rows'.*JDP101", axis_name="rows")
def own_gradients_over_an_axis_of_another_name(p, batch):
    return descend(p, jax.grad(loss_fn)(p, batch))


@pmapped(outcome=ALL_UNIFORM, is_right=True, out_axes=None)
def pmap_with_synced_gradients(p, batch):
    return descend(p, jdp.sync_gradients(jax.grad(loss_fn)(p, batch)))


@pmapped(outcome=r"'data'.*JDP101", is_right=False, out_axes=None)
def pmap_with_own_gradients(p, batch):
    return descend(p, jax.grad(loss_fn)(p, batch))


@pmapped(outcome="varying", is_right=True)
def pmap_with_own_losses(p, batch):
    return loss_fn(p, batch)
