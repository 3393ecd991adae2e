"""Ragged exchanges move each row to its place and back, and say which rows do not fit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.training import assert_close, step_of

import jdp
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.distributed import in_flight, this_process

NUM_ROWS, BLOCKS = 151, 3


def counts_of(kind, num_ranks):
    """`[ranks, ranks, blocks]`, by source; the last rank keeps a row that it sends nowhere."""
    draw = np.random.default_rng(num_ranks)
    counts = draw.multinomial(
        NUM_ROWS - 1, np.ones(num_ranks * BLOCKS) / num_ranks / BLOCKS, num_ranks
    )
    counts = counts.reshape(num_ranks, num_ranks, BLOCKS)
    if kind != "equal":
        counts[:] = 0
    if kind == "one block":
        counts[:, -1, 1] = NUM_ROWS
    if kind == "one rank":  # in several rounds
        counts[0, -1, 1] = NUM_ROWS
    return counts.astype(np.int32)


def rows_of(num_ranks, dtype=np.float32):
    numbers = 1 + np.arange(2 * num_ranks * NUM_ROWS) % 120
    return numbers.reshape(num_ranks, NUM_ROWS, 2).astype(jnp.dtype(dtype))


def exchanged(mesh, rows, counts, max_rows, check_vma=True):
    """The rows that each rank receives, their sizes, and the rows that come back."""

    def on_rank(rows, counts):
        received, sizes, back = jdp.ragged_all_to_all(rows[0], counts[0], max_rows=max_rows)
        return received[None], sizes[None], back(received)[None]

    specs = dict(in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, **specs))(rows, counts)


def expected(rows, counts, max_rows):
    """The same, row by row."""
    received = np.zeros((len(rows), max_rows, *rows.shape[2:]), rows.dtype)
    back = np.zeros_like(rows)
    begins = counts.reshape(len(counts), -1).cumsum(1).reshape(counts.shape) - counts
    for to in range(len(rows)):
        place = 0
        for block in range(counts.shape[2]):
            for source in range(len(rows)):
                for i in range(counts[source, to, block]):
                    row = begins[source, to, block] + i
                    received[to, place] = back[source, row] = rows[source, row]
                    place += 1
    return received, counts.transpose(1, 2, 0), back


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["equal", "one block", "one rank", "nothing"])
def test_rows_arrive_by_block_and_return(mesh, kind, check_vma):
    rows, counts = rows_of(mesh.size), counts_of(kind, mesh.size)
    max_rows = max(1, counts.sum((0, 2)).max())
    got = exchanged(mesh, rows, counts, max_rows, check_vma)
    jax.tree.map(np.testing.assert_array_equal, got, expected(rows, counts, max_rows))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["equal", "one rank"])
def test_gradients_go_back(make_mesh, kind, check_vma):
    rows, counts = rows_of(8), counts_of(kind, 8)

    def total(rows):
        received, _, back = exchanged(make_mesh(8), rows, counts, 2 * NUM_ROWS, check_vma)
        return (received**2).sum() + (back * jnp.arange(2)).sum()

    is_sent = expected(rows, counts, 2 * NUM_ROWS)[2] > 0
    got = jax.grad(total)(rows)
    np.testing.assert_array_equal(got, np.where(is_sent, 2 * rows + np.arange(2), 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool"])
def test_rows_of_any_dtype(make_mesh, dtype):
    rows, counts = rows_of(3, dtype), counts_of("equal", 3)
    got = exchanged(make_mesh(3), rows, counts, 2 * NUM_ROWS)
    np.testing.assert_array_equal(got[0], expected(rows, counts, 2 * NUM_ROWS)[0])
    assert got[0].dtype == got[2].dtype == rows.dtype


def test_negative_zeros_keep_their_sign(make_mesh):
    counts = counts_of("equal", 3)
    received, sizes, _ = exchanged(make_mesh(3), -0.0 * rows_of(3), counts, 2 * NUM_ROWS)
    for of_rank, num_rows in zip(received, sizes.sum((1, 2)), strict=True):
        np.testing.assert_array_equal(np.signbit(of_rank[:num_rows]), True)


@pytest.mark.parametrize("num_blocks", [0, 2])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (4, 2)])
@pytest.mark.parametrize("check_vma", [True, False])
def test_no_numbers_are_exchanged_as_others(make_mesh, shape, num_blocks, check_vma):
    rows, counts = np.zeros((2, *shape), np.float32), np.zeros((2, 2, num_blocks), int)
    received, sizes, back = exchanged(make_mesh(2), rows, counts, 5, check_vma)
    assert (received.shape, sizes.shape) == ((2, 5, shape[1]), (2, num_blocks, 2))
    assert back.shape == rows.shape


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
def test_counts_that_int32_cannot_hold_are_misfits(make_mesh, before_init, dtype):
    with jax.enable_x64(dtype == "int64"):
        counts = np.zeros((2, 2, 1), dtype)
        counts[0, 1] = 2**32 - 1 if dtype == "uint32" else 2**32 + 1
        received, _, _ = exchanged(make_mesh(2), np.ones((2, 4), np.float32), counts, 4)
    assert np.isnan(received[:, 0]).all()


def test_typed_keys_are_refused():
    with pytest.raises(ValueError, match="typed keys"):
        jdp.ragged_all_to_all(jax.random.split(jax.random.key(0)), jnp.array([[2]]), max_rows=2)


def test_without_ranks_a_row_only_moves():
    rows = jnp.arange(3.0)
    received, sizes, back = jdp.ragged_all_to_all(rows, jnp.array([[1, 1]]), max_rows=4)
    assert received.tolist() == [0, 1, 0, 0] and sizes.tolist() == [[1], [1]]
    assert back(received + 1).tolist() == [1, 2, 0]


def experts_loss(params, batch, is_weighted=False):
    """A loss whose rows are computed by the rank that has the weights of their expert."""
    num = jax.lax.axis_size("data")
    order = jnp.argsort(batch["expert"])
    counts = jnp.bincount(batch["expert"], length=6).reshape(num, -1)
    rows = batch["x"][order]
    received, sizes, back = jdp.ragged_all_to_all(rows, counts, max_rows=training.NUM_ROWS)
    own = params["w"].reshape(num, -1, 5, 4)[jax.lax.axis_index("data")]
    computed = jnp.tanh(jax.lax.ragged_dot(received, own, sizes.sum(1)))
    y = jnp.zeros((len(order), 4)).at[order].set(back(computed))
    losses = ((y @ params["v"] + params["b"] - batch["y"]) ** 2).sum(1)
    if not is_weighted:
        return losses.mean()
    return num * (losses * batch["weight"]).sum() / jdp.sum_over_ranks(batch["weight"].sum())


def expert_batch(i):
    draw = np.random.default_rng(i)
    batch = training.batch(i)
    batch["expert"] = (draw.zipf(1.5, training.NUM_ROWS) % 6).astype(np.int32)
    batch["weight"] = draw.uniform(size=training.NUM_ROWS).astype(np.float32)
    batch["weight"][:9] = 0  # all rows of a rank
    return batch


STAGE_3 = jdp.sharded(optax.sgd(0.1, momentum=0.9), stage=3, min_size=1)


def expert_state(tx=None):
    params = training.params() | {"w": np.random.default_rng(0).normal(size=(6, 5, 4)).astype("f")}
    return jdp.TrainState.create(params, tx or training.sgd())


def trained(n, step, tx=None):
    return training.train(n, step, lambda: expert_state(tx), make_batch=expert_batch)[0].params


@pytest.mark.parametrize("accumulate, tx", [(1, None), (2, None), (1, STAGE_3)])
def test_experts_on_other_ranks_train_as_on_one(accumulate, tx):
    want, step = trained(1, step_of(experts_loss)), step_of(experts_loss, accumulate=accumulate)
    for n in (2, 3):
        assert_close(trained(n, step, tx), want)
    text = step.lower(expert_state(tx), expert_batch(0)).as_text()
    is_native = tx is STAGE_3 and cpu_runtime.why_missing() is None
    assert (cpu_runtime.ALL_TO_ALL in text) == is_native
    assert ("stablehlo.all_to_all" in text) == (not is_native)


def test_weighted_experts_train_as_on_one_by_the_formula_of_the_error():
    step = step_of(functools.partial(experts_loss, is_weighted=True))
    want = trained(1, step)
    assert_close(trained(3, step), want)
    with pytest.raises(ValueError, match=r"weight 0 (?s:.*)n \* sum\(w \* losses\)"):
        trained(3, step_of(experts_loss, weight=lambda batch: batch["weight"].sum()))


def over_processes(kind):
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])
    all_rows, all_counts = jnp.asarray(rows_of(4)), jnp.asarray(counts_of(kind, 4))

    @jdp.eval_step
    def send(state, batch):
        rank = jax.lax.axis_index("data")
        own = all_rows[rank], all_counts[rank]
        received, _, back = jdp.ragged_all_to_all(*own, max_rows=2 * NUM_ROWS)
        return {"there": jdp.rows(received[None]), "back": jdp.rows(back(received)[None])}

    batches = jdp.batches(np.arange(4), 4, epochs=1, shuffle=False)
    return training.fetched(jdp.evaluate(send, jnp.ones(1), batches))


@pytest.mark.parametrize("kind", ["equal", "one rank"])
def test_rows_travel_between_processes(processes, kind):
    there, _, back = expected(rows_of(4), counts_of(kind, 4), 2 * NUM_ROWS)
    for found in processes(2).run(over_processes, kind):
        np.testing.assert_array_equal(found["there"], there)
        np.testing.assert_array_equal(found["back"], back)


WRONG = {
    "receives": (lambda counts: counts.at[0, 2, 1].add(30), "rank 2 of data receives"),
    "sends": (
        lambda counts: counts.at[1, 0, 0].add(NUM_ROWS),
        "rank 1 of data has 151 rows and sends",
    ),
    "sends 2 ** 32": (
        lambda counts: counts.at[1, 0].set(jnp.array([2**31 - 1, 2**31 - 1, 2])),
        "rank 1 of data has 151 rows and sends",
    ),
    "negative": (lambda counts: counts.at[1, 0, 0].set(-1), "rank 1 of data has negative counts"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_rows_that_do_not_fit_are_an_error_of_a_later_call(before_init, kind):
    change, message = WRONG[kind]
    counts = np.array(change(jnp.asarray(counts_of("nothing", 3)).at[:, 1].set(2)))
    jdp.init(devices=jax.devices()[:3])

    @jdp.train_step
    def step(state, batch):
        received, _, _ = jdp.ragged_all_to_all(batch[0][0], batch[1][0], max_rows=29)
        grads = jax.tree.map(jnp.ones_like, state.params)
        return state.apply_gradients(grads), {"first": received.mean()}

    state, metrics = step(training.state(), (rows_of(3), counts))
    assert np.isnan(metrics["first"])
    with pytest.raises(RuntimeError, match=f"{message}.*(?s:.*)JDP216"):
        for _ in range(10):
            state, metrics = step(state, (rows_of(3), counts))
    assert in_flight.Unchecked().went_wrong()  # so no state is saved
    in_flight.accept_new_state()
    assert not in_flight.Unchecked().went_wrong()


def test_an_error_names_the_group_of_another_axis(before_init, caplog):
    mesh = jdp.init(axes={"expert": 4}, devices=jax.devices()[:8])
    counts = np.zeros((2, 4, 4, 1), np.int32)
    counts[1, :, 2] = 2

    def inner(rows, counts):
        return jdp.ragged_all_to_all(rows[0], counts[0, 0], max_rows=7, axis_name="expert")[0]

    def outer(rows, counts):
        specs = dict(in_specs=(P("expert"), P(None, "expert")), out_specs=P("expert"))
        return jax.shard_map(inner, axis_names={"expert"}, **specs)(rows, counts)

    specs = dict(in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    outer = jax.shard_map(outer, mesh=mesh, axis_names={"data"}, **specs)
    found = jax.jit(outer)(np.ones((4, 9, 1), "f"), counts).reshape(8, 7)
    assert np.isnan(found[:, 0]).all()  # on all ranks
    assert "rank 2 of expert (group 1 of data) receives [2, 2, 2, 2]" in caplog.text
    assert caplog.text.count("ragged_all_to_all") == 1
    assert "max_rows=8" in this_process.current.exchange_error


@pytest.mark.parametrize("max_rows", [7, 8])
def test_beside_an_axis_that_is_left_to_the_compiler(before_init, max_rows):
    mesh = jdp.init(axes={"expert": 2, "model": 2}, devices=jax.devices()[:8])

    def on_device(x, w):
        counts = jnp.full((2, 1), len(x) // 2)
        received, _, back = jdp.ragged_all_to_all(x, counts, max_rows=max_rows, axis_name="expert")
        return back(received @ w)

    def loss_fn(params, x):
        specs = dict(in_specs=(P("expert"), P()), out_specs=P("expert"))
        y = jax.shard_map(on_device, axis_names={"expert"}, **specs)(x, params["w"])
        return jnp.mean(y**2)

    draw = np.random.default_rng(0).normal
    x, w = draw(size=(32, 4)).astype("f"), draw(size=(4, 4)).astype("f")
    params = {"w": jax.device_put(w, NamedSharding(mesh, P(None, "model")))}
    state = jdp.TrainState.create(params, jdp.replicated(optax.sgd(0.1)))
    state, metrics = step_of(loss_fn)(state, x)
    want = w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    if max_rows == 8:
        np.testing.assert_allclose(state.params["w"], want, atol=1e-5)
    else:
        assert np.isnan(metrics["loss"])
        assert "receives [4, 4]" in this_process.current.exchange_error


def test_batched_rows_and_counts_fit(make_mesh, before_init):
    def on_rank(rows, counts):
        one = lambda rows, counts: jdp.ragged_all_to_all(rows, counts, max_rows=200)[0]  # noqa: E731
        return jax.vmap(one)(rows[0], counts[0])[None]

    rows = np.stack([rows_of(3), 2 * rows_of(3)], 1)
    counts = np.stack([counts_of("equal", 3), counts_of("one rank", 3)], 1)
    specs = dict(in_specs=P("data"), out_specs=P("data"), check_vma=False)
    got = jax.jit(jax.shard_map(on_rank, mesh=make_mesh(3), **specs))(rows, counts)
    for i in range(2):
        np.testing.assert_array_equal(got[:, i], expected(rows[:, i], counts[:, i], 200)[0])
    assert this_process.current.exchange_error is None


def test_received_rows_differ_between_ranks(before_init):
    jdp.init(devices=jax.devices()[:2])

    @jdp.train_step
    def step(state, batch):
        received, _, _ = jdp.ragged_all_to_all(batch, jnp.ones((2, 1), int), max_rows=2)
        return state.replace(params=received[0]), {}

    with pytest.raises(ValueError, match="JDP101"):
        step(training.state(), np.ones((4, 3), "f"))


@pytest.mark.parametrize(
    "rows, counts", [((3,), (1, 2, 1)), ((3,), (3, 1)), ((), (1, 1)), ((3,), (1,))], ids=str
)
def test_wrong_shapes_are_refused(rows, counts):
    with pytest.raises(ValueError, match=r"ragged_all_to_all got"):
        jdp.ragged_all_to_all(jnp.ones(rows), jnp.ones(counts, int), max_rows=3)


def test_rows_of_another_number_do_not_return():
    _, _, back = jdp.ragged_all_to_all(jnp.ones(3), jnp.array([[2]]), max_rows=4)
    with pytest.raises(ValueError, match=r"\[5\](?s:.*)\[4, \.\.\.\]"):
        back(jnp.ones(5))
