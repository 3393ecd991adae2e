"""Every optimizer and transformation that optax exports, built with ordinary arguments."""

import inspect

import jax
import jax.numpy as jnp
import optax
import optax.contrib

NAMESPACES = {"optax": optax, "contrib": optax.contrib}

NOT_BUILT = {
    "contrib.differentially_private_aggregate": "takes gradients of every row",
    "contrib.dpsgd": "takes gradients of every row",
    "optax._deprecated_differentially_private_aggregate": "takes gradients of every row",
    "optax._deprecated_dpsgd": "takes gradients of every row",
    "optax.inject_hyperparams": "returns a factory; `injected` below is made by it",
    "optax.inject_stateful_hyperparams": "returns a factory, as inject_hyperparams",
    "optax.lookahead": "its parameters are of another type; `lookahead` below",
    "optax.measure_with_ema": "returns what it measures, not updates",
    "optax.optimistic_adam": "deprecated: optimistic_adam_v2",
}


def _adam():
    return optax.adam(1e-2)


def matrices(tree):
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)


def _kinds(tree):
    return jax.tree.map(lambda x: "matrix" if jnp.ndim(x) > 1 else "other", tree)


# What a parameter that has no default is given, by its name.
ARGUMENTS = {
    "adv_optimizer": lambda: optax.sgd(0.05),
    "base_optimizer": _adam,
    "clipping": lambda: 0.1,
    "decay": lambda: 0.9,
    "eta": lambda: 0.01,
    "f": lambda: lambda updates, params: jax.tree.map(lambda g: -0.1 * g, updates),
    "fast_optimizer": _adam,
    "freeze_mask": lambda: matrices,
    "gamma": lambda: 0.5,
    "inner": _adam,
    "learning_rate": lambda: 1e-2,
    "mask": lambda: matrices,
    "max_backtracking_steps": lambda: 5,
    "max_consecutive_errors": lambda: 3,
    "max_delta": lambda: 0.05,
    "max_linesearch_steps": lambda: 5,
    "max_norm": lambda: 0.5,
    "measure": lambda: optax.tree.norm,
    "measure_name": lambda: "norm",
    "optimizer": _adam,
    "param_labels": lambda: _kinds,
    "should_transform_fn": lambda: lambda step, **extra: step % 2 == 0,
    "step_size": lambda: -0.1,
    "step_size_fn": lambda: optax.linear_schedule(-0.1, 0.0, 10),
    "threshold": lambda: 0.1,
    "transforms": lambda: {"matrix": optax.adam(1e-2), "other": optax.sgd(0.1)},
    "tx": _adam,
}

# Other arguments than those.
SPECIAL = {
    "contrib.galore": lambda: optax.contrib.galore(1e-2, rank=2, update_proj_gap=5),
    "contrib.muon": lambda: optax.contrib.muon(1e-2),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.9),
    "contrib.sam": lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "optax.adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "optax.add_noise": lambda: optax.add_noise(0.01, 0.5, 3),
    "optax.chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "optax.named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", _adam())),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=3),
    "optax.scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
    ),
    "optax.scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)
    ),
    "optax.stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda g, p: -0.1 * g - 0.01 * p
    ),
}

# Not exported as a function that returns a transformation.
MORE = {
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 20)),
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    "nadam": lambda: optax.nadam(1e-2),
    "nadamw": lambda: optax.nadamw(1e-2),
    "sgd_with_clipped_blocks": lambda: optax.chain(
        optax.clip_by_block_rms(0.1), optax.sgd(0.1, momentum=0.9)
    ),
}


def exported():
    """Names such as "optax.adam" of all functions that return a transformation."""
    for label, module in NAMESPACES.items():
        for name, value in sorted(vars(module).items()):
            if inspect.isfunction(value):
                returned = inspect.signature(value).return_annotation
                if "GradientTransformation" in str(returned):
                    yield f"{label}.{name}"


def _built(name):
    if name in SPECIAL:
        return SPECIAL[name]
    label, _, function = name.partition(".")
    make = getattr(NAMESPACES[label], function)
    required = [
        parameter.name
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    return lambda: make(**{each: ARGUMENTS[each]() for each in required})


def _is_called_by_another(name):
    """Whether the optimizer of the same name calls it: `scale_by_adam` is what `adam` runs."""
    label, _, function = name.partition(".")
    return (
        hasattr(NAMESPACES[label], function.removeprefix("scale_by_")) and "scale_by_" in function
    )


OPTIMIZERS = {
    name: _built(name)
    for name in exported()
    if name not in NOT_BUILT and not _is_called_by_another(name)
} | MORE


def loss(params):
    """What line searches and estimators of curvature evaluate."""
    return sum(jnp.sum((x - 1.0) ** 2) for x in jax.tree.leaves(params)) / 2


def extra_args(name, params, grads):
    """What `update` of this optimizer takes besides gradients, state and parameters."""
    if name in ("contrib.momo", "contrib.momo_adam", "contrib.reduce_on_plateau"):
        return {"value": loss(params)}
    if name in ("optax.polyak_sgd", "optax.scale_by_polyak"):
        return {"value": loss(params)}
    if name == "contrib.sophia":
        return {"obj_fn": loss}
    if "linesearch" in name or name == "optax.lbfgs":
        return {"value": loss(params), "grad": grads, "value_fn": loss}
    return {}
