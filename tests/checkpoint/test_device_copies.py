"""Copies of a state on its devices take about as much memory on each device of the process."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.states import bits, committed, mixed_state

import jdp
from jdp.checkpoint import snapshot
from jdp.checkpoint.host_commits import HostCommits
from jdp.checkpoint.snapshot import CommitSnapshots, DeviceCopies
from jdp.checkpoint.write_plan import Finder, Share, StatePiece

# Numbers of float32, primes; the last two are less than 1 MiB.
SIZES = (300_007, 700_001, 262_147, 1_000_003, 400_009, 262_139, 5)
MIB = 1 << 18  # numbers of float32


def numbers(size, device):
    return np.arange(size, dtype=np.float32) + device * 2.0**20


def arrays_on(devices, sizes, spec=None, num_parts=1):
    """Arrays whose shard on each device is `numbers(size, device)`, though their sharding says
    that `num_parts` of them make up the array, and the others equal these.
    """
    mesh = Mesh(np.reshape(devices, (-1, num_parts)), ("data", "model"))
    where = NamedSharding(mesh, PartitionSpec(spec))
    return [
        jax.make_array_from_single_device_arrays(
            (num_parts * size,),
            where,
            [jax.device_put(numbers(size, device.id), device) for device in devices],
            dtype=np.float32,
        )
        for size in sizes
    ]


def replicated(num_devices, sizes=SIZES):
    return arrays_on(jax.devices()[:num_devices], sizes)


def taken(copies, state):
    return copies.take(Finder().find(state, here=True).pieces)


def loads_of(pieces):
    """The numbers that were copied on each device, in which every copy is that device's."""
    loads = Counter()
    for piece in pieces:
        assert piece.array is None  # the state would live until the copies are written
        [device] = piece.values.devices()
        np.testing.assert_array_equal(piece.values, numbers(piece.values.size, device.id))
        loads[device.id] += piece.values.size
    return loads


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_large_arrays_are_copied_on_the_device_with_the_least(num_devices):
    pieces = taken(DeviceCopies(reuse=False), replicated(num_devices))
    loads = loads_of(pieces)
    least = max(sum(SIZES) / num_devices, *SIZES)
    assert max(loads.values()) <= 4 / 3 * least  # Graham's bound
    assert [piece.values.device.id for piece in pieces[-2:]] == [0, 0]  # the small ones


def test_the_largest_arrays_are_placed_first():
    pieces = taken(DeviceCopies(reuse=False), replicated(2, (MIB, MIB, 2 * MIB)))
    assert loads_of(pieces) == {0: 2 * MIB, 1: 2 * MIB}


def test_what_only_one_device_can_copy_counts_first():
    small = replicated(3, (MIB // 2,) * 3)
    alone = jax.device_put(numbers(2 * MIB, 1), jax.devices()[1])  # large, and not replicated
    pieces = taken(DeviceCopies(reuse=False), [*replicated(3, (3 * MIB, 2 * MIB)), *small, alone])
    assert loads_of(pieces) == {0: 1.5 * MIB + 2 * MIB, 1: 2 * MIB, 2: 3 * MIB}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_a_part_is_copied_on_any_device_that_holds_it(order):
    devices = [jax.devices()[i] for i in order]
    alone = jax.device_put(numbers(3 * MIB, devices[0].id), devices[0])
    state = [*arrays_on(devices, (MIB, 2 * MIB), "model", 2), alone]
    *parts, last = taken(DeviceCopies(reuse=False), state)
    loads = loads_of([*parts, last])
    assert [loads[device.id] for device in devices] == [3 * MIB, 2 * MIB, 3 * MIB, MIB]
    for piece in parts:  # the devices of a column of the mesh hold the same part
        [device] = piece.values.devices()
        assert (piece.index[0].start or 0) == devices.index(device) % 2 * piece.values.size


def test_of_a_piece_with_rows_only_these_are_copied_and_counted():
    first, second, third = replicated(2)[1:4]
    pieces = [
        StatePiece(i, ..., x.addressable_data(0), array=x) for i, x in enumerate((first, second))
    ]
    for rows in ((600_000, 1_000_003), (900_000, 1_000_003)):  # the second has less than 1 MiB
        index = (slice(*rows),)
        pieces.append(StatePiece(2, index, third.addressable_data(0), rows=rows, array=third))
    copied = DeviceCopies(reuse=False).take(pieces)
    assert [piece.values.device.id for piece in copied] == [1, 0, 0, 0]
    for piece in copied[2:]:
        whole = numbers(third.size, piece.values.device.id)
        np.testing.assert_array_equal(piece.values, whole[piece.index])
        assert piece.rows is None and piece.array is None


def test_every_copy_reuses_the_memory_of_the_one_before():
    copies, state = DeviceCopies(reuse=True), replicated(3)
    copies.reservation(Finder().find(state, here=True).pieces)()
    reserved = {x.unsafe_buffer_pointer() for each in copies._spare.values() for x in each}
    for _ in range(3):
        pieces = taken(copies, state)
        assert {piece.values.unsafe_buffer_pointer() for piece in pieces} == reserved
        del pieces


def test_memory_of_devices_that_copy_nothing_more_is_freed():
    copies = DeviceCopies(reuse=True)
    taken(copies, replicated(3, (MIB,) * 3))
    taken(copies, replicated(3, (MIB,)))
    assert [*copies._spare] == jax.devices()[:1]


def test_commits_and_checkpoints_have_the_bits_of_states_that_are_copied_on_several_devices(
    monkeypatch, tmp_path, file
):
    where = NamedSharding(jdp.init(devices=jax.devices()[:3]), PartitionSpec())
    state = mixed_state(where)
    expected = bits(state)
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 1)
    monkeypatch.setattr(snapshot, "takes", lambda x: False)
    commits = HostCommits(file, Share(0, 1))
    snapshots = CommitSnapshots(commits)
    for _ in range(3):
        taken = snapshots.take_snapshot(state)
        commits.shared.finish(taken.fetch(), {"leaves": taken.leaves})
        assert committed(commits.shared) == expected
    with jdp.Checkpointer(tmp_path) as ckpt:
        ckpt.step(ckpt.restore(state))
    with jdp.Checkpointer(tmp_path, resume=True) as ckpt:
        assert bits(ckpt.restore(state)) == expected
