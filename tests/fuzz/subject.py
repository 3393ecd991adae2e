"""Training a program with jdp, in every way that the program names."""

import contextlib
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdp
from fuzz import model, states, step
from jdp import axis
from jdp.collectives.cpu import shared_memory


def train(p):
    """Return the state and the metrics of each step, as jdp leaves them on the devices."""
    with _hosts(p):
        return _train(p)


@contextlib.contextmanager
def _hosts(p):
    if not p.apart:
        yield
        return
    apart = mock.patch.object(shared_memory, "why_apart", lambda *_: "the ranks are apart.")
    is_between = mock.patch.object(axis, "is_between_processes", lambda m: m is None or m.size > 1)
    with apart, is_between:
        yield


def _train(p):
    mesh = _mesh(p)
    tx = step.optimizer(p)
    params = model.params(p)
    if p.auto > 1:  # one parameter is split, by the compiler
        params["w1"] = jax.device_put(params["w1"], NamedSharding(mesh, P(None, "model")))
    given = jax.device_get(params)
    state = _state(p, params, tx)
    before = jax.device_get(state) if p.processes == 1 else None
    trained, metrics = _LOOPS[p.loop if p.run == "train_step" else p.run](p, mesh, state)
    _require_same(given, params, "the arrays given to the state changed")
    if not p.donate and before is not None:
        _require_same(before, state, "donate=False, and the first state changed")
    named = states.OF[p.library].named(trained)
    if p.is_local:
        del named["opt_state"]  # of each rank; outer updates read it
    if p.skips:
        guard = named["opt_state"]
        named |= {"opt_state": guard.inner_state, "num_skipped": guard.num_skipped}
        if p.optimizer == "loss_scale":
            named["scale"] = guard.scale
    if p.state != "none":
        named["own"] = trained.model_state["own"].value
    return named, metrics


def _state(p, params, tx):
    if p.library != "jdp":
        # A step donates the state, and with it arrays of the author's that it holds.
        return states.OF[p.library].create(jax.tree.map(lambda x: x.copy(), params), tx)
    trainable = model.trainable(p, params)
    return jdp.TrainState.create(params, tx, seed=p.seed, trainable=trainable, model_state=_own(p))


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
    if p.devices:
        shape = (p.devices,)
    devices = np.array(devices[: math.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    return jdp.init(mesh, axis_name=p.axes)


def _require_same(before, after, what):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, err_msg=what), before, after)


def _place(p, mesh, batch, *, lead=()):
    """Lay a global batch over the ranks; `lead` are dims before the rows."""
    is_split = p.ranks % mesh.devices.shape[0] == 0 if p.devices else True
    sharding = NamedSharding(mesh, P(*lead, p.axes) if is_split else P())

    def place(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)


def _feed(p, mesh):
    batches = model.batches(p)
    if p.feed == "batches":
        rows = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
        options = {"axis_name": p.axes, "mesh": mesh, "shuffle": False}
        options["virtual_ranks"] = step.virtual_ranks(p)
        return jdp.batches(rows, p.ranks * p.rows, num_steps=p.num_steps, mask=False, **options)
    if p.processes > 1:
        return [_place(p, mesh, batch) for batch in batches]
    return batches


def _python(p, mesh, state):
    steps = [step.train(p), step.train(p, 0.5)] if p.loop == "alternate" else [step.train(p)]
    measure, metrics = step.evaluate(p), []
    for i, batch in enumerate(_feed(p, mesh)):
        before = measure(state, batch) if p.loop == "evaluated" else {}
        state, reported = steps[i % len(steps)](state, batch)
        metrics.append(reported | before)
    return state, metrics


def _scan(p, mesh, state):
    batches = jax.tree.map(lambda *x: np.stack(x), *model.batches(p))
    batches = _place(p, mesh, batches, lead=(None,))
    one = step.train(p)
    state, stacked = jax.jit(lambda s, b: lax.scan(one, s, b))(state, batches)
    return state, [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(p.num_steps)]


def _two_in_jit(p, mesh, state):
    one, other = step.train(p), step.train(p, 0.5)

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
        step.body(p),
        mesh=mesh,
        in_specs=(P(), P(p.axes)),
        out_specs=P(),
        check_vma=p.run == "typed",
    )
    jitted, metrics = jax.jit(mapped), []
    for batch in model.batches(p):
        state, reported = jitted(state, _place(p, mesh, batch))
        metrics.append(reported)
    return state, metrics


def _pmap(p, mesh, state):
    devices = list(mesh.devices.flat)
    mapped = jax.pmap(step.body(p), axis_name="data", devices=devices)
    state = jax.tree.map(lambda x: jnp.stack([np.asarray(x)] * p.ranks), state)
    metrics = []
    for batch in model.batches(p):
        rows = jax.tree.map(lambda x: x.reshape(p.ranks, -1, *x.shape[1:]), batch)
        state, reported = mapped(state, rows)
        metrics.append(reported)
    return state, metrics


_LOOPS = {
    "python": _python,
    "alternate": _python,
    "evaluated": _python,
    "scan": _scan,
    "two_in_jit": _two_in_jit,
    "shard_map": _shard_map,
    "typed": _shard_map,
    "pmap": _pmap,
}
