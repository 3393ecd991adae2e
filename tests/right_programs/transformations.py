"""JAX's transformations inside a step: derivatives of derivatives, own rules, remat, Refs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jdp
from right_programs.corpus import add_loss, loss, loss_fn, minimises, params, predict, right, state

POLICIES = jax.checkpoint_policies


def direction():
    return jax.tree.map(lambda x: np.full_like(x, 0.1), params())


# Derivatives of derivatives


@right()
def hessian_vector_product_forward_over_reverse(state, batch):
    grad_fn = jax.grad(lambda p: loss_fn(p, batch))
    grads, product = jax.jvp(grad_fn, (state.params,), (direction(),))
    return state.apply_gradients(jax.tree.map(lambda g, h: g - 0.1 * h, grads, product)), {}


@loss()
def hessian_vector_product_reverse_over_reverse(p, batch):
    grads = jax.grad(loss_fn)(p, batch)
    return loss_fn(p, batch) + 0.1 * optax.tree.vdot(grads, direction())


@loss(runs=True)
def gradient_penalty(p, batch):
    """WGAN-GP: the norm of the gradient in each input row."""
    slope = jax.vmap(jax.grad(lambda x: jnp.sum(predict(p, x))))(batch["rows"])
    return loss_fn(p, batch) + jnp.mean((jnp.linalg.norm(slope, axis=-1) - 1) ** 2)


@loss()
def jacobian_penalty(p, batch):
    jacobians = jax.vmap(jax.jacfwd(lambda x: predict(p, x)))(batch["rows"])
    backwards = jax.vmap(jax.jacrev(lambda x: predict(p, x)))(batch["rows"])
    return loss_fn(p, batch) + jnp.mean(jacobians * backwards)


@loss()
def score_matching(p, batch):
    """The trace of the Hessian in each row's input."""

    def energy(x):
        return jnp.sum(predict(p, x) ** 2)

    traces = jax.vmap(lambda x: jnp.trace(jax.hessian(energy)(x)))(batch["rows"])
    scores = jax.vmap(jax.grad(energy))(batch["rows"])
    return jnp.mean(traces + 0.5 * jnp.sum(scores**2, axis=-1))


@loss()
def physics_informed(p, batch):
    """The residual of a differential equation, by nested derivatives in the input."""

    def u(x):
        return jnp.sum(predict(p, batch["rows"][0].at[0].set(x)))

    residual = jax.vmap(lambda x: jax.grad(jax.grad(u))(x) + u(x))(batch["counts"])
    return jnp.mean(residual**2)


@loss(runs=True)
def model_agnostic_meta_learning(p, batch):
    """Each row is a task: one step on it, then the loss of another target."""

    def of_task(x, y):
        adapted = jax.tree.map(
            lambda q, g: q - 0.1 * g, p, jax.grad(loss_fn)(p, {"rows": x[None], "targets": y[None]})
        )
        return loss_fn(adapted, {"rows": x[None], "targets": -y[None]})

    return jnp.mean(jax.vmap(of_task)(batch["rows"], batch["targets"]))


@loss(lambda: {**params(), "log_decay": np.float32(-2)})
def hypergradient_through_an_unrolled_optimizer(p, batch):
    tx = optax.sgd(0.1, momentum=0.9)

    def inner(q):
        return loss_fn(q, batch) + jnp.exp(p["log_decay"]) * optax.tree.norm(q, squared=True)

    def body(carry, _):
        q, opt_state = carry
        updates, opt_state = tx.update(jax.grad(inner)(q), opt_state, q)
        return (optax.apply_updates(q, updates), opt_state), None

    start = {key: p[key] for key in ("w", "b")}
    (q, _), _ = lax.scan(body, (start, tx.init(start)), None, length=2)
    return loss_fn(q, {**batch, "targets": -batch["targets"]})


@loss()
def implicit_differentiation_by_hand(p, batch):
    """Ridge regression inside, with the derivative of its solution from the normal equations."""

    @jax.custom_vjp
    def ridge(features):
        return jnp.linalg.solve(features.T @ features + jnp.eye(3), features.T @ batch["targets"])

    def forward(features):
        return ridge(features), (features, ridge(features))

    def backward(kept, g):
        features, solution = kept
        u = jnp.linalg.solve(features.T @ features + jnp.eye(3), g)
        return (batch["targets"] @ u.T - features @ (u @ solution.T + solution @ u.T),)

    ridge.defvjp(forward, backward)
    features = predict(p, batch["rows"])
    return jnp.mean((features @ ridge(features) - batch["targets"]) ** 2)


@right()
def forward_gradient(state, batch):
    """One directional derivative along a direction that all ranks share."""
    keys = dict(zip(state.params, jax.random.split(state.shared_key, 2), strict=True))
    along = {k: jax.random.normal(keys[k], x.shape) for k, x in state.params.items()}
    loss, slope = jax.jvp(lambda p: loss_fn(p, batch), (state.params,), (along,))
    return state.apply_gradients(jax.tree.map(lambda v: slope * v, along)), {"loss": loss}


@right()
def linearized_and_transposed(state, batch):
    loss, linear = jax.linearize(lambda p: loss_fn(p, batch), state.params)
    (grads,) = jax.linear_transpose(linear, state.params)(jnp.float32(1))
    return state.apply_gradients(grads), {"loss": loss}


@right()
def pulled_back(state, batch):
    predictions, pullback = jax.vjp(lambda p: predict(p, batch["rows"]), state.params)
    error = predictions - batch["targets"]
    (grads,) = pullback(2 * error / error.size)
    return state.apply_gradients(grads), {"loss": jnp.mean(error**2)}


# Own rules


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


def mean_error(predictions, batch):
    return jnp.mean((predictions - batch["targets"]) ** 2)


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
    """A vmap's own axis, of another name than the ranks', and of the same meaning as BatchNorm's."""

    def of_row(x):
        y = predict(p, x)
        return y - lax.pmean(y, "rows") + p["shift"]

    return mean_error(jax.vmap(of_row, axis_name="rows")(batch["rows"]), batch)


@loss()
def mean_over_rows_and_ranks(p, batch):
    def of_row(x):
        y = predict(p, x)
        return y - lax.stop_gradient(lax.pmean(y, ("rows", "data"))) + p["b"]

    return mean_error(jax.vmap(of_row, axis_name="rows")(batch["rows"]), batch)


# Remat


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


# Refs


@right()
def rows_added_up_in_a_ref(state, batch):
    """The gradient of each row goes into a Ref, and the sum to the optimizer."""
    total = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), state.params)

    def add(i, _):
        row = {key: lax.dynamic_slice_in_dim(batch[key], i, 1) for key in ("rows", "targets")}
        grads = jax.grad(loss_fn)(state.params, row)
        jax.tree.map(lambda ref, g: ref.__setitem__(..., ref[...] + g), total, grads)
        return 0

    lax.fori_loop(0, batch["rows"].shape[0], add, 0)
    n = batch["rows"].shape[0]
    return state.apply_gradients(jax.tree.map(lambda ref: jax.freeze(ref) / n, total)), {}


@right(lambda: state(model_state=np.float32(0)))
def moving_average_in_a_ref(state, batch):
    """A Ref that holds what all ranks agree on, written from inside of a jit."""
    average = jax.new_ref(state.model_state)

    @jax.jit
    def note(loss):
        average[...] = 0.9 * average[...] + 0.1 * loss

    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    note(jdp.mean_over_ranks(loss))
    return state.apply_gradients(grads).replace(model_state=average[...]), {"loss": loss}


@right()
def parameters_in_refs(state, batch):
    """Three updates in place, under one loop, with mean gradients."""
    refs = jax.tree.map(jax.new_ref, state.params)

    def body(_, carry):
        p = jax.tree.map(lambda ref: ref[...], refs)
        grads = jdp.sync_gradients(jax.grad(loss_fn)(p, batch))
        jax.tree.map(lambda ref, g: ref.__setitem__(..., ref[...] - 0.1 * g), refs, grads)
        return carry

    lax.fori_loop(0, 3, body, 0)
    return state.replace(params=jax.tree.map(jax.freeze, refs)), {}


@right()
def a_ref_of_this_rank(state, batch):
    """What varies may lie in a Ref, as long as only its mean leaves."""
    largest = jax.new_ref(jnp.float32(0))

    def note(i, _):
        error = jnp.abs(predict(state.params, batch["rows"][i]) - batch["targets"][i]).max()

        def replace():
            largest[...] = error

        lax.cond(error > largest[...], replace, lambda: None)
        return 0

    lax.fori_loop(0, batch["rows"].shape[0], note, 0)
    new, metrics = minimises(loss_fn)(state, batch)
    return new, {**metrics, "largest": lax.pmax(largest[...], "data")}
