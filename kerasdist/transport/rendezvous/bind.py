"""Sockets that listen at a task's address, and nowhere else if possible."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable

from kerasdist.cluster.address import split_address
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.probe import look_up

# Free ports for servers that need the number before they listen.

_ATTEMPTS = 20


def on_free_port(
    listen: Callable[[int], None], taken: type[Exception] | tuple[type[Exception], ...]
) -> int:
    """Make a server listen on a free port.

    Another process may take the port before the server listens: then another port is
    tried.

    Args:
        listen: Listens on a port, of all of the machine's addresses.
        taken: The exceptions that it raises if the port is taken.

    Returns:
        The port.

    Raises:
        Exception: Any that `listen` raises; of `taken` the last of several.
    """
    for _ in range(_ATTEMPTS - 1):
        port = _free_port()
        try:
            listen(port)
        except taken:
            continue
        return port
    port = _free_port()
    listen(port)
    return port


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


# Seconds for looking up the name of the own address.
_LOOK_UP_SECONDS = 10.0
_BACKLOG = 1024


def listen_at(address: str) -> tuple[list[socket.socket], bool]:
    """Listen at `"host:port"`: at all addresses of this machine that the host has.

    The name that others use for this task may not lead to an address of this machine
    (that of a Kubernetes service doesn't): then its port counts, and the sockets
    listen on all addresses, of IPv6 and of IPv4.

    Returns:
        The sockets, the caller's; and whether the host isn't this machine's.

    Raises:
        OSError: The port is taken, or not allowed. Nothing is left.
    """
    host, port = split_address(address)
    found = look_up(host, port, Deadline(_LOOK_UP_SECONDS))
    targets = [] if isinstance(found, str) else found
    made: list[socket.socket] = []
    foreign: OSError | None = None
    with contextlib.ExitStack() as undo:
        for family, target in targets:
            try:
                sock = _bound(family, target)
            except OSError as error:
                # A family that this machine doesn't have counts as foreign, too.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                foreign = error
                continue
            undo.callback(sock.close)
            made.append(sock)
        if not made and foreign is not None and _is_local(host):
            raise foreign
        elsewhere = not made
        if elsewhere:
            made.append(_anywhere(port))
            undo.callback(made[0].close)
        for sock in made:
            sock.listen(_BACKLOG)
        undo.pop_all()
    return made, elsewhere


def _bound(
    family: socket.AddressFamily, target: tuple[str, int] | tuple[str, int, int, int]
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
    except OSError:
        sock.close()
        raise
    return sock


def _anywhere(port: int) -> socket.socket:
    """Return a socket bound to all of this machine's addresses."""
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError:  # no IPv6
        return _bound(socket.AF_INET, ("", port))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:  # IPv6 is there, but switched off
            return _bound(socket.AF_INET, ("", port))
        raise
    return sock


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def inherited_socket(port: int) -> socket.socket | None:
    """Return a copy of the launcher's socket at this port, if there is one.

    The launcher holds the port from before this process began, so no other process can
    take it in between. It stays open for a later strategy.
    """
    number = os.environ.get("KERASDIST_LISTEN_FD", "")
    if not number.isdigit():
        return None
    try:
        copy = os.dup(int(number))
    except (OSError, OverflowError):
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # it isn't a socket
        os.close(copy)
        return None
    with contextlib.suppress(OSError):
        internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if (
            internet
            and sock.getsockname()[1] == port
            and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            return sock
    sock.close()
    return None
