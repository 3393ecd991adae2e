"""Asks NCCL's RAS service which ranks of a job on GPUs hang.

Each process with a communicator of NCCL 2.24 or later has a thread of that service, and each of
them answers for the whole job. They speak lines of text, as NVIDIA's client `ncclras` does. It
was tried with NCCL 2.32.
"""

import asyncio
import os

from jdp.launch.transport.connection import connect

_DEFAULT = "localhost:28028"
# NCCL waits so long for answers of other processes, and then for as long again.
_LEG_S = 5
_REPORT_S = 2 * _LEG_S + 2.0
# A process that is stopped accepts connections and does not answer; the next try may reach another.
_GREETING_S = 1.0
_NUM_TRIES = 5

# A report is shown up to here.
_MAX_BYTES = 1 << 16


async def ask() -> str:
    """Return the report of the service on this host, or a line that says why there is none."""
    address = os.environ.get("NCCL_RAS_ADDR") or _DEFAULT
    try:
        report = await _asked(address)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        why = getattr(error, "strerror", None) or str(error)
        return (
            f"NCCL's RAS service at {address} has no report: {why}. NCCL has it since 2.24, if "
            "NCCL_RAS_ENABLE is not 0 and NCCL_RAS_ADDR is that of the processes."
        )
    return f"the report of NCCL's RAS service at {address}:\n{report}"


async def _asked(address: str) -> str:
    reader, writer = await _connected(address)
    try:
        async with asyncio.timeout(_REPORT_S):
            return await _report(reader, writer)
    except TimeoutError:
        raise TimeoutError(f"no report within {_REPORT_S:g} s") from None
    finally:
        writer.close()


async def _connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError("NCCL_RAS_ADDR must be host:port, such as localhost:28028")
    for _ in range(_NUM_TRIES):
        try:
            async with asyncio.timeout(_GREETING_S):
                return await _greeted(host.strip("[]"), int(port))
        except TimeoutError:
            continue
    raise TimeoutError(f"no answer in {_NUM_TRIES} tries of {_GREETING_S:g} s")


async def _greeted(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = await connect((host, port), _GREETING_S)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        answer = await _answer(reader, writer, "CLIENT PROTOCOL 2")
        if not answer.startswith("SERVER PROTOCOL "):
            raise ValueError(f"{answer[:80]!r} is not NCCL's greeting")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _report(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    answer = await _answer(reader, writer, f"TIMEOUT {_LEG_S}")
    if answer != "OK":
        raise ValueError(f"it answered {answer[:80]!r} to a timeout")
    writer.write(b"VERBOSE STATUS\n")
    parts, num_bytes = [], 0
    while (part := await reader.read(_MAX_BYTES)) and num_bytes <= _MAX_BYTES:
        parts.append(part)
        num_bytes += len(part)
    text = b"".join(parts).decode(errors="replace")
    return text[:_MAX_BYTES].strip() or "(empty)"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str) -> str:
    writer.write(f"{line}\n".encode())
    answer = await reader.readline()
    if not answer:
        raise ValueError("it closed the connection")
    return answer.decode(errors="replace").strip()
