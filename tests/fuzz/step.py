"""The step of a program, written with jdp."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jdp
from fuzz import model, states
from fuzz.program import EVERY


def optimizer(p):
    """Return the optimizer of a program, over its ranks."""
    options = {
        "axis_name": p.tx_axes,
        "all_reduce": getattr(jdp.collectives, p.algorithm),
        "bucket_bytes": p.bucket_bytes,
        "mean": p.reduce != "sum",
    }
    tx = model.optimizer(p)
    if p.is_local:
        options = {name: options[name] for name in ("axis_name", "all_reduce")} | {"every": EVERY}
        if p.is_diloco:
            return jdp.diloco(tx, model.outer_optimizer(p), **options)
        return jdp.local_sgd(tx, **options)
    tx = jdp.skip_nonfinite(tx) if p.optimizer == "skipping" else tx
    tx = jdp.dynamic_loss_scale(tx, initial=model.SCALE) if p.optimizer == "loss_scale" else tx
    if p.stage == 0:
        return jdp.replicated(tx, **options)
    over = {"all": None, "outer": p.tx_axes[0], "inner": p.tx_axes[-1]}[p.over]
    return jdp.sharded(
        tx, stage=p.stage, min_size=p.min_size, over=over, keep_gathered=p.tx == "kept", **options
    )


def _over(p, weight):
    axes, step = p.axes, p.run == "train_step"
    given = {} if step else {"weight": weight}
    reduce = getattr(jdp.collectives, p.algorithm)
    return model.Over(
        mean=lambda x: jdp.mean_over_ranks(x, axis_name=axes, **given),
        total=lambda x: jdp.sum_over_ranks(x, axis_name=axes),
        gather=lambda x: lax.all_gather(x, axes, tiled=True),
        gradient=lambda g: jdp.sync_gradients(g, axis_name=axes, all_reduce=reduce, **given),
        divide=lambda x, w: x / w,  # 0 / 0 on a rank of which nothing counts
        scan=lambda f, x, layers: jdp.scan_layers(
            f, x, layers, axis_name=axes, late=p.model.startswith("late")
        ),
        elsewhere=functools.partial(_elsewhere, axes),
    )


def _elsewhere(axes, fn, x, ids):
    num_ranks = lax.axis_size(axes)
    rank = ids % num_ranks
    order = jnp.argsort(rank, stable=True)
    counts = jnp.zeros((num_ranks, 1), int).at[rank].add(1)
    most = num_ranks * len(x)
    received, _, back = jdp.ragged_all_to_all(x[order], counts, max_rows=most, axis_name=axes)
    return jnp.zeros_like(x).at[order].set(back(fn(received)))


def _weight(batch):
    return model.weights(batch).sum()


def _loss(p, factor=1.0):
    """Return `(params, batch, key) -> (loss, what is reported)` of one rank."""
    weight = None if p.weight == "none" else _weight

    def loss_fn(params, batch, key):
        noise = jnp.zeros((len(batch["x"]), 2))
        if p.noise != "none":
            noise = jax.random.normal(key, noise.shape, float)
        if p.state != "none":
            noise = noise + batch["own"][:, None]
        over = _over(p, None if weight is None else weight(batch))
        loss, (mean, out) = model.loss(p, over, params, batch, noise)
        # Rows belong to a step of jdp's, elsewhere they would leave by P().
        is_used = p.metrics == "all" or p.state != "none"
        rows = jdp.rows(out) if p.run == "train_step" and is_used else None
        return loss * factor, {"mean": mean, "out": rows}

    return loss_fn


def _given(p, state, batch):
    """Return what the loss of one rank is computed from: rows with its state, and a key."""
    if p.library != "jdp":
        return batch, None
    if p.state != "none":
        own = state.model_state["own"].value
        batch = batch | {"own": jnp.repeat(own, p.rows if p.state == "rank" else 1)}
    return batch, state.key if p.noise == "rank" else state.shared_key


def body(p, factor=1.0):
    """Return the step of one rank: `(state, batch) -> (state, metrics)`."""
    axes, library = p.axes, states.OF[p.library]
    weight = None if p.weight == "none" else _weight
    is_step = p.run == "train_step"
    how, _, number = p.split.partition("=")
    split = {} if how == "whole" else {how: int(number)}
    loss_fn = _loss(p, factor)

    def differentiate_scaled(scale, *args):
        def scaled(*args):
            loss, aux = loss_fn(*args)
            return loss * scale, aux

        (loss, aux), grads = differentiate(scaled, *args)
        return (loss / scale, aux), grads

    def differentiate(loss_fn, params, batch, key):
        if p.loss == "global_mean":
            fn = jdp.global_mean(lambda *args: loss_fn(*args)[0], axis_name=axes)
            loss, grads = jax.value_and_grad(fn)(params, batch, key)
            return (loss, {}), grads
        if how == "whole" and p.run != "typed" and p.grad == "jax":
            return jax.value_and_grad(loss_fn, has_aux=True, allow_int=True)(params, batch, key)
        fn = jdp.value_and_grad(
            loss_fn,
            has_aux=True,
            axis_name=axes,
            **split,
            **({} if is_step else {"weight": weight}),
        )
        return fn(params, batch, key)

    def on_rank(state, batch):
        batch, key = _given(p, state, batch)
        given = library.params(state), batch, key
        if p.optimizer == "loss_scale":
            (loss, aux), grads = differentiate_scaled(state.opt_state.scale, *given)
        else:
            (loss, aux), grads = differentiate(loss_fn, *given)
        given = {} if is_step or weight is None else {"weight": weight(batch)}
        synced = p.reduce in ("synced", "by_axis") or p.loss == "global_mean"
        if synced and p.loss != "global_mean":
            options = {"all_reduce": getattr(jdp.collectives, p.algorithm), **given}
            for names in axes if p.reduce == "by_axis" else [p.tx_axes]:
                grads = jdp.sync_gradients(
                    grads, axis_name=names, bucket_bytes=p.bucket_bytes, **options
                )
        metrics = {"loss": loss}
        if p.metrics == "all" and aux:
            metrics["mean"] = aux["mean"]
        if not is_step:
            metrics = jdp.mean_over_ranks(metrics, axis_name=axes, **given)
        if p.metrics == "all":
            counted = (model.weights(batch) > 0).sum()
            metrics["count"] = jdp.sum_over_ranks(counted, axis_name=axes)
            if is_step and aux:
                metrics["out"] = aux["out"]
            if synced:
                squares = [jnp.sum(g.astype(float) ** 2) for g in jax.tree.leaves(grads)]
                scale = state.opt_state.scale if p.optimizer == "loss_scale" else 1.0
                metrics["norm"] = jnp.sqrt(sum(squares)) / scale
        if p.state != "none":
            [out] = jax.tree.leaves(aux["out"])
            moved = jnp.sin(out)
            own = state.model_state["own"].value
            moved = 0.5 * own + 0.1 * (moved if p.state == "rows" else moved.mean(keepdims=True))
            state = state.replace(model_state={"own": jdp.per_rank(moved)})
        return library.updated(state, grads, synced), metrics

    return on_rank


def train(p, factor=1.0):
    """Return the decorated step."""
    return jdp.train_step(body(p, factor), **_options(p), donate=p.donate)


def evaluate(p):
    """Return a decorated step that reports the loss and changes nothing."""

    def on_rank(state, batch):
        params = states.OF[p.library].params(state)
        return {"before": _loss(p)(params, *_given(p, state, batch))[0]}

    return jdp.eval_step(on_rank, **_options(p))


def virtual_ranks(p):
    return p.ranks if p.devices else None


def _options(p):
    weight = None if p.weight == "none" else _weight
    return {"axis_name": p.axes, "weight": weight, "virtual_ranks": virtual_ranks(p)}
