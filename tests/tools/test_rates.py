"""Each rate has its source; a collective takes the link between the ranks that meet."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jdp
from jdp import collectives
from jdp.tools import targets, timeline, transfers
from jdp.tools.calibration import CollectiveLaw
from jdp.tools.explain import Likely
from jdp.tools.hlo import HloProgram, Instruction
from jdp.tools.rate import Rate, given_rate
from jdp.tools.rates import UNITS, given_rates, rates_of
from jdp.tools.targets import TargetDevices

H100 = "NVIDIA H100 80GB HBM3"


def devices(platform, kind, num_hosts=1, description=""):
    """Devices that this machine has not."""
    found = [SimpleNamespace(platform=platform, device_kind=kind, process_index=0)] * 8
    mesh = SimpleNamespace(devices=np.array(found, object), size=8)
    hosts = [i * num_hosts // 8 for i in range(8)]
    return TargetDevices("8 of them", mesh, hosts, description)


# Peaks of NVIDIA's data sheets; 65 % of those of matmuls, 85 % of that of memory.
@pytest.mark.parametrize(
    ("kind", "flops", "memory"),
    [(H100, 989e12, 3.35e12), ("NVIDIA A100-SXM4-80GB", 312e12, 2.04e12),
     ("NVIDIA B200", 2250e12, 8e12), ("NVIDIA GB200", 2500e12, 8e12)],
)  # fmt: skip
def test_a_gpu_that_xla_does_not_describe_has_published_rates(kind, flops, memory):
    found = rates_of(devices("gpu", kind))
    assert found["matmul_flops"].value == pytest.approx(0.65 * flops)
    assert found["matmul_flops_f32"].value == pytest.approx(0.65 * flops / 2)
    assert found["memory_bytes_per_s"].value == pytest.approx(0.85 * memory)
    assert "65% of" in found["matmul_flops"].source and "data sheet" in found["matmul_flops"].source


def test_the_links_of_an_a100_are_its_own():
    links = [rates_of(devices("gpu", kind))["link_bytes_per_s"].value
             for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200")]  # fmt: skip
    assert links == [230e9, 700e9]


def test_a_host_has_a_link_for_each_of_its_gpus():
    links = [rates_of(devices("gpu", kind, 2))["host_link_bytes_per_s"].value
             for kind in ("NVIDIA B200", "NVIDIA GB200")]  # fmt: skip
    assert links == [360e9, 180e9]


def test_an_unknown_gpu_asks_for_its_rates_and_takes_them():
    names = ("matmul_flops", "matmul_flops_f32", "memory_bytes_per_s")
    with pytest.raises(ValueError, match=f"{', '.join(names)}.*NVIDIA T1000.*--calibrate"):
        rates_of(devices("gpu", "NVIDIA T1000"))
    some = given_rates({"matmul_flops": 1e12, "memory_bytes_per_s": jnp.float32(1e9)})
    measured = {"matmul_flops_f32": Rate(5e11, 5e11, 5e11, "FLOP/s", "measured")}
    found = rates_of(devices("gpu", "NVIDIA T1000"), some, measured)
    assert [found[name].value for name in names] == [1e12, 5e11, 1e9]


def test_a_rate_of_a_tpu_names_the_peak_of_which_it_is_a_part():
    found = rates_of(devices("tpu", "TPU v5 lite"))
    assert found["memory_bytes_per_s"].value == pytest.approx(0.85 * 819e9)
    assert "85% of 8.19e+11" in found["memory_bytes_per_s"].source
    assert "60% of 1.97e+14" in found["matmul_flops_f32"].source


def test_the_starts_within_a_host_and_between_hosts_are_printed_as_they_are_used():
    one, two = (rates_of(devices("gpu", H100, num_hosts=n)) for n in (1, 2))
    start, between = two["reduction_start_s"], two["host_reduction_start_s"]
    assert start == one["reduction_start_s"] and between.value == 2 * start.value
    assert "twice" in between.source
    assert not [name for name in one if name.startswith("host_")]  # not even if it is given
    given_one = {"host_reduction_start_s": 7.0, "reduction_start_s": 5.0}
    assert rates_of(devices("gpu", H100), given_rates(given_one)).keys() == one.keys()
    own = rates_of(devices("gpu", H100, 2), given_rates(given_one))
    likely = Likely(own, 8, TWO_HOSTS)
    assert likely.transfer_s("all-reduce", "xla", 0.0) == pytest.approx(7.0)
    assert likely.transfer_s("all-reduce", "xla", 0.0, [(0, 1), (2, 3)]) == pytest.approx(5.0)


def test_a_given_rate_that_no_operation_takes_says_so():
    jdp.init(devices=jax.devices()[:2])

    @jdp.eval_step
    def measure(weights, x):
        return {"mean": (x @ weights).mean()}

    shapes = [jax.ShapeDtypeStruct((8, 8), np.float32)] * 2
    used, unused = "matmul_flops_f32", ("matmul_flops", "host_link_bytes_per_s")
    rates = dict.fromkeys([used, *unused], 1e9)
    report = jdp.explain(measure, *shapes, on="cpu:2", rates=rates)
    for name in unused:
        assert "no operation of this step takes it" in report.rates[name].source
        assert f"{name} = 1e+09" in str(report)
    assert used in report.rates["matmul_flops"].source and report.rates[used].source == "given"
    assert jdp.explain(measure, *shapes, on="cpu:2", rates={used: 1e9}).time == report.time


TWO_HOSTS = [0, 0, 0, 0, 1, 1, 1, 1]
NO_STARTS = dict.fromkeys(("reduction_start_s", "host_reduction_start_s"), given_rate(0.0, "s"))
ONES = dict.fromkeys(UNITS, given_rate(1.0, "")) | NO_STARTS


PAIRS = [(0, 4), (1, 5), (2, 6), (3, 7)]


# 100 bytes a second within a host, 10 between hosts.
def seconds_of(kind, groups, hosts=TWO_HOSTS, num_ranks=8):
    rates = ONES | {
        "link_bytes_per_s": given_rate(100.0, ""),
        "host_link_bytes_per_s": given_rate(10.0, ""),
    }
    return Likely(rates, num_ranks, hosts).transfer_s(kind, "xla", 800.0, groups)


@pytest.mark.parametrize(
    ("groups", "seconds"),
    [
        # A rank sends 800 (n - 1) / n bytes.
        ((), 800 * 7 / 8 / 10),
        ([range(8)], 800 * 7 / 8 / 10),
        ([range(4), range(4, 8)], 800 * 3 / 4 / 100),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 800 / 2 / 100),
        (PAIRS, 4 * 800 / 2 / 10),  # four rings leave each host
        (PAIRS[:1], 800 / 2 / 10),
        ([(0, 1), (2, 3), (4, 6), (3, 7)], 800 / 2 / 10),  # the last one takes longest
        ([(i,) for i in range(8)], 1.0),
    ],
)
def test_groups_within_a_host_take_its_links_and_others_share_its_network(groups, seconds):
    assert seconds_of("all-gather", groups) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("hosts", "seconds"),
    [
        ([0, 1] * 4, 2 * 800 * 3 / 4 / 10),  # both groups on both hosts
        ([0, 0, 0, 0, 1, 1, 1, 1], 800 * 3 / 4 / 100),
        ([0, 0, 0, 1, 1, 1, 2, 2], 2 * 800 * 3 / 4 / 10),  # the host in the middle has both
        ([5] * 8, 800 * 3 / 4 / 100),
    ],
)
def test_the_hosts_are_those_of_the_devices_not_of_their_numbers(hosts, seconds):
    found = seconds_of("all-gather", [range(4), range(4, 8)], hosts, num_ranks=4)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "groups", "seconds"),
    [
        # A rank sends an eighth of its array to each other one: half of it to the other host.
        ("all-to-all", [range(8)], 4 * 800 / 2 / 10),
        ("all-to-all", [range(4), range(4, 8)], 800 * 3 / 4 / 100),
        ("all-to-all", PAIRS, 4 * 800 / 2 / 10),
        # A pair sends a whole array.
        ("collective-permute", [(i, i ^ 1) for i in range(8)], 800 / 100),
        ("collective-permute", [(i, (i + 1) % 8) for i in range(8)], 800 / 10),
        ("collective-permute", [(i, (i + 4) % 8) for i in range(8)], 4 * 800 / 10),
        ("all-reduce", PAIRS, 2 * 4 * 800 / 2 / 10),
    ],
)
def test_each_kind_sends_its_bytes_out_of_the_host(kind, groups, seconds):
    assert seconds_of(kind, groups) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("attribute", "groups"),
    [
        ("{}", []),
        ("{{0,1,2}}", [(0, 1, 2)]),
        ("{{4,1},{2,3}}", [(1, 4), (2, 3)]),
        ("[4,2]<=[8]", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("[1,8]<=[8]", [tuple(range(8))]),
        ("mesh['a'=2,'b'=3] {'a'}", [(0, 3), (1, 4), (2, 5)]),
        ("mesh['a'=2,'b'=3] {'b'}", [(0, 1, 2), (3, 4, 5)]),
        ("mesh['a'=2,'b'=3] {'b','a'}", [tuple(range(6))]),
    ],
)
def test_groups_are_read_in_every_notation(attribute, groups):
    rest = f"%x), channel_id=1, replica_groups={attribute}, use_global_device_ids=true"
    assert transfers.replica_groups(Instruction("r", "f32[8]", "all-reduce", rest)) == groups


def test_the_groups_of_a_permutation_are_its_pairs():
    rest = "%x), channel_id=1, source_target_pairs={{0,1},{1,0},{2,3}}"
    pairs = transfers.replica_groups(Instruction("r", "f32[8]", "collective-permute", rest))
    assert pairs == [(0, 1), (1, 0), (2, 3)]


def test_a_native_call_between_the_ranks_of_one_axis_has_as_many(before_init):
    mesh = jax.make_mesh((2, 3), ("outer", "inner"), devices=jax.devices()[:6])
    for axes, num in (("inner", 3), ("outer", 2), (("outer", "inner"), 6)):
        summed = jax.shard_map(
            lambda x, axes=axes: collectives.native([[x]], axes, mesh=mesh)[0][0], mesh=mesh,
            in_specs=P(), out_specs=P(), check_vma=False,
        )  # fmt: skip
        text = jax.jit(summed).lower(np.ones((2, 3), np.float32)).compile().as_text()
        (transfer,) = timeline.simulate(HloProgram(text), NoTime()).transfers.values()
        assert (transfer.algorithm, transfer.groups) == ("native", [tuple(range(num))])


class NoTime:
    def compute_s(self, work):
        return 0.0

    def transfer_s(self, kind, algorithm, num_bytes, groups=()):
        return 0.0


def test_gpus_of_a_mesh_are_described_as_those_of_their_name(monkeypatch):
    found = Mesh(np.array(jax.devices()[:2]), ("data",))
    asked = []
    monkeypatch.setattr(targets, "gpu_description", lambda name: asked.append(name) or "its text")
    gpus = SimpleNamespace(platform="gpu", device_kind=H100, process_index=0)
    fake = SimpleNamespace(
        devices=np.array([gpus] * 2, object), size=2, axis_names=found.axis_names
    )
    assert targets._of_mesh(fake, ("data",)).description == "its text" and asked == [H100]

    def missing(name):
        raise targets.MissingPluginError

    monkeypatch.setattr(targets, "gpu_description", missing)
    assert targets._of_mesh(fake, ("data",)).description == ""


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    # Each rank reads 7 arrays; or an eighth of 7, and 7 eighths of the sum.
    [("triton one-shot", 3 + 7 * 800 / 100), ("triton two-shot", 3 + 2 * 7 / 8 * 800 / 100)],
)
def test_kernels_of_xla_have_a_start_of_their_own_but_the_law_that_was_measured(algorithm, seconds):
    rates = ONES | {
        "link_bytes_per_s": given_rate(100.0, ""),
        "kernel_reduction_start_s": given_rate(3, ""),
    }
    kernel = Likely(rates, 8, [0] * 8)
    assert kernel.transfer_s("all-reduce", algorithm, 800.0) == pytest.approx(seconds)
    points = ((1, 5.0), (9, 5.1))
    measured = CollectiveLaw("all-reduce", "xla", 8, 1, "float32", 5.0, 1e2, 0.0, points, points)
    likely = Likely(rates, 8, [0] * 8, laws={("all-reduce", "xla"): measured})
    assert likely.transfer_s("all-reduce", algorithm, 800.0) == pytest.approx(measured.seconds(800))
