"""A port for process 0 of the next generation, in case that process is on this host."""

import socket


def reserve_port() -> socket.socket:
    """Return a socket that is bound to a port, so that no other program gets it meanwhile."""
    if not socket.has_dualstack_ipv6():
        reserved = socket.socket()
        reserved.bind(("", 0))
        return reserved
    reserved = socket.socket(socket.AF_INET6)
    reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    reserved.bind(("::", 0))
    return reserved
