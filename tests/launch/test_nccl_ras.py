"""The client of NCCL's RAS service, against a server that speaks its protocol; not against NCCL."""

import asyncio
import contextlib
import re
import socket
import threading

import pytest
from support.launcher import free_port

from jdp.launch.host import local_generation

REPORT = "Communicators... (1 with 2 ranks)\n  rank 1: MISMATCH, AllReduce 41 of 42\n"

HANGS = """
from jdp.worker.progress_board import Board, record
slot = Board.attach(launcher.board_file).slot(launcher.slot)
slot.claim(a.generation, 1.0)
slot.enter(record("running a step"))
"""


class Service:
    """A RAS service, which answers after `num_silent` connections that it accepts and ignores."""

    def __init__(self, num_silent=0, greeting="SERVER PROTOCOL 2\n", report=REPORT):
        self.lines, self._silent = [], []
        self._num_silent, self._greeting, self._report_text = num_silent, greeting, report
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._listener, *self._silent):
            each.close()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if len(self._silent) < self._num_silent:
                self._silent.append(connection)
                continue
            # One that waited too long for its greeting has closed its end, and tries again.
            with (
                contextlib.suppress(ConnectionError),
                connection,
                connection.makefile("rw") as lines,
            ):
                self._answer(lines)

    # As `rasClientEventLoop` of NCCL: a status ends the connection.
    def _answer(self, lines):
        for line in lines:
            self.lines.append(line)
            is_status = line == "VERBOSE STATUS\n"
            kind = line.partition(" ")[0]
            answers = {"CLIENT": self._greeting, "TIMEOUT": "OK\n", "VERBOSE": self._report_text}
            lines.write(answers[kind])
            lines.flush()
            if is_status:
                return


def asked(address, monkeypatch):
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    return asyncio.run(asyncio.wait_for(local_generation.ask(), 60.0))


def test_the_report_of_the_service_is_returned(monkeypatch):
    with Service() as service:
        text = asked(service.address, monkeypatch)
    assert text.endswith(f"{service.address}:\n{REPORT.strip()}")
    assert service.lines == ["CLIENT PROTOCOL 2\n", "TIMEOUT 5\n", "VERBOSE STATUS\n"]


def test_a_process_that_accepts_and_does_not_answer_is_passed_over(monkeypatch):
    with Service(num_silent=2) as service:
        assert "AllReduce 41 of 42" in asked(service.address, monkeypatch)


def test_a_long_report_is_cut(monkeypatch):
    with Service(report="x" * (1 << 20)) as service:
        assert len(asked(service.address, monkeypatch)) < (1 << 16) + 200


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("localhost", "host:port"),
        ("localhost:65536", "host:port"),
        ("localhost:²", "host:port"),
        (f"127.0.0.1:{free_port()}", " Connection refused."),
        ("nohost.invalid:28028", "[Nn]ame "),  # not "Unknown error -2"
    ],
    ids=["no port", "large port", "no digit", "nobody listens", "no host"],
)
def test_without_the_service_one_line_says_why(address, why, monkeypatch):
    text = asked(address, monkeypatch)
    assert re.search(why, text)
    assert address in text
    assert "\n" not in text


def test_a_name_with_several_addresses_has_one_reason(monkeypatch):
    port, real = free_port(), socket.getaddrinfo
    # As where localhost is ::1 and 127.0.0.1.
    both = [real(f"127.0.0.{i}", port, type=socket.SOCK_STREAM)[0] for i in (1, 2)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *each, **more: both)
    assert " has no report: Connection refused. " in asked(f"localhost:{port}", monkeypatch)


def test_another_service_at_that_port_is_said_in_one_line(monkeypatch):
    with Service(greeting="SSH-2.0-OpenSSH_9.6\n") as service:
        text = asked(service.address, monkeypatch)
    assert "SSH-2.0" in text
    assert "\n" not in text


@pytest.mark.parametrize("gpus", ["0,1", ""])
def test_a_hang_on_gpus_shows_the_report_and_one_on_cpus_does_not_ask(jdp_run, gpus):
    with Service() as service:
        run = jdp_run(
            "--nproc-per-node=2",
            "--timeout-s=1",
            "--max-restarts=0",
            "--standbys=0",
            after=HANGS,
            JAX_PLATFORMS="cuda,cpu",
            CUDA_VISIBLE_DEVICES=gpus,
            NCCL_RAS_ADDR=service.address,
        )
        run.until("stalled")
        if gpus:
            run.until_true(lambda: "AllReduce 41 of 42" in run.output, "report")
        assert run.wait() == 124
    assert bool(service.lines) == bool(gpus)
