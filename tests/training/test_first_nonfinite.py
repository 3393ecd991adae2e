"""`jdp.debug.first_nonfinite` names operation, line, rank and rows that are broken on purpose."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from support.training import ranks, step_of

import jdp

NUM_ROWS = 24
W, V = np.full((6, 4), 0.5, np.float32), np.ones(4, np.float32)


def batch(*zero, value=0.0):
    x = np.random.default_rng(0).uniform(0.5, 1.0, (NUM_ROWS, 6)).astype(np.float32)
    x[list(zero)] = value
    return x


def log(p, x):
    h = x @ p["w"]
    scores = jnp.log(x.sum(-1))  # first
    return (h @ p["v"] + scores).mean()


def root(p, x):
    h = jnp.sqrt((x @ p["w"]).sum(-1))  # first
    return (h * p["v"].sum()).mean()


def masked(p, x):
    scores = jnp.where(x[:, :1] > 0, x @ p["w"], -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)  # first
    return (weights @ p["v"] + (x @ p["w"]) @ p["v"]).mean()


def scanned(p, x):
    def body(h, i):
        h = h * jnp.where(h > 0, 1.0, 1.0 / (3.0 - i))  # first
        return h + 0.0, h.sum()

    h, _ = lax.scan(body, x @ p["w"], jnp.arange(6.0))
    return (h @ p["v"]).mean()


def until(p, x):
    def body(carry):
        i, h = carry
        return i + 1, jnp.log(h - i)  # first

    end = jnp.where(x.min() > 0, 0, 2)  # another number of rounds on each rank
    _, h = lax.while_loop(lambda carry: carry[0] < end, body, (0, jnp.exp(x.sum(-1) + 0.1)))
    return ((x @ p["w"]) @ p["v"]).mean() + h.sum() * 1e-3


def branch(p, x):
    h = (x @ p["w"]) @ p["v"]

    def broken(x):
        return jnp.log(-1.0 - x.sum()) + x  # first

    def right(x):  # where it is taken
        return jnp.sqrt(x - 0.25)

    found = lax.cond(x.min() <= 0, broken, right, x)
    return h.mean() + found.mean() * 1e-3


# Name -> loss, kind, operation, the infinity before a NaN.
CASES = {
    "log": (log, "infinity", "log", None),
    "root": (root, "NaN", "dot_general", "div"),
    "masked": (masked, "NaN", "sub", "convert_element_type"),
    "scanned": (scanned, "NaN", "mul", "div"),
    "until": (until, "NaN", "log", None),
    "branch": (branch, "NaN", "log", None),
    "remat": (jax.checkpoint(log), "infinity", "log", None),
}
BROKEN = (5, 21)


def state_of(stage=0, **params):
    tx = jdp.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
    tx = jdp.sharded(tx, stage=stage, min_size=1) if stage else jdp.replicated(tx)
    return jdp.TrainState.create({"w": W, "v": V, **params}, tx)


def line_of(fn, mark="# first"):
    lines, start = inspect.getsourcelines(inspect.unwrap(fn))
    return f"test_first_nonfinite.py:{start + [mark in line for line in lines].index(True)}"


@pytest.mark.parametrize(
    ("name", "n"), [*zip(CASES, [8, 3, 2, 1, 3, 2, 8], strict=True), ("log", 1), ("branch", 3)]
)
def test_it_names_the_operation_the_line_the_ranks_and_the_rows(name, n):
    ranks(n)
    loss_fn, kind, operation, before = CASES[name]
    found = jdp.debug.first_nonfinite(step_of(loss_fn), state_of(), batch(*BROKEN))
    assert (found.kind, found.operation, found.line) == (kind, operation, line_of(loss_fn)), found
    assert found.ranks == tuple(sorted({row * n // NUM_ROWS for row in BROKEN}))
    assert (found.infinity and found.infinity.operation) == before
    where = found.infinity if name == "root" else found
    assert where.rows == (None if name == "branch" else BROKEN)


def found_by(names, stage, devices=None):
    """What is found on all ranks of all processes."""
    where = NamedSharding(jdp.init(devices=devices), PartitionSpec("data"))
    rows, found = batch(*BROKEN), []
    for name in names:
        placed = jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])
        step = step_of(CASES[name][0])
        found.append(jdp.debug.first_nonfinite(step, state_of(stage), placed))
    return found


@pytest.mark.processes
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("stage", "names"),
    [(3, ["log", "branch"]), pytest.param(0, [*CASES][:-1], marks=pytest.mark.thorough)],
)
def test_all_processes_find_what_one_finds(processes, stage, names):
    want = found_by(names, stage, jax.devices()[:4])
    assert processes(2).run(found_by, names, stage) == [want, want]
    assert want[0].rows == BROKEN


@pytest.mark.parametrize("name", ["masked", "until", "branch"])
def test_a_step_with_finite_results_has_none(name):
    ranks(2)
    step, state = step_of(CASES[name][0]), state_of()
    assert jdp.debug.first_nonfinite(step, state, batch()) is None
    step(state, batch())  # not donated


@pytest.mark.parametrize(("accumulate", "stage"), [(1, 3), (2, 1), (3, 2), (3, 3)])
def test_sharded_states_and_micro_batches(accumulate, stage):
    ranks(2)
    step = step_of(log, accumulate=accumulate)
    found = jdp.debug.first_nonfinite(step, state_of(stage), batch(5))
    assert (found.kind, found.operation, found.ranks, found.rows) == ("infinity", "log", (0,), (5,))
    assert found.rounds == (() if accumulate == 1 else (5 * accumulate // 12,))


@pytest.mark.parametrize(("n", "stage"), [(2, 0), (3, 2)])
def test_a_rank_of_weight_0_does_not_count(n, stage):
    ranks(n)
    mask = (np.arange(NUM_ROWS) < NUM_ROWS // n * (n - 1)).astype(np.float32)

    def loss_fn(p, batch):
        share = batch["mask"].sum() / batch["mask"].sum()  # 0 / 0 on the last rank
        logs = jnp.log((batch["x"] @ p["w"]).sum(-1))
        return (logs * batch["mask"]).mean() * share + p["v"].sum()

    @jdp.train_step(weight=lambda batch: batch["mask"].sum())
    def step(state, batch, scale=1.0):
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        highest = jdp.max_over_ranks(1 / (batch["mask"].sum() + scale))
        return state.apply_gradients(grads), {"loss": loss, "highest": highest}

    def found(*zero, scale=1.0):
        return jdp.debug.first_nonfinite(
            step, state_of(stage), {"x": batch(*zero), "mask": mask}, scale
        )

    assert found() is None and found(NUM_ROWS - 1) is None
    first = found(3, NUM_ROWS - 1)
    assert (first.operation, first.ranks, first.rows) == ("log", (0,), (3,))
    assert found(scale=0.0).kind == "infinity"  # a maximum counts every rank


def test_two_data_axes():
    mesh = jax.make_mesh((2, 3), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    jdp.init(mesh, axis_name=("a", "b"))

    @jdp.eval_step(axis_name=("a", "b"))
    def measure(params, x):
        return {"rows": jdp.rows(jnp.log(x.sum(-1))), "n": jdp.sum_over_ranks(1, axis_name="b")}

    found = jdp.debug.first_nonfinite(measure, {"w": W}, batch(*BROKEN))
    assert (found.operation, found.ranks, found.rows) == ("log", (1, 5), BROKEN)


def test_arguments_have_their_names():
    ranks(2)
    step = step_of(log)
    found = jdp.debug.first_nonfinite(step, state_of(w=W * np.nan), batch())
    assert (found.operation, found.name, found.ranks) == ("", "state.params['w']", (0, 1))
    found = jdp.debug.first_nonfinite(step, state_of(), batch(7, value=np.inf))
    assert (found.kind, found.name, found.ranks, found.rows) == ("infinity", "batch", (0,), (7,))
    assert "argument `batch`" in str(found) and "rows 7 of the batch" in str(found)


def test_the_optimizer_may_be_the_first():
    ranks(2)
    tx = jdp.replicated(optax.chain(optax.scale(1e30), optax.scale(1e30)))
    state = jdp.TrainState.create({"w": W, "v": V}, tx)
    found = jdp.debug.first_nonfinite(step_of(log), state, batch())
    assert (found.kind, found.operation, found.ranks, found.rows) == (
        "infinity",
        "mul",
        (0, 1),
        None,
    )


def test_scanned_layers():
    ranks(2)

    def layer(h, p):
        return h * jnp.log(h.sum(-1, keepdims=True)) * p, None  # first

    def loss_fn(p, x):
        return jdp.scan_layers(layer, x[:, :4], p["layers"])[0].mean() + p["w"].sum() + p["v"].sum()

    state = state_of(layers=np.full((3, 4), 0.5, np.float32))
    found = jdp.debug.first_nonfinite(step_of(loss_fn), state, batch(13)).infinity
    assert (found.operation, found.line, found.ranks) == ("log", line_of(layer), (1,))
    assert (found.rounds, found.rows) == ((0,), (13,))


def test_a_callback_runs_for_each_rank():
    ranks(2)

    def loss_fn(p, x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        scale = jax.pure_callback(
            lambda x: np.float32(1 / x), shape, x.min(), vmap_method="sequential"
        )
        return ((x @ p["w"]) @ p["v"]).mean() + lax.stop_gradient(scale)

    with np.errstate(divide="ignore"):
        found = jdp.debug.first_nonfinite(step_of(loss_fn), state_of(), batch(13))
    assert (found.operation, found.ranks) == ("pure_callback", (1,))


@pytest.mark.parametrize("num_further", [2, 4])
def test_inside_a_shard_map_over_a_further_axis(num_further):
    jdp.init(axes={"model": num_further})

    def on_device(w, x):
        return lax.psum(jnp.log(x @ w), "model")  # first

    def loss_fn(p, x):
        specs = PartitionSpec(None, "model"), PartitionSpec()
        model = jax.shard_map(
            on_device, axis_names={"model"}, in_specs=specs, out_specs=PartitionSpec()
        )
        return (model(p["w"], x) * p["v"].sum()).mean()

    found = jdp.debug.first_nonfinite(step_of(loss_fn), state_of(), batch(*BROKEN))
    rows_of_rank = NUM_ROWS * num_further // 8
    assert (found.kind, found.operation, found.rows) == ("infinity", "log", BROKEN), found
    assert found.line == line_of(on_device)
    assert found.ranks == tuple(sorted({row // rows_of_rank for row in BROKEN}))
    assert found.type == f"float32[{rows_of_rank}, {4 // num_further}]"


@pytest.mark.parametrize("is_typed", [True, False])
def test_one_device_of_a_rank_is_enough(is_typed):
    jdp.init(axes={"stage": 2})

    def on_device(w, x):
        index = lax.axis_index("stage")

        def round(h, i):
            is_wrong = (index == 1) & (i == 2)
            h = h / jnp.where(is_wrong, 0.0, 1.0)  # first
            return lax.ppermute(h, "stage", [(0, 1), (1, 0)]), None

        h = lax.pcast(x @ w, "stage", to="varying") if is_typed else x @ w
        return lax.psum(lax.scan(round, h, jnp.arange(4.0))[0], "stage")

    def loss_fn(p, x):
        model = jax.shard_map(
            on_device,
            axis_names={"stage"},
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=is_typed,
        )
        return (model(p["w"], x) * p["v"].sum()).mean()

    found = jdp.debug.first_nonfinite(step_of(loss_fn), state_of(), batch())
    assert (found.kind, found.line) == ("infinity", line_of(on_device)), found
    assert (found.ranks, found.rounds) == ((0, 1, 2, 3), (2,))


def of_model(on_device, **options):
    """Return a loss with a function of w and x on each device of "model"."""

    def loss_fn(p, x):
        specs = PartitionSpec(None, "model"), PartitionSpec()
        model = jax.shard_map(
            on_device,
            axis_names={"model"},
            in_specs=specs,
            out_specs=PartitionSpec(),
            **options,
        )
        return (model(p["w"], x) * p["v"].sum()).mean()

    return loss_fn


def test_a_mask_that_devices_compare_is_no_finding():
    def on_device(w, x):
        scores = jnp.where(x[:, :2] > 0.7, x @ w, -jnp.inf)
        most = lax.pmax(lax.stop_gradient(scores), "model").max()
        return lax.psum(jnp.exp(scores - most), "model")

    jdp.init(axes={"model": 2})
    assert jdp.debug.first_nonfinite(step_of(of_model(on_device)), state_of(), batch()) is None


def test_a_rank_of_weight_0_does_not_count_beside_a_further_axis():
    jdp.init(axes={"model": 2})
    loss_fn = of_model(lambda w, x: lax.psum(jnp.log(x @ w), "model"))

    @jdp.train_step(weight=lambda x: (x[:, 0] > 0).all().astype(float))
    def step(state, x):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
        return state.apply_gradients(grads), {"loss": loss}

    assert jdp.debug.first_nonfinite(step, state_of(), batch(1)) is None


def test_one_that_also_reduces_over_ranks_is_one_operation():
    def on_device(w, x):
        return lax.psum(jnp.log(x @ w), "model") + lax.pmean(x.sum(), "data")

    jdp.init(axes={"model": 2})
    found = jdp.debug.first_nonfinite(step_of(of_model(on_device)), state_of(), batch(5))
    assert (found.operation, found.ranks, found.rows) == ("shard_map", (0,), (5,))


def test_what_it_cannot_run_is_refused():
    ranks(2)
    with pytest.raises(TypeError, match="not decorated"):
        jdp.debug.first_nonfinite(log, state_of(), batch())
    step, state = step_of(log), state_of()
    step(state, batch())
    with pytest.raises(ValueError, match="donated"):
        jdp.debug.first_nonfinite(step, state, batch())
