"""A collective of a TPU in three fusions, counted by hand: it is one, and hides behind a matmul."""

from jdp.tools import timeline
from jdp.tools.costs import Costs
from jdp.tools.hlo import HloProgram

SHARD, WHOLE = "bf16[256,1024]{1,0}", "bf16[2048,1024]{1,0}"
GATHER = 'all-gather(%shard), channel_id=1, dimensions={0}, frontend_attributes={chain_id="3"}'
PROGRAM = f"""HloModule it

%start (shard: bf16[256,1024]) -> (bf16[256,1024], bf16[2048,1024], u32[]) {{
  %shard = {SHARD} parameter(0)
  %gather = {WHOLE} {GATHER}
  ROOT %call = ({SHARD}, {WHOLE}, u32[]) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}}

%beside (shard: bf16[256,1024], whole: bf16[2048,1024], flag: u32[], x: f32[8,64], w: f32[64,32]) -> (f32[8,32], bf16[256,1024], bf16[2048,1024], u32[]) {{
  %shard = {SHARD} parameter(0)
  %whole = {WHOLE} parameter(1)
  %flag = u32[] parameter(2)
  %x = f32[8,64]{{1,0}} parameter(3)
  %w = f32[64,32]{{1,0}} parameter(4)
  %dot = f32[8,32]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %gather = {WHOLE} {GATHER}
  ROOT %tuple = (f32[8,32]{{1,0}}, {SHARD}, {WHOLE}, u32[]) tuple(%dot, %shard, %gather, %flag)
}}

%done (shard: bf16[256,1024], whole: bf16[2048,1024], flag: u32[]) -> bf16[2048,1024] {{
  %shard = {SHARD} parameter(0)
  %whole = {WHOLE} parameter(1)
  %flag = u32[] parameter(2)
  %gather = {WHOLE} {GATHER}
  ROOT %call = {WHOLE} custom-call(%shard, %whole, %gather, %flag), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (p: bf16[256,1024], x: f32[8,64], w: f32[64,32]) -> bf16[2048,1024] {{
  %p = {SHARD} parameter(0)
  %x = f32[8,64]{{1,0}} parameter(1)
  %w = f32[64,32]{{1,0}} parameter(2)
  %a = ({SHARD}, {WHOLE}, u32[]) fusion(%p), kind=kCustom, calls=%start
  %a0 = {SHARD} get-tuple-element(%a), index=0
  %a1 = {WHOLE} get-tuple-element(%a), index=1
  %a2 = u32[] get-tuple-element(%a), index=2
  %b = (f32[8,32]{{1,0}}, {SHARD}, {WHOLE}, u32[]) fusion(%a0, %a1, %a2, %x, %w), kind=kOutput, calls=%beside
  %b1 = {SHARD} get-tuple-element(%b), index=1
  %b2 = {WHOLE} get-tuple-element(%b), index=2
  %b3 = u32[] get-tuple-element(%b), index=3
  ROOT %c = {WHOLE} fusion(%b1, %b2, %b3), kind=kCustom, calls=%done
}}
"""  # noqa: E501
FOUND = HloProgram(PROGRAM)


class Speeds:
    """10 s for each collective, and 3 s for each computation."""

    def transfer_s(self, kind, algorithm, num_bytes, groups=()):
        return 10.0

    def compute_s(self, work):
        return 3.0


def test_the_parts_of_a_collective_are_one_whose_time_the_computation_hides():
    found = timeline.simulate(FOUND, Speeds())
    (gather,) = found.transfers.values()
    assert (gather.kind, gather.runs, gather.num_bytes) == ("all-gather", 1, 2048 * 1024 * 2)
    assert [array.dims for array in gather.arrays] == [(256, 1024)]
    assert (gather.took_s, gather.exposed_s, gather.hidden_runs) == (10.0, 7.0, 1)
    assert found.step_s == 10.0 and found.computing_s == 3.0
    assert found.flops == {"f32": 2 * 8 * 64 * 32}


TWO = """HloModule it

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8], x: f32[4]) -> (f32[8], f32[4]) {
  %p = f32[8] parameter(0)
  %x = f32[4] parameter(1)
  %first = f32[8] all-reduce-start(%p), to_apply=%add
  %second = f32[4] all-reduce-start(%x), to_apply=%add
  %two = f32[4] all-reduce-done(%second)
  %one = f32[8] all-reduce-done(%first)
  ROOT %out = (f32[8], f32[4]) tuple(%one, %two)
}
"""


def test_a_wait_for_the_link_is_booked_to_what_is_on_it():
    found = timeline.simulate(HloProgram(TWO), Speeds())
    first, second = found.transfers.values()
    assert (first.begins_s, second.begins_s, second.ends_s) == (0.0, 10.0, 20.0)
    assert (first.exposed_s, second.exposed_s, found.step_s) == (10.0, 10.0, 20.0)


def test_arrays_that_pass_through_a_computation_are_not_its_bytes():
    entry = FOUND.computations["main"]
    (beside,) = [one for one in entry if one.name == "b"]
    shapes = {one.name: one.shape for one in entry}
    assert Costs(FOUND.computations).num_bytes(beside, shapes) == 4 * (8 * 64 + 64 * 32 + 8 * 32)
