"""Two processes whose datasets differ are refused; those that differ by design are not."""

import jax
import numpy as np
import pytest
from support.threads import wait_until_none_runs

from jdp.data import batch_checks
from jdp.data.batches import batches

NUM_ROWS, BATCH = 40, 8


class Augmented:
    """Rows that are different each time, in each process by itself."""

    def __init__(self):
        self._random = np.random.default_rng(jax.process_index())

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, i):
        return {"row": np.int32(i), "x": self._random.normal()}


class Flipped(Augmented):
    """Rows that are turned round half of the times, in each process by itself."""

    def __getitem__(self, i):
        row = np.arange(4) + i
        return row[::-1] if self._random.random() < 0.5 else row


def own_half():
    return np.arange(NUM_ROWS) + NUM_ROWS * jax.process_index()


def own_order():
    return {"row": np.random.default_rng(jax.process_index()).permutation(NUM_ROWS)}


def one_column():
    same = np.arange(NUM_ROWS, dtype=np.float32)
    return same, np.where(jax.process_index(), np.nan, same)


def looped(make, options):
    """What a loop over a dataset of each process raises, empty for nothing."""
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    try:
        num = sum(1 for _ in batches(make(), BATCH, num_steps=10, mesh=mesh, **options))
    except ValueError as error:
        return str(error)
    finally:
        wait_until_none_runs()
    assert num == 10
    return ""


@pytest.mark.parametrize("make", [own_half, own_order, one_column])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_processes_with_other_rows_are_refused_before_the_first_batch(make, prefetch, processes):
    first, second = processes(2).run(looped, make, {"prefetch": prefetch})
    assert first == second
    assert "of the dataset differs between processes 1 and 0" in first and "JDP209" in first


def looped_often(num):
    return [looped(Flipped, {}) for _ in range(num)]


def test_rows_that_are_flipped_at_random_are_accepted_each_time(processes):
    assert processes(2).run(looped_often, 40) == [[""] * 40] * 2


def same():
    zeros = np.copysign(np.zeros((NUM_ROWS, 2)), 1 - 2 * jax.process_index())  # 0.0 and -0.0
    return {"x": np.full((NUM_ROWS, 3), np.nan), "y": np.arange(NUM_ROWS), "z": zeros}


@pytest.mark.parametrize(
    ("make", "options"), [(same, {}), (Augmented, {}), (own_half, {"rows": "of this process"})]
)
def test_equal_rows_random_ones_and_those_that_differ_by_design_are_accepted(
    make, options, processes
):
    assert processes(2).run(looped, make, options) == ["", ""]


class Edited:
    """Rows that change on one process once they are edited."""

    is_edited = False

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, i):
        return np.int32(i + 1000 * self.is_edited * jax.process_index())


def edited_late(num_batches):
    """After how many batches a loop compares rows that are edited after 12 of them."""
    dataset, compared, found = Edited(), [], 0
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    original, batch_checks.MIN_BATCHES = batch_checks.require_equal, num_batches
    batch_checks.require_equal = lambda *args: (compared.append(found), original(*args))
    loop = batches(dataset, BATCH, num_steps=40, shuffle=False, prefetch=0, mesh=mesh)
    try:
        with pytest.raises(ValueError, match="of the dataset differs between processes 1"):
            for _ in loop:
                found += 1
                dataset.is_edited = found >= 12
    finally:
        batch_checks.require_equal = original
    return compared


@pytest.mark.parametrize(
    # An epoch is 5 batches, and a check counts from the one before.
    ("num_batches", "compared"),
    [(1, [0, 5, 10, 15]), (6, [0, 10, 20]), (12, [0, 15])],
)
def test_rows_are_compared_again_where_an_epoch_begins(num_batches, compared, processes):
    assert processes(2).run(edited_late, num_batches) == [compared, compared]


def test_rows_takes_two_values():
    with pytest.raises(ValueError, match='rows must be .*"of this process"'):
        batches(np.ones(4), 2, num_steps=1, rows="mine")
