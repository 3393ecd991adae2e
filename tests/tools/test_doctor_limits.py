"""Each limit is a line with its numbers, and a limit that is too low is an error or a warning."""

import contextlib
import json
import os
import resource
import subprocess
import sys

import pytest

from jdp.tools.doctor import limits

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
