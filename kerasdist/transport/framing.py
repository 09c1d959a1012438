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
(`kerasdist.transport.handshake`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import socket
import struct
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from kerasdist.errors import ProtocolError
from kerasdist.transport.deadline import Deadline

MAGIC = b"KDST"
VERSION = 8
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
        call = Call(sequence, KINDS[k], OPS[o], DTYPES[d], elements, detail, root)
        if call.kind == "all_reduce" and call.op == "none":
            raise ValueError  # nobody could reduce anything
        return FrameType(kind), length, call
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


# Small messages outside of collectives: reading and writing one control frame.
#
# They are used in a handshake; after it frames are authenticated, see
# `kerasdist.transport.base`. Payloads are bytes or JSON objects of at most
# `MAX_CONTROL` bytes.


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


# Records (dataclasses and named tuples) as JSON, checked field by field when read.
#
# A record inside another one is a list of its fields, which is short. A message that is
# one record is an object with the fields' names, so that it can have others beside
# them: a hello has those by which the listener assigns it. Both forms can be read.

_Record = TypeVar("_Record")
# No number in a message is larger; -1 stands for none.
_MOST = 1 << 62
# A number that can't be -1.
Count = Annotated[int, 0]


class _WrongField(ValueError):
    """A field doesn't have its type; the text begins with its name."""


def to_plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if type(value) in (int, str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return [to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, frozenset):
        return [to_plain(each) for each in sorted(value)]
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    return value


def to_object(record: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object with its fields' names."""
    names = [field.name for field in dataclasses.fields(record)]
    return {name: to_plain(getattr(record, name)) for name in names}


def read_record(value: Any, kind: type[_Record], what: str) -> _Record:
    """Return the record that `to_object` or `to_plain` was given.

    Args:
        value: A JSON value.
        kind: The record's type.
        what: Its name in a message: "A hello".

    Raises:
        ProtocolError: It isn't of that type.
    """
    try:
        record: _Record = from_plain(value, kind)
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"{what} is damaged. Received: {error!s:.500}.") from None
    return record


def from_plain(value: Any, kind: Any) -> Any:
    """Return the value of a type that `to_plain` was given.

    Raises:
        TypeError, ValueError: It isn't of that type.
    """
    return _reader(kind)(value)


# Every message is read by these: a type is taken apart once, not for each value.
@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that reads the values of a type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin in (types.UnionType, typing.Union):
        other = _reader(args[0])
        return lambda value: None if value is None else other(value)
    if origin is Annotated:
        number, least = _reader(args[0]), args[1]
        return _if(lambda value: number(value) >= least)
    if kind is int:
        return _if(lambda value: type(value) is int and -1 <= value < _MOST)
    if kind is float:
        return _if(lambda value: type(value) in (int, float) and math.isfinite(value))
    if kind in (bool, str):
        return _if(lambda value: type(value) is kind)
    if origin is typing.Literal:
        return _if(lambda value: isinstance(value, str) and value in args)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        members = kind.__members__
        known = _if(lambda value: isinstance(value, str) and value in members)
        return lambda value: members[known(value)]
    if origin in (dict, Mapping):
        key, each = int if args[0] is int else str, _reader(args[1])
        return lambda value: {key(k): each(v) for k, v in _is_dict(value).items()}
    if origin is frozenset or (origin is tuple and args[1:] == (...,)):
        each = _reader(args[0])
        return lambda value: origin(map(each, _is_list(value)))
    if origin is tuple:
        readers = [_reader(arg) for arg in args]
        several = _if(lambda value: isinstance(value, list) and len(value) == len(args))
        return lambda value: tuple(
            read(each) for read, each in zip(readers, several(value), strict=True)
        )
    return functools.partial(_read_fields, kind)


def _if(test: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """Return a function that returns what passes a test, and raises for the rest."""

    def read(value: Any) -> Any:
        if test(value):
            return value
        raise ValueError(f"{value!r:.100}")

    return read


_is_dict = _if(lambda value: isinstance(value, dict))
_is_list = _if(lambda value: isinstance(value, list))


def _read_fields(kind: Any, value: Any) -> Any:
    readers = _field_readers(kind)
    if typing.is_typeddict(kind):
        given = {name: _is_dict(value).get(name, ...) for name in readers}
    elif isinstance(value, dict):
        given = {name: value[name] for name in readers if name in value}
    else:
        # With a length that differs it raises ValueError.
        given = dict(zip(readers, _is_list(value), strict=True))
    found = {}
    for name, each in given.items():
        if each is ...:
            raise _WrongField(f"{name} is missing")
        try:
            found[name] = readers[name](each)
        except _WrongField as error:
            raise _WrongField(f"{name}.{error}") from None
        except ValueError:
            raise _WrongField(f"{name}={each!r:.100}") from None
    return kind(**found)


@functools.cache
def _field_readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what reads a record's fields, in order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _reader(hint) for name, hint in hints.items()}
