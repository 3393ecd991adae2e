"""Operations of devices in JAX's profile, from a profile of GPUs that was written by hand."""

from support import gpu_profile

from jdp.inspect.profiling import device_operations
from jdp.inspect.profiling.breakdown import Activity, parts_of
from jdp.inspect.profiling.collectives import Collective, by_order
from jdp.inspect.profiling.spans import union

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
        sent = union((x.begin, x.end) for x in ran if x.looks_like_communication())
        computing = union((x.begin, x.end) for x in ran if not x.looks_like_communication())
        parts[device] = parts_of(Activity(computing, sent, [], []), window)
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


def nccl_ran(*names):
    kernel = gpu_profile.NCCL
    return [
        device_operations.Operation(name, kernel, "jit_step", None, 10 * i, 10 * i + 5)
        for i, name in enumerate(names)
    ]


def collective(name, algorithm="xla"):
    return Collective(name, "all-reduce", 64, algorithm, ("w",))


def test_collectives_that_xla_renamed_are_found_by_their_order():
    # As on an H200 with JAX 0.11: the program has starts, the profile what they were made of.
    started = {name: collective(name) for name in ("start.4", "start.3", "start")}
    ran = nccl_ran(*["all-reduce.2", "psum.70.1", "psum.68.1"] * 2)
    found = by_order(ran, {"jit_step": started})["jit_step"]
    assert [found[x.name].name for x in ran] == ["start.4", "start.3", "start"] * 2


def test_names_that_are_known_stay_and_an_uncertain_order_names_nothing():
    known = {"start.1": collective("start.1"), "start": collective("start")}
    known |= {"ring": collective("ring", "split")}
    found = by_order(nccl_ran("psum.2", "start.1"), {"jit_step": known})["jit_step"]
    assert found["start.1"].name == "start.1" and found["psum.2"].name == "start"
    found = by_order(nccl_ran("psum.1", "psum.2", "psum.3"), {"jit_step": known})["jit_step"]
    assert found == known
