"""Messages between the parts of a run: one JSON object a line, over a socket.

Three parts talk. A *process* and the *host* that started it (`jdp/worker/launcher_client.py`,
`jdp/launch/host/worker_process.py`) over a
socket pair; hosts and the *leader* (`jdp/launch/host/agent.py`,
`jdp/launch/leader/leader.py`) over TCP.

A process tells its host:
  parked                        it ran up to `jdp.init()` and waits there
  joined      s                 it found the others; took s seconds
  restored    step, tier, s     it has the state after `step` steps, from memory or disk
  first_step  s, compile_s      it finished its first step, s seconds after `go`
  failed      code, traceback   its script raised, and it is about to exit with that code
  ended       steps             its script came to its end, after it has called so many, if any
A host tells a process:
  go          an `Assignment`   which process of which generation it is now

A host tells the leader:
  join    id, proof, ...           who it is, and that it knows the token
  ready   generation               a change would be quick: its standbys wait, or it has none
  told    process_id, what, ...    what a process told it
  exited  process_id, ...          a process ended by itself
  ended   generation, port, step   none of its processes is left; a port for the next coordinator
  stop    signal, at_once          its launcher was asked to end the run
  beat    at, statuses             it lives, its time, and the statuses of its processes
The leader tells a host:
  challenge  nonce, protocol       show that you know the token
  welcome    proof, is_running     you are in; so do I; a generation lives
  refused    why, is_final         you are not, for now or for good
  go         first, slots, ...     start your part of a generation
  stepped                          each process has finished a step: start standbys
  end                              kill your part of the generation
  stop       signal                ask your processes to end, with a signal or without
  dump       process_ids           have your processes show their stacks, these on the console
  beat       at                    I heard your beat of that time
  over       code, why             the run is over
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

# A line that is longer than this was not written by one of us; what a process wrote or raised is
# cut below it.
MAX_LINE_BYTES = 1 << 20


@functools.cache
def protocol() -> str:
    """Name the language of these messages: both ends must be of the same sources."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for room in ("worker", "launch"):
        for path in sorted((package / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def encode(kind: str, facts: dict[str, Any]) -> bytes:
    """Write a message as a line.

    >>> encode("restored", {"step": 3})
    b'{"kind": "restored", "step": 3}\\n'
    """
    return json.dumps({"kind": kind, **facts}).encode() + b"\n"


def decode(line: bytes) -> tuple[str, dict[str, Any]]:
    """Read a message: its kind and its facts.

    Raises:
      ValueError: if it is none.

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
