"""Leaves in another memory, or on devices of some processes alone, are saved whole or refused."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp
from jdp.checkpoint.saved_leaves import describe

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("processes")]

SPECS = PartitionSpec(), PartitionSpec("data")


def values(step):
    return np.arange(1008, dtype=np.float32) * step


def save_from_memory_of_the_host(path):
    mesh = jdp.init()
    shardings = [NamedSharding(mesh, spec, memory_kind="pinned_host") for spec in SPECS]

    def state_at(step):
        return [
            jax.make_array_from_callback((1008,), each, lambda index: values(step)[index])
            for each in shardings
        ]

    with jdp.Checkpointer(path, commit_every=1) as ckpt:
        ckpt.restore(state_at(0))
        for step in (1, 2, 3):
            ckpt.step(state_at(step))
    with jdp.Checkpointer(path, resume=True) as ckpt:
        restored = ckpt.restore(state_at(0))
        assert ckpt.steps == 3
    assert [x.sharding for x in restored] == shardings
    return [(s.index, np.asarray(s.data)) for x in restored for s in x.addressable_shards]


def test_leaves_in_the_memory_of_the_host_are_saved_and_restored_there(processes, tmp_path):
    for shards in processes(2).run(save_from_memory_of_the_host, tmp_path):
        assert len(shards) == 4
        for index, found in shards:
            np.testing.assert_array_equal(found, values(3)[index])


def refusal_of_a_leaf_of(holders, spec):
    devices = [device for device in jax.devices() if device.process_index in holders]
    sharding = NamedSharding(Mesh(devices, "data"), spec)
    data = [
        jax.device_put(values(1)[index], device)
        for device, index in sharding.addressable_devices_indices_map((1008,)).items()
    ]
    x = jax.make_array_from_single_device_arrays((1008,), sharding, data, dtype=np.float32)
    try:
        describe({"other": x})
    except ValueError as error:
        return str(error)
    return None


# The process that holds all of it takes it for an array of its own, which may be on each process.
@pytest.mark.parametrize("holder, spec", [(0, SPECS[0]), (1, SPECS[1])])
def test_a_leaf_without_a_part_on_a_process_is_refused_there(holder, spec, processes):
    found = processes(2).run(refusal_of_a_leaf_of, (holder,), spec)
    assert found[holder] is None
    text = f"`['other']` has no part on the devices of process {1 - holder}: it is on 2 devices"
    assert text in found[1 - holder]


def test_a_leaf_without_a_part_on_one_of_three_processes_is_refused_on_all(processes):
    for text in processes(3).run(refusal_of_a_leaf_of, (0, 2), SPECS[1]):
        assert "no part on the devices of process 1: it is on 4 devices, of 2 of 3 proc" in text
