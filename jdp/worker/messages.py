"""Messages between the parts of a run: one JSON object a line, over a socket.

Three parts exchange them. A *process* and the *host* that started it
(`jdp/worker/launcher_client.py`, `jdp/launch/host/worker_process.py`) use a socket pair; hosts and
the *leader* (`jdp/launch/host/agent.py`, `jdp/launch/leader/leader.py`) use TCP.

From a process to its host:
  parked      pid, cannot_fork  the process ran up to `jdp.init()` and waits there; why it cannot
                                be forked, or null, see `jdp/worker/fork_server.py`
  compiled_imports  modules, s, measured, why, command
                                it compiled these modules at its start, for s seconds, since they
                                have no bytecode; why, and the command that writes it
  joined      s                 it found the others, which took s seconds
  restored    step, tier, s,    it has the state after `step` steps, from memory or disk; its calls
              base, is_complete of steps are counted from `base`; whether no step is left
  first_step  s, compile_s,     it finished its first step, s seconds after `go`; whether its
              is_uncached       program was kept out of JAX's compilation cache
  failed      code, traceback   its script raised, and it is about to exit with that code
  closed      step              its `Checkpointer` has saved the last step
  ended       steps             its script has ended, after so many steps if it trains
From a host to a process:
  go          an `Assignment`   its number and generation

From a host to the leader:
  join    id, proof, ...           the host, the proof that it knows the token, and the past of the
                                   run as it knows it (`jdp/worker/run_progress.py`)
  ready   generation               a change would be quick: its standbys wait, or it has none
  told    process_id, what, ...    a message of one of its processes
  exited  process_id, ...          a process ended by itself
  ended   generation, port, step   no process is left; a port for the next coordinator
  stop    signal, at_once          its launcher was asked to end the run
  commit saved  step, ...          its latest commit is in the checkpoint directory, or an error
  beat    at, standbys, ...        its time, how many standbys wait, the statuses of its processes,
                                   times of their steps
  nccl    report                   the report of NCCL's RAS service, or why there is none
On a second connection, where several hosts may lead (`jdp/launch/connection.py`):
  lifeline  id, source, proof      from a host: this connection shows its death, and the leader's;
                                   its own end
  attached  proof, is_direct       from the leader: from now on it does, unless through a proxy
  farewell                         from both: the connection ends, and the launcher lives
From the leader to a host:
  challenge  nonce, protocol, ...  asks for a proof that the host knows the token; with the claim
                                   of the leader, see `jdp/launch/election.py`
  welcome    proof, is_running,    the host has joined; the leader's proof; a generation lives;
             leader                id of the leader's launcher
  refused    why, is_final         the host may not join, for now or at all
  go         first, slots, ...     start your part of a generation
  settled    known                 each process has found the others, so all hosts have got `go`;
                                   the electors and the past of the run, as in `go`
  stepped    known                 each process has finished a step: start standbys; as in `settled`
  resigned                         another leader has a better claim: join that one
  end                              kill your part of the generation
  stop       signal                ask your processes to end, by a signal if there is one
  dump       process_ids, ...      have your processes show their stacks, these on the console;
                                   perhaps ask NCCL which ranks hang
  save commit                      write your latest commit to the checkpoint directory
  beat       at                    the answer to your beat of that time
  over       code, why             the run is over
"""

import json
from typing import Any

# No message is longer: output and tracebacks of processes are cut below this.
MAX_LINE_BYTES = 1 << 20


def encode(kind: str, facts: dict[str, Any]) -> bytes:
    """Write a message as a line.

    >>> encode("restored", {"step": 3})
    b'{"kind": "restored", "step": 3}\\n'
    """
    return json.dumps({"kind": kind, **facts}).encode() + b"\n"


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """Read a message: its kind and its facts.

    >>> decode(b'{"kind": "restored", "step": 3}')
    ('restored', {'step': 3})
    """
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("not a message: too deep") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError(f"not a message: {line[:80]!r}")
    return message.pop("kind"), message
