"""The benchmark of all-reduces runs through, and says which peers it did not find."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jdp.collectives.cpu import runtime as cpu_runtime

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough  # test_benchmarks.py tests its loops and its checks
@pytest.mark.skipif(cpu_runtime.why_missing() is not None, reason="needs the compiled library")
def test_a_quick_run_measures_every_part_and_names_the_peers_that_are_missing():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": ""}  # no mpirun
    command = "-m benchmarks.all_reduce.beside_peers --quick --timeout-s=300".split()
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 310}
    done = subprocess.run([sys.executable, *command], env=environment, **pipes)
    assert done.returncode == 0, done.stdout + done.stderr
    page = Path(re.search(r"^wrote (.*\.md)$", done.stdout, re.MULTILINE)[1])
    lines = [json.loads(line) for line in page.with_suffix(".jsonl").read_text().splitlines()]
    parts = {"one process", "one process, memory", "processes", "processes, memory", "training"}
    assert {line["section"] for line in lines} == parts
    assert {line["met"] for line in lines if line.get("rival") == "Open MPI"} == {"missing"}
    assert page.read_text().count("Results checked on every rank in each round") == 3
