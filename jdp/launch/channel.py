"""Messages between the parts of a run: one JSON object a line, over a socket.

Three parts talk. A *process* and the *host* that started it (`member.py`, `process.py`) over a
socket pair; hosts and the *leader* (`host.py`, `leader.py`) over TCP.

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
  beat    at, where                it lives, its time, and where its processes are
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

import asyncio
import functools
import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A line that is longer than this was not written by one of us; what a process wrote or raised is
# cut below it.
MAX_LINE_BYTES = 1 << 20

# Who is behind by more than this has stopped, and would have to be given up anyway.
_MAX_UNSENT_BYTES = 4 * MAX_LINE_BYTES


@functools.cache
def protocol() -> str:
    """Name the language of these messages: both ends must be of the same sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
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


class Channel:
    """One end of a connection, on the running event loop.

    Args:
      connection: a connected stream socket, which the channel closes.
      received: is called with kind and facts of each message. May be changed later, as the next.
      closed: is called once, with the reason, when the other end is gone; not after `close`.
      max_line_bytes: a longer line ends the connection.
      addresses: of this end and of the other, as both see them; known when it was accepted, while
        a socket forgets them when the other end is gone.
    """

    def __init__(
        self,
        connection: socket.socket,
        received: Callable[[str, dict[str, Any]], None] = lambda kind, facts: None,
        closed: Callable[[str], None] = lambda why: None,
        max_line_bytes: int = MAX_LINE_BYTES,
        addresses: tuple[str, str] = ("", ""),
    ) -> None:
        connection.setblocking(False)
        self.is_open = True
        self.received = received
        self.max_line_bytes, self.addresses = max_line_bytes, addresses
        self.closed = closed
        self._socket = connection
        self._rest, self._unsent = b"", b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self.read)

    def send(self, kind: str, **facts: Any) -> None:
        """Send a message; into nothing if the other end is gone."""
        if self.is_open:
            self._unsent += encode(kind, facts)
            self._write()

    def read(self) -> None:
        """Take what has arrived; the event loop calls this, and who wants to be sure."""
        while self.is_open:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                return self._lose(error.strerror or "connection lost")
            if not data:
                return self._lose("connection closed")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)
            if len(self._rest) > self.max_line_bytes:
                return self._lose(f"a message of more than {self.max_line_bytes} bytes")

    def close(self) -> None:
        """Close this end."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    # Of a long message the kernel takes a part, and the rest when the other end has read that.
    def _write(self) -> None:
        try:
            count = self._socket.send(self._unsent)
        except BlockingIOError:
            count = 0
        except OSError as error:
            return self._lose(error.strerror or "connection lost")
        self._unsent = self._unsent[count:]
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self._lose("it stopped reading")
        elif self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)

    def _take(self, line: bytes) -> None:
        if not self.is_open:
            return
        try:
            kind, facts = decode(line)
        except ValueError as error:
            return self._lose(str(error))
        self.received(kind, facts)

    # Called later, so that nobody who sends finds the world changed when `send` returns.
    def _lose(self, why: str) -> None:
        if self.is_open:
            self.close()
            self._loop.call_soon(self.closed, why)
