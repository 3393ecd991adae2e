"""Functions with derivatives and batching of their own, and what is computed again."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify

from corpus.right.corpus import (
    add_loss,
    loss,
    loss_fn,
    mean_error,
    minimises,
    params,
    plain,
    predict,
    right,
)


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_jvp
def softened_sign(x):
    return jnp.sign(x)


@softened_sign.defjvp
def _softened_sign_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jnp.sign(x), dx / (1 + x**2)


@jax.custom_batching.custom_vmap
def doubled(x):
    return 2 * x


@doubled.def_vmap
def _doubled_rows(axis_size, in_batched, x):
    return 2 * x, in_batched[0]


@loss()
def custom_vjp(p, batch):
    return mean_error(clipped_gradient(predict(p, batch["rows"])), batch)


@loss()
def custom_jvp(p, batch):
    return mean_error(softened_sign(predict(p, batch["rows"])), batch)


@loss()
def custom_vmap(p, batch):
    rows = jax.vmap(doubled)(batch["rows"])
    return mean_error(predict(p, rows), batch)


@loss()
def custom_gradient(p, batch):
    @jax.custom_gradient
    def softplus(x):
        return jnp.log1p(jnp.exp(x)), lambda g: g * jax.nn.sigmoid(x)

    return mean_error(softplus(predict(p, batch["rows"])), batch)


@loss()
def converted_closure(p, batch):
    of_rows, captured = jax.closure_convert(lambda x: predict(p, x), batch["rows"])
    return mean_error(of_rows(batch["rows"], *captured), batch)


@loss()
def checked_for_nan(p, batch):
    y = predict(p, batch["rows"])
    return mean_error(eqx.error_if(y, jnp.isnan(y).any(), "a prediction is NaN"), batch)


@right()
def functionalised_checks(state, batch):
    def loss(p):
        value = loss_fn(p, batch)
        checkify.check(value < 100, "the loss is {x}", x=value)
        return value

    _, (value, grads) = checkify.checkify(jax.value_and_grad(loss))(state.params)
    return state.apply_gradients(grads), {"loss": value}


@loss()
def straight_through(p, batch):
    y = predict(p, batch["rows"])
    return mean_error(y + lax.stop_gradient(jnp.round(y) - y), batch)


@loss()
def reversed_gradient(p, batch):
    """Domain adaptation: a custom_vjp that closes over a parameter of the step."""

    @jax.custom_vjp
    def reverse(x):
        return x

    reverse.defvjp(lambda x: (x, None), lambda _, g: (-0.1 * g,))
    return mean_error(predict({**p, "b": reverse(p["b"])}, batch["rows"]), batch)


@loss(lambda: {**params(), "shift": np.float32(0.1)})
def mean_over_the_rows_of_a_vmap(p, batch):
    """A vmap has an axis of its own, of another name than the ranks'."""

    def of_row(x):
        y = predict(p, x)
        return y - lax.pmean(y, "rows") + p["shift"]

    return mean_error(jax.vmap(of_row, axis_name="rows")(batch["rows"]), batch)


@loss()
def mean_over_the_rows_of_a_vmap_called_data(p, batch):
    def of_row(x):
        y = predict(p, x)
        return y - lax.pmean(y, "data") + p["b"]

    return mean_error(jax.vmap(of_row, axis_name="data")(batch["rows"]), batch)


@loss()
def mean_over_rows_and_ranks(p, batch):
    def of_row(x):
        y = predict(p, x)
        return y - lax.stop_gradient(lax.pmean(y, ("rows", "data"))) + p["b"]

    return mean_error(jax.vmap(of_row, axis_name="rows")(batch["rows"]), batch)


POLICIES = jax.checkpoint_policies


def rematerialised(name, policy):
    def deep(p, x):
        hidden = checkpoint_name(jnp.tanh(x @ p["w"] @ p["w"].T), "hidden")
        return jnp.tanh(hidden @ p["w"] + p["b"])

    def loss_fn(p, batch):
        return mean_error(jax.checkpoint(deep, policy=policy)(p, batch["rows"]), batch)

    add_loss(f"remat, {name}", loss_fn)


OFFLOAD = dict(offload_src="device", offload_dst="pinned_host", names_which_can_be_saved=[])
rematerialised("nothing saved", POLICIES.nothing_saveable)
rematerialised("everything saved", POLICIES.everything_saveable)
rematerialised("dots saved", POLICIES.dots_saveable)
rematerialised("by name", POLICIES.save_only_these_names("hidden"))
rematerialised("all names but one", POLICIES.save_any_names_but_these("hidden"))
rematerialised(
    "offloaded",
    POLICIES.save_and_offload_only_these_names(names_which_can_be_offloaded=["hidden"], **OFFLOAD),
)


@right()
def checkpoint_of_the_whole_loss(state, batch):
    return minimises(jax.checkpoint(loss_fn))(state, batch)


@right()
def jit_inside_of_the_step(state, batch):
    @functools.partial(jax.jit, static_argnames="power")
    def inner(p, batch, power):
        return jnp.mean(jnp.abs(predict(p, batch["rows"]) - batch["targets"]) ** power)

    return minimises(functools.partial(inner, power=2))(state, batch)


@right()
def checkpoint_of_the_whole_step(state, batch):
    return jax.checkpoint(plain)(state, batch)


@right()
def one_jitted_update_for_two_batches(state, batch):
    @jax.jit
    def update(state, rows):
        return minimises(loss_fn)(state, {**batch, "rows": rows})

    state, _ = update(state, batch["rows"])
    return update(state, -batch["rows"])


@loss()
def barrier_and_scope(p, batch):
    with jax.named_scope("layer"):
        rows, p = lax.optimization_barrier((batch["rows"], p))
        return mean_error(predict(p, rows), batch)


@loss()
def composite(p, batch):
    @functools.partial(lax.composite, name="tests.whitened")
    def whitened(x):
        return (x - x.mean()) / (1e-3 + x.std())

    return mean_error(predict(p, whitened(batch["rows"])), batch)
