"""A calibration is read back as it was saved, and the fitted law is that of the points."""

import dataclasses
import json
import math

import pytest
from support.calibrations import ALONE, FOUND, LAW, TOGETHER

from jdp.tools import calibration
from jdp.tools.bench import calibrate, output
from jdp.tools.calibration import ComputeRates, fit_alpha_beta
from jdp.tools.known_values import WrongResultError

SAVED = {"format": calibration.FORMAT, **dataclasses.asdict(FOUND)}
FIRST = SAVED["computation"][0]


def test_a_saved_calibration_is_read_back_from_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration.load("cpu") is None
    path = FOUND.save()
    assert tmp_path in path.parents
    assert calibration.load("cpu") == FOUND
    assert calibration.load("gpu") is None
    assert [*path.parent.iterdir()] == [path]


def test_a_file_of_format_6_is_read_without_its_further_fields(tmp_path):
    path = tmp_path / "file.json"
    more = {"cached_bytes_per_s": 2e10, "slowness": {"matmul": 1.5}}
    earlier = {"format": 6, "computation": [it | more for it in SAVED["computation"]]}
    path.write_text(json.dumps(SAVED | earlier))
    assert calibration.load("cpu", path) == FOUND


def test_a_law_whose_time_does_not_grow_is_saved_as_json_and_read_back(tmp_path):
    flat = dataclasses.replace(FOUND, rates=(dataclasses.replace(LAW, bytes_per_s=math.inf),))
    path = flat.save(tmp_path / "file.json")
    # Infinity is not JSON, and other programs do not read it.
    saved = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert saved["rates"][0]["bytes_per_s"] is None
    assert calibration.load("cpu", path) == flat
    path.write_text(path.read_text().replace("null", "Infinity"))  # as jdp wrote it before
    assert calibration.load("cpu", path) == flat


def test_a_rate_is_found_by_operation_algorithm_ranks_and_processes():
    assert FOUND.rate("all-reduce", "direct", 2) is LAW
    assert FOUND.rate("all-reduce", "direct", 2, 2) is FOUND.rates[1]
    assert FOUND.rate("all-reduce", "direct", 4) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '"text"',
        json.dumps({"format": 5}),
        json.dumps({"format": calibration.FORMAT, "rates": [{}]}),
        json.dumps(SAVED | {"computation": []}),
        json.dumps(SAVED | {"computation": [FIRST | {"memory_bytes_per_s": None}]}),
        json.dumps(SAVED | {"rates": [dataclasses.asdict(LAW) | {"alpha_s": None}]}),
        "[" * 100_000,
        json.dumps(SAVED)[:-9],
        json.dumps(SAVED | {"computation": SAVED["computation"][::-1]}),
        *(json.dumps(SAVED | {name: value}) for name, value in (
            ("date", 1), ("host", None), ("num_cores", 0), ("num_cores", "2"), ("versions", []),
            ("rates", {}), ("rates", [[]]), ("computation", 1), ("device_kind", []),
        )),
        *(json.dumps(SAVED | {"computation": [FIRST | {name: value}]}) for name, value in (
            ("matmul_flops_per_s", {}), ("matmul_flops_per_s", [1]), ("num_ranks", 0),
            ("matmul_flops_per_s", {"float32": "1"}), ("memory_bytes_per_s", math.nan),
            ("memory_bytes_per_s", 0), ("memory_bytes_per_s", True),
        )),
        *(json.dumps(SAVED | {"rates": [dataclasses.asdict(LAW) | {name: value}]})
          for name, value in (
              ("alpha_s", math.nan), ("alpha_s", -1), ("alpha_s", 10**400), ("bytes_per_s", 0),
              ("bytes_per_s", "1"), ("num_ranks", 1.5), ("operation", 1), ("algorithm", []),
              ("points", []), ("points", [[1024, 3e-6]]), ("points", [[8, 1.0], [8, 2.0]]),
              ("points", [[8, 1.0], [16, 0.0]]), ("points", [[8, 1.0], [16]]),
              ("cpu_points", [[8, 1.0], [16, math.inf]]), ("cpu_points", None),
          )),
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_refused_with_its_path(text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    # The command does not write the file that a user has named.
    with pytest.raises(
        ValueError, match=rf"{path}.*--calibrate.*{calibration.default_path('cpu')}"
    ):
        calibration.load("cpu", path)


def test_bytes_that_are_not_text_are_refused_with_the_path(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(json.dumps(SAVED).encode().replace(b"host0", b"host\xff"))
    with pytest.raises(ValueError, match=f"{path}.*not JSON"):
        calibration.load("cpu", path)


def test_a_host_whose_cache_is_below_a_file_has_no_calibration(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert calibration.load("cpu") is None


# Powers of two: every sum of the fit is exact, or nearly.
@pytest.mark.parametrize(
    ("points", "law"),
    [
        ([(0, 1.0), (2, 2.0), (4, 3.0)], (1.0, 2.0, 0.0)),
        ([(1, 1.0), (2, 2.0)], (0.0, 1.0, 0.0)),
        ([(1, 4.0), (1024, 4.0)], (4.0, float("inf"), 0.0)),
        ([(1, 0.25), (2, 1.0)], (0.0, 3.33333, 0.4)),  # bytes / t: 4 and 2, slope 6 / 20
        ([(1, 2.0), (1024, 1.0)], (1.33333, float("inf"), 1 / 3)),
    ],
)
def test_the_law_has_the_alpha_and_the_beta_of_its_points(points, law):
    assert fit_alpha_beta(points) == pytest.approx(law, rel=1e-5, abs=1e-9)


def test_points_of_one_size_fix_no_law():
    with pytest.raises(ValueError, match="2 points"):
        fit_alpha_beta([(8, 1.0), (8, 2.0)])


def test_processes_that_may_share_a_gpu_are_not_measured():
    share = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    with pytest.raises(ValueError, match=r"NCCL_MULTI_RANK_GPU_ENABLE=1 .* 2 processes"):
        calibrate.require_own_gpus("gpu", 2, share)
    for right in (("gpu", 1, share), ("cpu", 2, share), ("gpu", 2, {})):
        calibrate.require_own_gpus(*right)


@pytest.mark.parametrize(
    ("changed", "num_kept"), [({}, 2), ({"device_kind": "another"}, 0), ({"versions": {}}, 0)]
)
def test_laws_of_other_devices_or_versions_are_not_kept(
    changed, num_kept, make_mesh, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = {name: output.machine()[name] for name in ("versions", "device_kind")}
    dataclasses.replace(FOUND, **here | changed).save()
    monkeypatch.setattr(calibrate, "_meshes", lambda mesh: [])
    monkeypatch.setattr(calibrate, "_computation", lambda mesh, earlier, num_cores: (ALONE,))
    found = calibrate.calibrate(make_mesh(2), print)
    assert found is not None and len(found.rates) == num_kept
    assert found.computation == ((ALONE, TOGETHER) if num_kept else (ALONE,))


def test_each_rate_is_its_work_over_its_seconds(make_mesh, monkeypatch):
    monkeypatch.setattr(calibrate, "_seconds", lambda *args: 1.0)
    monkeypatch.setitem(calibrate._WIDTH, "cpu", 4)
    monkeypatch.setattr(calibrate, "_ELEMENTS", 256)
    flops = dict.fromkeys(("float32", "bfloat16"), 2 * 4**3)
    assert calibrate.compute_rates(make_mesh(1), 3) == ComputeRates(3, flops, 2 * 4 * 256)


def test_a_program_whose_result_is_wrong_has_no_rate(make_mesh, monkeypatch):
    mesh, on_all = make_mesh(3), calibrate._on_all

    def wrong(mesh, function, **options):
        return on_all(mesh, lambda x, old: function(x, old).at[0, 5].add(1), **options)

    monkeypatch.setattr(calibrate, "_ELEMENTS", 256)
    assert calibrate.memory_bytes_per_s(mesh) > 0
    monkeypatch.setattr(calibrate, "_on_all", wrong)
    with pytest.raises(WrongResultError, match="a scaled array"):
        calibrate.memory_bytes_per_s(mesh)
