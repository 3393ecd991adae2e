"""How a host joins a run, and what the leader makes of a host that does not stay."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
import time

import pytest

from jdp.launch import connection
from jdp.launch.election import LeaderSearch
from jdp.launch.host.leader_connection import LeaderConnection
from jdp.launch.leader.leader import Leader
from jdp.launch.leader.membership import Admission
from jdp.launch.options import parse
from jdp.worker import build_info
from jdp.worker.messages import decode, encode


# Addresses of the loopback at which nobody listens, or never answers.
@pytest.fixture
def deserted():
    with socket.socket() as deserted:
        deserted.bind(("127.0.0.1", 0))
        yield deserted.getsockname()


@pytest.fixture
def silent():
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as silent,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(4):  # more than it keeps; what comes then is left without an answer
            visitor = stack.enter_context(socket.socket())
            visitor.setblocking(False)
            visitor.connect_ex(silent.getsockname())
        yield silent.getsockname()


CODE = build_info.code_digest(build_info.PROTOCOL)


# What a leader of another jdp may say, and what anybody else may.
@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b'{"kind": "challenge", "nonce": "1"}\n', "JDP308"),
        (b'{"kind": "challenge", "nonce": 1, "protocol": "?", "more": 2}\n', "JDP308"),
        (encode("challenge", {"nonce": "1", "protocol": "?", "code": CODE}), "JDP307"),
        (b'{"kind": "welcome"}\n', "JDP309"),
        (b'{"kind": "refused", "more": 1}\n', "JDP307"),
        (b'{"kind": "beat"}\n', "JDP307"),
        (b'{"kind": "go"}\n', "JDP307"),
    ],
)
def test_a_host_says_that_who_listens_is_no_leader_of_its_jdp(greeting, why):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = parse(["--join-timeout-s=1", "--heartbeat-timeout-s=0.3", "train.py"], {})

        async def join():
            found = asyncio.get_running_loop().create_future()
            joining = LeaderConnection(
                options,
                "token",
                LeaderSearch.of_one(listener.getsockname()),
                introduce=dict,
                received=print,
                joined=print,
                lost=print,
                gave_up=found.set_result,
            )
            listener.setblocking(False)
            visitor, _ = await asyncio.get_running_loop().sock_accept(listener)
            with visitor:
                visitor.send(greeting)
                try:
                    return await found
                finally:
                    joining.leave()

        assert why in asyncio.run(join())


def _listener():
    return socket.create_server(("127.0.0.1", 0))


def _joining(heartbeat_timeout_s, admit, joined, listener, *, seconds=9, address=None, lost=print):
    """What a future gets while a host joins a leader, which answers by `admit(host, end, ...)`."""
    flags = f"--join-timeout-s={seconds}", f"--heartbeat-timeout-s={heartbeat_timeout_s}"

    async def join():
        end = asyncio.get_running_loop().create_future()
        door = Admission(
            listener,
            "token",
            judge=lambda facts: None,
            admit=lambda channel, facts, proof: admit(link, end, channel, proof),
        )
        link = LeaderConnection(
            parse([*flags, "train.py"], {}),
            "token",
            LeaderSearch.of_one(address or listener.getsockname()),
            introduce=dict,
            joined=lambda is_running: joined(link, end),
            received=lambda kind, facts: None,
            lost=lost or end.set_result,
            gave_up=end.set_result,
        )
        try:
            return await end
        finally:
            link.leave()
            door.stop_listening()

    return asyncio.run(asyncio.wait_for(join(), 10.0))


@pytest.mark.parametrize("first", ["deserted", "silent"])
def test_a_host_tries_all_addresses_of_the_leader(monkeypatch, request, first):
    def admit(link, end, channel, proof):
        channel.send("welcome", proof=proof, is_running=False)

    listener = _listener()
    addresses = request.getfixturevalue(first), listener.getsockname()
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    options = {"seconds": 3, "address": ("leader", 7), "lost": None}
    joined = lambda link, end: end.set_result("joined")  # noqa: E731
    assert _joining(1, admit, joined, listener, **options) == "joined"


def test_a_host_stays_joined_whose_time_to_join_ends_with_the_answer():
    def admit(link, end, channel, proof):
        channel.received = lambda kind, facts: end.set_result(kind)
        channel.closed = end.set_result
        time.sleep(0.4)  # so the answer and the end come in one turn of the loop
        channel.send("welcome", proof=proof, is_running=False)

    def joined(link, end):
        asyncio.get_running_loop().call_later(0.05, link.send, "ready")

    assert _joining(0.3, admit, joined, _listener()) == "ready"


def test_an_answer_to_an_attempt_that_was_given_up_is_not_taken_for_another():
    late = []

    def admit(link, end, channel, proof):
        late.append((channel, proof))
        if len(late) == 1:
            asyncio.get_running_loop().call_soon(link.join_again)
            return
        for each, its in late:  # first the answer to the attempt that was given up
            each.send("welcome", proof=its, is_running=False)

    joined = lambda link, end: end.set_result("joined")  # noqa: E731
    assert _joining(5.0, admit, joined, _listener()) == "joined"


def _join_and_go(nnodes, folder, *, is_reset):
    """Join a leader and be gone before it reads that: what it said, the names of events, bugs."""
    flags = f"--nnodes={nnodes}", f"--log-dir={folder}"
    options = parse([*flags, "--rdzv-endpoint=a:7", "train.py"], {"JDP_TOKEN": "token"})
    facts = {"id": "a", "name": "a", "address": None, "port": 7, "num_processes": [1, 1]}
    facts |= {"host_id": None, "run_id": None, "generation": -1, "stepped": False, "nonce": "2"}
    facts |= {"heartbeat_timeout_s": 5.0, "history": {}, "loss": None}

    async def join():
        said, bugs, loop = [], [], asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: bugs.append(context))
        listener = socket.create_server(("127.0.0.1", 0))
        leader = Leader(options, "token", listener, said.append, show=print)
        with socket.create_connection(listener.getsockname()) as host:
            host.setblocking(False)
            nonce = decode(await loop.sock_recv(host, 9999))[1]["nonce"]
            facts["proof"] = connection.token_proof("token", "host", nonce, "2")
            host.sendall(encode("join", facts))
            if is_reset:
                host.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        while "host lost" not in (folder / "events.jsonl").read_text() and not bugs:
            await asyncio.sleep(0.001)
        await leader.finish_run(1, "")
        return said, bugs

    said, bugs = asyncio.run(asyncio.wait_for(join(), 10.0))
    lines = (folder / "events.jsonl").read_text().splitlines()
    return said, [json.loads(line)["event"] for line in lines], bugs


def test_a_host_that_dies_while_it_joins_is_lost_and_no_bug(tmp_path):
    (joined, lost), _, bugs = _join_and_go("2", tmp_path, is_reset=True)
    assert "1 of 2" in joined and os.strerror(errno.ECONNRESET) in lost and not bugs


@pytest.mark.parametrize("is_reset", [False, True])
def test_no_generation_begins_with_a_host_that_gave_up_joining(tmp_path, is_reset):
    _, events, bugs = _join_and_go("1", tmp_path, is_reset=is_reset)
    assert events == ["host joined", "host lost", "over"] and not bugs
