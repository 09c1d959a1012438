"""The frame: the header of every message on every connection.

    offset  bytes  field
    0       4      magic         b"KDST"
    4       1      version       of the protocol, `VERSION`
    5       1      type          a `FrameType`
    6       2      root          of a broadcast, else 0
    8       8      sequence      number of the collective, 0 outside of one
    16      16     fingerprint   of the collective (see below), or zeros
    32      8      length        bytes of payload that follow

All integers are big-endian. The fingerprint describes the collective that the sender
is in, so that a receiver can name both sides when they differ:

    16  1  kind     index into `KINDS`
    17  1  op       index into `OPS`
    18  1  dtype    index into `DTYPES`
    19  1  reserved
    20  4  detail   CRC-32 of shapes and dtypes
    24  8  elements

A frame's length is bounded by what its receiver expects: exactly for data,
`MAX_CONTROL` for everything else. Nothing is ever unpickled. After the handshake every
frame but those of bulk data is followed by a tag
(`kerasdist.transport.wire.frame_auth`).
"""

from __future__ import annotations

import dataclasses
import enum
import struct

from kerasdist.errors import ProtocolError

MAGIC = b"KDST"
VERSION = 6
MAX_CONTROL = 1 << 20
_HEADER = struct.Struct("!4sBBHQBBBxIQQ")
HEADER_BYTES = _HEADER.size

KINDS = ("none", "all_reduce", "all_gather", "broadcast", "barrier")
OPS = ("none", "sum", "prod", "min", "max")
DTYPES = (
    "none",
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)


class FrameType(enum.IntEnum):
    """The purpose of a frame."""

    CHALLENGE = 1
    PROOF = 2
    HELLO = 3
    ROSTER = 4
    REFUSAL = 5
    HEARTBEAT = 6
    FAILURE = 7
    GOODBYE = 8
    DATA = 9
    DESCRIPTOR = 10
    REQUEST = 11
    REPLY = 12
    EVENT = 13
    NOTICE = 14
    MEMBERSHIP = 15


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One collective as one rank sees it: the fingerprint.

    Attributes:
        sequence: Its number on this communicator, from 1.
        kind: One of `KINDS`.
        op: One of `OPS`.
        dtype: One of `DTYPES`.
        elements: Number of elements, over all buffers.
        detail: A CRC-32 of the shapes and dtypes of all buffers.
        root: The rank that a broadcast starts from, else 0.
    """

    sequence: int
    kind: str = "none"
    op: str = "none"
    dtype: str = "none"
    elements: int = 0
    detail: int = 0
    root: int = 0

    def __str__(self) -> str:
        """Return the call as it would be written in a script."""
        if self.kind == "none":
            return f"#{self.sequence}"
        parts = []
        if self.op != "none":
            parts.append(f"op={self.op!r}")
        if self.dtype != "none":
            parts.append(f"dtype={self.dtype}")
            parts.append(f"elements={self.elements}")
        if self.kind == "broadcast":
            parts.append(f"root={self.root}")
        return f"#{self.sequence} {self.kind}({', '.join(parts)})"


def pack_header(frame: FrameType, length: int, call: Call | None = None) -> bytes:
    """Return the `HEADER_BYTES` bytes that announce `length` bytes of payload."""
    if call is None:
        return _HEADER.pack(MAGIC, VERSION, frame, 0, 0, 0, 0, 0, 0, 0, length)
    return _HEADER.pack(
        MAGIC,
        VERSION,
        frame,
        call.root,
        call.sequence,
        KINDS.index(call.kind),
        OPS.index(call.op),
        DTYPES.index(call.dtype),
        call.detail,
        call.elements,
        length,
    )


def unpack_header(
    header: bytes | bytearray | memoryview,
) -> tuple[FrameType, int, Call]:
    """Return a frame's type, payload length in bytes and call.

    Raises:
        ProtocolError: If this isn't a header of this version (with its
            `version`, if it's of another). The connection is then out of step for good
            and must be closed.
    """
    magic, version, kind, root, sequence, k, o, d, detail, elements, length = (
        _HEADER.unpack(header)
    )
    if magic != MAGIC:
        raise ProtocolError(
            "The received bytes aren't a kerasdist frame. "
            f"Received: first bytes {bytes(magic)!r}; expected {MAGIC!r}. Another "
            "program is connected to this port, or the stream was damaged."
        )
    if version != VERSION:
        raise ProtocolError(
            "The other side has another version of kerasdist's protocol. "
            f"Received: version={version}, expected {VERSION}. Install the same "
            "version of kerasdist on all workers.",
            version=version,
        )
    try:
        return (
            FrameType(kind),
            length,
            Call(sequence, KINDS[k], OPS[o], DTYPES[d], elements, detail, root),
        )
    except (ValueError, IndexError):
        raise ProtocolError(
            "A frame's header is damaged. "
            f"Received: type={kind}, kind={k}, op={o}, dtype={d}."
        ) from None


def unexpected(frame: FrameType) -> ProtocolError:
    """Return the error for a message that isn't expected now."""
    return ProtocolError(
        f"An unexpected {frame.name} message arrived. Do all tasks run the same "
        "version of kerasdist?"
    )
