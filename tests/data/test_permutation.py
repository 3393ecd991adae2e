"""The computed order is a permutation for any number of rows, and looks like a random one."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest

from jdp.data.sampler import NUM_ROUNDS, Sampler, permuted


def keys_of(*seeds):
    return np.random.SeedSequence(seeds).generate_state(NUM_ROUNDS, np.uint64)


# [orders, num_rows], each row of it one permutation.
def orders_of(num_rows, num_orders):
    positions = np.arange(num_rows)
    orders = [permuted(positions, num_rows, keys_of(seed)) for seed in range(num_orders)]
    return np.array(orders, np.int64)


# How many standard deviations a chi-square lies above or below its mean.
def deviation(counts):
    expected = counts.mean(axis=-1, keepdims=True)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = counts.size - counts.size // counts.shape[-1]
    return (chi_square - freedom) / math.sqrt(2 * freedom)


# Correlations with `other`, of uniform orders normal with the deviation 1 / sqrt(num_rows - 1).
def correlations(orders, other):
    a, b = (x - x.mean(axis=-1, keepdims=True) for x in (orders, other))
    scale = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    return (a * b).sum(axis=-1) / scale * math.sqrt(orders.shape[-1] - 1)


def require_normal(values):
    assert abs(values.mean()) < 4 / math.sqrt(len(values))
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / len(values))
    assert np.abs(values).max() < 5


@pytest.mark.parametrize("num_keys", [3])
def test_every_row_comes_once_for_each_small_number_of_rows(num_keys):
    for num_rows, seed in itertools.product(range(1, 300), range(num_keys)):
        rows = permuted(np.arange(num_rows), num_rows, keys_of(seed))
        assert sorted(rows) == list(range(num_rows)), num_rows


@pytest.mark.parametrize("num_rows", [2**16 + 1, 2**17, 300**2, 300**2 + 1, 300 * 301, 99_991])
def test_every_row_comes_once_at_the_edges_of_the_grid(num_rows):
    rows = permuted(np.arange(num_rows), num_rows, keys_of(1))
    assert (np.bincount(rows.astype(int), minlength=num_rows) == 1).all()


@pytest.mark.parametrize("num_rows", [2**32 - 1, 2**40 + 1, 2**61 + 3])
def test_rows_of_huge_numbers_differ_and_are_inside(num_rows):
    positions = np.concatenate([np.arange(20_000), num_rows - 1 - np.arange(20_000)])
    rows = permuted(positions, num_rows, keys_of(2))
    assert len(set(rows.tolist())) == 40_000 and rows.max() < num_rows
    assert abs(deviation(np.bincount((rows // (num_rows // 64 + 1)).astype(int))[None])) < 5


def test_a_row_does_not_depend_on_what_else_is_asked_for():
    rows = permuted(np.arange(1001), 1001, keys_of(3))
    assert [int(permuted(np.array([i]), 1001, keys_of(3))[0]) for i in range(1001)] == [*rows]


def test_all_orders_of_few_rows_occur():
    found = {tuple(order) for order in orders_of(4, 2000)}
    assert len(found) == math.factorial(4)


def test_each_row_stands_at_each_position_equally_often():
    orders = orders_of(1000, 3000)
    counts = [np.bincount(orders[:, p], minlength=1000) for p in range(0, 1000, 50)]
    assert abs(deviation(np.array(counts))) < 5


def test_neighbours_are_as_far_apart_as_chance_has_it():
    orders = orders_of(1000, 3000)
    for step in (1, 2, 32, 33):  # 32: the width of the grid
        apart = (orders[:, step:] - orders[:, :-step]) % 1000
        assert abs(deviation(np.bincount(apart.ravel(), minlength=1000)[1:][None])) < 5
        require_normal(correlations(orders[:, step:], orders[:, :-step]))


def test_orders_of_other_keys_and_the_order_of_the_rows_are_uncorrelated():
    orders = orders_of(1000, 3000)
    require_normal(correlations(orders[1:], orders[:-1]))
    require_normal(correlations(orders, np.arange(1000)[None]))
    fixed = (orders == np.arange(1000)).sum(axis=1)  # of Poisson's distribution
    assert abs(fixed.mean() - 1) < 0.1 and abs(fixed.var() - 1) < 0.2


@pytest.mark.parametrize("varied", ["seed", "epoch"])
def test_seeds_and_epochs_of_a_large_dataset_are_uncorrelated(varied):
    num_rows, orders = 2**16 + 1, []
    for i in range(30):
        seed, epoch = (i, 0) if varied == "seed" else (0, i)
        orders.append(Sampler(num_rows, 1, seed=seed).indices(epoch * num_rows, num_rows))
    orders = np.array(orders, float)
    assert (np.sort(orders[7]) == np.arange(num_rows)).all()
    pairs = np.array(list(itertools.combinations(range(30), 2)))
    require_normal(correlations(orders[pairs[:, 0]], orders[pairs[:, 1]]))


def test_a_batch_of_a_huge_dataset_takes_memory_for_a_batch():
    sampler = Sampler(10**9, 64, position=10**9 - 32)
    next(sampler)
    tracemalloc.start()
    rows = next(sampler)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows.dtype == np.int32 and len(set(rows)) == 64
    assert peak < 100_000


# A run that resumes must not see rows twice: these never change.
def test_the_order_never_changes():
    assert Sampler(10**9, 4, seed=3).indices(0, 4).tolist() == [
        177145982,
        686870328,
        329035185,
        338076138,
    ]
    assert Sampler(2**40, 4, seed=3).indices(2**40, 4).tolist() == [
        626352771250,
        422866068747,
        268797710353,
        554758110955,
    ]
