"""Slurm's own daemons on this machine, with a configuration in a temporary folder.

The nodes are named by addresses of the loopback interface, since JAX and `examples/slurm.sh`
connect to the name of the first node. Each node is a slurmd of its own.
"""

import contextlib
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

from support.launcher import DIES_WITH_US, free_port

NODES = ("127.0.0.1", "127.0.0.2")
START_TIMEOUT_S = 60.0
_DAEMONS = ("munged", "slurmctld", "slurmd")
_PROGRAMS = (*_DAEMONS, "mungekey", "sbatch", "srun", "sinfo", "scontrol", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

_CONFIGURATION = """
ClusterName=jdp
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=1,sched_min_interval=0
"""


def missing():
    """Return why Slurm cannot run here, or None if it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"Slurm is not installed: there is no {', '.join(absent)}"
    if os.geteuid() != 0:
        return "slurmd starts jobs, which needs root"
    return None


class Slurm:
    """A cluster of two nodes, until `close`.

    Args:
      folder: an empty folder for its configuration, keys, sockets and logs.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._daemons = []
        foreign = ("SLURM_", "SBATCH_", "SRUN_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        self.environment = {**clean, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self):
        """Start the daemons, and wait until all nodes are idle.

        Raises:
          RuntimeError: if they are not in time, with the ends of the logs.
        """
        (self.folder / "state").mkdir()
        lines = [_CONFIGURATION.format(folder=self.folder, port=free_port())]
        for node in NODES:
            where = f"NodeHostname=localhost NodeAddr={node} Port={free_port()}"
            lines.append(f"NodeName={node} {where} CPUs=64 Gres=gpu:8 State=UNKNOWN")
            (self.folder / f"spool-{node}").mkdir()
        lines.append(f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        # GPUs that nobody opens: slurmd needs devices, and these are /dev/null.
        for number in range(8):
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        gres = f"Name=gpu File={self.folder}/gpu[0-7]\n"
        (self.folder / "gres.conf").write_text(gres)
        key, socket = self.folder / "munge.key", self.folder / "munge.socket"
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={key}"], env=self.environment, check=True
        )
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "pid", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", "-S", socket, *own)
        self._wait(socket.exists)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self._wait(lambda: self.command("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2")

    def command(self, *arguments, variables=None, timeout_s=120.0):
        """Return the output of one of Slurm's commands, also if it fails."""
        ended = self.run(*arguments, variables=variables, timeout_s=timeout_s)
        return ended.stdout

    def run(self, *arguments, variables=None, timeout_s=120.0, cwd=None):
        """Run a command of Slurm's until it ends, and return it with its output."""
        return subprocess.run(
            [str(argument) for argument in arguments],
            env={**self.environment, **(variables or {})},
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def close(self):
        """End all jobs, then the daemons."""
        if self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run("scancel", "--full", "--user=root", timeout_s=10)
                self._wait(lambda: not self.command("squeue", "-h", timeout_s=10).strip())
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []

    def _daemon(self, name, *arguments):
        with (self.folder / f"{name}.out").open("ab") as output:
            started = subprocess.Popen(
                [*DIES_WITH_US, shutil.which(name, path=_PATH), *map(str, arguments)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._daemons.append(started)

    def _wait(self, ready):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if time.monotonic() > deadline:
                logs = sorted(self.folder.glob("*.out"))
                ends = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)
                raise RuntimeError(f"Slurm is not ready after {START_TIMEOUT_S:.0f} s\n{ends}")
            time.sleep(0.2)
