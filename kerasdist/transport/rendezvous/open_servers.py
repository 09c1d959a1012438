"""Servers that another library of this process opens without authentication.

TensorFlow's servers use no secret: a process that can connect can read and write any
file of the user's by one of TensorFlow's operations, and so run any program. They
listen on all of the machine's addresses; no option of TensorFlow changes that. So they
need the user's explicit consent, and a filter in the kernel drops packets to other
addresses than the task's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence

from kerasdist.cluster.address import split_address
from kerasdist.errors import ClusterError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.rendezvous.probe import look_up

_WORD = "KERASDIST_ALLOW_OPEN_SERVERS"
_DESCRIPTORS = "/dev/fd"
_LOOK_UP_SECONDS = 10.0
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
    found = look_up(host, port, Deadline(_LOOK_UP_SECONDS))
    if isinstance(found, str):
        return False
    own = [
        ipaddress.ip_address(str(target[0]).partition("%")[0])
        for family, target in found
        if _is_own(family, target)
    ]
    if not own or len(own) > _MOST_ADDRESSES:
        return False
    program = _program(own)
    count = 0
    for name in os.listdir(_DESCRIPTORS):
        # Closed meanwhile, or no listening socket of that port.
        with contextlib.suppress(OSError):
            count += _narrow_one(int(name), port, program)
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


def _is_own(
    family: socket.AddressFamily, target: tuple[str, int] | tuple[str, int, int, int]
) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((target[0], 0, *target[2:]))
        except OSError:
            return False
    return True


def _narrow_one(descriptor: int, port: int, program: Sequence[_Instruction]) -> int:
    # A copy: Python's object closes its descriptor.
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        if (
            sock.family not in (socket.AF_INET, socket.AF_INET6)
            or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            or sock.getsockname()[1] != port
        ):
            return 0
        code = b"".join(struct.pack("=HBBI", *each) for each in program)
        room = ctypes.create_string_buffer(code, len(code))
        pointer = ctypes.addressof(room)
        sock.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program), pointer)
        )
        return 1


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
