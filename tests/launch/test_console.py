"""The console of a launcher, on a terminal and on a pipe that somebody has made non-blocking."""

import os
import pty
import select
import subprocess
import sys
import threading
import time

import pytest
from support.launcher import PACKAGES
from support.screen import Screen

from jdp.launch.flags import STDOUT
from jdp.launch.host.console import Console
from jdp.launch.options import Options
from jdp.worker.run_progress import RunSummary

SUMMARY = RunSummary(7, None, None, None, None, None, None, 0, 1.0)


@pytest.fixture
def options():
    return Options(("train.py",))


def test_the_last_line_is_there_when_output_came_just_before_the_end(options, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(theirs, "wb", buffering=0) as terminal, open(ours, "rb", buffering=0) as seen:
        console, screen = Console(options, terminal, terminal), Screen()
        console.show_summary(SUMMARY)
        console.say("over")
        console.end()
        data = b""
        while select.select([seen], [], [], 0.2)[0]:
            data += seen.read(1 << 16)
        screen.write(data)
    assert screen.lines == ["jdp run: over", "step 7 · ETTR 100.0 %"]


def test_a_path_that_is_not_text_is_shown(options, tmp_path):
    with open(tmp_path / "err", "wb") as err:
        Console(options, err, err).say(os.fsdecode(b"/logs\xff cannot be written"))
    assert (tmp_path / "err").read_bytes() == rb"jdp run: /logs\udcff cannot be written" + b"\n"


PROGRAM = """
import os, sys
os.set_blocking(2, False)
for _ in range(1000):
    try:
        os.write(2, b"x" * 1000)
    except BlockingIOError:
        break
from jdp.launch import run
print("full", flush=True)
run._say("the cause: " + "y" * 100_000)
"""


def test_the_cause_of_the_end_reaches_a_full_pipe_that_does_not_block():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env={"PYTHONPATH": PACKAGES}) as process:
        assert process.stdout.readline() == b"full\n"
        _, found = process.communicate(timeout=240)
    assert found.lstrip(b"x") == b"jdp run: the cause: " + b"y" * 100_000 + b"\n"


# A pipe holds 64 KiB: more than some lines, less than one; raw and buffered streams.
@pytest.mark.parametrize("buffering", [0, -1])
@pytest.mark.parametrize("num_lines", [1, 1000])
def test_a_full_pipe_that_does_not_block_gets_all_output(options, buffering, num_lines):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    lines = [bytes([65 + i % 26]) * (200_000 // num_lines) + b"\n" for i in range(num_lines)]
    found = []

    def read():
        while select.select([], [writes], [], 0.001)[1]:
            time.sleep(0.001)
        found.append(reader.read())

    with open(reads, "rb") as reader, open(writes, "wb", buffering=buffering) as writer:
        console = Console(options, writer, writer)
        thread = threading.Thread(target=read)
        thread.start()
        for line in lines:
            console.write(STDOUT, line)
        writer.close()
        thread.join(60)
    assert found == [b"".join(lines)]
