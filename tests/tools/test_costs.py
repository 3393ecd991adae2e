"""The operations and the bytes of instructions, counted by hand in small programs."""

import pytest

from jdp.tools import timeline
from jdp.tools.costs import Costs
from jdp.tools.hlo import HloProgram

TABLE, ROWS = 1000 * 8 * 4, 16 * 8 * 4  # bytes of f32[1000,8] and f32[16,8]


def program(*lines, others=""):
    body = "\n".join(f"  {line}" for line in lines)
    return HloProgram(f"HloModule it\n\n{others}\nENTRY %main () -> f32[] {{\n{body}\n}}\n")


def fusion(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"%inner () -> f32[] {{\n{body}\n}}\n"


def bytes_of_root(found):
    entry = found.computations[found.entry]
    shapes = {one.name: one.shape for one in entry}
    return Costs(found.computations).num_bytes(entry[-1], shapes)


INDICES = "%indices = s32[16,1]{1,0} parameter(1)"


@pytest.mark.parametrize(
    ("root", "num_bytes"),
    [
        ("f32[16,8]{1,0} gather(%table, %indices), offset_dims={1}", 2 * ROWS + 64),
        ("f32[16,8]{1,0} slice(%table), slice={[3:19], [0:8]}", 2 * ROWS),
        ("f32[16,8]{1,0} dynamic-slice(%table, %i, %i), dynamic_slice_sizes={16,8}", 2 * ROWS + 8),
        # Reads 16 rows and their numbers, and adds the rows to 16 of the table.
        ("f32[1000,8]{1,0} scatter(%table, %indices, %rows), to_apply=%add", 3 * ROWS + 64),
        ("f32[1000,8]{1,0} dynamic-update-slice(%table, %rows, %i, %i)", 2 * ROWS + 8),
        ("f32[8,1000]{1,0} transpose(%table), dimensions={1,0}", 2 * TABLE),
    ],
)
def test_of_an_array_that_is_sliced_the_slice_is_read(root, num_bytes):
    found = program(
        "%table = f32[1000,8]{1,0} parameter(0)", INDICES,
        "%rows = f32[16,8]{1,0} parameter(2)", "%i = s32[] parameter(3)", f"ROOT %root = {root}",
    )  # fmt: skip
    assert bytes_of_root(found) == num_bytes


# The first parameter of the fusion is the table, the second the numbers of the rows.
PARAMETERS = ("%p = f32[1000,8]{1,0} parameter(0)", "%n = s32[16,1]{1,0} parameter(1)")
SLICED = "f32[16,8]{1,0} slice(%p)"


@pytest.mark.parametrize(
    ("inner", "result", "num_bytes"),
    [
        (["ROOT %g = f32[16,8]{1,0} gather(%p, %n), offset_dims={1}"], "f32[16,8]", 2 * ROWS + 64),
        # Two slices of one array are two slices.
        (
            [f"%a = {SLICED}", f"%b = {SLICED}", "ROOT %sum = f32[16,8]{1,0} add(%a, %b)"],
            "f32[16,8]", 3 * ROWS,
        ),
        # A slice of a view of the array.
        (
            ["%v = f32[8000]{0} bitcast(%p)", "ROOT %a = f32[128]{0} slice(%v)"], "f32[128]",
            2 * ROWS,
        ),
        # Also read as a whole.
        (
            [f"%a = {SLICED}", "%s = f32[] reduce(%p, %a)", "ROOT %t = (f32[16,8], f32[]) "
             "tuple(%a, %s)"],
            "(f32[16,8], f32[])", TABLE + ROWS + 4,
        ),
        # Of a converted array only the slice is converted, but XLA may read all of it.
        (
            ["%c = bf16[1000,8]{1,0} convert(%p)", "ROOT %a = bf16[16,8]{1,0} slice(%c)"],
            "bf16[16,8]", TABLE + ROWS // 2,
        ),
        # 16 rows are changed in place.
        (
            ["%z = f32[] constant(0)", "%rows = f32[16,8]{1,0} broadcast(%z)",
             "ROOT %u = f32[1000,8]{1,0} dynamic-update-slice(%p, %rows, %z, %z)"],
            "f32[1000,8]", ROWS,
        ),
        (["ROOT %e = f32[1000,8]{1,0} exponential(%p)"], "f32[1000,8]", 2 * TABLE),
    ],
)  # fmt: skip
def test_a_fusion_reads_and_writes_the_parts_that_its_operations_use(inner, result, num_bytes):
    found = program(
        "%table = f32[1000,8]{1,0} parameter(0)", INDICES,
        f"ROOT %root = {result} fusion(%table, %indices), kind=kLoop, calls=%inner",
        others=fusion(*PARAMETERS, *inner),
    )  # fmt: skip
    assert bytes_of_root(found) == num_bytes


def flops_of_root(found):
    entry = found.computations[found.entry]
    shapes = {one.name: one.shape for one in entry}
    return Costs(found.computations).flops(entry[-1], shapes)


LEFT, RIGHT = "%a = bf16[6,4,8]{2,1,0} parameter(0)", "%b = bf16[6,8,5]{2,1,0} parameter(1)"
NUMBERS = (
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],'
    '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}'
)


@pytest.mark.parametrize(
    "root",
    [
        "bf16[6,4,5]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}",
        '(bf16[6,4,5]{2,1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
        + NUMBERS,
    ],
)
def test_a_product_of_6_pairs_of_matrices_counts_6_products(root):
    found = program(LEFT, RIGHT, f"ROOT %root = {root}")
    assert flops_of_root(found) == {"bf16": 2 * 6 * 4 * 8 * 5}


def test_a_product_whose_dims_are_not_said_is_that_of_two_matrices():
    found = program(
        "%a = f32[4,8]{1,0} parameter(0)", "%b = f32[8,5]{1,0} parameter(1)",
        'ROOT %root = f32[4,5]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"',
    )  # fmt: skip
    assert flops_of_root(found) == {"f32": pytest.approx(2 * 4 * 8 * 5)}


def test_a_call_of_one_array_whose_name_says_dot_is_no_product():
    found = program(
        "%a = f32[4,8]{1,0} parameter(0)",
        'ROOT %root = f32[4]{0} custom-call(%a), custom_call_target="my_dot_with_itself"',
    )
    assert flops_of_root(found) == {}


class Seconds:
    """A second for each floating-point operation of a matmul, none for anything else."""

    def compute_s(self, work):
        return sum(work.flops.values())

    def transfer_s(self, kind, algorithm, num_bytes, groups=()):
        return 0.0


BRANCHES = """
%long (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %q = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[4,4]{1,0} dot(%q, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%short (p: f32[4,4]) -> f32[4,4] {
  %o = f32[4,4]{1,0} parameter(0)
  %a = f32[4,4]{1,0} add(%o, %o)
  %b = f32[4,4]{1,0} add(%a, %o)
  %c = f32[4,4]{1,0} add(%b, %o)
  ROOT %d = f32[4,4]{1,0} dot(%c, %o), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%long, %short}", "true_computation=%short, false_computation=%long"],
)
def test_of_two_branches_the_one_that_takes_longer_counts(branches):
    found = program(
        "%i = s32[] parameter(0)", "%x = f32[4,4]{1,0} parameter(1)",
        f"ROOT %root = f32[4,4]{{1,0}} conditional(%i, %x, %x), {branches}",
        others=BRANCHES,
    )  # fmt: skip
    simulated = timeline.simulate(found, Seconds())
    assert simulated.step_s == sum(simulated.flops.values()) == 2 * 2 * 4**3
    assert simulated.unknown == ["of root the longest branch was counted"]


@pytest.mark.parametrize(
    ("count", "times", "is_known"), [("0", 0, True), ("7", 7, True), (None, 1, False)]
)
def test_a_loop_counts_as_often_as_it_runs(count, times, is_known):
    config = f', backend_config={{"known_trip_count":{{"n":"{count}"}}}}' if count else ""
    found = program(
        "%x = f32[4,4]{1,0} parameter(0)",
        f"ROOT %root = f32[4,4]{{1,0}} while(%x), condition=%until, body=%long{config}",
        others=BRANCHES,
    )
    simulated = timeline.simulate(found, Seconds())
    assert simulated.step_s == sum(simulated.flops.values()) == times * 2 * 2 * 4**3
    assert bool(simulated.unknown) != is_known
