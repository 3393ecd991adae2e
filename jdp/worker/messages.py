"""Messages between a run's parts: one JSON object a line, over a socket.

A *process* and its *host* (`jdp/worker/launcher_client.py`, `jdp/launch/host/worker_process.py`)
use a socket pair; hosts and the *leader* (`jdp/launch/host/agent.py`,
`jdp/launch/leader/leader.py`) use TCP.

From a process to its host:
  parked      pid, cannot_fork  waits in `jdp.init()`; why it cannot be forked, or null
  compiled_imports  modules, without, s, command   see `bytecode.Imports`
  joined      s                 found the others after s seconds
  restored    step, tier, s,    has the state after `step` steps, from memory or disk; counts its
              base              steps from `base`, which includes models trained before
  first_step  s, compile_s,     finished its first step, s seconds after `go`; whether its program
              is_uncached       bypassed JAX's compilation cache
  failed      code, traceback   its script raised; it will exit with that code
  closed      step              its `Checkpointer` saved the last step
  ended       steps             its script ended after so many steps
From a host to a process:
  go          an `Assignment`   its index and generation

From a host to the leader:
  join    id, proof, ...           host, proof that it knows the token, its record of the run
  ready   generation               standbys wait, or it has none: a change would be quick
  told    process_id, what, ...    a message of one of its processes
  exited  process_id, ...          a process exited
  ended   generation, port, step   no process is left; a port for the next coordinator
  stop    signal, at_once          its launcher was asked to end the run
  commit saved  step, ...          its latest commit is in the checkpoint directory, or an error
  beat    at, standbys, ...        heartbeat: its time, number of standbys, statuses, step times
  nccl    report                   NCCL's RAS report, or why there is none
On a second connection, where several hosts may lead (`jdp/launch/connection.py`):
  lifeline  id, source, proof      from a host: this connection shows either side's death
  attached  proof, is_direct       from the leader: confirmed; is_direct: without a proxy
  farewell                         from both: the connection closes, the launcher lives
From the leader to a host:
  challenge  nonce, protocol, ...  asks for a proof of the token; holds the leader's claim
  welcome    proof, is_running,    the host has joined; the leader's proof; a generation runs;
             leader                id of the leader's launcher
  refused    why, is_final         the host may not join, now or ever
  go         first, slots, ...     start your part of a generation
  settled    known                 all processes joined; electors and record of the run, as in `go`
  stepped    known                 all processes finished a step: start standbys; as in `settled`
  resigned                         another leader has a better claim: join that one
  end                              kill your part of the generation
  stop       signal                ask your processes to end, with a signal if given
  dump       process_ids, ...      print the stacks of these processes; perhaps query NCCL
  save commit                      write your latest commit to the checkpoint directory
  beat       at                    the answer to your beat of that time
  over       code, why             the run is over
"""

import json
from typing import Any

# Output and tracebacks are cut to fit.
MAX_LINE_BYTES = 1 << 20


def encode(kind: str, facts: dict[str, Any]) -> bytes:
    """Return a message as a line.

    >>> encode("restored", {"step": 3})
    b'{"kind": "restored", "step": 3}\\n'
    """
    return json.dumps({"kind": kind, **facts}).encode() + b"\n"


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and facts of a message."""
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("not a message: too deep") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError(f"not a message: {line[:80]!r}")
    return message.pop("kind"), message
