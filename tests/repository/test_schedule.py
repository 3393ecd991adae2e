"""The model of time counts a schedule as its author can by hand."""

import pytest

from benchmarks.gpu import timeline

BIG = "f32[1024,2048]{1,0}"  # 8 MiB
PRODUCT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def entry(*lines):
    body = "".join(f"  {line}\n" for line in lines)
    return f"ENTRY %main (x: f32[1024,2048]) -> f32[] {{\n  %x = {BIG} parameter(0)\n{body}}}\n"


def test_a_reduction_is_hidden_where_a_matmul_runs_before_its_end():
    text = entry(
        f"%s = {BIG} all-reduce-start(%x), to_apply=%add",
        f"%p = f32[1024,1024]{{1,0}} {PRODUCT}",
        f"%d = {BIG} all-reduce-done(%s)",
        f"%t = {BIG} all-reduce(%d), to_apply=%add",
    )
    found = timeline.run(text)
    assert (found.reductions, found.sent_bytes) == (2, 2 * 8 * timeline.MiB)
    assert found.hidden_bytes == found.tail_bytes == 8 * timeline.MiB


def test_the_wait_is_what_computing_leaves_of_a_reduction():
    text = entry(
        f"%s = {BIG} all-reduce-start(%x), to_apply=%add",
        f"%p = f32[1024,1024]{{1,0}} {PRODUCT}",
        f"%d = {BIG} all-reduce-done(%s)",
    )
    reading, multiplying = (8 + 8 + 4) * timeline.MiB / 4e12, 2 * 1024 * 1024 * 2048 / 600e12
    computing = max(reading, multiplying)
    found = timeline.run(text)
    assert found.reducing_s == pytest.approx(76e-6)
    assert found.waited_s == pytest.approx(76e-6 - computing)
    assert found.now_s == pytest.approx(76e-6)


def test_a_ring_is_told_by_its_number_and_costs_a_copy():
    ring = (
        'custom_call_target="jdp_ring_{}", api_version=API_VERSION_TYPED_FFI, '
        "backend_config={{bucket = {} : i32, num_ranks = 8 : i32}}"
    )
    start = "f32[1]{0} custom-call(%scale, %x), "
    done = f"(f32[1]{{0}}, {BIG}) custom-call(%a, %b, %x), "
    text = entry(
        "%scale = f32[] constant(0.125)",
        "%a = " + start + ring.format("start", 3),
        "%b = " + start + ring.format("start", 14),
        f"%p = f32[1024,1024]{{1,0}} {PRODUCT}",
        "%c = " + done + ring.format("done", 14),
        "%d = " + done + ring.format("done", 3),
    )
    found = timeline.run(text)
    assert (found.reductions, found.hidden_bytes) == (2, 2 * 8 * timeline.MiB)
    # Number 14 comes second on the stream; then each done copies 8 MiB from its place.
    copies = 2 * 2 * (8 * timeline.MiB + 4) / timeline.BYTES_PER_S
    assert found.now_s == pytest.approx(2 * 76e-6 + copies)


@pytest.mark.parametrize(("mib", "us"), [(0, 20), (0.25, 22), (8, 76), (24, 158), (256, 1051)])
def test_the_time_of_a_reduction_is_between_those_published(mib, us):
    assert timeline.all_reduce_s(mib * timeline.MiB) == pytest.approx(us * 1e-6)
