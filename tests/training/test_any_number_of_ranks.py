"""A global batch of any size trains alike on any number of ranks: what pads does not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import training
from support.processes import DEVICES_PER_PROCESS
from support.ranks_rows import count_rows as count
from support.training import assert_close, predict, ranks, state, step_of

import jdp

ROWS = training.batch(num_rows=26)


def masked_loss(p, batch):
    """0 / 0, not finite, where no row counts."""
    errors = (predict(p, batch["x"]) - batch["y"])[:, 0] ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def train(n, batch_size, split=None, **run):
    """Parameters, losses and sizes of the batches on n ranks."""
    ranks(n)
    step = step_of(masked_loss, weight=count, **(split or {}))

    s, losses, sizes = state(), [], set()
    batches = jdp.batches(ROWS, batch_size, seed=3, **run)
    for batch in batches:
        s, metrics = step(s, batch)
        losses.append(metrics["loss"])
        sizes.add(batch["x"].shape[0])
    return training.fetched((s.params, losses)), sizes, batches.position


@pytest.mark.parametrize("run", [dict(epochs=2), dict(num_steps=5, mask=True)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 12])  # fewer rows than ranks, and no multiple
def test_parameters_are_the_same_on_any_number_of_ranks(batch_size, run):
    want, sizes, end = train(1, batch_size, **run)
    assert sizes == {batch_size} and np.isfinite(want[1]).all()
    for n in (2, 3, 5, 8):
        got, sizes, position = train(n, batch_size, **run)
        assert_close(got, want)
        assert sizes == {-(-batch_size // n) * n}
        assert position == end  # padding is no row


def test_fewer_ranks_take_more_micro_batches_of_the_same_rows():
    want, _, _ = train(1, 12, num_steps=3, mask=True)
    for n in (1, 2, 3, 5, 8):  # 12, 6, 4, 3 and 2 rows on each rank
        got, _, _ = train(n, 12, dict(micro_batch_rows=2), num_steps=3, mask=True)
        assert_close(got, want)


def test_the_whole_batch_lies_in_front_of_what_pads_it(make_mesh):
    x = np.arange(40)
    for batch in jdp.batches(
        {"x": x}, 12, num_steps=3, shuffle=False, mask=True, mesh=make_mesh(5)
    ):
        np.testing.assert_array_equal(batch["mask"], np.arange(15) < 12)
        assert np.asarray(batch["x"])[12:].tolist() == [batch["x"][11]] * 3
        counts = [int(np.sum(shard.data)) for shard in batch["mask"].addressable_shards]
        assert counts == [3, 3, 3, 3, 0]


@pytest.mark.parametrize("n, batch_size", [(8, 3), (5, 12), (3, 1), (2, 7)])
def test_evaluation_counts_every_row_once(n, batch_size):
    ranks(n)

    @jdp.eval_step(weight=count)
    def measure(scale, batch):
        x = batch["x"][:, 0] * scale
        return {
            "mean": (x * batch["mask"]).sum() / batch["mask"].sum(),
            "rows": jdp.sum_over_ranks(batch["mask"].sum()),
            "x": jdp.rows(x),
        }

    batches = jdp.batches(ROWS, batch_size, epochs=1, shuffle=False)
    found = jdp.evaluate(measure, jnp.float32(2), batches)
    assert found["rows"] == 26
    np.testing.assert_array_equal(found["x"], 2 * ROWS["x"][:, 0])
    np.testing.assert_allclose(found["mean"], 2 * ROWS["x"][:, 0].mean(), rtol=1e-5)


def test_a_step_that_does_not_read_the_mask_is_refused():
    ranks(5)
    (batch,) = jdp.batches(ROWS, 12, num_steps=1, mask=True)
    with pytest.raises(ValueError, match=r"`batch\['mask'\]`.*JDP109"):
        jdp.train_step(training.plain_step)(state(), batch)


# Three processes of two ranks each: 4 rows are padded to 6, so that the last one holds padding.


def train_in_processes(batch_size):
    mesh = jdp.init()
    step = step_of(masked_loss, weight=count)

    s, losses, mine = state(), [], []
    for batch in jdp.batches(ROWS, batch_size, epochs=1, seed=3):
        s, metrics = step(s, batch)
        losses.append(metrics["loss"])
        mine.append(sum(int(np.sum(shard.data)) for shard in batch["mask"].addressable_shards))
    assert mesh.size == DEVICES_PER_PROCESS * jax.process_count()
    return training.fetched((s.params, losses)), mine


@pytest.mark.parametrize("batch_size, rows", [(4, [2, 2, 0]), (12, [4, 4, 4])])
def test_a_process_may_hold_padding_alone(processes, batch_size, rows):
    want, _, _ = train(1, batch_size, epochs=1)
    results = processes(3).run(train_in_processes, batch_size)
    for got, _ in results:
        assert_close(got, want)
    assert [mine[0] for _, mine in results] == rows
    assert sum(sum(mine) for _, mine in results) == 26
