"""The number of this host, where the scheduler that started the launcher gives it."""

from collections.abc import Mapping

_VARIABLES = {
    "JOB_COMPLETION_INDEX": "an Indexed Job of Kubernetes",
    "SLURM_NODEID": "Slurm",
    "GROUP_RANK": "torchrun",
}


def node_rank(environment: Mapping[str, str], num_hosts: int) -> dict[str, int]:
    """Return the value of the option `node_rank` by that name, or {} if none is given.

    Args:
      num_hosts: number of hosts that --nnodes allows, >= 1.

    >>> node_rank({"SLURM_NODEID": "1"}, num_hosts=2)
    {'node_rank': 1}
    """
    if num_hosts == 1:
        return {}
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None or (name == "SLURM_NODEID" and not _is_on_several_hosts(environment)):
        return {}
    text = environment[name]
    if not text.isdecimal() or int(text) >= num_hosts:
        raise ValueError(
            f"{name}={text}, by which {_VARIABLES[name]} numbers this host, is not a host of "
            f"--nnodes with at most {num_hosts}, which are numbered from 0 to {num_hosts - 1}. "
            "Start as many launchers as --nnodes allows, or give each its --node-rank."
        )
    return {"node_rank": int(text)}


def warning_if_alone(environment: Mapping[str, str]) -> str | None:
    """Return what to say of a launcher that does not look for others, None if it is the only one.

    >>> warning_if_alone({"SLURM_STEP_NUM_TASKS": "1"})
    """
    number = _num_launchers(environment)
    if number == 1 or environment.get("SLURM_PROCID", "0") != "0":
        return None
    return (
        f"this is one of {number} tasks of srun, and trains by itself. For a run of several hosts, "
        "start one launcher on each with --nnodes and --rdzv-endpoint, as in examples/slurm.sh. "
        "For runs of their own, add --standalone."
    )


# In a step on one host, such as an interactive shell, the number is 0 in all of its programs.
def _is_on_several_hosts(environment: Mapping[str, str]) -> bool:
    num_hosts = _number("SLURM_STEP_NUM_NODES", environment)
    if 1 < num_hosts < _num_launchers(environment):
        raise ValueError(
            f"srun starts {_num_launchers(environment)} launchers on {num_hosts} hosts, and a run "
            "has one on each: write srun --ntasks-per-node=1. --nproc-per-node is the number of "
            "processes that a launcher starts."
        )
    return num_hosts > 1 or "SLURM_STEP_NUM_NODES" not in environment


def _num_launchers(environment: Mapping[str, str]) -> int:
    return _number("SLURM_STEP_NUM_TASKS", environment)


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 1
