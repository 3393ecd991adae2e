"""`jdp bench` times what it has compared with exact results, and ends at a wrong one."""

import argparse
import dataclasses
import json
import os

import numpy as np
import pytest
from support.calibrations import FOUND

from jdp.__main__ import main
from jdp.collectives import native_shards
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.tools import calibration, known_values
from jdp.tools.bench import collectives, output
from jdp.tools.bench.collectives import Case, Trial, algorithms
from jdp.tools.known_values import OPERATIONS

NEEDS_LIBRARY = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason="needs the compiled library"
)
QUICK = ["-b", "4", "-e", "100", "-f", "20", "-n", "2"]


@pytest.fixture(autouse=True)
def process(before_init, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as of these tests
    monkeypatch.setattr(collectives, "_MAX_CALLS", 2)
    monkeypatch.setattr(collectives, "_MAX_PPERMUTES", 1)


@NEEDS_LIBRARY
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("operation", known_values.OPERATIONS)
def test_every_algorithm_is_exact(operation, in_place, make_mesh):
    mesh = make_mesh(3)
    cases = [
        Case(operation, name, dtype, 3 * size)
        for name in algorithms(operation)
        for dtype, size in (("float32", 1), ("bfloat16", 301))
    ]
    trial = Trial(cases, mesh, in_place=in_place)
    for _ in range(3):
        trial.prepare()
        trial()
        trial.check()


def test_xla_makes_as_many_calls_as_there_are_cases(make_mesh):
    trial = Trial([Case("all-reduce", "xla", "float32", 5)] * 4, make_mesh(2))
    assert trial.lowered().compile().as_text().count(" all-reduce(") == 4


@NEEDS_LIBRARY
@pytest.mark.parametrize("operation", ["all-reduce", "all-gather"])
def test_rows_have_the_bandwidths_of_nccl_tests(operation, capsys, tmp_path):
    path = tmp_path / "rows.json"
    assert main(["bench", operation, *QUICK, f"--json={path}"]) == 0
    found = json.loads(path.read_text())
    names = [name for name in algorithms(operation) if name != "auto"]
    rows = found["rows"]
    assert [(row["bytes"], row["algorithm"]) for row in rows] == [
        (size, name) for size in (32, 64) for name in names
    ]
    for row in rows:
        assert (row["ranks"], row["rounds"], row["dtype"]) == (8, 2, "float32")
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert 0 < row["cpu_s"] <= (os.cpu_count() or 1) * row["max_s"]
        assert row["algbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["median_s"])
        factor = {"all-reduce": 14 / 8, "all-gather": 7 / 8}[operation]
        assert row["busbw_bytes_per_s"] == pytest.approx(factor * row["algbw_bytes_per_s"])
        assert (row["xla_over_this"] == 1) == (row["algorithm"] == "xla")
    assert "exact" not in capsys.readouterr().err


def test_an_algorithm_that_is_none_is_refused_with_those_that_are(capsys):
    assert main(["bench", "all-reduce", "-a", "native,xla"]) == 2
    error = capsys.readouterr().err
    assert "'native'" in error and "direct and ring" in error and "auto,direct" in error


@NEEDS_LIBRARY
def test_a_wrong_result_ends_the_bench_with_rank_element_and_size(capsys, monkeypatch):
    right = native_shards.all_to_all

    def wrong(buckets, dims, axis_name, *, mesh=None):
        from jax import lax

        [[leaf]] = right(buckets, dims, axis_name, mesh=mesh)
        return [[leaf.at[0, 5].add((lax.axis_index(axis_name) == 6).astype(leaf.dtype))]]

    monkeypatch.setattr(native_shards, "all_to_all", wrong)
    assert main(["bench", "all-to-all", *QUICK]) == 1
    printed = capsys.readouterr().err
    assert "all-to-all (native)" in printed and "on rank 6 in round 1" in printed
    assert "of 32 bytes, element 5" in printed


def test_an_algorithm_that_cannot_run_is_left_out_with_the_reason(monkeypatch, capsys):
    monkeypatch.setattr(cpu_runtime, "why_missing", lambda: "it was not built.")
    assert main(["bench", "reduce-scatter", *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["algorithm"] for row in found["rows"]} == {"xla"}
    assert "it was not built" in found["skipped"]["native"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["all-reduce", "-f", "1"],
        ["all-reduce", "-a", "tree"],
        ["all-reduce", "-a", ""],
        ["all-reduce", "-b", "64M", "-e", "4096"],
        ["all-reduce", "-d", "float33"],
        ["all-reduce", "-d", "bool"],
        ["all-reduce", "--json=missing/rows.json"],
        ["all-reduce", "--png=rows.xyz"],
        ["step", "mlp", "--json=missing/rows.json"],
        ["step", "mlp", "--png=missing/rows.png"],
        ["faults", "--json=missing/rows.json"],
        ["broadcast"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_named(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert repr(arguments[-1]).strip("'") in capsys.readouterr().err


def test_the_picture_has_a_line_for_each_algorithm(tmp_path):
    numbers = {"min_s": 1.0, "median_s": 2.0, "max_s": 3.0, "busbw_bytes_per_s": 1e9}
    rows = [{"algorithm": name, "bytes": 8, **numbers} for name in ("direct", "xla")]
    output.draw(str(tmp_path / "found.svg"), rows, "a title")
    assert (tmp_path / "found.svg").stat().st_size > 1000


def rows_of_processes():
    from jdp.distributed.mesh import init

    skipped = {}
    rows = collectives.measure(
        init(), "all-reduce", ("direct", "xla"), [4], collectives.Setting(num_rounds=1),
        skipped.__setitem__,
    )  # fmt: skip
    return [{**row, "skipped": skipped} for row in rows]


# The checks of all processes count: the wrong rank is in process 1 alone.
def error_of_processes():
    from jax import lax

    from jdp.collectives.cpu.primitives import Calls

    right = Calls.summed

    def wrong(self, primitive, bucket, scale, **params):
        [leaf] = right(self, primitive, bucket, scale, **params)
        return [leaf.at[0, 1].add((lax.axis_index("data") == 3).astype(leaf.dtype))]

    Calls.summed = wrong
    try:
        rows_of_processes()
    except collectives.WrongResultError as error:
        return str(error)
    finally:
        Calls.summed = right


def refusal_of_processes():
    from jdp.distributed.mesh import init
    from jdp.tools.bench import flags

    options = argparse.Namespace(json="missing/rows.json", png=None)
    try:
        flags.require_files(init(), lambda: flags.require_outputs(options))
    except ValueError as error:
        return str(error)


# The first process alone writes the file. The others would wait for it in a collective.
def test_all_processes_refuse_a_file_that_the_first_one_cannot_write(processes):
    one, other = processes(2).run(refusal_of_processes)
    assert one == other and "--json=missing/rows.json" in one


@NEEDS_LIBRARY
def test_processes_agree_on_times_and_on_wrong_results(processes):
    one, other = processes(2).run(rows_of_processes)
    assert one == other
    assert [(row["ranks"], row["processes"]) for row in one] == [(4, 2), (4, 2)]
    one, other = processes(2).run(error_of_processes)
    assert one == other
    assert "process 1" in one and "on rank 3" in one and "element 1" in one


@NEEDS_LIBRARY
def test_a_calibration_has_every_collective_and_keeps_those_of_other_numbers_of_ranks(
    tmp_path, monkeypatch, make_mesh
):
    from jdp.tools.bench import calibrate

    monkeypatch.setattr(calibrate, "_BYTES", (64, 256))
    monkeypatch.setattr(known_values, "OPERATIONS", ("all-reduce", "all-gather"))
    monkeypatch.setattr(calibrate, "_SETTING", collectives.Setting(num_rounds=1, in_place=True))
    monkeypatch.setattr(calibrate, "_WIDTH", {"cpu": 64})
    monkeypatch.setattr(calibrate, "_ELEMENTS", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = []
    found = calibrate.calibrate(make_mesh(3), lines.append)
    found.save()
    assert calibration.load("cpu") == found
    keys = {(rate.operation, rate.algorithm, rate.num_ranks) for rate in found.rates}
    assert len(keys) == len(found.rates) == len(lines) == 2 * (4 + 2)
    assert {rate.num_ranks for rate in found.rates} == {2, 3}
    assert found.rate("all-reduce", "direct", 3).points[0][0] == 60
    cores = found.num_cores
    assert [it.num_ranks for it in found.computation] == sorted({1, min(cores, 3), 3})
    for it in found.computation:
        assert set(it.matmul_flops_per_s) == {"float32", "bfloat16"}
        numbers = [*it.matmul_flops_per_s.values(), it.memory_bytes_per_s]
        assert np.isfinite(numbers).all() and min(numbers) > 0
    again = calibrate.calibrate(make_mesh(2), lines.append)  # 3 ranks are kept
    assert {rate.num_ranks for rate in again.rates} == {2, 3}
    assert again.computation[-1] == found.computation[-1] != again.computation[0]


def calibrated_by_processes(cache):
    from jdp.distributed.mesh import init
    from jdp.tools.bench import calibrate

    os.environ["XDG_CACHE_HOME"] = cache
    kept = calibrate._BYTES, known_values.OPERATIONS, calibrate._SETTING
    calibrate._BYTES, known_values.OPERATIONS = (64, 256), ("all-reduce",)
    calibrate._SETTING = collectives.Setting(num_rounds=1, in_place=True)
    try:
        return calibrate.calibrate(init(), lambda line: None)
    finally:
        del os.environ["XDG_CACHE_HOME"]
        calibrate._BYTES, known_values.OPERATIONS, calibrate._SETTING = kept


# Beside other processes no device computes alone.
@NEEDS_LIBRARY
def test_processes_add_laws_to_a_calibration_and_keep_its_computation(processes, tmp_path):
    earlier = dataclasses.replace(FOUND, versions=output.machine()["versions"])
    earlier.save(tmp_path / "jdp" / "calibration" / calibration.default_path("cpu").name)
    found, none = processes(2).run(calibrated_by_processes, str(tmp_path))
    assert none is None
    assert set(earlier.rates) < set(found.rates)
    assert {law.num_processes for law in set(found.rates) - set(earlier.rates)} == {2}
    same = dataclasses.replace(
        found, rates=earlier.rates, date=earlier.date, host=earlier.host, num_cores=2
    )
    assert same == earlier


def calibrated_anew_by_processes(cache):
    from jdp.tools.bench import calibrate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_WIDTH", {"cpu": 64})
        patch.setattr(calibrate, "_ELEMENTS", 1000)
        return calibrated_by_processes(cache)


@NEEDS_LIBRARY
def test_processes_without_a_calibration_measure_one_device_and_all_of_the_host(
    processes, tmp_path
):
    found, none = processes(2).run(calibrated_anew_by_processes, str(tmp_path))
    assert none is None
    assert [it.num_ranks for it in found.computation] == [1, 4]
    assert min(it.memory_bytes_per_s for it in found.computation) > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("slice_size", "m"), [(1, 251), (5, 3), (700, 251)])
def test_a_result_is_that_of_whole_arrays(operation, num_ranks, slice_size, m):
    n, size, call = num_ranks, num_ranks * slice_size, 4
    # [ranks, elements]; the formula of the module's docstring.
    r, i = np.mgrid[:n, : known_values.input_size(operation, n, size)]
    x = (i + 2 * r + 5 * call) % m
    right = {
        "all-reduce": lambda: np.tile(x.sum(0), (n, 1)),
        "reduce-scatter": lambda: x.sum(0).reshape(n, slice_size),
        "all-gather": lambda: np.tile(x.reshape(-1), (n, 1)),
        "all-to-all": lambda: x.reshape(n, n, slice_size).swapaxes(0, 1).reshape(n, size),
    }[operation]()
    for rank in range(n):
        found = known_values.result(operation, rank, n, call, size, m)
        np.testing.assert_array_equal(found, right[rank])
        own = known_values.values(rank, call, 0, x.shape[1], m)
        np.testing.assert_array_equal(own, x[rank])


@pytest.mark.parametrize(
    ("dtype", "largest"), [("bfloat16", 256), ("float16", 2048), ("int8", 127), ("float32", 2**24)]
)
@pytest.mark.parametrize("num_ranks", [1, 3, 60])
def test_sums_stay_below_what_a_dtype_holds_exactly(dtype, largest, num_ranks):
    assert num_ranks * (known_values.modulus(num_ranks, dtype) - 1) <= largest


def test_a_dtype_that_cannot_hold_the_sums_is_refused():
    with pytest.raises(ValueError, match="bfloat16.*256.*129 ranks"):
        known_values.modulus(129, "bfloat16")
