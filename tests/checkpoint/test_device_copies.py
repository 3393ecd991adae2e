"""Copies of a state on its devices take about as much memory on each device of the process."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.states import bits, committed, mixed_state

import jdp
from jdp.checkpoint import device_copies, native_copy
from jdp.checkpoint.commit_snapshot import CommitSnapshots
from jdp.checkpoint.device_copies import DeviceCopies
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.pieces import Finder, StatePiece
from jdp.checkpoint.shares import Share

# Numbers of float32, primes; the last two are less than 1 MiB.
SIZES = (300_007, 700_001, 262_147, 1_000_003, 400_009, 262_139, 5)


def replicated(num_devices, values_of):
    """Arrays whose copy on the k-th device is `values_of(size, k)`."""
    devices = jax.devices()[:num_devices]
    where = NamedSharding(Mesh(devices, "data"), PartitionSpec())
    copies = [
        [jax.device_put(values_of(size, k), device) for k, device in enumerate(devices)]
        for size in SIZES
    ]
    return [
        jax.make_array_from_single_device_arrays(x[0].shape, where, x, dtype=np.float32)
        for x in copies
    ]


def numbers(size, k):
    return np.arange(size, dtype=np.float32) + k * 2.0**20


def taken(copies, state):
    return copies.take(Finder().find(state, here=True).pieces)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_large_arrays_are_copied_on_the_device_with_the_least(num_devices):
    loads = dict.fromkeys(jax.devices()[:num_devices], 0)
    pieces = taken(DeviceCopies(reuse=False), replicated(num_devices, numbers))
    for size, piece in zip(SIZES, pieces, strict=True):
        [device] = piece.values.devices()
        np.testing.assert_array_equal(piece.values, numbers(size, device.id))
        if size * 4 < device_copies.LARGE_BYTES:
            assert device.id == 0
        else:
            loads[device] += size
    least = max(sum(loads.values()) / num_devices, *SIZES)
    assert max(loads.values()) <= 4 / 3 * least  # Graham's bound


def test_of_a_piece_with_rows_only_these_are_copied_and_counted():
    first, second, third = replicated(2, numbers)[1:4]
    pieces = [
        StatePiece(i, ..., x.addressable_data(0), array=x) for i, x in enumerate((first, second))
    ]
    rows = (600_000, 1_000_003)
    pieces.append(StatePiece(2, (slice(*rows),), third.addressable_data(0), rows=rows, array=third))
    copied = DeviceCopies(reuse=False).take(pieces)
    assert [piece.values.device.id for piece in copied] == [0, 1, 1]
    np.testing.assert_array_equal(copied[2].values, numbers(third.size, 1)[slice(*rows)])
    assert copied[2].index == (slice(*rows),)


def test_every_copy_reuses_the_memory_of_the_one_before():
    copies, state = DeviceCopies(reuse=True), replicated(3, numbers)
    copies.reservation(Finder().find(state, here=True).pieces)()
    reserved = {x.unsafe_buffer_pointer() for each in copies._spare.values() for x in each}
    for _ in range(3):
        pieces = taken(copies, state)
        assert {piece.values.unsafe_buffer_pointer() for piece in pieces} == reserved
        del pieces


def test_commits_and_checkpoints_have_the_bits_of_states_that_are_copied_on_several_devices(
    monkeypatch, tmp_path, file
):
    where = NamedSharding(jdp.init(devices=jax.devices()[:3]), PartitionSpec())
    state = mixed_state(where)
    expected = bits(state)
    monkeypatch.setattr(device_copies, "LARGE_BYTES", 1)
    monkeypatch.setattr(native_copy, "takes", lambda x: False)
    commits = HostCommits(file, Share(0, 1))
    snapshots = CommitSnapshots(commits)
    for _ in range(3):
        snapshot = snapshots.take_snapshot(state)
        commits.shared.finish(snapshot.fetch(), {"leaves": snapshot.leaves})
        assert committed(commits.shared) == expected
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.step(ckpt.restore(state))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        assert bits(ckpt.restore(state)) == expected
