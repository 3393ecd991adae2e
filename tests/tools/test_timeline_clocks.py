"""`jdp timeline` compares the clocks of hosts by the collectives that both ran."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import profiled
from support.profiled import bucket, process, step

from jdp.__main__ import main
from jdp.tools import transfers
from jdp.tools.hlo import HloProgram
from jdp.tools.profiling import trace_file
from jdp.tools.profiling.summary import clock_shifts, summarize

MS = 1_000_000


# What the ranks of two hosts did, by a true clock; the second host's is `skew` ahead.
def two_hosts(skew, lag=50_000, seed=0, num_steps=20):
    draw = random.Random(seed)
    first, second = [], []
    for number in range(num_steps):
        at = number * 10 * MS
        entered = [at + draw.randrange(3 * MS), at + draw.randrange(3 * MS)]
        left = [max(entered) + draw.randrange(1, lag) for _ in entered]
        for slices, rank, shift in ((first, 0, 0), (second, 1, skew)):
            slices += [
                step(number, at + shift, at + 10 * MS + shift, rank),
                bucket("b", entered[rank] + shift, left[rank] + shift, rank),
            ]
    return (
        process(0, first, num_processes=2, clock="one"),
        process(1, second, num_processes=2, clock="two"),
    )


@pytest.mark.parametrize("skew", [0, 1, 3_700_000, -250 * MS])
@pytest.mark.parametrize("seed", range(3))
def test_a_known_skew_of_two_hosts_is_found_within_the_error_that_is_stated(skew, seed):
    same, shift = clock_shifts(two_hosts(skew, seed=seed))
    assert (same.ns, same.within) == (0, 0)
    assert abs(shift.ns + skew) <= shift.within
    assert shift.within <= 50_000  # no more than ranks take to leave a collective


# Each process alone bounds the clock less tightly than both do together.
def test_processes_of_another_host_are_shifted_alike():
    slices = [bucket("b", 0, 4 * MS, 0), step(0, 0, 5 * MS, 0)]
    slices += [bucket("b", 10 * MS, 14 * MS, 0), step(1, 9 * MS, 15 * MS, 0)]
    early = [bucket("b", 3 * MS, 4 * MS, 1), step(0, 0, 5 * MS, 1)]
    late = [bucket("b", 10 * MS, 11 * MS, 2), step(1, 9 * MS, 15 * MS, 2)]
    traces = process(0, slices), process(1, early, clock="two"), process(2, late, clock="two")
    # Process 1 may be 4 ms early and 1 ms late, process 2 1 ms early and 4 ms late.
    assert clock_shifts(traces) == [(0, 0), (0, MS), (0, MS)]


# As the gathers of a state that is split within each host: they would bound the clocks wrongly.
def test_collectives_of_groups_of_ranks_do_not_compare_clocks():
    same, shift = two_hosts(5 * MS)
    grouped = [
        trace_file.ProcessTrace(
            trace.facts,
            [
                dataclasses.replace(each, facts=each.facts | {"num_groups": 2})
                if each.kind == trace_file.COMMUNICATION
                else each
                for each in trace.slices
            ],
        )
        for trace in (same, shift)
    ]
    assert clock_shifts(grouped)[1] == (0, None)


@pytest.mark.parametrize(("axes", "groups"), [("a", 3), ("b", 2), (("a", "b"), 1)])
def test_the_groups_of_a_collective_are_read_from_its_program(axes, groups, before_init):
    mesh = jax.make_mesh((2, 3), ("a", "b"), devices=jax.devices()[:6])
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    text = jax.jit(summed).lower(np.ones((2, 3), np.float32)).compile().as_text()
    program = HloProgram(text)
    [found] = [one for one in program.computations[program.entry] if one.op == "all-reduce"]
    assert len(transfers.replica_groups(found)) == groups


def test_clocks_of_hosts_that_were_not_compared_are_not_called_those_of_one_host(tmp_path, capsys):
    alone = [each for each in two_hosts(0)[1].slices if each.kind == trace_file.STEP]
    second = trace_file.ProcessTrace(two_hosts(0)[1].facts, alone)
    profiled.write(tmp_path, two_hosts(0)[0], second)
    assert main(["timeline", str(tmp_path)]) == 0
    assert "of one host" not in capsys.readouterr().out


def test_processes_of_one_host_are_not_shifted():
    first, second = two_hosts(0)
    facts = {**second.facts, "clock": "one"}
    found = clock_shifts([first, trace_file.ProcessTrace(facts, second.slices)])
    assert [(each.ns, each.within) for each in found] == [(0, 0), (0, 0)]


def test_a_clock_that_cannot_be_compared_is_not_shifted_and_said(tmp_path):
    first, second = two_hosts(5 * MS)
    alone = [each for each in second.slices if each.kind == trace_file.STEP]
    second = trace_file.ProcessTrace(second.facts, alone)
    profiled.write(tmp_path, first, second)
    found = summarize(tmp_path)
    assert found.shifts[1] == (0, None)
    assert [note for note in found.notes if note.startswith("process 1: ")]
    # A clock that jumps contradicts itself.
    jumping = [bucket("b", 0, 1, 1), step(0, 0, 2, 1), bucket("b", 9 * MS, 9 * MS + 1, 1),
               step(1, 9 * MS, 10 * MS, 1)]  # fmt: skip
    met = [bucket("b", 0, 1, 0), step(0, 0, 2, 0), bucket("b", 3, 4, 0), step(1, 2, 5, 0)]
    traces = process(0, met), process(1, jumping, clock="two")
    assert clock_shifts(traces)[1] == (0, None)
