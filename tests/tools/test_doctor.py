"""`jdp doctor` says healthy on a healthy machine, and names what is wrong on another."""

import functools
import json

import pytest

import jdp
from jdp.__main__ import main
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu.primitives import Calls, all_reduce_p
from jdp.tools.doctor import command, devices, limits
from jdp.tools.doctor.diagnosis import Diagnosis, checked, is_healthy, text

NEEDS_LIBRARY = pytest.mark.skipif(
    cpu_runtime.why_missing() is not None, reason="needs the compiled library"
)


@pytest.fixture(autouse=True)
def process(before_init, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as of these tests


def report(capsys):
    return json.loads(capsys.readouterr().out)


def test_a_healthy_machine_is_healthy(capsys, monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    assert main(["doctor", "--json"]) == 0
    found = report(capsys)
    assert found["healthy"] is True
    checks = {it["check"]: it for it in found["checks"]}
    assert {it["level"] for it in found["checks"]} <= {"ok", "warning"}
    assert checks["devices"]["facts"]["kinds"] == {"cpu": 8}
    for operation in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all"):
        of_sums = checks[f"{operation}, devices of a process"]
        assert of_sums["facts"] == {"ranks": 8, "results": 32, "wrong": []}
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_ranks_below_1_is_refused(number, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--cpu-ranks", number])
    assert ended.value.code == 2 and repr(number) in capsys.readouterr().err


@pytest.mark.parametrize("command", [["doctor"], ["bench", "all-reduce"], ["bench", "--calibrate"]])
def test_more_ranks_than_xla_can_start_are_refused(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--cpu-ranks", "1000000"])
    assert ended.value.code == 2 and "1024" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"cpu_ranks is 1025, .* at most 1024"):
        jdp.init(cpu_ranks=1025)


def test_a_report_that_cannot_be_written_is_printed_and_the_exit_code_is_2(monkeypatch, capsys):
    found = {0: [Diagnosis("devices", "ok", "8 x cpu")]}
    monkeypatch.setattr(command, "_examined", lambda cpu_ranks: found)
    assert main(["doctor", "--json=missing/report.json"]) == 2
    output = capsys.readouterr()
    assert "8 x cpu" in output.out and "missing/report.json" in output.err


@NEEDS_LIBRARY
def test_a_wrong_sum_of_one_rank_is_an_error_and_the_exit_code_is_1(capsys, monkeypatch, tmp_path):
    right = Calls.summed

    def wrong_on_rank_2(self, primitive, bucket, scale, **params):
        rank = (self._rank == 2).astype("float32")
        sums = right(self, primitive, bucket, scale, **params)
        is_wrong = primitive is all_reduce_p
        return [(it + (rank * (it.size == 3) * is_wrong).astype(it.dtype)) for it in sums]

    monkeypatch.setattr(Calls, "summed", wrong_on_rank_2)
    monkeypatch.setattr(limits, "files", lambda _: 1 / 0)  # a check that fails is an error too
    path = tmp_path / "report.json"
    assert main(["doctor", f"--json={path}"]) == 1
    printed = capsys.readouterr().out
    assert "not healthy (2 errors" in printed
    assert "error    file descriptors: the check itself failed: ZeroDivisionError" in printed
    checks = {it["check"]: it for it in json.loads(path.read_text())["checks"]}
    found = checks["all-reduce, devices of a process"]
    assert found["level"] == "error"
    assert "on rank 2" in found["found"] and "element 0" in found["found"]
    assert "(auto)" in found["found"] and len(found["facts"]["wrong"]) == 2  # both rounds
    assert checks["reduce-scatter, devices of a process"]["level"] == "ok"


def test_without_the_library_a_warning_says_why_and_auto_takes_xla(
    make_mesh, monkeypatch, tmp_path
):
    monkeypatch.setattr(cpu_runtime, "_PATH", tmp_path / "libjdp_cpu.so")
    monkeypatch.setattr(cpu_runtime, "_loaded", functools.cache(cpu_runtime._loaded.__wrapped__))
    (tmp_path / "libjdp_cpu.txt").write_text("no compiler was found")
    of_cpu, of_gpu = devices.libraries("cpu")
    assert (of_cpu.level, of_gpu.level) == ("warning", "ok")
    assert "no compiler was found" in of_cpu.found
    found = devices.algorithms(make_mesh(2))
    assert set(found.facts["chosen"].values()) == {"xla"}
    assert "no compiler was found" in found.found


@NEEDS_LIBRARY
def test_auto_is_asked_for_each_size(make_mesh):
    found = devices.algorithms(make_mesh(3))
    assert found.facts["chosen"] == {"4 KiB": "native", "1 MiB": "native", "64 MiB": "native"}


def test_a_broken_library_is_a_warning_with_the_error_of_the_loader(monkeypatch, tmp_path):
    (tmp_path / "libjdp_cpu.so").write_text("not a library")
    monkeypatch.setattr(cpu_runtime, "_PATH", tmp_path / "libjdp_cpu.so")
    monkeypatch.setattr(cpu_runtime, "_loaded", functools.cache(cpu_runtime._loaded.__wrapped__))
    found = devices.libraries("cpu")[0]
    assert found.level == "warning" and "does not load" in found.found


def of_processes():
    from jdp.distributed import agree
    from jdp.distributed.mesh import init
    from jdp.tools.doctor.command import _of_hosts

    mesh = init()
    found = [*_of_hosts(agree.peers(mesh)), devices._tested(mesh, "all processes", "all-reduce")]
    return [(it.check, it.level) for it in found]


def test_two_processes_reach_each_other_and_sum_exactly(processes):
    everyones = processes(2).run(of_processes)
    assert everyones[0] == everyones[1]
    assert {level for _, level in everyones[0]} == {"ok"}
    assert len(everyones[0]) == 3


def test_equal_lines_of_several_processes_are_shown_once():
    fine, bad = (
        Diagnosis("memory", "ok", "much."),
        Diagnosis("memory", "error", "2 MiB.", "A.", "B."),
    )
    assert text({0: [fine], 1: [fine]}) == "ok       memory: much."
    assert text({0: [fine], 1: [bad], 2: [bad]}).splitlines() == [
        "ok       memory (process 0): much.",
        "error    memory (processes 1, 2): 2 MiB.",
        "         A.",
        "         B.",
    ]
    assert is_healthy({0: [fine]}) and not is_healthy({0: [fine], 1: [bad]})


def test_a_check_that_fails_is_an_error():
    found = checked("memory", lambda: 1 / 0)
    assert found.level == "error" and "ZeroDivisionError" in found.found
