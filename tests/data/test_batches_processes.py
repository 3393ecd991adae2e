"""Two processes of two ranks: each reads its own rows, and wrong ones are refused on both."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.processes import ProcessError
from support.threads import running, wait_until_none_runs

import jdp
from jdp.data.batches import batches, shard_batches
from jdp.data.sampler import Sampler

NUM_ROWS, BATCH_SIZE = 21, 8

# Ranks by process: as JAX orders the devices, and with the processes taking turns.
ORDERS = {"blocks": [0, 1, 2, 3], "in turns": [0, 2, 1, 3]}


class Rows:
    """Gives i for row i, and says which were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, i):
        self.read.append(i)
        return {"row": np.int32(i)}


def mesh_of(order):
    return jax.sharding.Mesh(np.array(jax.devices())[order], "data")


# What lies on this process's ranks, {rank: values}.
def shards(x, mesh):
    rank = {device: r for r, device in enumerate(mesh.devices)}
    return {rank[s.device]: np.asarray(s.data).tolist() for s in x.addressable_shards}


def message_of(error, loop):
    with pytest.raises(error) as caught:
        next(iter(loop))
    return str(caught.value)


def read_batches(order):
    mesh, rows = mesh_of(order), Rows()
    loop = batches(rows, BATCH_SIZE, epochs=1, seed=4, mesh=mesh, rows="of this process")
    found = [(shards(b["row"], mesh), shards(b["mask"], mesh), b["row"].shape) for b in loop]
    wait_until_none_runs()
    return found, rows.read, loop.position


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_each_process_reads_its_own_rows_of_the_global_batch(order, processes):
    results = processes(2).run(read_batches, order)
    stream = Sampler(NUM_ROWS, 1, seed=4).indices(0, NUM_ROWS).tolist()
    seen = []
    for parts in zip(*(found for found, _, _ in results), strict=True):
        rows, mask = {}, {}
        for part_rows, part_mask, shape in parts:
            assert shape == (BATCH_SIZE,)
            assert len(part_rows) == 2  # ranks of this process
            rows.update(part_rows)
            mask.update(part_mask)
        batch, counts = (np.concatenate([x[r] for r in range(4)]) for x in (rows, mask))
        seen += batch[counts].tolist()
    assert seen == stream
    read = [set(rows) for _, rows, _ in results]
    assert all(len(rows) == 12 for _, rows, _ in results)  # 3 batches of 4 rows, padding too
    assert not read[0] & read[1] - {stream[-1]}  # the row that pads
    assert [position for _, _, position in results] == [NUM_ROWS, NUM_ROWS]


def shard_own_batches(order):
    mesh, first = mesh_of(order), 100 * jax.process_index()
    loop = shard_batches([{"x": np.arange(4) + first + i} for i in range(3)], mesh=mesh)
    return [shards(batch["x"], mesh) for batch in loop]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_processs_batch_lies_on_its_ranks_in_order(order, processes):
    results = processes(2).run(shard_own_batches, order)
    for process, found in enumerate(results):
        mine = [rank for rank, device in enumerate(order) if device // 2 == process]
        for i, got in enumerate(found):
            x = np.arange(4) + 100 * process + i
            assert got == {mine[0]: x[:2].tolist(), mine[1]: x[2:].tolist()}


# In turn, so that all processes agree on what comes next after each failure.
def repeated():
    """Whether the log warns of loaders that give equal rows on both processes, and other rows."""
    mesh, me, found = mesh_of(ORDERS["blocks"]), jax.process_index(), []
    logger = logging.getLogger("jdp")
    for rows in (np.ones(4), np.full(4, me)):
        records = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        logger.addHandler(handler)
        list(shard_batches([rows], mesh=mesh))
        logger.removeHandler(handler)
        found.append(any("counts 2 times" in record.getMessage() for record in records))
    return found


def test_a_loader_that_gives_every_process_the_same_rows_is_reported_once(processes):
    assert processes(2).run(repeated) == [[True, False], [False, False]]


def refusals():
    mesh, odd = mesh_of(ORDERS["blocks"]), jax.process_index() == 1

    def broken():
        raise OSError("no such file")
        yield

    found = {
        "rows": message_of(ValueError, shard_batches([np.ones(6 if odd else 4)], mesh=mesh)),
        "dtype": message_of(
            ValueError, shard_batches([{"x": np.ones(4, "int8" if odd else "int16")}], mesh=mesh)
        ),
        "end": message_of(ValueError, shard_batches([] if odd else [np.ones(4)], mesh=mesh)),
        "scalar": message_of(
            ValueError if odd else RuntimeError,
            shard_batches([1.0 if odd else np.ones(4)], mesh=mesh),
        ),
        "error": message_of(
            OSError if odd else RuntimeError,
            shard_batches(broken() if odd else [np.ones(4)], mesh=mesh),
        ),
        "seed": message_of(
            ValueError, batches(np.ones(9), 4, num_steps=2, seed=int(odd), mesh=mesh)
        ),
    }
    assert list(shard_batches([], mesh=mesh)) == []
    assert not running()
    return found


def test_first_batches_that_do_not_fit_together_are_refused_on_every_process(processes):
    first, second = processes(2).run(refusals)
    for case in ("rows", "dtype", "end", "seed"):
        assert first[case] == second[case]
    assert "process 1" in first["rows"] and "float64[6]" in first["rows"]
    assert "process 0" in first["rows"] and "float64[4]" in first["rows"]
    assert "['x']` int8[4]" in first["dtype"] and "['x']` int16[4]" in first["dtype"]
    assert re.search("process 1 .* 0 rows", first["end"])
    assert all("JDP209" in first[case] for case in ("rows", "dtype", "end", "seed"))
    assert "seed=1" in first["seed"] and "seed=0" in first["seed"]
    assert "scalar" in second["scalar"] and "scalar" in first["scalar"]
    assert second["error"] == "no such file"
    assert "process 1" in first["error"] and "JDP208" in first["error"]
    assert "no such file" in first["error"]


def read_growing(lengths):
    """The shapes that a loop over batches of these lengths gives each process, or its error."""
    mine = lengths[jax.process_index()]
    loader = [np.ones((2, length), np.float32) for length in mine]
    try:
        found = [batch.shape for batch in shard_batches(loader, mesh=mesh_of([0, 1, 2, 3]))]
    except (ValueError, RuntimeError) as error:
        return str(error)
    wait_until_none_runs()
    return found


def test_processes_agree_on_new_shapes(processes):
    lengths = [3, 3, 5, 3]
    for found in processes(2).run(read_growing, [lengths] * 2):
        assert found == [(4, length) for length in lengths]


def test_a_process_with_another_new_shape_is_named(processes):
    for found in processes(2).run(read_growing, [[3, 3, 5], [3, 3, 6]]):
        assert "JDP209" in found and "process 1 has 1 rows per rank" in found, found
        assert "float32[2, 5]" in found and "float32[2, 6]" in found


def train_growing(lengths):
    jdp.init()

    @jdp.train_step
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.mean((batch * w) ** 2))(state.params)
        return state.apply_gradients(grads), {}

    state = jdp.TrainState.create(jnp.float32(1), jdp.replicated(optax.sgd(0.1)))
    mine = lengths[jax.process_index()]
    for batch in shard_batches([np.ones((2, length), np.float32) for length in mine]):
        state, _ = step(state, batch)


def test_a_process_that_alone_has_a_new_shape_is_named_at_once(processes):
    match = r"`step` .* on process 0.*new shapes on process 1(.|\n)*JDP211"
    with pytest.raises(ProcessError, match=match):
        processes(2).run(train_growing, [[3, 3, 3, 3], [3, 3, 5, 3]])
