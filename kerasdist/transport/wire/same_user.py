"""A check that the process at the other end of a connection is this user's own.

It's for connections inside one machine. Jobs without a secret rely on it.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MOMENT_MILLISECONDS = 50
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")

_End = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def why_not_same_user(sock: socket.socket) -> str | None:
    """Describe why a peer can't be taken for a process of this user.

    Args:
        sock: A connected Unix socket, or a TCP socket whose ends are both on this
            machine. Its peer must have accepted the connection already.

    Returns:
        None if it is one; else the reason, without a full stop.

    Raises:
        EOFError: The peer has closed: its socket has no owner any more.
        OSError: The connection is broken.
    """
    mine = os.geteuid()
    if sock.family == socket.AF_UNIX:
        size = _CREDENTIALS.size
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        user: int | None = _CREDENTIALS.unpack(found)[1]
    else:
        user = _owner(_end(sock.getpeername()), _end(sock.getsockname()))
    if user == mine:
        return None
    _check_open(sock)
    if user is None:
        return "the user of the process at the other end is unknown"
    return f"the other end is a process of user {user}, this one is of user {mine}"


def _check_open(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    # The end of a connection may arrive a moment after its socket has lost its owner.
    if poll.poll(_MOMENT_MILLISECONDS) and sock.recv(1, socket.MSG_PEEK) == b"":
        raise EOFError("the connection was closed")


def _owner(local: _End, remote: _End) -> int | None:
    """Return the user of the TCP socket with these ends; None if it isn't found."""
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as rows:
                next(rows)
                for row in rows:
                    fields = row.split(maxsplit=8)
                    # The port alone rules out nearly all rows.
                    if not fields[1].endswith(f":{local[1]:04X}"):
                        continue
                    if _parse(fields[1]) == local and _parse(fields[2]) == remote:
                        return int(fields[7])
        except OSError:  # no IPv6, or no /proc
            continue
    return None


def _end(name: tuple[str, int]) -> _End:
    return _plain(ipaddress.ip_address(name[0].partition("%")[0])), name[1]


def _parse(text: str) -> _End:
    """Read `0100007F:1F90`: four-byte words in the processor's order, and a port."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(
    host: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IPv4 address for one that is written as an IPv6 address."""
    return getattr(host, "ipv4_mapped", None) or host
