"""The regression problem of `support.training`, with rows for each rank and a mask."""

import jax
import jax.numpy as jnp
import numpy as np

from support import training
from support.training import predict


def batch(num_ranks=None, masked=False, rows=24):
    """24 rows (of each rank), a third of them masked out; all of the first quarter."""
    drawn = training.batch(seed=3, num_rows=rows * (num_ranks or 1))
    if masked:
        draw = np.random.default_rng(0).uniform
        drawn["mask"] = (draw(size=len(drawn["x"])) < 0.6) & (np.arange(len(drawn["x"])) >= 6)
    if num_ranks is None:
        return drawn
    return jax.tree.map(lambda x: x.reshape(num_ranks, rows, *x.shape[1:]), drawn)


def whole(ranks_rows):
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), ranks_rows)


def masked_loss(p, batch):
    """Not finite where no row counts."""
    errors = (predict(p, batch["x"]) - batch["y"])[:, 0] ** 2
    return jnp.sum(jnp.where(batch["mask"], errors, 0)) / jnp.sum(batch["mask"])


def count_rows(batch):
    return batch["mask"].sum()
