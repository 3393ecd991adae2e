"""`jdp plan` prints what it predicts and assumes, and refuses what it cannot answer."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from support.calibrations import FOUND

from benchmarks.plan import published
from jdp.__main__ import main
from jdp.tools import results
from jdp.tools.plan import assumptions

MODEL = ["--model", "params=1e9,layers=4,tokens=8192"]


def planned(*arguments):
    assert main(["plan", *MODEL, "--hosts", "1,2", *arguments, "--json", "found.json"]) == 0
    return json.loads(Path("found.json").read_text())


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_every_assumption_is_printed_with_its_source(capsys):
    found = planned("--set", "network_hop_s=2e-5", "--png", "plan.png")
    text = capsys.readouterr().out
    assert [row["hosts"] for row in found["predicted"]] == [1, 2] * 5
    for name in assumptions.NAMES:
        assert f"  {name} = " in text and found["assumed"][name]["source"]
    assert "network_hop_s = 2e-05 s: given" in text and "predicted, not measured" in text
    assert found["assumed"].keys() == set(assumptions.NAMES)
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sorted(set(assumptions.NAMES) - {"memory_bytes"}))
def test_every_assumption_has_an_effect(name):
    few = "--methods", "hsdp", "--commit-every", "100"
    usual = assumptions.assumed("H100", "8x400")[name].value
    value = 0.9 if name == "forward_share" else 3 * usual or 10.0
    before, after = planned(*few), planned(*few, "--set", f"{name}={value}")
    assert before["predicted"] != after["predicted"]


def test_a_state_that_does_not_fit_is_marked(capsys):
    [row, _] = planned("--methods", "replicated", "--set", "memory_bytes=15.9e9")["predicted"]
    assert not row["fits"] and "16.0*" in capsys.readouterr().out
    assert planned("--set", "memory_bytes=16.1e9")["predicted"][0]["fits"]
    larger = planned("--set", "memory_bytes=16.1e9", "--activations", "1G")["predicted"][0]
    assert larger["memory_bytes"] == row["memory_bytes"] + 2**30 and not larger["fits"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "memory"), [("GB200", [4, 8], 186e9), ("B300", [8, 16], 270e9)]
)
def test_a_gpu_has_its_memory_and_its_number_in_a_host(gpu, gpus, memory):
    found = planned("--methods", "hsdp", "--gpu", gpu)
    assert [row["gpus"] for row in found["predicted"]] == gpus
    assert found["assumed"]["memory_bytes"]["value"] == memory
    assert found["assumed"]["network_bytes_per_s"]["value"] == 0.9 * gpus[0] * 400e9 / 8
    [row, _] = planned("--methods", "hsdp", "--gpu", gpu, "--gpus-per-host", "72")["predicted"]
    assert row["gpus"] == 72  # a rack


def test_a_host_that_is_missing_takes_its_share():
    few = "--methods", "hsdp", "--commit-every", "1", "--set", "mtbf_gpu_s=1e9"
    few += "--set", "commit_bytes_per_s=1e15"
    rows = planned(*few), planned(*few, "--missing-host-s", "1e6")
    for hosts, before, after in zip((1, 2), *(it["predicted"] for it in rows), strict=True):
        lost = 8 * hosts / 1e9 * 1e6 / hosts
        assert before["ettr"] - after["ettr"] == pytest.approx(lost, rel=1e-3)


def test_measured_links_and_recoveries_are_used(capsys):
    FOUND.save()
    row = {"state_bytes": 10**6, "detection_s": 0.5, "re_forming_s": 1.0, "tracing_s": 2.0,
           "loading_s": 4.0, "restoring_s": 8.0, "first_step_s": 16.0}  # fmt: skip
    recovery = {"host": "host0", "date": "2026-11-25T12:00", "rows": [row], "restoring": None}
    Path("recovery.json").write_text(json.dumps(recovery))
    result = planned("--calibration", "--recovery", "recovery.json")
    found, law = result["assumed"], FOUND.rates[0]  # of 2 ranks: 2 hops
    # On CPUs nothing is hidden: 24 leaves are a bucket each, with 14 hops on 8 ranks.
    exposed = 24 * 14 * law.alpha_s / 2 + 2 * 7 / 8 * 4e9 / law.bytes_per_s
    assert result["predicted"][0]["exposed_s"] == pytest.approx(exposed)
    assert found["link_hop_s"]["value"] == law.alpha_s / 2
    assert found["link_bytes_per_s"]["value"] == law.bytes_per_s
    assert found["matmul_flops"]["value"] == 6e10
    assert [found[name]["value"] for name in ("detection_s", "compiling_s", "first_step_s")] == [
        0.5, 6.0, 16.0,
    ]  # fmt: skip
    assert "measured here, direct on 2 ranks" in capsys.readouterr().out


def test_rates_without_a_limit_are_null_in_json_and_read_back(capsys):
    dataclasses.replace(
        FOUND, rates=(dataclasses.replace(FOUND.rates[0], bytes_per_s=math.inf),)
    ).save()
    names = "state_bytes detection_s re_forming_s tracing_s loading_s restoring_s first_step_s"
    law = {"alpha_s": 1.0, "bytes_per_s": math.inf}
    recovery = {"host": "host0", "date": "2026-11-25T12:00", "restoring": law}
    recovery["rows"] = [dict.fromkeys(names.split(), 1)]
    results.write(results.to_json(recovery), "recovery.json")
    json.loads(Path("recovery.json").read_text(), parse_constant=pytest.fail)
    planned("--calibration", "--recovery", "recovery.json")
    found = json.loads(Path("found.json").read_text(), parse_constant=pytest.fail)["assumed"]
    table = capsys.readouterr().out
    for name in ("link_bytes_per_s", "restore_bytes_per_s"):
        assert found[name]["value"] is None and f"  {name} = inf B/s: measured" in table


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--hosts 0", "--hosts 0"),
        ("--hosts 4:2", "Write 2:4"),
        ("--hosts many", "1:2048"),
        ("--gpu H300", "H100"),
        ("--link fast", "8x400"),
        ("--link 0x400", "8x400"),
        ("--methods stage4", "stage3"),
        ("--set mtbf_gpu_s=-1", "mtbf_gpu_s=-1"),
        ("--set mtbf_gpu_s=0", "mtbf_gpu_s=0"),
        ("--set network_bytes_per_s=0", "network_bytes_per_s=0"),
        ("--set network_hop_s=-1e-6", "network_hop_s=-1e-06"),
        ("--set straggler_scale=2", "straggler_scale=2"),
        ("--set forward_share=1", "forward_share=1"),
        ("--set matmul_flops=nan", "matmul_flops=nan"),
        ("--set matmul_flops=1e-300", "1e-30"),
        ("--set network_bytes_per_s=1e300", "1e+30"),
        ("--model params=7e9,layers=2,tokens=1e300", "tokens=1e300"),
        ("--set speed=1", "matmul_flops"),
        ("--set matmul_flops", "matmul_flops"),
        ("--calibration", "jdp bench --calibrate"),
        ("--recovery missing.json", "jdp bench faults"),
        ("--model 7e9", "params=7e9"),
        ("--model params=7e9,layers=32", "step_s"),
        ("--model params=7e9,layers=32,tokens=1,step_s=1", "step_s"),
        ("--model params=-1,layers=32,step_s=1", "params=-1"),
        ("--model params=7e9,layers=2.5,step_s=1", "layers=2.5"),
        ("--model params=7e9,layers=0,step_s=1", "layers=0"),
        ("--model params=7e9,depth=2,step_s=1", "depth"),
        ("--model params=inf,layers=2,step_s=1", "params=inf"),
        ("--model params=7e9,layers=2,step_s=1,params=1", "repeats params"),
        # A million layers would be simulated for hours.
        ("--model params=7e9,layers=1000000,step_s=1", "6e+06 pieces"),
        ("--model params=7e9,layers=32,step_s=1,micro_batches=1000", "leaves=1"),
        ("--model params=7,layers=2,step_s=1", "params=7 is too small"),
        ("--model params=7e9,layers=2,tokens=4,micro_batches=8", "tokens=4 is too small"),
        ("--recovery=", "jdp bench faults"),
        ("--hosts \u00b2", "1:2048"),  # a digit, and not a decimal one
        ("--set mtbf_gpu_s=inf", "mtbf_gpu_s=inf"),
        ("--set detection_s=inf", "detection_s=inf"),
        ("--straggler none --set straggler_scale=0.1", "straggler_scale=0.1"),
        ("--calibration .", "jdp bench --calibrate"),
        ("--recovery without_numbers.json", "jdp bench faults"),
        ("--recovery without_rows.json", "it has no row."),
        ("--recovery list.json", "[] is not an object"),
        ("--recovery text.json", "it is not JSON"),
        ("--json=missing/plan.json", "folder missing"),
        ("--json=.", "--json=."),
        ("--png=missing/plan.png", "folder missing"),
        ("--png=plan.xyz", ".xyz"),
        ("--model params=7e9,layers=1e9,step_s=1", "Write fewer layers."),
        ("--model params=7e9,layers=32,step_s=1,leaves=9,micro_batches=1000", "Write leaves=1, or"),
        ("--model params=7e9,layers=20000,step_s=1,leaves=9,micro_batches=3", "Write leaves=1."),
        ("--model params=7e9,layers=60000,step_s=1,leaves=2,micro_batches=2", "leaves=1 and fewer"),
        ("--model params=7e9,layers=9,step_s=1,micro_batches=1e9", "Write fewer micro_batches."),
        ("--model params=7e9,layers=0,step_s=1", "from 1 to"),
        ("--model params=7e9,layers=2,step_s=1,micro_batches=0", "from 1 to"),
        ("--set mtbf_gpu_s=1e8 --set mtbf_gpu_s=1e9", "--set mtbf_gpu_s is repeated"),
        (f"--hosts {'9' * 310}", "1e+30"),
        (f"--hosts 1:{'9' * 5000}", "1e+30"),
        (f"--link {'9' * 310}x1", "8x400"),
        (f"--link 1x{'9' * 310}", "8x400"),
        (f"--model params=7e9,layers={'9' * 310},step_s=1", "1e+30"),
    ],
)
def test_bad_input_is_refused_with_what_to_write(arguments, named, capsys):
    names = "state_bytes detection_s re_forming_s tracing_s loading_s restoring_s first_step_s"
    row = dict.fromkeys(names.split())
    unknown = {"rows": [row], "restoring": None, "host": "h", "date": "2026-11-26"}
    Path("without_numbers.json").write_text(json.dumps(unknown))
    Path("without_rows.json").write_text(json.dumps(unknown | {"rows": []}))
    Path("list.json").write_text("[]")
    Path("text.json").write_text("recovery")
    assert main(["plan", *MODEL, *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jdp plan: ") and named in error


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("row", "detection_s", "1"), ("row", "detection_s", math.inf), ("row", "loading_s", None),
        ("row", "loading_s", math.nan), ("row", "first_step_s", 10**400), ("row", "tracing_s", -1),
        ("row", "state_bytes", "1"), ("row", "state_bytes", None), ("law", "alpha_s", math.nan),
        ("law", "bytes_per_s", 0), ("law", "bytes_per_s", []), ("all", "date", 1),
        ("all", "host", []), ("all", "rows", {"a": 1}), ("all", "rows", [1]),
        ("all", "restoring", [1]),
    ],
)  # fmt: skip
def test_a_recovery_with_a_value_that_no_measurement_has_is_refused_with_its_name(
    part, name, value, capsys
):
    names = "state_bytes detection_s re_forming_s tracing_s loading_s restoring_s first_step_s"
    row, law = dict.fromkeys(names.split(), 1), {"alpha_s": 1.0, "bytes_per_s": 1e9}
    whole = {"rows": [row], "restoring": law, "host": "h", "date": "2026-11-26"}
    Path("recovery.json").write_text(json.dumps(whole))
    assert main(["plan", *MODEL, "--recovery", "recovery.json"]) == 0
    {"row": row, "law": law, "all": whole}[part][name] = value
    Path("recovery.json").write_text(json.dumps(whole))
    capsys.readouterr()
    assert main(["plan", *MODEL, "--recovery", "recovery.json"]) == 2
    error = capsys.readouterr().err
    assert "--recovery recovery.json" in error and (name in error or name == "rows")


@pytest.mark.parametrize("content", [b"[" * 100_000, b'"\xff"', b'{"rows": [', b""])
def test_a_damaged_recovery_is_refused_with_its_name(content, capsys):
    Path("recovery.json").write_bytes(content)
    assert main(["plan", *MODEL, "--recovery", "recovery.json"]) == 2
    assert "--recovery recovery.json" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["activations", "bucket-bytes", "gpus-per-host", "commit-every"])
@pytest.mark.parametrize("value", ["-1", "9" * 310, "9" * 5000, "1e999999999", "4X", "nan"])
def test_numbers_that_are_none_or_too_large_are_refused_with_an_example(flag, value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *MODEL, f"--{flag}={value}"])
    assert ended.value.code == 2 and "is not a" in capsys.readouterr().err


def test_the_largest_numbers_are_predicted():
    most = f"{10**30}"
    planned("--hosts", most, "--gpus-per-host", most, "--commit-every", most)
    planned("--missing-host-s", "1e9", "--activations", "1048576T", "--bucket-bytes", "1048576T")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("1.5G", 3 * 2**29), ("40GB", 4 * 10**10), ("4MiB", 2**22), ("1e6", 10**6),
     ("1t", 2**40), ("100B", 100), ("2.5kb", 2500)],
)  # fmt: skip
def test_sizes_are_read_as_users_of_such_tools_write_them(text, num_bytes):
    few = "--methods", "replicated"
    [less, _], [more, _] = (
        planned(*few, "--activations", size)["predicted"] for size in ("0", text)
    )
    assert more["memory_bytes"] - less["memory_bytes"] == pytest.approx(num_bytes, abs=0.01)


def test_spaces_in_lists_mean_nothing():
    model = "--model", "params = 1e9, layers = 4, tokens = 8192"
    spaced = "--methods", "hsdp, stage1", "--hosts", "1, 2", "--set", "mtbf_gpu_s = 1e8"
    tight = "--methods", "hsdp,stage1", "--hosts", "1,2", "--set", "mtbf_gpu_s=1e8"
    assert planned(*model, *spaced) == planned(*tight)


def test_nothing_exposed_is_zero(capsys):
    alone = "--hosts", "1", "--gpus-per-host", "1", "--straggler", "none"
    for layers in (3, 5, 7, 11):
        model = "--model", f"params=7e9,layers={layers},tokens=16384"
        rows = planned(*model, *alone)["predicted"]
        assert all(row["exposed_s"] >= 0 for row in rows)
    assert "-0.0%" not in capsys.readouterr().out


def test_seconds_that_are_not_a_number_are_refused_with_an_example(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *MODEL, "--missing-host-s", "long"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "'long'" in error and "600" in error


def test_a_method_that_is_named_twice_is_shown_once():
    found = planned("--methods", "hsdp,stage1,hsdp")["predicted"]
    assert [row["method"] for row in found] == ["hsdp", "hsdp", "stage1", "stage1"]


def test_cells_that_are_wider_than_their_columns_stay_apart(capsys):
    hosts = 10**20
    assert main(["plan", *MODEL, "--hosts", str(hosts), "--methods", "replicated"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "replicated " in line][:1]
    assert line.split()[:3] == ["replicated", str(hosts), str(8 * hosts)]


# The update of a third of the parameters saves more than the links of a host cost, and links that
# are slow beside fast computation do not change that.
@pytest.mark.parametrize("method", ["replicated", "stage1", "stage3", "hsdp"])
def test_each_prediction_lies_in_its_interval(method):
    model = "--model", "params=1.7e10,layers=27,tokens=10083,leaves=1", "--gpus-per-host", "3"
    rows = planned(*model, "--methods", method, "--straggler", "none")["predicted"]
    for row in rows:
        assert row["low_s"] <= row["step_s"] <= row["high_s"]
        assert row["efficiency_low"] <= row["efficiency"] <= row["efficiency_high"]
        assert 0 <= row["ettr_low"] <= row["ettr"] <= row["ettr_high"] <= 1


# Published runs, with one fitted constant


def test_the_scale_of_stragglers_is_the_one_that_was_fitted():
    default = assumptions.assumed("H100", "8x400")[assumptions.STRAGGLER].value
    assert default == pytest.approx(published.fitted_scale(), abs=5e-4)


@pytest.mark.parametrize("row", published.rows(0.0154), ids=lambda row: row.name)
def test_published_runs_are_predicted_within_five_points(row):
    assert abs(row.error) <= published.GOAL
