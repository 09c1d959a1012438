"""Small messages outside of collectives: reading and writing one control frame.

They are used in a handshake; after it frames are authenticated, see
`kerasdist.transport.connection`. Payloads are bytes or JSON objects of at most
`MAX_CONTROL` bytes.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.wire.framing import (
    HEADER_BYTES,
    MAX_CONTROL,
    FrameType,
    pack_header,
    unpack_header,
)


def write_frame(
    sock: socket.socket, frame: FrameType, payload: bytes, deadline: Deadline
) -> None:
    """Write one frame to a blocking socket.

    Raises:
        TimeoutError: The other side received nothing until the deadline.
        OSError: The connection is broken.
    """
    sock.settimeout(max(deadline.remaining(), 0.001))
    sock.sendall(pack_header(frame, len(payload)) + payload)


def read_frame(
    sock: socket.socket, deadline: Deadline, *, bound: int = MAX_CONTROL
) -> tuple[FrameType, bytes]:
    """Read one frame from a blocking socket.

    Raises:
        TimeoutError: It wasn't there by the deadline.
        EOFError: The connection was closed.
        ProtocolError: It isn't a frame, or is longer than `bound` bytes.
        OSError: The connection is broken.
    """
    _, kind, length = read_header(sock, deadline, bound)
    return kind, read_exactly(sock, length, deadline)


def read_header(
    sock: socket.socket, deadline: Deadline, bound: int
) -> tuple[bytes, FrameType, int]:
    """Read a frame's header; return it, the frame's type and its payload's length.

    Raises:
        As `read_frame`.
    """
    header = read_exactly(sock, HEADER_BYTES, deadline)
    kind, length, _ = unpack_header(header)
    if length > bound:
        raise ProtocolError(
            f"A {kind.name} frame is too long. Received: {length} bytes, expected at "
            f"most {bound}."
        )
    return header, kind, length


def read_exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Read `count` bytes from a blocking socket.

    Raises:
        As `read_frame`.
    """
    data = bytearray()
    while len(data) < count:
        sock.settimeout(max(deadline.remaining(), 0.001))
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return bytes(data)


def to_json(payload: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ProtocolError: It isn't one.
    """
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A control frame isn't JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ProtocolError(
            f"A control frame isn't a JSON object. Received: {type(value).__name__}."
        )
    return value
