"""Small messages outside of collectives: read and write one control frame.

Used while connections are made and by the supervisor. Payloads are bytes or
JSON objects of at most `MAX_CONTROL` bytes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import (
    HEADER_BYTES,
    MAX_CONTROL,
    FrameType,
    pack_header,
    unpack_header,
)

__all__ = [
    "from_places",
    "read_frame",
    "read_json",
    "to_json",
    "to_places",
    "write_frame",
    "write_json",
]


def write_frame(
    sock: socket.socket, frame: FrameType, payload: bytes, deadline: Deadline
) -> None:
    """Write one frame to a blocking socket.

    Raises:
        TimeoutError: The other side took nothing until the deadline.
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
    kind, length, _ = unpack_header(_read(sock, HEADER_BYTES, deadline))
    if length > bound:
        raise ProtocolError(
            f"A {kind.name} frame is too long. Received: {length} bytes, expected at "
            f"most {bound}."
        )
    return kind, _read(sock, length, deadline)


def _read(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
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


def from_places(places: Sequence[int]) -> bytes:
    """Return the chief's heartbeat: the number of each rank's collective."""
    return struct.pack(f"!{len(places)}Q", *places)


def to_places(payload: bytes, size: int) -> tuple[int, ...]:
    """Return what `from_places` was given, by rank.

    Raises:
        ProtocolError: It isn't of `size` ranks.
    """
    if len(payload) != 8 * size:
        raise ProtocolError(
            f"A heartbeat has the wrong length. Received: {len(payload)} bytes, "
            f"expected {8 * size}."
        )
    return struct.unpack(f"!{size}Q", payload)


def write_json(
    sock: socket.socket, frame: FrameType, value: dict[str, Any], deadline: Deadline
) -> None:
    """Write one frame that holds a JSON object. Raises as `write_frame`."""
    write_frame(sock, frame, json.dumps(value).encode(), deadline)


def read_json(
    sock: socket.socket, deadline: Deadline
) -> tuple[FrameType, dict[str, Any]]:
    """Read one frame that holds a JSON object. Raises as `read_frame`."""
    kind, payload = read_frame(sock, deadline)
    return kind, to_json(payload)
