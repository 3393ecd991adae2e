"""Read the variables that Slurm's srun sets for each task of a step."""

import re
from collections.abc import Mapping

from jdp.distributed.variables import number

# As JAX does in a job of Slurm: the port follows from the number of the job, among so many.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
# For JAX two steps of a job have one port, and their processes would join each other's runs. Jobs
# that are so far apart seldom run at the same time on one host.
_JOBS_BETWEEN_STEPS = 997


def coordinator(environment: Mapping[str, str]) -> str:
    """Return "address:port" at which process 0 listens; JAX_COORDINATOR_PORT wins, as in JAX.

    >>> coordinator({"SLURM_STEP_NODELIST": "n[01-03,7]", "SLURM_JOB_ID": "7"})
    'n01:61447'
    """
    job, step = number("SLURM_JOB_ID", environment), number("SLURM_STEP_ID", environment, 0)
    port = _FIRST_PORT + (job + _JOBS_BETWEEN_STEPS * step) % _NUM_PORTS
    host = first_host(environment["SLURM_STEP_NODELIST"])
    return f"{host}:{number('JAX_COORDINATOR_PORT', environment, port)}"


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> first_host("node[007,010-015],login"), first_host("rack1-n[2-3]-ib")
    ('node007', 'rack1-n2-ib')
    """
    first = re.match(r"(\[[^]]*\]|[^,\[])*", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else hosts)


def num_tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of this step on this host.

    >>> num_tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    3
    """
    tasks = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        each, _, times = part.rstrip(")").partition("(x")
        tasks += [int(each)] * int(times or 1)
    return tasks[min(number("SLURM_NODEID", environment, 0), len(tasks) - 1)]
