"""`jdp doctor` says healthy on a healthy machine, and names what is wrong on another."""

import contextlib
import functools
import json
import os
import resource
import subprocess
import sys

import pytest

import jdp
from jdp.__main__ import main
from jdp.collectives.cpu import runtime as cpu_runtime
from jdp.collectives.cpu.primitives import Calls, all_reduce_p
from jdp.tools.doctor import command, devices, limits, versions
from jdp.tools.doctor.diagnosis import Diagnosis, checked, is_healthy, text
from jdp.tools.doctor.versions import Installed

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


NEW = {"jdp": "0.1.0", "jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
OLD = {"jdp": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}


@pytest.mark.parametrize(
    ("here", "level", "named"),
    [
        (Installed({**NEW, "jax-cuda13-plugin": "0.11.2"}, None, "gpu", 1), "error", "0.11.2"),
        (Installed({**NEW, "jax-cuda13-pjrt": "0.12.0.1"}, "570.86", "gpu", 1), "error", "580"),
        (Installed({**NEW, "jax-cuda12-pjrt": "0.12.0.1"}, "515.1", "gpu", 1), "error", "525"),
        (Installed({**NEW, "jax": "0.9.2"}, None, "gpu", 1), "error", "0.10.2"),
        (Installed(OLD, None, "cpu", 1), "warning", "0.10.2"),
        (Installed({**NEW, "jax": "0.11.2"}, None, "cpu", 2), "warning", "reduce-scatter"),
    ],
)
def test_a_known_bad_combination_is_found_with_its_source(here, level, named):
    [found] = versions.known_bad(here)
    assert found.level == level and named in found.found
    assert found.do.endswith(")")


@pytest.mark.parametrize(
    "here",
    [
        Installed(NEW, None, "cpu", 2),
        Installed({**NEW, "jax": "0.11.2"}, None, "cpu", 1),
        Installed(OLD, None, "gpu", 2),
        Installed({**NEW, "jax-cuda13-plugin": "0.12.0"}, "580.65.06", "gpu", 8),
    ],
)
def test_other_combinations_are_fine(here):
    assert [it.level for it in versions.known_bad(here)] == ["ok"]


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Rel", "580.65.06"),
    ],
)
def test_the_version_of_the_driver_is_read_from_its_own_line(line, driver, tmp_path):
    (tmp_path / "nvidia").mkdir()
    (tmp_path / "nvidia" / "version").write_text(line)
    assert versions.installed("gpu", 1, str(tmp_path)).driver == driver


def test_what_is_installed_here_is_listed():
    import jax

    here = versions.installed("cpu", 1)
    assert here.versions["jax"] == jax.__version__
    assert here.versions["jax"] in versions.versions(here).found


MiB = 2**20


@contextlib.contextmanager
def limited(what, soft):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@pytest.mark.parametrize(
    ("soft", "num_processes", "level"),
    [(100, 1, "error"), (200, 1, "warning"), (200, 16, "error"), (2000, 1, "ok")],
)
def test_few_file_descriptors_are_found(soft, num_processes, level):
    with limited(resource.RLIMIT_NOFILE, soft):
        found = limits.files(num_processes)
    assert found.level == level
    assert f"may open {soft} files" in found.found
    assert (found.do == "") == (level == "ok")


def mounted(num_mib):
    """Look at a /dev/shm of that size, in a mount namespace of its own."""
    code = (
        "import json; from jdp.tools.doctor import limits; "
        "print(json.dumps([vars(limits.shared_memory(p)) for p in ('cpu', 'gpu')]))"
    )
    mount = f'mount -t tmpfs -o size={num_mib}m none /dev/shm && exec "$PYTHON" -c "$CODE"'
    command = ["unshare", "--mount", "sh", "-c", mount]
    environment = {**os.environ, "PYTHON": sys.executable, "CODE": code}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace: {done.stderr}")
    return json.loads(done.stdout)


def test_a_small_dev_shm_is_found():
    on_cpu, on_gpu = mounted(1)
    assert "1 MiB" in on_cpu["found"]
    assert (on_cpu["level"], on_gpu["level"]) == ("warning", "error")
    assert on_cpu["facts"] == {"bytes": MiB, "free_bytes": MiB}


def test_locked_memory_matters_where_there_is_an_rdma_card(tmp_path):
    with limited(resource.RLIMIT_MEMLOCK, 65536):
        assert limits.locked_memory(str(tmp_path)).level == "ok"
        (tmp_path / "mlx5_0").mkdir()
        found = limits.locked_memory(str(tmp_path))
    assert found.level == "warning"
    assert "64 KiB" in found.found and "mlx5_0" in found.found


@pytest.mark.parametrize(
    ("free_mib", "group", "level", "shown"),
    [
        (4096, None, "ok", "4096 MiB of 8192 MiB"),
        (1024, None, "warning", "1024 MiB of 8192 MiB"),
        (4096, (600, 100), "error", "500 MiB of 600 MiB"),
        (4096, ("max", 100), "ok", "4096 MiB of 8192 MiB"),
    ],
)
def test_memory_is_that_of_the_host_or_of_the_control_group(
    free_mib, group, level, shown, tmp_path
):
    (tmp_path / "proc").mkdir()
    lines = f"MemTotal: {8192 * 1024} kB\nMemAvailable: {free_mib * 1024} kB\nHugePages_Total: 0\n"
    (tmp_path / "proc" / "meminfo").write_text(lines)
    if group:
        folder = tmp_path / "sys" / "fs" / "cgroup"
        folder.mkdir(parents=True)
        limit = group[0] if group[0] == "max" else group[0] * MiB
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{group[1] * MiB}\n")
    found = limits.memory(str(tmp_path))
    assert (found.level, shown in found.found) == (level, True), found


def test_a_proxy_is_named_without_its_value():
    secret = {"HTTPS_PROXY": "http://user:secret@proxy:3128"}
    found = limits.proxies(secret)
    assert found.level == "warning"
    assert "HTTPS_PROXY" in found.found and "secret" not in str(found)
    assert limits.proxies({**secret, "grpc_proxy": ""}).level == "ok"
    assert limits.proxies({}).level == "ok"
