"""Two hosts with a wire between them, on one machine: Linux's network namespaces."""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path


def ip(*args):
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)


def add_host(i, name):
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    folder = Path("/etc/netns", name)
    folder.mkdir(parents=True)
    # Gloo listens where the host's name points to.
    (folder / "hosts").write_text(f"10.83.0.{i + 1} {socket.gethostname()}\n")


@contextlib.contextmanager
def removed_after(names):
    try:
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


@contextlib.contextmanager
def two_hosts():
    """The prefixes of a command that is to run there; each host has its end of the wire, wire0 or
    wire1, and the address 10.83.0.1 or 10.83.0.2.
    """
    names = [f"jdp-{os.getpid()}-{i}" for i in (0, 1)]
    with removed_after(names):
        for i, name in enumerate(names):
            add_host(i, name)
        ip("-n", names[0], "link", "add", "wire0", "type", "veth", "peer", "name", "wire1")
        ip("-n", names[0], "link", "set", "wire1", "netns", names[1])
        for i, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.83.0.{i + 1}/24", "dev", f"wire{i}")
            ip("-n", name, "link", "set", f"wire{i}", "up")
        yield [("ip", "netns", "exec", name) for name in names]


@contextlib.contextmanager
def several_hosts(num_hosts):
    """As `two_hosts`, for more hosts, which a switch connects: addresses 10.83.0.1 and so on."""
    names = [f"jdp-{os.getpid()}-{i}" for i in range(num_hosts)]
    switch = f"jdp-{os.getpid()}-s"
    with removed_after([*names, switch]):
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            add_host(i, name)
            ip("-n", name, "link", "add", "wire", "type", "veth", "peer", "name", f"wire{i}")
            ip("-n", name, "link", "set", f"wire{i}", "netns", switch)
            ip("-n", switch, "link", "set", f"wire{i}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.83.0.{i + 1}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield [("ip", "netns", "exec", name) for name in names]


def why_no_namespaces():
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no ip command"
    made = subprocess.run(["ip", "netns", "add", "jdp-probe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "jdp-probe"], capture_output=True)
    return f"ip netns: {made.stderr.strip()}" if made.returncode else None
