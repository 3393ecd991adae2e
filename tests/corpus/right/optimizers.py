"""Optax: every alias, contrib, and the wrappers, all inside `jdp.replicated`."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import jdp
from corpus.right.corpus import add, loss_fn, params, plain, state


def descends(name, tx, *, step=plain, runs=False):
    """Train `predict` with an optimizer, given or made by a function."""

    def make_state():
        return state(tx=jdp.replicated(tx() if callable(tx) else tx))

    add(f"optax: {name}", step, make_state, runs=runs)


def with_value(state, batch):
    """Hand the mean loss to an optimizer that reads it."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    loss = jdp.mean_over_ranks(loss)
    return state.apply_gradients(grads, value=loss), {"loss": loss}


def searches(state, batch):
    """Let an optimizer evaluate, and differentiate, the mean loss by itself."""
    mean_loss = jdp.global_mean(lambda p: loss_fn(p, batch))
    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    new = state.apply_gradients(grads, synced=True, value=loss, grad=grads, value_fn=mean_loss)
    return new, {"loss": loss}


def searches_from_state(state, batch):
    """As `searches`, with the value and gradient that the line search left in its state."""
    mean_loss = jdp.global_mean(lambda p: loss_fn(p, batch))
    value_and_grad = optax.value_and_grad_from_state(mean_loss)
    loss, grads = value_and_grad(state.params, state=state.opt_state)
    new = state.apply_gradients(grads, synced=True, value=loss, grad=grads, value_fn=mean_loss)
    return new, {"loss": loss}


def with_hessian(state, batch):
    """Pass the optimizer the mean loss, of which it takes products with the Hessian."""
    mean_loss = jdp.global_mean(lambda p: loss_fn(p, batch))
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads, obj_fn=mean_loss), {"loss": loss}


def sharpness_aware(state, batch):
    """Opaque SAM: it takes its inner gradients by itself."""
    mean_loss = jdp.global_mean(lambda p: loss_fn(p, batch))
    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    new = state.apply_gradients(grads, synced=True, grad_fn=lambda p, _: jax.grad(mean_loss)(p))
    return new, {"loss": loss}


def at_the_eval_parameters(state, batch):
    """Schedule-free training also reports the loss at the average."""
    new, metrics = plain(state, batch)
    average = contrib.schedule_free_eval_params(new.opt_state, new.params)
    return new, {**metrics, "average": loss_fn(average, batch)}


def ahead_of_slow_weights(state, batch):
    """Lookahead: the gradient is that of the fast weights."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params.fast, batch)
    return state.apply_gradients(grads), {"loss": loss}


def every_second_step(tx, period=2, **kwargs):
    return lambda: optax.MultiSteps(tx, period, **kwargs).gradient_transformation()


def skips_large(updates, *args):
    return optax.skip_large_updates(updates, *args, max_squared_norm=10.0)


def is_bias(p):
    return {"w": False, "b": True}


LOOKAHEAD = jdp.replicated(optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5))
COSINE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 50)
STAGES = optax.join_schedules(
    [optax.linear_schedule(0.0, 0.1, 3), optax.exponential_decay(0.1, 5, 0.9)], [3]
)
SAM = contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2)
OPAQUE_SAM = contrib.sam(
    optax.sgd(0.1),
    optax.chain(contrib.normalize(), optax.sgd(0.05)),
    opaque_mode=True,
    sync_period=2,
)

descends("adabelief", optax.adabelief(1e-3))
descends("adadelta", optax.adadelta(1e-3))
descends("adafactor", optax.adafactor(1e-3))
descends("adafactor, factored", optax.adafactor(1e-3, min_dim_size_to_factor=2))
descends("adagrad", optax.adagrad(1e-3))
descends("adam", optax.adam(1e-3))
descends("adamax", optax.adamax(1e-3))
descends("adamaxw", optax.adamaxw(1e-3))
descends("adamw", optax.adamw(1e-3, mask=is_bias))
descends("adamw with nesterov", optax.adamw(COSINE, nesterov=True))
descends("adan", optax.adan(1e-3))
descends("amsgrad", optax.amsgrad(1e-3))
descends("fromage", optax.fromage(1e-3))
descends("lamb", optax.lamb(1e-3))
descends("lars", optax.lars(1e-3))
descends("lion", optax.lion(1e-3))
descends("nadam", optax.nadam(1e-3))
descends("nadamw", optax.nadamw(1e-3))
descends("noisy_sgd", lambda: optax.noisy_sgd(1e-2, key=jax.random.key(0)))
descends("novograd", optax.novograd(1e-3))
descends("optimistic_adam_v2", optax.optimistic_adam_v2(1e-3))
descends("optimistic_gradient_descent", optax.optimistic_gradient_descent(1e-2))
descends("polyak_sgd", optax.polyak_sgd(), step=with_value)
descends("radam", optax.radam(1e-3))
descends("rmsprop", optax.rmsprop(1e-3, centered=True, momentum=0.9))
descends("rprop", optax.rprop(1e-2))
descends("sgd", optax.sgd(1e-2, momentum=0.9, nesterov=True))
descends("sgd with a schedule", optax.sgd(STAGES))
descends("sign_sgd", optax.sign_sgd(1e-2))
descends("signum", optax.signum(1e-2))
descends("sm3", optax.sm3(1e-2))
descends("yogi", optax.yogi(1e-3))
descends("lbfgs", optax.lbfgs(), step=searches_from_state)
descends("lbfgs without a line search", optax.lbfgs(0.1, linesearch=None))
descends(
    "a backtracking line search",
    optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)),
    step=searches_from_state,
    runs=True,
)
descends(
    "a zoom line search",
    optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)),
    step=searches,
)

descends("acprop", contrib.acprop(1e-3))
descends("ademamix", contrib.ademamix(1e-3))
descends("simplified_ademamix", contrib.simplified_ademamix(1e-3))
descends("adopt", contrib.adopt(1e-3))
descends("cocob", contrib.cocob())
descends("dadapt_adamw", contrib.dadapt_adamw())
descends("dog", contrib.dog(1.0))
descends("dowg", contrib.dowg(1.0))
descends("galore", lambda: contrib.galore(1e-3, rank=2))
descends("madgrad", contrib.madgrad(1e-3))
descends("mechanize", contrib.mechanize(optax.adam(1e-3)))
descends("momo", contrib.momo(), step=with_value)
descends("momo_adam", contrib.momo_adam(), step=with_value)
descends("muon", contrib.muon(1e-3))
descends("prodigy", contrib.prodigy())
descends(
    "reduce_on_plateau",
    optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=2)),
    step=with_value,
)
descends("sam", SAM, runs=True)
descends("sam, opaque", OPAQUE_SAM, step=sharpness_aware)
descends(
    "schedule_free",
    contrib.schedule_free(optax.sgd(0.1), 0.1),
    step=at_the_eval_parameters,
    runs=True,
)
descends("schedule_free_adamw", contrib.schedule_free_adamw(1e-3))
descends("sophia", contrib.sophia(1e-3), step=with_hessian)
descends("split_real_and_imaginary", contrib.split_real_and_imaginary(optax.adam(1e-3)))

descends(
    "chain with clip_by_global_norm", optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
)
descends("named_chain", optax.named_chain(("clip", optax.clip(0.1)), ("sgd", optax.sgd(0.1))))
descends("adaptive_grad_clip", optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)))
descends("clip_by_block_rms", optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)))
descends("centralize", optax.chain(optax.centralize(), optax.sgd(0.1)))
descends("add_decayed_weights", optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)))
descends(
    "add_noise", lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
)
descends("trust ratio", optax.chain(optax.scale_by_trust_ratio(), optax.scale(-0.1)))
descends("ema of updates", optax.chain(optax.sgd(0.1), optax.ema(0.9)))
descends(
    "monitor",
    optax.chain(
        optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}), optax.sgd(0.1)
    ),
)
descends("snapshot", optax.chain(optax.snapshot("before", optax.tree.norm), optax.sgd(0.1)))
descends("keep_params_nonnegative", optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()))
descends("zero_nans", optax.chain(optax.zero_nans(), optax.sgd(0.1)))
descends("flatten", optax.flatten(optax.adam(1e-3)))
descends("normalize_by_update_norm", optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)))
descends("apply_every", optax.chain(optax.sgd(0.1), optax.apply_every(2)))
descends("apply_if_finite", optax.apply_if_finite(optax.sgd(0.1), 3), runs=True)
descends("MultiSteps", every_second_step(optax.sgd(0.1)), runs=True)
descends(
    "MultiSteps with a schedule",
    every_second_step(optax.adam(1e-3), lambda step: jnp.where(step < 2, 1, 2)),
)
descends(
    "skip_not_finite",
    every_second_step(optax.sgd(0.1), should_skip_update_fn=optax.skip_not_finite),
)
descends("skip_large_updates", every_second_step(optax.sgd(0.1), should_skip_update_fn=skips_large))
descends(
    "conditionally_transform",
    optax.chain(
        optax.conditionally_transform(optax.clip(0.1), lambda step: step < 2), optax.sgd(0.1)
    ),
)
descends("conditionally_mask", optax.conditionally_mask(optax.sgd(0.1), lambda step: step < 2))
descends("masked", optax.masked(optax.sgd(0.1), is_bias))
descends(
    "partition", optax.partition({"x": optax.sgd(0.1), "y": optax.adam(1e-3)}, {"w": "x", "b": "y"})
)
descends("freeze", optax.chain(optax.sgd(0.1), optax.freeze({"w": False, "b": True})))
descends(
    "selective_transform",
    optax.selective_transform(optax.sgd(0.1), freeze_mask={"w": False, "b": True}),
)
descends(
    "set_to_zero",
    optax.partition({"x": optax.sgd(0.1), "y": optax.set_to_zero()}, {"w": "x", "b": "y"}),
)
descends("inject_hyperparams", lambda: optax.inject_hyperparams(optax.adam)(COSINE, b1=0.8))
descends(
    "stateless",
    optax.chain(optax.stateless(lambda g, p: jax.tree.map(jnp.sign, g)), optax.sgd(0.1)),
)
add(
    "optax: lookahead",
    ahead_of_slow_weights,
    lambda: state(optax.LookaheadParams.init_synced(params()), LOOKAHEAD),
    runs=True,
)
