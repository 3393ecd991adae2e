"""Operations of devices in JAX's profile, from a profile of GPUs that was written by hand."""

import pytest
from support import gpu_profile

from jdp.tools.profiling import device_operations
from jdp.tools.profiling.device_operations import Collective, by_order
from jdp.tools.profiling.summary import Activity, span_union, step_parts

US = 1000


def test_kernels_of_streams_are_operations_and_those_of_nccl_communicate(tmp_path):
    path = tmp_path / "host.xplane.pb"
    gpu_profile.write(path)
    found = device_operations.read(path)
    assert sorted(found) == [0, 1]
    for ran in found.values():
        assert len(ran) == 2 * 4
        named = {each.name: each for each in ran}
        assert {n for n, each in named.items() if each.looks_like_communication()} == {
            "all-reduce-start.1"
        }
        assert named["all-reduce-start.1"].kernel == gpu_profile.NCCL
        # A copy belongs to no program.
        assert {n: each.program for n, each in named.items()} == {
            "MemcpyH2D": "", "gemm_fusion_dot.1": "jit_step", "all-reduce-start.1": "jit_step",
            "loop_multiply_fusion": "jit_step",
        }  # fmt: skip


def test_runs_are_counted_by_operations_where_the_profile_does_not_number_them(tmp_path):
    gpu_profile.write(tmp_path / "host.xplane.pb")
    for ran in device_operations.read(tmp_path / "host.xplane.pb").values():
        runs = device_operations.runs(ran, "jit_step", 2)
        assert [(run.begin - gpu_profile.START_NS, run.end - gpu_profile.START_NS)
                for run in runs] == [(100 * US, 550 * US), (1100 * US, 1550 * US)]  # fmt: skip
        assert device_operations.runs(ran, "jit_step", 3) == []


def test_the_slower_gpu_computes_longer_and_the_other_one_waits_in_the_collective(tmp_path):
    gpu_profile.write(tmp_path / "host.xplane.pb")
    found = device_operations.read(tmp_path / "host.xplane.pb")
    window = gpu_profile.START_NS + 550 * US, gpu_profile.START_NS + 1550 * US
    parts = {}
    for device, ran in found.items():
        sent = span_union((x.begin, x.end) for x in ran if x.looks_like_communication())
        computing = span_union((x.begin, x.end) for x in ran if not x.looks_like_communication())
        parts[device] = step_parts(Activity(computing, sent, [], []), window)
    # 100 us of each collective are hidden; the copy takes 10.
    assert parts[0] == (0, 260 * US, 200 * US, 540 * US)
    assert parts[1] == (0, 360 * US, 100 * US, 540 * US)


def test_names_of_collectives_are_known_without_the_text_of_the_program():
    def looks(name, kernel=""):
        one = device_operations.Operation(name, kernel, "jit_step", None, 0, 1)
        return one.looks_like_communication()

    names = "jdp_all_reduce.3 psum.7 all-reduce-start.1 all_gather.2 reduce-scatter all-to-all.1"
    assert all(map(looks, names.split()))
    assert looks("fusion", gpu_profile.NCCL)
    ours = "void jdp::(anonymous namespace)::{}<float, (jdp::Algorithm)0>(jdp::Arguments)"
    assert looks("ffi_call.3", ours.format("reduce_kernel"))
    assert not looks("ffi_call.4", ours.format("copy_kernel"))
    assert not any(map(looks, ["dot.3", "reduce.1", "gather.2", "fusion", "copy", "scatter"]))


def test_kernels_of_a_cuda_graph_are_called_by_their_own_names(tmp_path, monkeypatch):
    gemm, nccl, update = gpu_profile.KERNELS
    in_graph = [(kernel, "command_buffer_1", *rest) for kernel, _, *rest in (gemm, update)]
    monkeypatch.setattr(gpu_profile, "KERNELS", (in_graph[0], nccl, in_graph[1]))
    path = tmp_path / "host.xplane.pb"
    gpu_profile.write(path)
    for ran in device_operations.read(path).values():
        names = {each.name for each in ran if each.program}
        assert names == {gemm[0], nccl[1], update[0]}
        # Each of them ran once in each run, so that the runs are found.
        assert len(device_operations.runs(ran, "jit_step", 2)) == 2


# From NCCL 2.18, 2.19, 2.27 and 2.28 on: the last two in symmetric memory.
@pytest.mark.parametrize("prefix", ["ncclKernel", "ncclDevKernel", "ncclSymDevKernel",
                                    "ncclSymkDevKernel"])  # fmt: skip
def test_kernels_of_nccl_are_known_by_their_names_of_each_version(prefix):
    one = device_operations.Operation("x", f"{prefix}_AllReduce_f32(int)", "jit_step", None, 0, 1)
    assert one.looks_like_communication() and one.is_of_nccl()
    assert one.may_be("all-reduce") and not one.may_be("all-gather")


def kernels(*begins, name="dot", us=10):
    return [
        device_operations.Operation(name, name, "jit_step", None, at * US, (at + us) * US)
        for at in begins
    ]


def runs_of(num, *operations):
    ran = sorted(sum(operations, []), key=lambda x: x.begin)
    found = device_operations.runs(ran, "jit_step", num)
    return [(run.begin // US, run.end // US) for run in found]


def test_a_loop_in_a_branch_that_one_run_takes_is_not_taken_for_an_operation_of_each_run():
    # Four runs, of which the third takes a branch with a loop of four iterations.
    first, last = kernels(0, 100, 200, 300, name="dot"), kernels(50, 150, 290, 350, name="add")
    loop = [kernels(220 + i, 230 + i, 240 + i, 250 + i, name=f"fusion.{i}") for i in range(3)]
    want = [(0, 60), (100, 160), (200, 300), (300, 360)]
    assert runs_of(4, first, last) == runs_of(4, first, last, *loop) == want


def test_another_program_of_the_same_name_does_not_move_the_ends_of_steps():
    # Two programs in alternation: one of them runs a kernel twice.
    common = kernels(0, 100, 200, 300, name="dot")
    last = kernels(50, 150, 250, 350, name="add")
    twice = kernels(110, 120, 310, 320, name="copy")
    assert runs_of(4, common, last, twice) == [(0, 60), (100, 160), (200, 260), (300, 360)]


def test_operations_that_overlap_those_of_the_next_run_end_their_own_run():
    first = kernels(0, 100, 200, name="dot")
    late = kernels(60, 160, 260, name="copy", us=70)  # on a stream of its own
    assert runs_of(3, first, late) == [(0, 130), (100, 230), (200, 330)]


def test_without_an_operation_of_each_run_no_run_is_found():
    assert runs_of(3, kernels(0, 1, 100, 101, 200, 201)) == []
    assert runs_of(0) == runs_of(2) == []


def nccl_ran(*names, kernel=gpu_profile.NCCL):
    return [
        device_operations.Operation(name, kernel, "jit_step", None, 10 * i, 10 * i + 5)
        for i, name in enumerate(names)
    ]


def collective(name, algorithm="xla", kind="all-reduce"):
    return Collective(name, kind, 64, algorithm, ("w",))


def paired(known, *devices):
    """Return the collectives by their names in the profile of some devices."""
    return by_order(dict(enumerate(devices)), {"jit_step": known})["jit_step"]


def test_collectives_that_xla_renamed_are_found_by_their_order():
    # As on an H200 with JAX 0.11: the program has starts, the profile what they were made of.
    started = {name: collective(name) for name in ("start.4", "start.3", "start")}
    ran = nccl_ran(*["all-reduce.2", "psum.70.1", "psum.68.1"] * 2)
    found = paired(started, ran, ran)
    assert [found[x.name].name for x in ran] == ["start.4", "start.3", "start"] * 2


def test_names_that_are_known_stay_and_an_uncertain_order_names_nothing():
    known = {"start.1": collective("start.1"), "start": collective("start")}
    known |= {"ring": collective("ring", "split")}
    found = paired(known, nccl_ran("psum.2", "start.1"))
    assert found["start.1"].name == "start.1" and found["psum.2"].name == "start"
    assert paired(known, nccl_ran("psum.1", "psum.2", "psum.3")) == known


def test_a_small_sum_that_xla_runs_by_a_kernel_of_its_own_is_not_missing():
    known = {name: collective(name) for name in ("fusion-start", "start.1", "start")}
    own = kernels(2, name="fusion-start")
    found = paired(known, sorted([*nccl_ran("psum.1", "psum.2"), *own], key=lambda x: x.begin))
    assert (found["psum.1"].name, found["psum.2"].name) == ("start.1", "start")


def test_kernels_of_another_kind_or_order_contradict_the_order_of_the_program():
    gather = {"start": collective("start", kind="all-gather")}
    assert paired(gather, nccl_ran("all-gather.1")) == gather
    kernel = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    assert "all-gather.1" in paired(gather, nccl_ran("all-gather.1", kernel=kernel))
    sums = {name: collective(name) for name in ("start.1", "start")}
    assert paired(sums, nccl_ran("psum.1", "psum.2"), nccl_ran("psum.2", "psum.1")) == sums
    # A device that did not run the program says nothing.
    assert "psum.1" in paired(sums, nccl_ran("psum.1", "psum.2"), [])
