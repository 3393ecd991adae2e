"""A lookup in a table that is split over the ranks equals one in a table that every rank holds."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import training
from support.ranks_rows import count_rows
from support.training import assert_close, fetched, step_of

import jdp
from jdp.collectives import split_rows
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.reduction import shard_registry

NUM_ROWS = 24  # of a batch; divides by 1, 2, 3 and 8
BY_ROWS, BY_COLUMNS, WHOLE = (48, 6), (47, 24), (47, 5)


def lookup(table, ids):
    return jdp.sharded_embedding(table, ids)


def loss_fn(params, batch, lookup=lookup):
    found = lookup(params["table"], batch["ids"]).astype(jnp.float32)
    losses = (jnp.tanh(found.sum(1)) @ params["w"] - batch["y"]) ** 2
    return jnp.mean(losses) if "mask" not in batch else masked_mean(losses, batch["mask"])


def masked_mean(losses, mask):
    return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask)


def params_of(shape):
    draw = np.random.default_rng(0).normal
    sizes = {"table": shape, "w": shape[1]}
    return {name: draw(size=size).astype(np.float32) for name, size in sizes.items()}


def batch_of(i, num_ids, dtype=np.int32, masked=False):
    """Ids of which half are those of few rows: duplicates on a rank and among ranks."""
    draw = np.random.default_rng(i)
    ids = draw.integers(0, num_ids, (NUM_ROWS, 6))
    ids[:, 1::2] %= 5
    batch = {"ids": ids.astype(dtype), "y": draw.normal(size=NUM_ROWS).astype(np.float32)}
    if masked:
        batch["mask"] = (draw.uniform(size=NUM_ROWS) < 0.6) & (np.arange(NUM_ROWS) >= 3)
    return batch


def split_sgd(**kwargs):
    return jdp.sharded(optax.sgd(0.1, momentum=0.9), stage=3, min_size=40, **kwargs)


def trained(n, shape, step=None, num_steps=3, masked=False):
    training.ranks(n)
    state, reported = jdp.TrainState.create(params_of(shape), split_sgd()), []
    step = step_of(loss_fn, weight=count_rows if masked else None) if step is None else step
    for i in range(num_steps):
        state, metrics = step(state, batch_of(i, shape[0], masked=masked))
        reported.append(metrics["loss"])
    return state, fetched({"params": state.params, "loss": reported})


def on_one_device(shape, masked=False, num_steps=3, loss_fn=loss_fn):
    """The same in plain JAX, with `table[ids]`."""
    loss_fn = functools.partial(loss_fn, lookup=lambda table, ids: table[ids])
    params, tx, reported = params_of(shape), optax.sgd(0.1, momentum=0.9), []
    opt_state = tx.init(params)
    for i in range(num_steps):
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(
            params, batch_of(i, shape[0], masked=masked)
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        reported.append(loss)
    return fetched({"params": params, "loss": reported})


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_training_equals_one_device(n, shape):
    state, got = trained(n, shape)
    assert_close(got, on_one_device(shape))
    held = {x.data.nbytes for x in state.params["table"].addressable_shards}
    assert held == {state.params["table"].nbytes // n}


@pytest.mark.parametrize(("n", "shape"), [(3, BY_ROWS), (8, BY_ROWS), (8, BY_COLUMNS)])
def test_the_gradient_has_the_weights_of_the_step(n, shape):
    _, got = trained(n, shape, masked=True)
    assert_close(got, on_one_device(shape, masked=True))


@pytest.mark.parametrize("n", [1, 3])
def test_a_table_that_does_not_divide_is_looked_up_as_a_whole(n):
    _, got = trained(n, WHOLE)
    assert_close(got, on_one_device(WHOLE))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_table_that_is_not_split_is_looked_up_as_a_whole(stage):
    training.ranks(3)
    tx = jdp.sharded(optax.sgd(0.1, momentum=0.9), stage=stage, min_size=40)
    state = jdp.TrainState.create(params_of(BY_ROWS), tx)
    state, metrics = step_of(loss_fn)(state, batch_of(0, 48))
    got = {"params": fetched(state.params), "loss": [np.asarray(metrics["loss"])]}
    assert_close(got, on_one_device(BY_ROWS, num_steps=1))


def test_plain_value_and_grad_is_right():
    @jdp.train_step
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads), {"loss": loss}

    _, got = trained(3, BY_ROWS, step)
    assert_close(got, on_one_device(BY_ROWS))


@pytest.mark.parametrize("over", ["inner", "outer"])
def test_a_table_that_is_split_over_one_of_two_axes(over):
    axes = ("outer", "inner")
    jdp.init(jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2), axis_name=axes)
    tx = split_sgd(over=over, axis_name=axes)
    for masked in (False, True):
        step = step_of(loss_fn, axis_name=axes, weight=count_rows if masked else None)
        state = jdp.TrainState.create(params_of(BY_ROWS), tx)
        for i in range(2):
            state, _ = step(state, batch_of(i, 48, masked=masked))
        want = on_one_device(BY_ROWS, masked, num_steps=2)["params"]
        assert_close(fetched(state.params), want)


@pytest.mark.parametrize("spec", [P("model"), P(None, "model")], ids=["rows", "columns"])
@pytest.mark.parametrize("num_data, num_model", [(2, 3), (3, 2), (1, 2)])
@pytest.mark.parametrize("splits", ["compiler", "author"])
def test_a_table_that_is_also_split_over_a_further_axis(num_data, num_model, spec, splits):
    def on_device(table, ids):
        if spec[0] is None:
            return lookup(table, ids)
        ids = ids - len(table) * jax.lax.axis_index("model")
        found = jdp.sharded_embedding(table, ids, out_of_range="zero")
        return jax.lax.psum(found, "model")

    def loss(params, batch):
        out = P(None, None, "model") if spec[0] is None else P()
        by_author = jax.shard_map(
            on_device, axis_names={"model"}, in_specs=(spec, P()), out_specs=out
        )
        return loss_fn(params, batch, by_author if splits == "author" else lookup)

    devices = jax.devices()[: num_data * num_model]
    mesh = jdp.init(axes={"model": num_model}, devices=devices)
    params = params_of((36, 6))
    params["table"] = jax.device_put(params["table"], NamedSharding(mesh, spec))
    state, step = jdp.TrainState.create(params, split_sgd()), step_of(loss)
    for i in range(3):
        state, _ = step(state, batch_of(i, 36))
    assert_close(fetched(state.params), on_one_device((36, 6))["params"])
    share = state.params["table"].addressable_shards[0].data.nbytes
    assert share * len(devices) == state.params["table"].nbytes


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_ids_of_any_integer_dtype(dtype):
    training.ranks(2)
    step = jdp.eval_step(lambda state, batch: {"loss": loss_fn(state.params, batch)})
    state = jdp.TrainState.create(params_of((1000, 6)), split_sgd())
    batch = batch_of(0, 100, dtype)
    want = loss_fn(params_of((1000, 6)), batch, lookup=lambda table, ids: table[np.int32(ids)])
    np.testing.assert_allclose(step(state, batch)["loss"], want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_a_small_dtype(shape, dtype):
    def loss_fn(params, batch):
        return jnp.sum(lookup(params["table"], batch).astype(jnp.float32))

    training.ranks(8)
    tx = jdp.sharded(optax.sgd(1.0), stage=3, min_size=40)
    zeros = {"table": np.zeros(shape, jnp.dtype(dtype))}
    ids = batch_of(0, shape[0])["ids"]
    state, _ = step_of(loss_fn)(jdp.TrainState.create(zeros, tx), ids)
    counts = np.bincount(ids.reshape(-1), minlength=shape[0])
    want = np.broadcast_to(-counts[:, None] / 8, shape)
    np.testing.assert_array_equal(np.asarray(state.params["table"], np.float32), want)


@pytest.mark.filterwarnings("ignore:the step reduces gradients, and returns")
def test_the_program_never_holds_the_whole_table():
    @jdp.train_step
    def step(state, batch):
        table = shard_registry.known(state.params["table"])
        loss, grads = jdp.value_and_grad(loss_fn)(state.params, batch)
        moved = table.value - 0.1 * shard_registry.known(grads["table"]).value
        (moved,) = shard_registry.gathered([table._replace(value=moved)])
        return state.replace(params={**state.params, "table": moved}), {"loss": loss}

    training.ranks(8)
    shape = (8 * 1001, 16)
    tx = jdp.sharded(optax.sgd(0.1), stage=3, min_size=40)
    state = jdp.TrainState.create(params_of(shape), tx)
    compiled = step.lower(state, batch_of(0, shape[0])).compile()
    text = compiled.as_text()
    assert "f32[1001,16]" in text and "f32[8008,16]" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < state.params["table"].nbytes / 2


def test_a_loss_of_one_row_may_be_mapped_over_the_batch():
    def loss_by_row(params, batch, lookup=lookup):
        def one(ids, y):
            return (jnp.tanh(lookup(params["table"], ids).sum(0)) @ params["w"] - y) ** 2

        return jnp.mean(jax.vmap(one)(batch["ids"], batch["y"]))

    _, got = trained(3, BY_ROWS, step_of(loss_by_row))
    assert_close(got, on_one_device(BY_ROWS))


def test_a_lookup_may_be_repeated_scanned_and_recomputed():
    def loss(params, batch, lookup=lookup):
        def one(total, ids):
            rows = jax.checkpoint(lambda ids: jnp.tanh(lookup(params["table"], ids)))(ids)
            return total + jnp.mean(rows), None

        looped, _ = jax.lax.scan(one, 0.0, batch["ids"].reshape(3, -1, 6))
        return looped + loss_fn(params, batch, lookup)

    _, got = trained(2, BY_ROWS, step_of(loss), num_steps=2)
    assert_close(got, on_one_device(BY_ROWS, num_steps=2, loss_fn=loss))


@pytest.mark.parametrize("masked", [False, True])
def test_micro_batches(masked):
    step = step_of(loss_fn, weight=count_rows if masked else None, accumulate=2)
    _, got = trained(3, BY_ROWS, step, masked=masked, num_steps=2)
    assert_close(got, on_one_device(BY_ROWS, masked, num_steps=2))


def test_a_table_may_be_used_as_a_whole_beside_the_lookup():
    def loss(params, batch, lookup=lookup):
        found = lookup(params["table"], batch["ids"])
        return jnp.mean(jnp.tanh(found @ params["table"].T)) + loss_fn(params, batch, lookup)

    _, got = trained(3, BY_ROWS, step_of(loss), num_steps=2)
    assert_close(got, on_one_device(BY_ROWS, num_steps=2, loss_fn=loss))


def over_processes(shape, devices=None):
    """Train on all devices; every process knows the batch and returns the whole table."""
    mesh = jdp.init(devices=devices or sorted(jax.devices(), key=lambda d: (d.process_index, d.id)))
    state = jdp.TrainState.create(params_of(shape), split_sgd())
    step = step_of(loss_fn)
    split = NamedSharding(mesh, P("data"))
    for i in range(2):
        batch = batch_of(i, shape[0])
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, split, lambda part, x=x: x[part]), batch
        )
        state, metrics = step(state, batch)
    whole = NamedSharding(mesh, P())
    table = jax.jit(lambda x: x, out_shardings=whole)(state.params["table"])
    return np.asarray(table), float(metrics["loss"])


@pytest.mark.parametrize("shape", [BY_ROWS, (47, 28), (4 * 5003, 36)], ids=str)
def test_a_table_over_two_processes(processes, shape):
    found = processes(2).run(over_processes, shape)
    table, loss = over_processes(shape, jax.devices()[:1])
    for theirs in found:
        np.testing.assert_allclose(theirs[0], table, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(theirs[1], loss, rtol=1e-5)


# Ids whose rows are exchanged in one round, and in several: all of one owner, each once.
ROUNDS = {"one round": (8 * 41, 1), "several rounds": (8 * 1447, 3)}
MANY = 24 * 60  # ids of a batch


def loss_of_rows(params, batch):
    found = jdp.sharded_embedding(params["table"], batch["ids"])
    return jnp.mean((found - batch["y"]) ** 2)


def trained_by_rows(num_rows, kind, n, num_columns=5):
    """Return what each rank of this process holds after three steps, and the program."""
    draw = np.random.default_rng(kind)
    table = draw.integers(-8, 9, (num_rows, num_columns)).astype(np.float32)
    state = jdp.TrainState.create(
        {"table": table}, jdp.sharded(optax.sgd(0.5), stage=3, min_size=40)
    )
    step = step_of(loss_of_rows)
    batches = []
    for _ in range(3):
        few = draw.permutation(num_rows // n) if kind == 3 else np.arange(num_rows)
        ids = few[:MANY] if kind == 3 else draw.integers(0, num_rows, MANY)
        y = draw.integers(-8, 9, (len(ids), num_columns))
        batches.append({"ids": ids.astype(np.int32), "y": y.astype(np.float32)})
    me, num_processes = jax.process_index(), jax.process_count()
    text = ""
    for batch in jdp.shard_batches(
        jax.tree.map(lambda x: np.split(x, num_processes)[me], each) for each in batches
    ):
        text = text or step.lower(state, batch).as_text()
        state, _ = step(state, batch)
    return [np.asarray(x.data) for x in state.params["table"].addressable_shards], text


needs_library = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason=f"{cpu_runtime.why_missing()}"
)


@pytest.mark.optimized
@needs_library
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_native_lookups_give_every_rank_the_bits_of_xla(monkeypatch, rounds, n):
    training.ranks(n)
    num_rows, kind = ROUNDS[rounds]
    mine, text = trained_by_rows(num_rows, kind, n)
    assert f"@{cpu_runtime.ALL_TO_ALL}" in text and "stablehlo.all_to_all" not in text
    assert "stablehlo.while" in text or rounds == "one round"
    monkeypatch.setattr(split_rows, "exchanged", lambda *args: None)
    by_xla, text = trained_by_rows(num_rows, kind, n)
    assert cpu_runtime.ALL_TO_ALL not in text and "stablehlo.all_to_all" in text
    assert [x.tobytes() for x in mine] == [x.tobytes() for x in by_xla]


def rows_over_processes(num_rows, kind, num_columns):
    jdp.init(devices=sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:4])
    parts, text = trained_by_rows(num_rows, kind, 4, num_columns)
    return parts, cpu_runtime.ALL_TO_ALL in text


@needs_library
@pytest.mark.parametrize("rounds, num_columns", [("one round", 5), ("several rounds", 307)])
def test_native_lookups_over_two_processes_give_the_bits_of_one(processes, rounds, num_columns):
    want, _ = rows_over_processes(*ROUNDS[rounds], num_columns)
    found = processes(2).run(rows_over_processes, *ROUNDS[rounds], num_columns)
    assert all(is_native for _, is_native in found)
    got = [part.tobytes() for parts, _ in found for part in parts]
    assert got == [part.tobytes() for part in want]


def test_a_table_that_does_not_train_is_looked_up():
    @jdp.train_step
    def step(state, batch):
        def loss(w):
            return loss_fn({"table": state.params["table"], "w": w}, batch)

        loss, grad = jax.value_and_grad(loss)(state.params["w"])
        return state.apply_gradients({"table": None, "w": grad}), {"loss": loss}

    training.ranks(8)
    whole = params_of(BY_ROWS)
    tx = split_sgd()
    state = jdp.TrainState.create(whole, tx, trainable={"table": False, "w": True})
    state, metrics = step(state, batch_of(0, 48))
    np.testing.assert_allclose(metrics["loss"], loss_fn(whole, batch_of(0, 48)), rtol=1e-6)
    np.testing.assert_array_equal(state.params["table"], whole["table"])


IDS = np.array([[0, -1], [48, 47], [-48, 2**31 - 1], [-(2**31), 5]])


@pytest.mark.parametrize("choice", ["nan", "zero", "clip"])
@pytest.mark.parametrize("n", [1, 2])
def test_ids_out_of_range_give_what_was_asked_for(choice, n):
    """Outside of a step, in the step of one rank, and in that of a split table."""
    table = params_of(BY_ROWS)["table"]
    is_row = (IDS >= 0) & (IDS < 48)
    want, counts = table[np.clip(IDS, 0, 47)], np.zeros(48)
    if choice != "clip":
        want[~is_row] = np.nan if choice == "nan" else 0
    np.add.at(counts, np.clip(IDS, 0, 47), 1 if choice == "clip" else is_row)
    find = functools.partial(jdp.sharded_embedding, out_of_range=choice)

    def loss(params, batch):
        return jnp.nansum(find(params["table"], batch))

    @jdp.train_step
    def step(state, batch):
        rows = find(state.params["table"], batch)
        _, grads = jdp.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads), {"rows": jdp.rows(rows)}

    training.ranks(n)
    np.testing.assert_array_equal(find(table, IDS), want)
    state = jdp.TrainState.create(
        {"table": table}, jdp.sharded(optax.sgd(0.5), stage=3, min_size=40)
    )
    state, metrics = step(state, IDS)
    np.testing.assert_array_equal(metrics["rows"], want)
    moved = table - 0.5 * counts[:, None].astype(np.float32) / n
    np.testing.assert_array_equal(state.params["table"], moved)


def test_jax_itself_counts_negative_ids_from_the_end_and_clips():
    """What the documentation says of `table[ids]`."""
    table = jnp.arange(4.0)
    ids = jnp.array([0, -1, -5, 4])
    np.testing.assert_array_equal(table[ids], [0, 3, 0, 3])
    np.testing.assert_array_equal(jax.grad(lambda t: t[ids].sum())(table), [1, 0, 0, 1])


def test_no_ids_and_no_rows():
    table = params_of(BY_ROWS)["table"]
    assert jdp.sharded_embedding(table, np.zeros((2, 0), np.int32)).shape == (2, 0, 6)
    none = jdp.sharded_embedding(table[:0], np.zeros(3, np.int32), out_of_range="zero")
    np.testing.assert_array_equal(none, np.zeros((3, 6)))
    training.ranks(2)
    step = jdp.eval_step(lambda state, ids: {"sum": jnp.sum(lookup(state.params["table"], ids))})
    state = jdp.TrainState.create(params_of(BY_ROWS), split_sgd())
    assert step(state, np.zeros((2, 0), np.int32))["sum"] == 0


def test_an_nnx_parameter_is_a_table():
    table = nnx.Param(jnp.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(lookup(table, 2), [4, 5])


@pytest.mark.parametrize(
    ("table", "ids", "options", "error", "words"),
    [
        (np.ones((3, 2)), np.ones(2), {}, TypeError, r"float32\[2\]"),
        (np.ones((3, 2)), np.ones(2, bool), {}, TypeError, r"bool\[2\]"),
        (np.ones((3, 2), np.int32), np.ones(2, int), {}, TypeError, r"int32\[3, 2\]"),
        (np.float32(3), np.ones(2, int), {}, ValueError, r"float32\[\]"),
        (np.ones((3, 2)), np.ones(2, int), {"out_of_range": "wrap"}, ValueError, "'wrap'"),
        (np.ones((0, 2)), np.ones(4, int), {"out_of_range": "clip"}, ValueError, "4 ids"),
    ],
)
def test_what_is_no_table_or_no_ids_is_refused(table, ids, options, error, words):
    with pytest.raises(error, match=words):
        jdp.sharded_embedding(table, ids, **options)


def test_a_lookup_that_some_ranks_skip_is_refused():
    @jdp.eval_step
    def step(state, batch):
        table = state.params["table"]
        shape = (*batch["ids"].shape, 6)
        found = jax.lax.cond(
            batch["y"][0] > 0, lambda: lookup(table, batch["ids"]), lambda: jnp.zeros(shape)
        )
        return {"found": found.mean()}

    training.ranks(2)
    state = jdp.TrainState.create(params_of(BY_ROWS), split_sgd())
    with pytest.raises(ValueError, match="JDP1"):
        step(state, batch_of(0, 48))


@pytest.mark.parametrize(
    ("shape", "tx", "level", "words"),
    [
        (BY_ROWS, jdp.replicated(optax.sgd(0.1)), logging.INFO, "stage=3"),
        (BY_ROWS, split_sgd(), logging.WARNING, "astype"),
        (WHOLE, jdp.replicated(optax.sgd(0.1)), logging.INFO, "48"),
        (BY_COLUMNS, split_sgd(), None, None),
    ],
)
def test_a_table_that_is_looked_up_as_a_whole_is_logged_once(caplog, shape, tx, level, words):
    training.ranks(3)

    @jdp.eval_step
    def step(state, batch):
        table = state.params["table"]
        return {"loss": loss_fn({**state.params, "table": 1 * table if words else table}, batch)}

    state = jdp.TrainState.create(params_of(shape), tx)
    with caplog.at_level(logging.INFO, "jdp"):
        step(state, batch_of(0, shape[0]))
        step.lower(state, jax.tree.map(lambda x: x[:12], batch_of(0, shape[0])))
    found = [r for r in caplog.records if "sharded_embedding" in r.message]
    assert [r.levelno for r in found] == ([] if level is None else [level])
    assert all(words in r.message for r in found)
