"""`jdp run` of victim.py: started, injured and looked at from outside."""

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import lineage
import numpy as np
import victim
from support.launcher import Launcher
from victim import Fault

from jdp.tools.bench.injector import write_whole

VICTIM = (Path(__file__).parent / "victim.py").read_text()

# Steps that do not end in this time are a hang; and as many seconds until --shutdown-timeout-s.
TIMEOUT_S = 3.0

# 60 epochs.
NUM_STEPS = 384

# A place where processes fail again and again within a minute stays empty for up to 5 s each time.
# Here all do: for a tenth of that.
SHORT_BACKOFF = """
from jdp.launch.leader import remote_host
remote_host.BACKOFF_S /= 10
remote_host.MAX_BACKOFF_S /= 10
"""


class Training:
    """One training run, in the folder that its processes share, by one launcher or several.

    Args:
      leash: how far it may go without further orders; None: to the end.
      changes: Python that its launchers execute first.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int = NUM_STEPS,
        leash: int | None = None,
        changes: str = SHORT_BACKOFF,
    ) -> None:
        self.folder, self.num_steps, self._changes = folder, num_steps, changes
        self.leash: int | None = None
        self.launchers: list[Launcher] = []
        self._num_faults, self._num_launches = 0, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.order(leash)

    def start(self, *flags: str, within: Sequence[str] = (), **environment: str) -> Launcher:
        """Start a launcher; `within` is what it is started by."""
        own = self.folder / f"launcher_{secrets.token_hex(4)}"
        own.mkdir()
        launcher = Launcher(
            own,
            *("--max-restarts=1000", f"--timeout-s={TIMEOUT_S:g}", *flags),
            script=VICTIM,
            before=str(self.folder),
            init=str(self.num_steps),
            within=within,
            changes=self._changes,
            JAX_NUM_CPU_DEVICES="1",
            **{victim.LAUNCH: str(self._num_launches), **environment},
        )
        self.launchers.append(launcher)
        return launcher

    def launch_again(self, *flags: str) -> Launcher:
        """Start a launcher that goes on where those before have ended."""
        self._num_launches += 1
        return self.start("--resume", *flags)

    def order(self, leash: int | None, *faults: tuple[str, int, int | None]) -> Path:
        """Let the run reach `leash` with faults (kind, rank, step); give the mark of the last."""
        steps = list(dict.fromkeys(step for _, _, step in faults))
        numbered = [Fault(self._num_faults + steps.index(fault[2]), *fault) for fault in faults]
        self._num_faults += len(steps)
        self.leash = leash
        orders = json.dumps({"leash": leash, "faults": numbered})
        write_whole(self.folder / "orders.json", orders)
        return self.folder / victim.happened(self._num_faults - 1)

    def step(self) -> int:
        """The last step that some process began."""
        return max((e["step"] for e in lineage.read(self.folder) if "step" in e), default=0)

    def until_step(self, launcher: Launcher, step: int) -> None:
        """Wait until some process begins this step."""
        launcher.until_true(lambda: self.step() >= step, f"step {step}")

    def finals(self) -> dict[int, dict[str, np.ndarray]]:
        """The leaves of the state after the last step, by process: each has left its own copy."""
        finals = {}
        for path in sorted(self.folder.glob("final.*.npz")):
            with np.load(path) as file:
                finals[int(path.name.split(".")[1])] = dict(file)
        return finals

    def lost_steps(self) -> list[int]:
        """How many steps that all processes had begun each restore took back."""
        return lineage.lost_steps(lineage.read(self.folder))

    def miscounted(self) -> list[str]:
        """What is wrong with the rows that the run has trained on."""
        return lineage.miscounted(lineage.read(self.folder), victim.NUM_ROWS, self.num_steps)

    def close(self) -> None:
        """End it, and see that no process is left."""
        for launcher in self.launchers:
            launcher.close()


def uninterrupted(folder: Path, num_steps: int = NUM_STEPS) -> Training:
    """Return a run of 3 processes to which nothing happened, all with the same final bits."""
    training = Training(folder, num_steps)
    with contextlib.closing(training):
        launcher = training.start("--nproc-per-node=3", "--standbys=0", "--timeout-s=60")
        if launcher.wait() or launcher.events("recovered"):
            raise RuntimeError(launcher.output)
        if wrong := training.miscounted() + wrong_bits(training, training):
            raise RuntimeError(f"{wrong}\n{launcher.output}")
    return training


def wrong_bits(training: Training, oracle: Training, num_processes: int = 3) -> list[str]:
    """Name each process without a final state, and each leaf of one that is not the oracle's.

    Bytes are compared: 0.0 is not -0.0.

    Args:
      training: that has ended.
      oracle: the same training, to which nothing happened.
      num_processes: with which the training ended.
    """
    expected, finals = oracle.finals()[0], training.finals()
    wrong = [f"process {rank} left no state" for rank in set(range(num_processes)) - set(finals)]
    for rank, leaves in finals.items():
        for name in expected.keys() | leaves.keys():
            if _bits(leaves.get(name)) != _bits(expected.get(name)):
                wrong.append(f"process {rank}: {name} has other bits")
    return sorted(wrong)


def _bits(leaf: np.ndarray | None) -> tuple | None:
    return None if leaf is None else (leaf.dtype, leaf.shape, leaf.tobytes())


def assert_close(training: Training, oracle: Training, num_processes: int) -> None:
    """Compare every process's final state, up to what the order of sums may change."""
    expected, finals = oracle.finals()[0], training.finals()
    assert finals.keys() == set(range(num_processes))
    for rank, leaves in finals.items():
        assert leaves.keys() == expected.keys()
        for name, values in expected.items():
            what = f"process {rank}: {name}"
            np.testing.assert_allclose(leaves[name], values, rtol=1e-5, atol=1e-5, err_msg=what)


def shared_memory() -> set[str]:
    """What has a name in shared memory."""
    return set(os.listdir("/dev/shm"))
