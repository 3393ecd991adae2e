"""Has the latest commit of this host written to the directory of its run, which needs JAX."""

import asyncio
import json
import os
import sys
from typing import Any

from jdp.launch.host import spawn
from jdp.launch.host.worker_process import HostResources


async def save_commit(resources: HostResources) -> dict[str, Any]:
    """Return the answer of `jdp/checkpoint/last_commit.py`, empty if there never was a commit."""
    if not os.fstat(resources.commit_file).st_size:
        return {}
    resources.say("the latest commit is written to the checkpoint directory. Ctrl-C skips that.")
    command = [sys.executable, "-m", "jdp.checkpoint.last_commit", str(resources.commit_file)]
    variables = {**resources.variables, "JAX_PLATFORMS": "cpu"}
    process = spawn.spawn(command, variables, pass_fds=[resources.commit_file])
    resources.guardian.add(process.pid)
    try:
        output, errors = await asyncio.to_thread(process.communicate)
        lines = output.decode().splitlines()
        if lines and process.returncode == 0:
            return json.loads(lines[-1])
        return {"error": errors.decode(errors="replace")[-1000:].strip()}
    finally:
        spawn.kill(process)
        resources.guardian.remove(process.pid)
