"""The simulated step of `jdp plan` is that of closed forms, and grows with each of its costs."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdp.tools.plan import assumptions, command
from jdp.tools.plan.prediction import NONE, PlanOptions, predict
from jdp.tools.plan.question import Model
from jdp.tools.plan.schedule import (
    ALGORITHMS,
    COMPUTE,
    METHODS,
    Deployment,
    Fabric,
    ModelLeaf,
    Workload,
    program_of,
    uniform,
)

DOCS = Path(__file__).parents[2] / "docs"
FREE = Fabric(float("inf"), 0.0, float("inf"), 0.0)
# One second for each byte that a ring moves, and nothing else.
BYTES = Fabric(1.0, 0.0, 1.0, 0.0, algorithm="ring")


def workload(params=8, layers=4, **changes):
    fields = dict(forward_s=4.0, backward_s=8.0, update_s=2.0, bucket_bytes=1)
    return Workload(uniform(params, layers, 1), **fields | changes)


def sent_s(program):
    return sum(task.seconds for task in program.tasks if task.lane != COMPUTE)


# Closed forms


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("hosts", [1, 3])
def test_links_without_cost_leave_the_computation(method, hosts):
    program = program_of(workload(micro_batches=2), Deployment(method, hosts, 2, FREE))
    ranks = {"replicated": 1, "hsdp": 2}.get(method, 2 * hosts)
    assert program.step_s() == pytest.approx(4 + 8 + 2 / ranks)
    assert program.exposed_s() == pytest.approx(0)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_one_bucket_is_sent_after_the_backward_pass_and_before_the_update(num_ranks):
    fabric = Fabric(2.0, 0.25, 1.0, 0.0, start_s=0.5, algorithm="ring")
    program = program_of(workload(layers=1), Deployment("replicated", 1, num_ranks, fabric))
    hops = 2 * (num_ranks - 1)
    sent = 0.5 + 0.25 * hops + hops / num_ranks * (8 * 4) / 2
    assert program.step_s() == pytest.approx(4 + 8 + sent + 2)
    assert program.exposed_s() == pytest.approx(sent)


def test_of_buckets_that_are_sent_faster_than_computed_only_the_last_is_exposed():
    # 4 buckets, each of 2 s of the backward pass; sent in 1 s each.
    fabric = Fabric(8.0, 0.0, 1.0, 0.0, algorithm="ring")  # 2 ranks: 8 bytes of 8 B/s
    program = program_of(workload(), Deployment("replicated", 1, 2, fabric))
    assert program.exposed_s() == pytest.approx(1.0)


def test_of_buckets_that_are_sent_slower_than_computed_all_but_the_first_wait():
    # The first is complete after 4 + 2 s, then 4 of 8 s each follow one another.
    program = program_of(workload(), Deployment("replicated", 1, 2, BYTES))
    assert program.step_s() == pytest.approx(4 + 2 + 4 * 8 + 2)


def test_on_cpus_nothing_is_hidden():
    fabric = Fabric(8.0, 0.0, 1.0, 0.0, algorithm="ring")
    program = program_of(workload(), Deployment("replicated", 1, 2, fabric, overlaps=False))
    assert program.step_s() == pytest.approx(4 + 8 + 2 + 4 * 1.0)
    assert program.exposed_s() == pytest.approx(4.0)


def test_stage_3_gathers_no_group_before_one_of_two_is_done():
    leaves = ModelLeaf(8, 0.8), ModelLeaf(8, 0.1), ModelLeaf(8, 0.1)
    fabric = Fabric(32 / 2 / 3, 0.0, 1.0, 0.0)  # a gather of 32 bytes on 2 ranks takes 3 s
    load = Workload(leaves, 10.0, 20.0, bucket_bytes=1)
    program = program_of(load, Deployment("stage3", 1, 2, fabric))
    # Gathers end at 3 and 6, the first group computes from 3 to 11, and then the third is gathered.
    assert program.ends()[:4] == pytest.approx([3, 6, 11, 14])


def test_stage_3_gathers_one_group_ahead():
    # 2 groups, forward 2 s each, backward 4 s each; a gather and a scatter take 3 s.
    fabric = Fabric(8 * 4 / 2 / 2 / 3, 0.0, 1.0, 0.0)
    program = program_of(workload(layers=2, update_s=0.0), Deployment("stage3", 1, 2, fabric))
    # gathers end at 3, 6; forwards at 5, 8; the group just read is gathered again from 6 (its
    # place is free at 5) to 9 and computes to 13; the last from 9 to 12, computes to 17; scatters
    # from 13 to 16 and from 17 to 20.
    assert program.step_s() == pytest.approx(20.0)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("method", ["replicated", "stage1", "stage2", "stage3"])
def test_the_bytes_sent_are_those_of_the_documentation(method, k):
    page = (DOCS / "sharding.md").read_text()
    name = {"replicated": "replicated(tx)"}.get(method, f"sharded(tx, stage={method[-1]})")
    [text] = re.findall(rf"^\| `{re.escape(name)}` \|.*\| ([^|]+) \|$", page, re.M)
    copies = {"2P": 2, "P + kP": 1 + k, "3kP": 3 * k}[text]
    program = program_of(workload(micro_batches=k), Deployment(method, 1, 4, BYTES))
    assert sent_s(program) / (3 / 4) == pytest.approx(copies * 8 * 4)


@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_hsdp_scatters_within_hosts_and_averages_the_parts_between_them(hosts):
    deployment = Deployment("hsdp", hosts, 4, BYTES)
    program = program_of(workload(micro_batches=2), deployment)
    lanes = {lane: sum(it.seconds for it in program.tasks if it.lane == lane)
             for lane in ("link", "network")}  # fmt: skip
    assert lanes["link"] == pytest.approx(2 * 3 * (3 / 4) * 32)
    # A host sends the part of each of its 4 GPUs: 32 bytes in all, in each micro-batch.
    assert lanes["network"] == pytest.approx(2 * 2 * (hosts - 1) / hosts * 32)


@pytest.mark.parametrize("slowness", [1.0, 1.5])
def test_the_slowest_rank_stretches_computation_and_not_links(slowness):
    program = program_of(workload(layers=1), Deployment("replicated", 1, 2, BYTES))
    assert program.step_s(slowness) == pytest.approx(slowness * (4 + 8 + 2) + 32)


# Properties

POSITIVE = st.floats(1e-6, 1e3)
SETTINGS = st.builds(
    Deployment, st.sampled_from(METHODS), st.integers(1, 9), st.integers(1, 8),
    st.builds(Fabric, *[POSITIVE] * 5, st.sampled_from(ALGORITHMS)), st.booleans(),
)  # fmt: skip
LOADS = st.builds(
    workload, st.floats(1, 1e3), st.integers(1, 9), forward_s=POSITIVE, backward_s=POSITIVE,
    update_s=POSITIVE, micro_batches=st.integers(1, 3), bucket_bytes=st.floats(1, 1e3),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(LOADS, SETTINGS, st.floats(1, 3))
def test_whatever_costs_more_makes_no_step_shorter(load, deployment, factor):
    before = program_of(load, deployment)
    slower = [
        program_of(load, deployment._replace(fabric=deployment.fabric._replace(**{name: value})))
        for name, value in (
            ("link_bytes_per_s", deployment.fabric.link_bytes_per_s / factor),
            ("network_bytes_per_s", deployment.fabric.network_bytes_per_s / factor),
            ("link_hop_s", deployment.fabric.link_hop_s * factor),
            ("network_hop_s", deployment.fabric.network_hop_s * factor),
            ("start_s", deployment.fabric.start_s * factor),
        )
    ]
    slower += [
        program_of(load._replace(**{name: getattr(load, name) * factor}), deployment)
        for name in ("forward_s", "backward_s", "update_s")
    ]
    steps = [before.step_s(factor), *(each.step_s() for each in slower)]
    assert min(steps) >= before.step_s() * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(LOADS, SETTINGS)
def test_a_step_is_at_least_each_lane_and_at_most_all_of_them(load, deployment):
    program = program_of(load, deployment)
    busy = {}
    for task in program.tasks:
        busy[task.lane] = busy.get(task.lane, 0.0) + task.seconds
    assert max(busy.values()) <= program.step_s() * (1 + 1e-9)
    assert program.step_s() <= sum(busy.values()) * (1 + 1e-9)
    assert program.exposed_s() == pytest.approx(program.step_s() - busy[COMPUTE])


@pytest.mark.parametrize("method", METHODS)
def test_the_parts_of_a_row_add_up_to_its_step(method):
    known = assumptions.assumed("H100", "8x400")
    options = PlanOptions(Model(params=1e9, layers=4, step_s=0.2))
    row = predict(options, known, method, hosts=64)
    assert row.compute_s == pytest.approx(0.2)
    parts = row.compute_s + row.update_s + row.exposed_s + row.straggler_s
    assert row.step_s == pytest.approx(parts)
    assert row.straggler_s > 0.001 and row.exposed_s > 0
    assert row.low_s < row.step_s < row.high_s
    assert row.efficiency_low < row.efficiency < row.efficiency_high
    calm = predict(options._replace(straggler=NONE), known, method, hosts=64)
    assert calm.straggler_s == pytest.approx(0, abs=1e-12)
    assert calm.exposed_s == pytest.approx(row.exposed_s)


def test_a_picture_shows_efficiencies_above_that_of_one_gpu(monkeypatch):
    figures = []
    monkeypatch.setattr("jdp.tools.results.write_picture", lambda figure, _: figures.append(figure))
    known = assumptions.assumed("H100", "8x400")
    known = assumptions.with_given(known, {"link_bytes_per_s": 1e15})
    # Hardly any rows: the update, of which each rank does an eighth, is most of a step.
    options = PlanOptions(Model(params=1e10, layers=1, tokens=1.0))
    row = predict(options, known, "stage1", 1)
    command.draw([row], "plan.png")
    assert row.efficiency > 1.1
    for panel in figures[0].axes:
        assert panel.get_ylim()[1] > 100 * row.efficiency_high
