"""Passing file descriptors between processes of a host, over Unix sockets.

A descriptor is sent with the first byte of a frame, even if the rest isn't sent.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import sys
import time
from collections.abc import Callable

from kerasdist.errors import ProtocolError
from kerasdist.transport.base import (
    Aborted,
    CallMismatch,
    Peer,
    PeerClosed,
    PeerSilent,
    connection_broke,
)
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.wire.framing import (
    HEADER_BYTES,
    Call,
    FrameType,
    pack_header,
    unpack_header,
)

# Received descriptors mustn't leak into processes that the script starts.
# (The socket module has a name for this flag only from Python 3.14 on.)
_CLOSE_ON_EXEC = 0x40000000 if sys.platform == "linux" else 0  # MSG_CMSG_CLOEXEC
# Seconds to wait when the kernel holds too many descriptors in sockets.
_CROWDED_SECONDS = 0.01


def receive_descriptor(sock: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive as `socket.recv_fds`, but close-on-exec: that ignores its flags."""
    fds = array.array("i")
    room = socket.CMSG_LEN(fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(count, room, _CLOSE_ON_EXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def give_descriptor(
    sock: socket.socket,
    peer: Peer,
    call: Call,
    deadline: Deadline,
    descriptor: int,
    aborted: Callable[[], bool],
) -> None:
    """Send a file descriptor, which stays open here, too.

    Args:
        sock: A Unix socket that doesn't block.
        peer: The rank at its other end.
        call: The collective that this is part of; the peer's must be equal.
        deadline: When to give up.
        descriptor: The file descriptor.
        aborted: Whether another thread has ended the transport.

    Raises:
        Aborted, PeerClosed, PeerSilent: See `transport.base`.
    """
    header = memoryview(pack_header(FrameType.DESCRIPTOR, 0, call))
    rights = array.array("i", [descriptor])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    while header:
        if aborted():
            raise Aborted
        try:
            sent = sock.sendmsg([header], ancillary)
        except BlockingIOError:
            _wait(sock, select.POLLOUT, peer, deadline, aborted)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise connection_broke(peer, error) from error
            if deadline.expired:
                raise PeerSilent(peer, f"silent for {deadline.seconds:g} s") from error
            # Other receivers must take theirs first; no event reports that.
            time.sleep(_CROWDED_SECONDS)
        else:
            header = header[sent:]
            ancillary = []  # it was sent with the first byte


def take_descriptor(
    sock: socket.socket,
    peer: Peer,
    call: Call,
    deadline: Deadline,
    aborted: Callable[[], bool],
) -> int:
    """Receive a file descriptor, which the caller owns then.

    Args:
        sock: A Unix socket that doesn't block.
        peer: The rank at its other end.
        call: The collective that this is part of.
        deadline: When to give up.
        aborted: Whether another thread has ended the transport.

    Raises:
        Aborted, CallMismatch, PeerClosed, PeerSilent: See `transport.base`.
        ProtocolError: The frame isn't one with a descriptor. None stays open then.
    """
    header = bytearray()
    descriptors: list[int] = []
    try:
        while len(header) < HEADER_BYTES:
            _wait(sock, select.POLLIN, peer, deadline, aborted)
            try:
                data, fds = receive_descriptor(sock, HEADER_BYTES - len(header))
            except BlockingIOError:
                continue
            except OSError as error:
                raise connection_broke(peer, error) from error
            descriptors.extend(fds)
            if not data:
                raise PeerClosed(peer, "its connection was closed")
            header += data
        kind, _, theirs = unpack_header(header)
        if theirs != call:
            raise CallMismatch(peer, call, theirs)
        if kind is not FrameType.DESCRIPTOR or len(descriptors) != 1:
            raise ProtocolError(
                f"{peer} sent a {kind.name} frame with {len(descriptors)} "
                "descriptors where one memory segment was expected."
            )
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    return descriptors[0]


def _wait(
    sock: socket.socket,
    mask: int,
    peer: Peer,
    deadline: Deadline,
    aborted: Callable[[], bool],
) -> None:
    poll = select.poll()
    poll.register(sock, mask)
    while True:
        if aborted():
            raise Aborted
        if poll.poll(deadline.milliseconds()):
            break
        if deadline.expired:
            raise PeerSilent(peer, f"silent for {deadline.seconds:g} s")
    if aborted():
        raise Aborted
