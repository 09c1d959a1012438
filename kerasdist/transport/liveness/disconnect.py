"""Disconnecting connections that another library of this process made.

A wait for a frozen machine in TensorFlow's runtime never ends: it has no heartbeats.
Shutting the connection down from this side ends such a wait.
"""

from __future__ import annotations

import contextlib
import os
import socket

from kerasdist.cluster.address import split_address

_DESCRIPTORS = "/dev/fd"


def disconnect(address: str) -> int:
    """Shut down all TCP connections of this process to an address.

    Their descriptors stay open: their owner closes them.

    Args:
        address: `"host:port"` of the other side, as the owner dialed it.

    Returns:
        The number of connections that were shut down.
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
            count += _shut_down_one(int(name), targets)
    return count


def _shut_down_one(descriptor: int, targets: set[tuple[str, int]]) -> int:
    # A copy: Python's object closes its descriptor.
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
    """Normalize an IPv4-mapped IPv6 address to IPv4."""
    return str(host).removeprefix("::ffff:").partition("%")[0]
