"""Ends connections that another library of this process has made.

What waits for a frozen machine in TensorFlow's runtime waits for ever: it has no
heartbeats. A connection that is shut down from this side ends such a wait.
"""

from __future__ import annotations

import contextlib
import os
import socket

from kerasdist.cluster.address import split_address

__all__ = ["disconnect"]

_DESCRIPTORS = "/dev/fd"


def disconnect(address: str) -> int:
    """Shut down all TCP connections of this process to an address.

    Their descriptors stay open: they are their owner's to close.

    Args:
        address: `"host:port"` of the other side, as the owner has dialed it.

    Returns:
        How many connections were shut down.
    """
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return 0
    targets = {(_plain(info[4][0]), port) for info in found}
    count = 0
    for name in os.listdir(_DESCRIPTORS):
        # Closed meanwhile, no socket, no connection, or one that is over already.
        with contextlib.suppress(OSError):
            count += _sever_one(int(name), targets)
    return count


def _sever_one(descriptor: int, targets: set[tuple[str, int]]) -> int:
    # A copy: Python's object closes what it was made of.
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        peer = sock.getpeername()
        if (_plain(peer[0]), peer[1]) not in targets:
            return 0
        sock.shutdown(socket.SHUT_RDWR)
        return 1


def _plain(host: object) -> str:
    """An IPv4 address in IPv6's clothes is the same one."""
    return str(host).removeprefix("::ffff:").partition("%")[0]
