"""Leaves in another memory, or on devices of some processes alone, are saved whole or refused."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jdp
from jdp.checkpoint.write_plan import Finder

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


def array_of(holders, spec, step=1):
    devices = [device for device in jax.devices() if device.process_index in holders]
    sharding = NamedSharding(Mesh(devices, "data"), spec)
    return jax.make_array_from_callback(
        (1008,), sharding, lambda index: values(step)[index], dtype=np.float32
    )


def save_what_process_0_holds(path, spec):
    whole = NamedSharding(jdp.init(), PartitionSpec())
    mine = jax.device_put(np.float32(1), whole)
    with jdp.Checkpointer(path, commit_every=1, check_replicas=False) as ckpt:
        ckpt.restore({"mine": mine, "first": array_of((0,), spec, 0)})
        for step in (1, 2, 3):
            ckpt.step({"mine": mine, "first": array_of((0,), spec, step)})
    with jdp.Checkpointer(path, resume=True, check_replicas=False) as ckpt:
        restored = ckpt.restore({"mine": mine, "first": array_of((0,), spec, 0)})["first"]
    return [(s.index, np.asarray(s.data)) for s in restored.addressable_shards]


@pytest.mark.parametrize("spec", SPECS)
def test_a_leaf_on_devices_of_process_0_alone_is_saved_and_restored(spec, processes, tmp_path):
    mine, others = processes(2).run(save_what_process_0_holds, tmp_path, spec)
    assert len(mine) == 2 and not others
    for index, found in mine:
        np.testing.assert_array_equal(found, values(3)[index])


def refusal_of_a_leaf_of(holders, spec):
    jdp.init()
    state = {"other": array_of(holders, spec)}
    try:
        Finder().find(state, here=jax.process_index() == 0)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("spec", SPECS)
def test_the_process_that_writes_refuses_a_leaf_of_which_it_holds_nothing(spec, processes):
    found, other = processes(2).run(refusal_of_a_leaf_of, (1,), spec)
    assert "`['other']` is only on devices of process 1, but process 0 writes it" in found
    assert other is None


def test_a_leaf_that_is_split_over_some_processes_is_written_by_these(processes):
    assert processes(3).run(refusal_of_a_leaf_of, (1, 2), SPECS[1]) == [None] * 3
