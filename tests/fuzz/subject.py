"""Training a program with jdp, in every way that the program names."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from fuzz import model


def train(p):
    """Return the state and the metrics of each step, as jdp leaves them on the devices."""
    mesh = _mesh(p)
    tx = jdp.replicated(
        model.optimizer(p),
        axis_name=p.tx_axes,
        all_reduce=getattr(jdp.collectives, p.algorithm),
        bucket_bytes=p.bucket_bytes,
        mean=p.reduce != "sum",
    )
    params = model.params(p)
    if p.auto > 1:  # one parameter is split, by the compiler
        params["w1"] = jax.device_put(params["w1"], NamedSharding(mesh, P(None, "model")))
    given = jax.device_get(params)
    state = jdp.TrainState.create(
        params, tx, seed=p.seed, trainable=model.trainable(p, params), model_state=_own(p)
    )
    before = jax.device_get(state) if p.processes == 1 else None
    trained, metrics = _LOOPS[p.loop if p.run == "train_step" else p.run](p, mesh, state)
    _require_same(given, params, "the arrays given to TrainState.create changed")
    if not p.donate and before is not None:
        _require_same(before, state, "donate=False, and the first state changed")
    named = {name: getattr(trained, name) for name in ("params", "opt_state", "step", "seed")}
    if p.state != "none":
        named["own"] = trained.model_state["own"].value
    return named, metrics


def _own(p):
    """Return state that is split over the ranks: a number for each rank or each row."""
    if p.state == "none":
        return None
    return {"own": jdp.per_rank(np.zeros(p.ranks * (p.rows if p.state == "rows" else 1)))}


def _mesh(p):
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    shape, names = p.mesh, ("a", "b") if len(p.mesh) == 2 else ("data",)
    if p.auto > 1:
        shape, names = (*shape, p.auto), (*names, "model")
    devices = np.array(devices[: p.ranks * p.auto]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return jdp.init(mesh, axis_name=p.axes)


def _require_same(before, after, what):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, err_msg=what), before, after)


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
    )


def _weight(batch):
    return model.weights(batch).sum()


def _body(p, factor=1.0):
    """Return the step of one rank: `(state, batch) -> (state, metrics)`."""
    axes = p.axes
    weight = None if p.weight == "none" else _weight
    is_step = p.run == "train_step"
    how, _, number = p.split.partition("=")
    split = {} if how == "whole" else {how: int(number)}

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
        rows = jdp.rows(out) if is_step and is_used else None
        return loss * factor, {"mean": mean, "out": rows}

    def differentiate(params, batch, key):
        if p.loss == "global_mean":
            fn = jdp.global_mean(lambda *args: loss_fn(*args)[0], axis_name=axes)
            loss, grads = jax.value_and_grad(fn)(params, batch, key)
            return (loss, {}), grads
        if how == "whole" and p.run != "typed":
            return jax.value_and_grad(loss_fn, has_aux=True, allow_int=True)(params, batch, key)
        fn = jdp.value_and_grad(
            loss_fn,
            has_aux=True,
            axis_name=axes,
            **split,
            **({} if is_step else {"weight": weight}),
        )
        return fn(params, batch, key)

    def body(state, batch):
        key = state.key if p.noise == "rank" else state.shared_key
        own = None
        if p.state != "none":
            own, rows = state.model_state["own"].value, p.rows if p.state == "rank" else 1
            batch = batch | {"own": jnp.repeat(own, rows)}
        (loss, aux), grads = differentiate(state.params, batch, key)
        given = {} if is_step or weight is None else {"weight": weight(batch)}
        synced = p.reduce in ("synced", "by_axis") or p.loss == "global_mean"
        if synced and p.loss != "global_mean":
            options = {"all_reduce": getattr(jdp.collectives, p.algorithm), **given}
            for names in axes if p.reduce == "by_axis" else [p.tx_axes]:
                grads = jdp.sync_gradients(
                    grads, axis_name=names, bucket_bytes=p.bucket_bytes, **options
                )
        metrics = {"loss": loss}
        if p.metrics == "all":
            metrics["mean"] = aux["mean"]
        if not is_step:
            metrics = jdp.mean_over_ranks(metrics, axis_name=axes, **given)
        if p.metrics == "all":
            counted = (model.weights(batch) > 0).sum()
            metrics["count"] = jdp.sum_over_ranks(counted, axis_name=axes)
            if is_step:
                metrics["out"] = aux["out"]
            if synced:
                squares = [jnp.sum(g.astype(float) ** 2) for g in jax.tree.leaves(grads)]
                metrics["norm"] = jnp.sqrt(sum(squares))
        if p.state != "none":
            [out] = jax.tree.leaves(aux["out"])
            moved = jnp.sin(out)
            moved = 0.5 * own + 0.1 * (moved if p.state == "rows" else moved.mean(keepdims=True))
            state = state.replace(model_state={"own": jdp.per_rank(moved)})
        return state.apply_gradients(grads, synced=synced), metrics

    return body


def _step(p, factor=1.0):
    weight = None if p.weight == "none" else _weight
    return jdp.train_step(_body(p, factor), axis_name=p.axes, weight=weight, donate=p.donate)


def _place(p, mesh, batch, *, lead=()):
    """Lay a global batch over the ranks; `lead` are dims before the rows."""
    sharding = NamedSharding(mesh, P(*lead, p.axes))

    def place(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)


def _feed(p, mesh):
    batches = model.batches(p)
    if p.feed == "batches":
        rows = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
        options = {"axis_name": p.axes, "mesh": mesh, "shuffle": False}
        return jdp.batches(rows, p.ranks * p.rows, num_steps=p.num_steps, mask=False, **options)
    if p.processes > 1:
        return [_place(p, mesh, batch) for batch in batches]
    return batches


def _python(p, mesh, state):
    steps = [_step(p)] if p.loop == "python" else [_step(p), _step(p, 0.5)]
    metrics = []
    for i, batch in enumerate(_feed(p, mesh)):
        state, reported = steps[i % len(steps)](state, batch)
        metrics.append(reported)
    return state, metrics


def _scan(p, mesh, state):
    batches = jax.tree.map(lambda *x: np.stack(x), *model.batches(p))
    batches = _place(p, mesh, batches, lead=(None,))
    step = _step(p)
    state, stacked = jax.jit(lambda s, b: lax.scan(step, s, b))(state, batches)
    return state, [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(p.num_steps)]


def _two_in_jit(p, mesh, state):
    one, other = _step(p), _step(p, 0.5)

    @jax.jit
    def both(state, first, second):
        state, reported = one(state, first)
        state, more = other(state, second)
        return state, (reported, more)

    metrics, batches = [], [_place(p, mesh, batch) for batch in model.batches(p)]
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        state, reported = both(state, first, second)
        metrics += reported
    return state, metrics


def _shard_map(p, mesh, state):
    mapped = jax.shard_map(
        _body(p),
        mesh=mesh,
        in_specs=(P(), P(p.axes)),
        out_specs=P(),
        check_vma=p.run == "typed",
    )
    step, metrics = jax.jit(mapped), []
    for batch in model.batches(p):
        state, reported = step(state, _place(p, mesh, batch))
        metrics.append(reported)
    return state, metrics


def _pmap(p, mesh, state):
    devices = list(mesh.devices.flat)
    step = jax.pmap(_body(p), axis_name="data", devices=devices)
    state = jax.tree.map(lambda x: jnp.stack([np.asarray(x)] * p.ranks), state)
    metrics = []
    for batch in model.batches(p):
        rows = jax.tree.map(lambda x: x.reshape(p.ranks, -1, *x.shape[1:]), batch)
        state, reported = step(state, rows)
        metrics.append(reported)
    return state, metrics


_LOOPS = {
    "python": _python,
    "alternate": _python,
    "scan": _scan,
    "two_in_jit": _two_in_jit,
    "shard_map": _shard_map,
    "typed": _shard_map,
    "pmap": _pmap,
}
