"""Several Python processes, joined by jax.distributed, in which tests run functions.

`Processes` is the parent's side, `serve` what a child runs. Each child has a pipe of its own: the
parent sends a function's name and arguments, the child answers with the result or a traceback.
"""

import ctypes
import dataclasses
import faulthandler
import importlib
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import IO

import jax

from support.launcher import free_port

DEVICES_PER_PROCESS = 2

START_TIMEOUT_S = 60.0

# More than a run makes of those calls that all processes have to make.
CALLS_OF_A_RUN = 1_000_000

# Once one process has failed, the others get this long: they may be waiting for it for ever.
GRACE_S = 3.0


class ProcessError(RuntimeError):
    """What went wrong, process by process."""


@dataclasses.dataclass
class Child:
    process: subprocess.Popen
    pipe: connection.Connection
    log: IO[bytes]


class Processes:
    """`num_processes` children; started by the first `run`, and again after one of them died.

    Args:
      num_processes: how many.
      address: where the first one listens, for all of them.
      within: what each is started by, for instance ("ip", "netns", "exec", "name"); None: itself.
      num_devices: CPU devices of each.
      start_timeout_s: in which all of them must have started and joined.
    """

    def __init__(
        self,
        num_processes,
        *,
        address="127.0.0.1",
        within=None,
        num_devices=DEVICES_PER_PROCESS,
        start_timeout_s=START_TIMEOUT_S,
    ):
        self.num_processes = num_processes
        self._num_devices = num_devices
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._within = within or [()] * num_processes
        self._children = []
        self._num_runs = 0

    def run(self, function, *args, timeout_s=60.0):
        """Call `function(*args)` in all processes at once and return the list of results.

        Args:
          function: found by its module and name, so not a lambda and not a nested function.
          *args: pickled, as the results are.
          timeout_s: processes without an answer by then show their stacks and end.

        Raises:
          ProcessError: with index and traceback of each process that failed.
        """
        name = function.__qualname__
        if "<" in name or function.__module__ == "__main__":
            raise ValueError(
                f"{function.__module__}.{name} can't be found by another process. Move it to the "
                "top level of a test module and pass what it closes over as arguments."
            )
        call = pickle.dumps((function.__module__, name, args))
        if not self._children:
            self._start()
        self._num_runs += 1
        for child in self._children:
            child.pipe.send((timeout_s, call, self._num_runs))
        return self._answers(timeout_s)

    @property
    def pids(self):
        """The numbers of the processes that run."""
        return [child.process.pid for child in self._children]

    def close(self):
        """End all processes."""
        for child in self._children:
            child.process.kill()
        for child in self._children:
            child.process.wait()
            child.pipe.close()
            child.log.close()
        self._children = []

    def _start(self):
        port = free_port()
        for index in range(self.num_processes):
            log = tempfile.TemporaryFile("ab+")  # appended to, so that both sides may seek
            ours, theirs = connection.Pipe()
            address = f"{self._address}:{port}"
            of_group = (address, self.num_processes, self._start_timeout_s)
            arguments = (theirs.fileno(), os.getpid(), index, *of_group)
            with theirs:
                process = subprocess.Popen(
                    [
                        *self._within[index],
                        sys.executable,
                        "-c",
                        f"from support import processes; processes.serve{arguments}",
                    ],
                    env=environment(self._num_devices),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._children.append(Child(process, ours, log))
        try:
            self._answers(self._start_timeout_s)
        except ProcessError:
            self.close()
            raise

    def _answers(self, timeout_s):
        answers = self._receive(timeout_s)
        failures = {i: text for i, (ok, text) in answers.items() if not ok}
        lost = [i for i in range(self.num_processes) if i not in answers]
        failures |= {i: self._last_words(i) for i in lost}
        if lost:
            self.close()
        if failures:
            raise ProcessError(
                "\n".join(
                    f"process {i} of {self.num_processes}: {text}"
                    for i, text in sorted(failures.items())
                )
            )
        return [pickle.loads(result) for _, (_, result) in sorted(answers.items())]

    # (True, pickled result) or (False, traceback) by index; none from a process that died or hangs.
    def _receive(self, timeout_s):
        answers = {}
        waiting = {child.pipe: i for i, child in enumerate(self._children)}
        deadline = time.monotonic() + timeout_s + GRACE_S  # a child ends itself at timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                i = waiting.pop(pipe)
                try:
                    answers[i] = pipe.recv()
                except (EOFError, ConnectionError):
                    pass
                if i not in answers or not answers[i][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _last_words(self, index):
        child = self._children[index]
        try:
            # The pipe closes a moment before the process is gone.
            end = f"ended with status {child.process.wait(timeout=0.5)}"
        except subprocess.TimeoutExpired:
            end = "gave no answer and was ended"
        child.log.seek(0)
        output = child.log.read().decode(errors="replace")
        return f"{end}; its last output was\n{output[-8000:]}"


# A child finds the test modules and jdp where the parent does.
def environment(num_devices=DEVICES_PER_PROCESS):
    tests = Path(__file__).parents[1]
    rooms = sorted({str(path.parent) for path in tests.glob("*/test_*.py")})
    paths = [str(tests), *rooms, str(tests.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def serve(fd, parent_pid, index, address, num_processes, timeout_s):
    """Join the other processes, if any, then answer calls until the parent closes the pipe."""
    end_with(parent_pid)
    faulthandler.enable()
    pipe = connection.Connection(fd)
    alone = num_processes == 1
    answer(pipe, timeout_s, lambda: alone or join(address, num_processes, index, timeout_s))
    while True:
        try:
            timeout_s, call, run = pipe.recv()
        except EOFError:
            return
        align_calls(run)
        answer(pipe, timeout_s, lambda call=call: evaluate(call))


def end_with(parent_pid):
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit()


def join(address, num_processes, index, timeout_s=START_TIMEOUT_S):
    jax.distributed.initialize(
        address,
        num_processes,
        index,
        coordinator_bind_address=address,
        initialization_timeout=int(timeout_s),
    )
    jax.devices()  # exchanges the topology, which takes all processes


def me():
    return jax.process_index()


def refusal(function, *args):
    """The error of `function` in a process, since a test sees only one error of all of them."""
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def align_calls(run):
    """Number the calls of a run alike in all processes, whatever those of earlier runs left out."""
    call_log = sys.modules.get("jdp.distributed.call_log")
    for log in call_log.logs.values() if call_log else ():
        log._latest.clear()
        log.num_calls = run * CALLS_OF_A_RUN


def evaluate(call):
    module, name, args = pickle.loads(call)
    return operator.attrgetter(name)(importlib.import_module(module))(*args)


def answer(pipe, timeout_s, function):
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        with warnings.catch_warnings():
            # As in pyproject.toml, whose filters only pytest reads.
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
            reply = True, pickle.dumps(function())
    except BaseException:
        reply = False, traceback.format_exc()
    faulthandler.cancel_dump_traceback_later()
    pipe.send(reply)
