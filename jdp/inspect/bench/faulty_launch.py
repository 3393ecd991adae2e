"""One `jdp run` of `faulty_run`, watched from outside. Needs no JAX."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jdp.inspect.exact import WrongResultError
from jdp.launch.host import spawn

_POLL_S = 0.01
_PROGRAM = "jdp.inspect.bench.faulty_run"
# No process begins a step that is so many after one that another has finished.
_MARGIN_STEPS = 5


class FaultSetting(NamedTuple):
    """The faults of a run.

    Attributes:
      mtbf_s: mean seconds from one fault to the next; their times are exponentially distributed.
      num_faults: number of faults.
      num_processes: processes of the run, with a device each.
      step_s: seconds that a step takes at least.
      commit_every: number of steps between commits, >= 1.
      deadline_s: seconds in which a run must recover from a fault.
      seed: seed of the times and of the processes that are killed.
    """

    mtbf_s: float
    num_faults: int
    num_processes: int = 2
    step_s: float = 0.1
    commit_every: int = 10
    deadline_s: float = 120.0
    seed: int = 0


class FaultyRunError(Exception):
    """A run that failed, or did not go on in time, with its last output."""


class FaultyLaunch:
    """One `jdp run` of `faulty_run`, in a folder of its own, which ends with the context."""

    def __init__(self, folder: Path, state_bytes: int, setting: FaultSetting):
        folder.mkdir(parents=True)
        plan = {
            "state_bytes": state_bytes,
            "step_s": setting.step_s,
            "commit_every": setting.commit_every,
        }
        (folder / "run.json").write_text(json.dumps(plan))
        self.folder, self._num_processes = folder, setting.num_processes
        self._output = (folder / "output").open("wb")
        command = [sys.executable, "-m", "jdp", "run"]
        command += [f"--nproc-per-node={setting.num_processes}", "--max-restarts=1000000"]
        command += [f"--log-dir={folder / 'logs'}", "-m", _PROGRAM, str(folder)]
        self._process = subprocess.Popen(
            spawn.ends_with_this(command),  # it would train without end
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "FaultyLaunch":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its processes end with it
                self._process.wait()
        self._output.close()

    @property
    def is_over(self) -> bool:
        """Whether the launcher has ended."""
        return self._process.poll() is not None

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a name so far."""
        path = self.folder / "logs" / "events.jsonl"
        found = read_lines(path) if path.exists() else []
        return [it for it in found if it["event"] == event]

    def first_steps(self) -> dict[int, list[dict[str, Any]]]:
        """Return generation -> the first steps of its processes, as they logged them."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in self.folder.glob("steps.*"):
            steps = read_lines(path)
            if steps:
                found.setdefault(steps[0]["generation"], []).append(steps[0])
        return found

    def running(self) -> dict[int, int]:
        """Return rank -> pid of the newest generation, {} until all have made a step."""
        told = self.events("first_step")
        newest = max((it["generation"] for it in told), default=0)
        found = {it["process_id"]: it["pid"] for it in told if it["generation"] == newest}
        return found if len(found) == self._num_processes else {}

    def until(self, is_there: Callable[[], Any], what: str, deadline_s: float) -> Any:
        """Wait until a condition holds, and return its value."""
        end = time.monotonic() + deadline_s
        while not (value := is_there()):
            if self.is_over and not is_there():
                raise FaultyRunError(f"the run ended without {what}.\n{self._tail()}")
            if time.monotonic() > end:
                raise FaultyRunError(f"no {what} within {deadline_s:.0f} s.\n{self._tail()}")
            time.sleep(_POLL_S)
        return value

    def stop(self) -> None:
        """Let the run end after a step that no process has begun."""
        newest = max(it["step"] for it in read_steps(self.folder))
        part = self.folder / "stop.part"
        part.write_text(str(newest + _MARGIN_STEPS))
        part.rename(self.folder / "stop")

    def wait(self, deadline_s: float) -> None:
        """Wait for the end of the run."""
        self.until(lambda: self.is_over, "end of the run", deadline_s)
        if self._process.returncode:
            raise FaultyRunError(
                f"the run ended with exit code {self._process.returncode}.\n{self._tail()}"
            )

    def _tail(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-3000:]


def require_exact(folder: Path, num_processes: int) -> None:
    """Compare the final states of all processes, as they reported them."""
    found = {}
    for path in folder.glob("final.*.json"):
        its = json.loads(path.read_text())
        found[its["rank"]] = its
    missing = sorted(set(range(num_processes)) - set(found))
    wrong = [f"process {rank}: {its['wrong']}" for rank, its in found.items() if its["wrong"]]
    if missing or wrong or len({its["digest"] for its in found.values()}) > 1:
        raise WrongResultError(
            "the final state has other bits than that of the run without faults: elements that are "
            f"wrong: {'; '.join(wrong) or 'none'}; processes without a state: {missing or 'none'}. "
            "A run with faults that ends elsewhere is not a recovery."
        )


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the steps of process 0 in all generations, in the order of their beginnings."""
    found = [it for path in folder.glob("steps.*") for it in read_lines(path) if it["rank"] == 0]
    return sorted(found, key=lambda it: it["begin"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON, but for one that is being written."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
