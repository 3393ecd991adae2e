"""`jdp run` as a program, for tests: started, watched through its events, and never left behind."""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jdp.launch.host import spawn
from jdp.tools.bench.injector import FaultyRun

DEADLINE_S = 60.0
# A script of a test's own imports JAX in each process, which takes long on a busy machine.
WITH_JAX_S = 120.0

# A host that is silent for so long is lost. Shorter, a busy machine loses hosts that live.
HEARTBEAT_TIMEOUT_S = 1
# So long it waits for hosts that do not come: some rounds of an election.
JOIN_TIMEOUT_S = 4 * HEARTBEAT_TIMEOUT_S

MARK = "JDP_TEST_MARK"

# A test run that is killed leaves no launcher behind, and one under nohup does not hand on that it
# ignores SIGHUP.
_BEFORE = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + spawn._BEFORE
DIES_WITH_US = [sys.executable, "-I", "-S", "-c", _BEFORE, str(os.getpid())]

PACKAGES = str(Path(__file__).parents[2])

# A program without JAX, which tells what a training script would. Its arguments are Python: what is
# done before init, between init and the first step, and after the first step of all processes. Then
# it trains until there is a file `done`.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from jdp.worker import launcher_client
folder = Path(__file__).parent
exec(sys.argv[1])
launcher = launcher_client.current()
a = launcher.park()
launcher.tell("joined", s=0.0)
step = 10 * a.generation
launcher.tell("restored", step=step, base=step, tier="commit", s=0.0)
exec(sys.argv[2])
launcher.tell("first_step", s=time.monotonic() - launcher.woken, compile_s=0.0)
(folder / f"stepped {a.generation} {a.process_id}").touch()
while len([*folder.glob(f"stepped {a.generation} *")]) < a.num_processes:
    time.sleep(0.005)
exec(sys.argv[3])
launcher.tell("running")
while not (folder / "done").exists():
    time.sleep(0.005)
"""


class Launcher(FaultyRun):
    """One `jdp run` of SCRIPT.

    Args:
      folder: for the script, events and output.
      *flags: of `jdp run`.
      before, init, after: Python that the script executes in these places.
      script: another one.
      within: what it is started by, such as ("ip", "netns", "exec", "name").
      changes: Python that the launcher itself executes first.
      environment: further variables.
    """

    deadline_s = DEADLINE_S

    def __init__(
        self,
        folder: Path,
        *flags: str,
        before="",
        init="",
        after="",
        script=SCRIPT,
        within: Sequence[str] = (),
        changes="",
        **environment: str,
    ):
        self.folder = folder
        if script != SCRIPT:
            self.deadline_s = max(self.deadline_s, WITH_JAX_S)
        self.mark = secrets.token_hex(8)
        logs = folder / f"logs_{self.mark}"
        path = folder / "train.py"
        path.write_text(script)
        changed = f"{changes}\nimport sys; from jdp.__main__ import main; sys.exit(main())"
        heartbeats = f"--heartbeat-timeout-s={HEARTBEAT_TIMEOUT_S}"
        quick = [heartbeats, "--shutdown-timeout-s=2", "--last-call-timeout-s=0.5"]
        super().__init__(
            [
                *DIES_WITH_US,
                *within,
                *(sys.executable, *(["-c", changed] if changes else ["-m", "jdp"])),
                *("run", "--local-ranks-filter=all"),
                *(f"--log-dir={logs}", *quick, *flags),
                *(str(path), before, init, after),
            ],
            logs,
            folder / f"output_{self.mark}",
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("JDP_", "PET_"))},
                "PYTHONPATH": PACKAGES,
                MARK: self.mark,
                **environment,
            },
            start_new_session=True,
        )

    def signal(self, number: int, size: int = 2) -> None:
        """Send a signal once so many processes run."""
        self.until("running", size)
        self.process.send_signal(number)

    def standbys(self, generation: int, number: int) -> list[int]:
        """The pids of the standbys behind a generation, once they wait."""
        self.until("ready", generation=generation)
        running = {e["pid"] for e in self.events("first_step", generation=generation)}
        found = [pid for pid in self.alive() if pid not in running]
        assert len(found) == number, (found, running)
        return found

    def finish(self, *generation_and_size: int) -> int:
        """Have the script end, of a generation after its first step; give the exit code."""
        if generation_and_size:
            self.pids(*generation_and_size)
        (self.folder / "done").touch()
        return self.wait()

    def alive(self) -> list[int]:
        """The pids of all processes that run the script."""
        script = str(self.folder / "train.py").encode()
        others = [pid for pid in marked(self.mark) if pid != self.process.pid]
        return [pid for pid in others if script in _read(pid, "cmdline")]

    def close(self) -> None:
        """End it, and see that nothing is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 5.0
        while left := marked(self.mark):
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {[_read(pid, 'cmdline') for pid in left]}")
            time.sleep(0.01)


class PatientLauncher(Launcher):
    deadline_s = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def marked(mark: str) -> list[int]:
    """Pids of processes with that mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    return [int(p) for p in os.listdir("/proc") if p.isdigit() and wanted in _read(p, "environ")]


def _read(pid: int | str, what: str) -> list[bytes]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{what}").read_bytes().split(b"\0")
    return []
