"""Processes under a launcher that does nothing but own their commit memory and write down what
they tell; for tests of what one process does under `jdp run`.
"""

import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from jdp.worker import launcher_client
from jdp.worker.messages import decode, encode
from jdp.worker.progress_board import Board
from support.processes import end_with, environment, free_port

TIMEOUT_S = 120.0


class Launcher:
    """Owner of the commit memory of some hosts, and of what it starts."""

    def __init__(self, num_hosts=1):
        self.memories = [os.memfd_create("commits") for _ in range(num_hosts)]
        self.board = Board.create(16)
        self.started = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            process.close()
        for memory in self.memories:
            os.close(memory)
        os.close(self.board.fd)

    def process(self, program, *args, host=0, parked=False, **assignment):
        """Start `module:function` with `args`, as the process that `assignment` says."""
        process = Process(self, program, args, host)
        self.started.append(process)
        if not parked:
            process.go(**assignment)
        return process

    def processes(self, num, program, *args, hosts=None, **assignment):
        """Start a generation of `num` processes, on one host each if `hosts` says which."""
        port = free_port()
        hosts = [0] * num if hosts is None else hosts
        return [
            self.process(
                program,
                *args,
                host=host,
                process_id=i,
                num_processes=num,
                local_id=hosts[:i].count(host),
                num_local=hosts.count(host),
                host_id=host,
                coordinator=f"127.0.0.1:{port}",
                **assignment,
            )
            for i, host in enumerate(hosts)
        ]


class Process:
    def __init__(self, launcher, program, args, host):
        self._ours, theirs = socket.socketpair()
        self._answer, self._log = tempfile.TemporaryFile(), tempfile.TemporaryFile("ab+")
        fds = {
            "socket": theirs.fileno(),
            "board": launcher.board.fd,
            "commit": launcher.memories[host],
        }
        invitation = launcher_client.invitation(**fds, slot=len(launcher.started))
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, str(Path(__file__)), program, str(os.getpid())]
                + [str(self._answer.fileno())]
                + [pickle.dumps(args).hex()],
                env=environment() | invitation | {"JAX_NUM_CPU_DEVICES": "1"},
                pass_fds=[*fds.values(), self._answer.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )

    def go(self, generation=0, process_id=0, num_processes=1, local_id=0, **more):
        facts = {
            "generation": generation,
            "process_id": process_id,
            "num_processes": num_processes,
            "local_id": local_id,
            "num_local": 1,
            "coordinator": "127.0.0.1:1",
            "resumes": generation > 0,
            "gpus": None,
            "run_id": "test",
        }
        self._ours.sendall(encode("go", facts | more))

    def kill(self):
        """End it, if it still runs."""
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    def close(self):
        self.kill()
        for each in (self._ours, self._answer, self._log):
            each.close()

    def output(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait(self):
        """Give the exit code."""
        return self.popen.wait(TIMEOUT_S)

    def result(self):
        """Give what the program returned."""
        code = self.wait()
        assert code == 0, f"ended with {code}; its output was\n{self.output()[-8000:]}"
        self._answer.seek(0)
        return json.load(self._answer)

    def told(self, kind):
        """Wait until the process tells this, and give the facts."""
        self._ours.settimeout(TIMEOUT_S)
        for found, facts in self._messages():
            if found == kind:
                return facts
        raise AssertionError(f"ended without telling {kind!r}; its output was\n{self.output()}")

    def messages(self):
        """Give all that the process told, after its end."""
        return list(self._messages())

    def _messages(self):
        data = b""
        while True:
            while b"\n" in data:
                line, _, data = data.partition(b"\n")
                yield decode(line)
            if not (more := self._ours.recv(1 << 16)):
                return
            data += more


def results(processes):
    return [process.result() for process in processes]


def main(program, parent_pid, answer, args):
    end_with(int(parent_pid))
    module, _, name = program.partition(":")
    result = getattr(importlib.import_module(module), name)(*pickle.loads(bytes.fromhex(args)))
    os.write(int(answer), json.dumps(result).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
