"""The order of the rows: exactly once per epoch, from any position, for any share."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.data.loops import EpochPlan
from jdp.data.sampler import Sampler

sizes = st.integers(1, 12)
seeds = st.integers(0, 2**70)
quick = settings(deadline=None, max_examples=100)


# The stream from `position` on, by the slow way: one row at a time.
def stream(sampler, position, count):
    return [int(sampler.indices(position + i, 1)[0]) for i in range(count)]


@quick
@given(
    num_rows=sizes, batch_size=sizes, seed=seeds, shuffle=st.booleans(), epochs=st.integers(1, 3)
)
def test_every_row_comes_exactly_once_in_each_epoch(num_rows, batch_size, seed, shuffle, epochs):
    sampler = Sampler(num_rows, batch_size, seed=seed, shuffle=shuffle)
    num_batches = -(-epochs * num_rows // batch_size)
    batches = [next(sampler) for _ in range(num_batches)]
    assert all(batch.shape == (batch_size,) for batch in batches)
    rows = np.concatenate(batches)[: epochs * num_rows].reshape(epochs, num_rows)
    for epoch in rows:
        assert sorted(epoch) == list(range(num_rows))
    assert sampler.position == num_batches * batch_size
    assert sampler.epoch == sampler.position // num_rows


@quick
@given(num_rows=sizes, share_size=sizes, num_shares=sizes, seed=seeds, position=st.integers(0, 40))
def test_shares_in_order_are_the_global_batch(num_rows, share_size, num_shares, seed, position):
    batch_size = share_size * num_shares
    options = dict(seed=seed, position=position)
    whole = Sampler(num_rows, batch_size, **options)
    shares = [
        Sampler(num_rows, batch_size, share=(i, num_shares), **options) for i in range(num_shares)
    ]
    for _ in range(2):
        parts = [next(share) for share in shares]
        assert [len(part) for part in parts] == [share_size] * num_shares
        assert np.concatenate(parts).tolist() == next(whole).tolist()
        assert {share.position for share in shares} == {whole.position}


@quick
@given(num_rows=sizes, before=sizes, after=sizes, num_shares=sizes, seed=seeds, num_batches=sizes)
def test_resumes_with_another_batch_size_and_other_shares(
    num_rows, before, after, num_shares, seed, num_batches
):
    sampler = Sampler(num_rows, before, seed=seed)
    for _ in range(num_batches):
        next(sampler)
    resumed = [
        Sampler(
            num_rows,
            after * num_shares,
            seed=seed,
            position=sampler.position,
            share=(i, num_shares),
        )
        for i in range(num_shares)
    ]
    rows = np.concatenate([next(share) for share in resumed])
    uninterrupted = stream(Sampler(num_rows, 1, seed=seed), num_batches * before, len(rows))
    assert rows.tolist() == uninterrupted


def test_epochs_and_seeds_have_different_orders():
    # 2**32 and more: as lists of 32-bit words, [2**32 + 7, 0] is [7, 1].
    seeds = (0, 1, 7, 2**32 + 7, 2**64 + 7)
    orders = {
        tuple(Sampler(20, 1, seed=seed).indices(20 * epoch, 20))
        for seed, epoch in itertools.product(seeds, range(4))
    }
    assert len(orders) == len(seeds) * 4
    assert tuple(range(20)) not in orders


def test_the_same_seed_has_the_same_order():
    assert stream(Sampler(20, 4, seed=3), 0, 60) == stream(Sampler(20, 5, seed=3), 0, 60)


# A run that resumes under another NumPy must not see rows twice. If this fails after an update,
# NumPy has changed Generator.shuffle, which it may: then the shuffle must become jdp's own.
def test_the_order_does_not_change_with_the_version_of_numpy():
    assert Sampler(8, 4, seed=3).indices(0, 24).reshape(3, 8).tolist() == [
        [6, 0, 4, 2, 1, 3, 5, 7],
        [1, 5, 4, 7, 0, 3, 2, 6],
        [7, 1, 0, 6, 4, 3, 5, 2],
    ]


def test_without_shuffle_rows_keep_their_order():
    assert stream(Sampler(3, 2, shuffle=False), 2, 5) == [2, 0, 1, 2, 0]
    assert next(Sampler(3, 8, shuffle=False)).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_no_batch_before_the_position_is_made():
    far = 7 * 10**15
    sampler = Sampler(7, 7, seed=1, position=far)  # would never end
    assert sorted(next(sampler)) == list(range(7))
    assert (sampler.position, sampler.epoch) == (far + 7, 10**15 + 1)


@pytest.mark.parametrize("num_rows", [1, 2, 1000, 2**16])
def test_both_orders_are_the_same_for_few_rows(num_rows):
    one, two = (Sampler(num_rows, 1, seed=4, order=order) for order in (1, 2))
    start = num_rows - 1
    assert (one.indices(start, 1000) == two.indices(start, 1000)).all()


# The order of jdp 0.1, in which runs that began with it go on.
def test_the_first_order_of_many_rows_is_that_of_an_exact_shuffle():
    sampler = Sampler(2**16 + 1, 1, seed=5, order=1)
    for epoch in (0, 3):
        expected = np.arange(2**16 + 1, dtype=np.int32)
        entropy = np.random.SeedSequence(5, spawn_key=(epoch,))
        np.random.Generator(np.random.Philox(entropy)).shuffle(expected)
        assert (sampler.indices(epoch * len(expected), len(expected)) == expected).all()


def test_an_epoch_is_shuffled_once(monkeypatch):
    made = []
    generator = np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda entropy: made.append(1) or generator(entropy))
    sampler = Sampler(10, 3)
    for _ in range(10):
        next(sampler)
    assert len(made) == 3


def test_a_batch_is_the_callers_own():
    sampler = Sampler(10, 4, seed=1)
    expected = stream(sampler, 0, 10)
    sampler.indices(0, 10)[:] = -1
    assert sampler.indices(0, 10).tolist() == expected


def test_row_numbers_take_four_bytes_where_they_fit():
    assert Sampler(2**31, 2, shuffle=False).indices(2**31 - 1, 2).tolist() == [2**31 - 1, 0]
    assert Sampler(2**31, 2, shuffle=False).indices(0, 1).dtype == np.int32
    assert Sampler(2**31 + 1, 2, shuffle=False).indices(2**31, 1).tolist() == [2**31]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_rows=0), "num_rows .*1.*0"),
        (dict(batch_size=0), "batch_size .*1.*0"),
        (dict(seed=-1), "seed .*0.*-1"),
        (dict(position=-4), "position .*0.*-4"),
        (dict(order=3), "order .* 3"),
        (dict(share=(2, 2)), r"share must .*\(2, 2\)"),
        (dict(share=(0, 3)), "batch_size 4 .* 3 .* 3"),
    ],
)
def test_refuses_numbers_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampler(**{"num_rows": 10, "batch_size": 4, **arguments})


def test_refuses_a_size_that_is_not_an_integer():
    with pytest.raises(TypeError, match="batch_size .*2.0"):
        Sampler(10, 2.0)


def counts(run, position=0):
    found = []
    while rows := run.next_rows(position):
        found.append(rows)
        position += rows
    return found


@quick
@given(
    num_rows=sizes,
    batch_size=sizes,
    epochs=st.integers(1, 3),
    seed=seeds,
    stretches=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), max_size=4),
)
def test_every_row_counts_once_however_often_the_number_of_ranks_changes(
    num_rows, batch_size, epochs, seed, stretches
):
    sampler = Sampler(num_rows, batch_size, seed=seed)
    run = EpochPlan.planned(num_rows, batch_size, None, epochs, "pad")
    position, batches = 0, []
    for num_ranks, num_batches in [*stretches, (3, run.num_batches)]:
        size = run.padded_size(num_ranks)
        assert size % num_ranks == 0 and batch_size <= size < batch_size + num_ranks
        for _ in range(num_batches):
            if not run.next_rows(position):
                break
            count = run.next_rows(position)
            rows = sampler.rows_at(position + np.minimum(np.arange(size), count - 1))
            assert rows.shape == (size,) and set(rows[count:]) <= {rows[count - 1]}
            # What a rank reads is its block of the rows, and of them what is not masked.
            blocks = zip(
                np.split(rows, num_ranks), np.split(np.arange(size) < count, num_ranks), strict=True
            )
            batches.append(np.concatenate([block[mask] for block, mask in blocks]).tolist())
            position += count
    expected = stream(Sampler(num_rows, 1, seed=seed), 0, epochs * num_rows)
    assert batches == [
        expected[i : i + batch_size] for i in range(0, len(expected), batch_size)
    ]  # the same batches, too, as on any number of ranks
    for epoch in np.reshape(expected, (epochs, num_rows)):
        assert sorted(epoch) == list(range(num_rows))


@pytest.mark.parametrize(
    "num_steps, epochs, tail, mask, has_mask",
    [
        (5, None, "pad", None, False),
        (5, None, "pad", True, True),
        (5, None, "pad", False, False),
        (None, 1, "pad", None, True),
        (None, 1, "pad", True, True),
        (None, 1, "drop", None, False),
        (None, 1, "drop", True, True),
    ],
)
def test_batches_have_a_mask_where_rows_may_pad_or_where_it_is_asked_for(
    num_steps, epochs, tail, mask, has_mask
):
    run = EpochPlan.planned(10, 4, num_steps, epochs, tail, mask)
    assert run.has_mask == has_mask
    if has_mask:
        assert [run.padded_size(n) for n in (1, 2, 3, 4, 5, 8)] == [4, 4, 6, 4, 5, 8]
    else:
        assert [run.padded_size(n) for n in (1, 2, 4)] == [4, 4, 4]
        with pytest.raises(ValueError, match="batch_size 4 .* 3 .*mask=True.* 6 "):
            run.padded_size(3)


def test_rows_that_pad_are_never_without_a_mask():
    with pytest.raises(ValueError, match='mask=False .*tail="pad"'):
        EpochPlan.planned(10, 4, None, 1, "pad", False)


@quick
@given(num_rows=sizes, batch_size=sizes, epochs=st.integers(1, 3))
def test_a_padded_run_counts_every_row_in_each_epoch(num_rows, batch_size, epochs):
    run = EpochPlan.planned(num_rows, batch_size, None, epochs, "pad")
    found = counts(run)
    assert sum(found) == epochs * num_rows
    assert set(found[:-1]) <= {batch_size}
    assert len(found) == run.num_batches


@quick
@given(num_rows=sizes, batch_size=sizes, epochs=st.integers(1, 3))
def test_tail_drop_leaves_out_the_short_batch_only(num_rows, batch_size, epochs):
    full = epochs * num_rows // batch_size
    if full == 0:
        with pytest.raises(ValueError, match='tail="drop"'):
            EpochPlan.planned(num_rows, batch_size, None, epochs, "drop")
    else:
        run = EpochPlan.planned(num_rows, batch_size, None, epochs, "drop")
        assert counts(run) == [batch_size] * full
        assert run.num_batches == full


@quick
@given(num_rows=sizes, batch_size=sizes, num_steps=sizes, position=st.integers(0, 30))
def test_a_run_of_steps_has_full_batches_without_mask(num_rows, batch_size, num_steps, position):
    run = EpochPlan.planned(num_rows, batch_size, num_steps, None, "pad")
    assert counts(run) == [batch_size] * num_steps
    assert not run.has_mask
    left = max(num_steps * batch_size - position, 0)  # after a change of the batch size
    assert counts(run, position) == [batch_size] * -(-left // batch_size)
