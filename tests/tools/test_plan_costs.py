"""Collectives and memory of `jdp plan` are those of closed forms and of the documentation."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.calibrations import FOUND, LAW
from support.training import ranks, step_of

import jdp
from jdp.tools.memory import allocated_bytes
from jdp.tools.plan import assumptions
from jdp.tools.plan.prediction import rank_memory, state_bytes_of_host
from jdp.tools.plan.schedule import METHODS, Deployment, Fabric, Group, ModelLeaf, Workload, uniform

PAGE = (Path(__file__).parents[2] / "docs" / "sharding.md").read_text()
BYTES = Fabric(1.0, 0.0, 1.0, 0.0)


def test_a_collective_of_one_rank_takes_no_time():
    alone = Group(1, 1)
    assert BYTES.all_reduce_s(100, alone) == BYTES.gather_s(100, alone) == 0


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_ring_over_hosts_crosses_the_network_once_less_than_there_are_hosts(hosts):
    fabric = Fabric(1000.0, 1.0, 10.0, 100.0, algorithm="ring")
    n = hosts * 4
    hops = 100 * (hosts - 1) + (n - hosts)
    assert fabric.gather_s(60, Group(hosts, 4)) == pytest.approx(hops + (n - 1) / n * 60 / 10)
    assert fabric.all_reduce_s(60, Group(hosts, 4)) == pytest.approx(
        2 * hops + 2 * (n - 1) / n * 60 / 10
    )


def test_a_tree_has_few_hops_and_less_bandwidth():
    tree = Fabric(1.0, 1.0, 1.0, 1.0, algorithm="tree")
    # 8 hosts: 3 levels up and down, 9 hosts: 4; 8 GPUs of a host: a chain of 7.
    assert tree.all_reduce_s(0, Group(8, 8)) == 2 * (3 + 7)
    assert tree.all_reduce_s(0, Group(9, 8)) == 2 * (4 + 7)
    best, ring = tree._replace(algorithm="best"), tree._replace(algorithm="ring")
    for num_bytes in (0, 10_000):
        times = [each.all_reduce_s(num_bytes, Group(9, 8)) for each in (tree, ring)]
        assert best.all_reduce_s(num_bytes, Group(9, 8)) == min(times)
    assert times[1] < times[0]


def test_as_many_ranks_as_were_calibrated_take_the_measured_time():
    law = dataclasses.replace(LAW, num_ranks=3, alpha_s=6e-6, points=())
    found = dataclasses.replace(FOUND, rates=(LAW, law))
    known = assumptions.values(
        assumptions.with_calibration(assumptions.assumed("H100", "8x400"), found)
    )
    fabric = Fabric(
        known["link_bytes_per_s"],
        known["link_hop_s"],
        1.0,
        0.0,
        known["collective_start_s"],
        "ring",
    )
    assert fabric.all_reduce_s(1e6, Group(1, 3)) == pytest.approx(law.seconds(1e6))


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_that_of_the_documentation(method, n, micro_batches):
    row = {"replicated": "`replicated`", "hsdp": "stage 3"}.get(method, f"stage {method[-1]}")
    row = row if n > 1 else "`replicated`"  # as in the step that one rank compiles
    [cells] = re.findall(rf"^\| {row} \| ([^|]+) \| \+ ([^|]+) \| \+ ([^|]+) \|$", PAGE, re.M)
    load = Workload(
        (ModelLeaf(6, 0.25), ModelLeaf(10, 0.5), ModelLeaf(4, 0.25)), 1.0, 2.0,
        micro_batches=micro_batches, bucket_bytes=24,
    )  # fmt: skip
    in_copies = {"n": n, "G": 10 / 20}  # a group is at least one leaf
    between, within, more = (eval(it.replace("2 G", "2 * G"), in_copies) for it in cells)
    within += more * (micro_batches > 1)
    found = rank_memory(load, Deployment(method, 1, n, BYTES))
    assert found.between_steps == pytest.approx(between * 20 * 4)
    assert found.in_step == pytest.approx(within * 20 * 4)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize(("method", "n"), [("replicated", 1), ("replicated", 2), ("stage1", 4)])
def test_memory_is_what_xla_allocates(method, n, layers, micro_batches):
    found = allocated(method, n, layers, micro_batches)
    if micro_batches == 1 and layers > 1:  # leaves are updated while others are computed
        assert found < 1.02
    else:
        assert found == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("n", [2, 8])
def test_a_model_of_one_group_gathers_no_second_one(n):
    assert 0.8 < allocated("stage3", n, 1, 1) < 1.02


DIM = 512


def allocated(method, n, layers, micro_batches):
    """Return what XLA allocates on n CPUs, over what the plan predicts."""
    ranks(n)
    options = {"bucket_bytes": 4 * DIM * DIM}
    tx = jdp.replicated(optax.adam(0.1), **options)
    if method != "replicated":
        tx = jdp.sharded(optax.adam(0.1), stage=int(method[-1]), min_size=1, **options)

    def loss_fn(params, x):
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.square(x).mean()

    params = [np.ones((DIM, DIM), np.float32)] * layers
    # Of one row, a gradient would be a product of two vectors, which XLA adds without an array.
    rows = np.zeros((2 * micro_batches * n, DIM), np.float32)
    step = step_of(loss_fn, accumulate=micro_batches) if micro_batches > 1 else step_of(loss_fn)
    compiled = step.lower(jdp.TrainState.create(params, tx), rows).compile()
    load = Workload(
        uniform(layers * DIM * DIM, layers, 1), 1.0, 2.0, micro_batches=micro_batches, **options
    )
    return allocated_bytes(compiled) / rank_memory(load, Deployment(method, 1, n, BYTES)).total


@pytest.mark.parametrize(
    ("method", "copies"), [("replicated", 3), ("stage1", 1 + 2 / 5), ("stage3", 3 / 5), ("hsdp", 3)]
)
def test_a_host_commits_the_state_that_its_ranks_hold_together(method, copies):
    load = Workload(uniform(8, 4, 1), 1.0, 2.0)
    found = state_bytes_of_host(load, Deployment(method, 5, 4, BYTES))
    assert found == pytest.approx(copies * 8 * 4)
