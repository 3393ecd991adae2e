"""`explain` predicts with the rates that `jdp bench --calibrate` measured on this host."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import optax
import pytest
from support.calibrations import ALONE, FOUND, TOGETHER

import jdp
from jdp.collectives.cpu import runtime
from jdp.tools.calibration import CollectiveLaw, of_ranks
from jdp.tools.explain import Likely
from jdp.tools.rates import UNITS, Rate
from jdp.tools.timeline import Work

ALL_REDUCE = CollectiveLaw(
    "all-reduce", "direct", 2, 1, "float32", 1.0, 1e6, 0.0, ((1, 1.0), (1 << 30, 8.0)),
    ((1, 1.5), (1 << 30, 6.0)),
)  # fmt: skip
ONE = dataclasses.replace(ALONE, matmul_flops_per_s={"float32": 3e9}, memory_bytes_per_s=5e9)
TWO = dataclasses.replace(TOGETHER, matmul_flops_per_s={"float32": 2e9}, memory_bytes_per_s=4e9)
MEASURED = dataclasses.replace(FOUND, computation=(ONE, TWO), rates=(ALL_REDUCE,))

PART = 0.75  # of the measured rate of large matmuls


@pytest.fixture
def calibrated(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda **changes: dataclasses.replace(MEASURED, **changes).save()


@jdp.train_step
def step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state.params)
    return state.apply_gradients(grads), {}


def explained(on, **options):
    state = jax.eval_shape(
        lambda: jdp.TrainState.create(jnp.zeros((256, 64)), jdp.replicated(optax.sgd(0.1)))
    )
    return jdp.explain(step, state, jax.ShapeDtypeStruct((12, 256), jnp.float32), on=on, **options)


def test_measured_rates_come_before_assumed_ones_and_after_given_ones(calibrated):
    calibrated()
    found = explained("cpu:2", rates={"memory_bytes_per_s": 7.0}).rates
    assert found["matmul_flops_f32"].value == PART * 2e9
    assert "75% of 2e+09, measured here" in found["matmul_flops_f32"].source
    assert found["memory_bytes_per_s"].value == 7.0
    assert found["reduction_start_s"].source.startswith("assumed")


def test_ranks_that_share_the_cores_share_the_measured_rates(calibrated):
    calibrated()
    assert explained("cpu:1").rates["matmul_flops_f32"].value == PART * 3e9
    assert explained("cpu:4").rates["matmul_flops_f32"].value == PART * 1e9


@pytest.mark.parametrize(
    ("num_ranks", "flops"), [(1, 3e9), (2, 2e9), (3, 0.9e9 * 4 / 3), (4, 0.9e9), (6, 0.6e9)]
)
def test_ranks_have_the_rates_of_the_next_larger_number_that_was_measured(
    calibrated, num_ranks, flops
):
    four = dataclasses.replace(TWO, num_ranks=4, matmul_flops_per_s={"float32": 0.9e9})
    calibrated(computation=(ONE, TWO, four))
    assert explained(f"cpu:{num_ranks}").rates["matmul_flops_f32"].value == pytest.approx(
        PART * flops
    )


def test_gpus_share_nothing():
    measured = ONE, dataclasses.replace(TWO, num_ranks=8)
    for num_ranks in (2, 8, 16):
        found = of_ranks(measured, num_ranks, share_cores=False)
        assert found.matmul_flops_per_s == {"float32": 2e9}
        assert found.num_ranks == num_ranks
    assert of_ranks(measured, 1, share_cores=False) == ONE


def test_ranks_that_share_the_cores_are_no_faster_than_one_by_itself(calibrated):
    # 8 ranks were measured: 2 of them have 4 times the cores, but each is one device.
    calibrated(computation=(ONE, dataclasses.replace(TWO, num_ranks=8)))
    found = explained("cpu:2").rates
    alone = explained("cpu:1").rates
    for name in ("matmul_flops_f32", "memory_bytes_per_s"):
        assert found[name].value == alone[name].value


@pytest.mark.parametrize(("num_cores", "shared"), [(1, True), (2, False)])
def test_more_ranks_than_cores_wait_for_no_more_than_the_cpu_time_of_a_collective(
    calibrated, num_cores, shared
):
    calibrated(num_cores=num_cores)
    ((law,), bucket) = (found := explained("cpu:2")).laws, found.buckets[0]
    first, last = law.points
    assert (first[1], last[1]) == ((1.5, 6.0) if shared else (1.0, 8.0))
    slope = (last[1] - first[1]) / (last[0] - first[0])
    assert bucket.exposed_s == pytest.approx(first[1] + slope * (256 * 64 * 4 - 1))


@pytest.mark.parametrize(
    ("num_bytes", "error", "times"),
    [
        # Between two measured times nothing but a busy machine is taken into account.
        (1 << 29, 0.5, (1 / 1.25, 1 / 0.75)),
        (1 << 31, 0.5, (1 / 1.5, 2.0)),
        (1 << 31, 0.1, (1 / 1.25, 1 / 0.75)),
        # A law that was 4 times too high once says nothing of the longest time.
        (1 << 31, 3.0, (1 / 4, 4.0)),
    ],
)
def test_the_interval_of_a_collective_follows_from_the_error_of_its_law(num_bytes, error, times):
    law = dataclasses.replace(ALL_REDUCE, largest_error=error)
    ones = dict.fromkeys(UNITS, Rate(1.0, 1.0, 1.0, "", ""))
    low, likely, high = (
        Likely(ones, 2, [0, 0], which, {("all-reduce", "native"): law}).transfer_s(
            "all-reduce", "native", num_bytes
        )
        for which in ("high", "value", "low")
    )
    assert likely == law.seconds(num_bytes)
    assert (low / likely, high / likely) == pytest.approx(times)


def test_a_time_that_does_not_grow_is_null_in_json(calibrated):
    calibrated(rates=(dataclasses.replace(ALL_REDUCE, bytes_per_s=float("inf")),))
    text = explained("cpu:2").to_json()
    (law,) = json.loads(text, parse_constant=pytest.fail)["laws"]
    assert law["bytes_per_s"] is None and law["points"] == [[1, 1.0], [1 << 30, 8.0]]


def test_a_collective_takes_its_measured_time(calibrated):
    calibrated()
    found = explained("cpu:2")
    [bucket] = found.buckets
    assert bucket.algorithm == "native" and found.laws == (ALL_REDUCE,)
    assert bucket.took_s == ALL_REDUCE.seconds(256 * 64 * 4) > 1.0
    assert found.time.low_s < found.time.likely_s < found.time.high_s
    assert "all-reduce (direct, 2 ranks): measured here" in str(found)
    assert "0.8 to 1.3 times as long" in str(found)


def test_a_given_link_is_used_in_place_of_the_measured_time(calibrated):
    calibrated()
    found = explained("cpu:2", rates={"link_bytes_per_s": 1e6, "reduction_start_s": 0.0})
    assert not found.laws
    [bucket] = found.buckets
    assert bucket.took_s == pytest.approx(2 * 256 * 64 * 4 / 2 / 1e6)


@pytest.mark.parametrize(
    ("flops", "seconds"), [({"f32": 4e9}, 4.5), ({"bf16": 1e9}, 3.5), ({}, 3.5)]
)
def test_an_operation_takes_its_start_and_the_longer_of_its_matmuls_and_its_memory(flops, seconds):
    ones = dict.fromkeys(UNITS, Rate(1e9, 1e9, 1e9, "", ""))
    start = {"operation_start_s": Rate(0.5, 0.5, 0.5, "", "")}
    assert Likely(ones | start, 1, [0]).compute_s(Work(flops, 3e9)) == pytest.approx(seconds)


def explained_by_processes(cache):
    os.environ["XDG_CACHE_HOME"] = cache
    try:
        jdp.init()
        found = explained(None)
    finally:
        del os.environ["XDG_CACHE_HOME"]
    bucket, _ = found.buckets  # and a checksum of the arguments
    return found.laws, found.rates["matmul_flops_f32"].source, bucket.took_s, [*found.rates]


@pytest.mark.skipif(runtime.why_missing() is not None, reason="needs the compiled library")
def test_processes_of_one_host_are_predicted_by_their_own_laws(calibrated, processes, tmp_path):
    several = dataclasses.replace(ALL_REDUCE, num_ranks=4, num_processes=2)
    rates = ALL_REDUCE, dataclasses.replace(several, num_processes=1), several
    calibrated(rates=rates, num_cores=4)
    for laws, source, took_s, rates in processes(2).run(explained_by_processes, str(tmp_path)):
        assert laws == (several,) and took_s == several.seconds(256 * 64 * 4)
        assert "measured here" in source and "host_link_bytes_per_s" not in rates


def test_rates_of_another_kind_of_device_are_not_used(calibrated):
    calibrated(device_kind="another")
    found = explained("cpu:2")
    assert not found.laws and found.rates["matmul_flops_f32"].source.startswith("assumed")
