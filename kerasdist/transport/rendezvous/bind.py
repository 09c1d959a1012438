"""Sockets that listen at a task's address, and nowhere else if possible."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence

from kerasdist.cluster.address import is_own_address, split_address
from kerasdist.errors import ClusterError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.handshake import is_loopback
from kerasdist.transport.liveness.announcements import open_sockets, socket_of
from kerasdist.transport.rendezvous.waiting_notice import look_up

# Servers that another library of this process opens without authentication.
#
# TensorFlow's servers use no secret: a process that can connect can read and write any
# file of the user's by one of TensorFlow's operations, and so run any program. They
# listen on all of the machine's addresses; no option of TensorFlow changes that. So
# they need the user's explicit consent, and a filter in the kernel drops packets to
# other addresses than the task's own.

_WORD = "KERASDIST_ALLOW_OPEN_SERVERS"
_NAME_SECONDS = 10.0
_MOST_ADDRESSES = 16

# A program of the kernel's packet filter (bpf(4)); the network header is at `_NETWORK`.
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x06
_NETWORK = 0xFFF00000
_IPV4_DESTINATION, _IPV6_DESTINATION = 16, 24
_DROP, _PASS = 0, 0xFFFFFFFF
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which the socket module doesn't name

_Instruction = tuple[int, int, int, int]
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def require_word(environ: Mapping[str, str], what: str) -> None:
    """Check that the user has allowed servers that no secret protects.

    Args:
        environ: The environment.
        what: The option that needs them, for the message.

    Raises:
        ClusterError: The user hasn't allowed them.
    """
    if environ.get(_WORD, "") == "1":
        return
    raise ClusterError(
        f"{what} makes TensorFlow open a port on each worker, which neither the job's "
        "secret nor a password protects, also in a job on loopback addresses: anyone "
        "who reaches it, another user of this machine for instance, can read and write "
        "all files that you can, and run any program as you. "
        f"Received: {_WORD}={environ.get(_WORD)!r}. If only trusted users can reach "
        f"these machines' ports, set {_WORD}=1 on all workers; else use another "
        "transport or strategy."
    )


def narrow(address: str) -> bool:
    """Make servers at a port accept only packets to the host's own addresses.

    This affects servers of this process that listen at the moment; connections that
    they have accepted stay open. Where the host's name leads elsewhere (to a Kubernetes
    service) nothing changes, since packets for it may be sent to any address.

    Args:
        address: `"host:port"` of the servers.

    Returns:
        Whether anything was narrowed.
    """
    host, port = split_address(address)
    found = look_up(host, port, Deadline(_NAME_SECONDS))
    if isinstance(found, str):
        return False
    own = [
        ipaddress.ip_address(str(target[0]).partition("%")[0])
        for family, target in found
        if is_own_address(family, target)
    ]
    if not own or len(own) > _MOST_ADDRESSES:
        return False
    program = _program(own)
    count = 0
    for sock in open_sockets():
        # Closed meanwhile, or no listening socket of that port.
        with contextlib.suppress(OSError):
            count += _narrow_one(sock, port, program)
    return count > 0


def report_unprotected(address: str, narrowed: bool, environ: Mapping[str, str]) -> str:
    """Describe what doesn't protect servers at an address, for a line at the start.

    Args:
        address: `"host:port"` of the servers.
        narrowed: What `narrow` has returned.
        environ: The environment.
    """
    where = (
        "accepts connections to this address alone"
        if narrowed
        else "accepts connections to all addresses of this machine"
    )
    text = (
        f"TensorFlow's server at {address} {where}. Neither the job's secret nor TLS "
        "protects it, and its data aren't encrypted"
    )
    if environ.get("KERASDIST_TLS", "").strip():
        text += ", although KERASDIST_TLS is set"
    return f"{text}: only trusted users may reach its port."


def _narrow_one(
    sock: socket.socket, port: int, program: Sequence[_Instruction]
) -> bool:
    if not _listens_at(sock, port):
        return False
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    room = ctypes.create_string_buffer(code, len(code))
    pointer = ctypes.addressof(room)
    sock.setsockopt(
        socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program), pointer)
    )
    return True


def _listens_at(sock: socket.socket, port: int) -> bool:
    return (
        sock.family in (socket.AF_INET, socket.AF_INET6)
        and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        and sock.getsockname()[1] == port
    )


def _program(own: Sequence[_Address]) -> list[_Instruction]:
    """Return a filter that passes packets to these addresses and drops all others."""
    fourth: list[_Instruction] = [(_LOAD_WORD, 0, 0, _NETWORK + _IPV4_DESTINATION)]
    sixth: list[_Instruction] = []
    for address in own:
        words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
        if address.version == 4:
            fourth += [(_JUMP_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, _PASS)]
            continue
        for i, word in enumerate(words):
            # Not this word: jump behind this address.
            behind = 2 * (len(words) - 1 - i) + 1
            at = _NETWORK + _IPV6_DESTINATION + 4 * i
            sixth += [(_LOAD_WORD, 0, 0, at), (_JUMP_IF_EQUAL, 0, behind, word)]
        sixth.append((_RETURN, 0, 0, _PASS))
    fourth.append((_RETURN, 0, 0, _DROP))
    sixth.append((_RETURN, 0, 0, _DROP))
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, len(fourth), 0, 0x60),
        *fourth,
        *sixth,
    ]


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
# IPv6 may be missing, or be switched off.
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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
                made.append(undo.enter_context(_listening(family, target)))
            except OSError as error:
                # A family that this machine doesn't have counts as foreign, too.
                if error.errno not in _NOT_HERE:
                    raise
                foreign = error
        if not made and foreign is not None and is_loopback(address):
            raise foreign
        elsewhere = not made
        if elsewhere:
            made.append(_listening_anywhere(port))
        undo.pop_all()
    return made, elsewhere


def _listening(
    family: socket.AddressFamily, target: tuple[str, int] | tuple[str, int, int, int]
) -> socket.socket:
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(
        target, family=family, backlog=_BACKLOG, dualstack_ipv6=both
    )


def _listening_anywhere(port: int) -> socket.socket:
    """Return a socket that listens on all of this machine's addresses."""
    try:
        return _listening(socket.AF_INET6, ("::", port))
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    return _listening(socket.AF_INET, ("", port))


def inherited_socket(port: int) -> socket.socket | None:
    """Return a copy of the launcher's socket at this port, if there is one.

    The launcher holds the port from before this process began, so no other process can
    take it in between. It stays open for a later strategy.
    """
    number = os.environ.get("KERASDIST_LISTEN_FD", "")
    if not number.isdigit():
        return None
    try:
        sock = socket_of(int(number))
    except (OSError, OverflowError):  # closed, or it isn't a socket
        return None
    with contextlib.suppress(OSError):
        if _listens_at(sock, port):
            return sock
    sock.close()
    return None
