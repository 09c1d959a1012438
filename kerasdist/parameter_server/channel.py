"""Channels: messages with arrays between one worker and one server.

A message is a frame (`kerasdist.transport.framing`) whose payload is

    4 bytes     M, the length of the JSON object
    M bytes     the JSON object; under "arrays" the dtype and shape of each array
    the body    the arrays one after the other, each at a multiple of 64

On one host the body is in memory that both share, and only the rest is sent through the
socket, a Unix socket. Requests and replies alternate: a received message can be read
until the next one is sent, and no longer, since its memory is reused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.row_exchange import Array, octets
from kerasdist.errors import ProtocolError, SharedMemoryFull
from kerasdist.parameter_server.layout import dtype_of
from kerasdist.transport import log
from kerasdist.transport.base import Aborted, Connection
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import (
    HEADER_BYTES,
    MAX_CONTROL,
    Call,
    Count,
    FrameType,
    pack_header,
    read_record,
    to_json,
    unpack_header,
)
from kerasdist.transport.handshake import TAG_BYTES
from kerasdist.transport.memory import create_segment, map_segment
from kerasdist.transport.sockets import receive_descriptor
from kerasdist.transport.tracing import now

# The dtype's name and the shape of an array in a message.
Spec = tuple[str, tuple[int, ...]]
_Result = TypeVar("_Result")
_ALIGNMENT = 64


class ChannelEnded(Exception):
    """The connection is closed or broken; the text has the reason."""


class ChannelSilent(Exception):
    """Nothing was received, or nothing could be sent, until the deadline."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        frame: REQUEST, REPLY or FAILURE.
        call: The collective that the message is part of; zeros if of none.
        meta: A small JSON object.
        arrays: Numbers.
    """

    frame: FrameType
    call: Call
    meta: Mapping[str, Any]
    arrays: Sequence[Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


def spans(specs: Sequence[Spec]) -> tuple[Sequence[tuple[int, int]], int]:
    """Return each array's first byte and end in a body; and the body's bytes."""
    return _spans(tuple(specs))


# Each step has messages of the same forms, but for rows.
@functools.lru_cache(maxsize=64)
def _spans(specs: tuple[Spec, ...]) -> tuple[Sequence[tuple[int, int]], int]:
    found = []
    end = 0
    for name, shape in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + dtype_of(name).itemsize * math.prod(shape)
        found.append((start, end))
    return tuple(found), end


def read_specs(value: Any) -> Sequence[Spec]:
    """Return the dtypes and shapes in a message's "arrays".

    Raises:
        ProtocolError: They are damaged.
    """
    kind = tuple[tuple[str, tuple[Count, ...]], ...]
    specs: Sequence[Spec] = read_record(value, kind, "A list of arrays")
    try:
        for name, shape in specs:
            dtype_of(name)
            if len(shape) > 32:
                raise ValueError(f"shape {shape}")
    except (TypeError, ValueError, ImportError) as error:
        raise ProtocolError(f"A message's arrays are damaged: {error}.") from None
    return specs


def body_views(body: npt.NDArray[np.uint8], specs: Sequence[Spec]) -> list[Array]:
    """Return the arrays of a body, which must have exactly their bytes."""
    places, _ = spans(specs)
    return [
        body[start:end].view(dtype_of(name)).reshape(shape)
        for (name, shape), (start, end) in zip(specs, places, strict=True)
    ]


def checksum_of(arrays: Sequence[Array]) -> int:
    """Return the CRC-32 of the bytes of all arrays."""
    crc = 0
    for array in arrays:
        crc = zlib.crc32(octets(np.ascontiguousarray(array)), crc)
    return crc


# Channels over stream sockets: TCP between hosts; inside one, with shared memory.
#
#     c: a worker     s: a server     C, S: the segment that each of them writes to
#
#     1. c        writes the arrays of its message into C
#     2. c -> s   DESCRIPTOR: C's file descriptor, if C is new; sizes grow
#     3. c -> s   the message without its body: the places of the arrays in C
#     4. s        reads C, for instance adds it to the table, without copying it first
#     5. s        writes its reply into S, and so on, the other way round
#
# c writes to C again only when it has the reply, s to S only at the next request. A
# message over a socket orders memory on every architecture, wakes the thread that waits
# for it, and fails when the other side dies. Small messages are sent through the socket
# whole.
#
# Between the JSON object and the body is a tag (`kerasdist.transport.handshake`): it
# authenticates all but the body.

_PREFIX = struct.Struct("!I")
# Of what follows a header, read by the first call of the socket.
_TOGETHER_BYTES = 4096
# A smaller body is sent through the socket.
_LEAST_SHARED_BYTES = 16 << 10
# Sockets accept no longer time-outs; a longer wait takes several.
_LONGEST_WAIT = 1e6
_MOST_SEGMENT_BYTES = 1 << 40
_ZEROS = bytes(64)
# The system takes at most 1024 (IOV_MAX).
_MOST_BUFFERS = 512


class Traffic:
    """The bytes of all messages of some channels. Safe for threads.

    Attributes:
        bytes_sent: Bytes of all messages sent, those in shared memory too.
        bytes_received: Bytes of all messages received.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self._lock = threading.Lock()

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Add the bytes of a message."""
        with self._lock:
            self.bytes_sent += sent
            self.bytes_received += received


class Channel:
    """One side of a connection between a worker and a server.

    Args:
        connection: The connection; owned from now on. Bodies are passed in shared
            memory if it is of Unix sockets. A message in either form is accepted in
            any case.
        traffic: Counts the messages; by default those of this channel alone.

    Attributes:
        kind: "tcp" or "shared_memory".
        traffic: As given.
        answered: When the last message received began to arrive, see
            `transport.tracing`.
    """

    def __init__(
        self, connection: Connection, *, traffic: Traffic | None = None
    ) -> None:
        self.traffic = traffic or Traffic()
        self.answered = 0
        sock = connection.sock
        self._auth = connection.auth
        self._sock = sock
        self._shared = self._unix = sock.family == socket.AF_UNIX
        self.kind = "shared_memory" if self._unix else "tcp"
        self._aborted = False
        self._room: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # for receiving
        self._arena: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # for sending
        self._fresh: list[int] = []  # descriptor of an arena not yet sent
        self._placed: list[Array] = []
        self._theirs: npt.NDArray[np.uint8] | None = None
        if not self._unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def place(self, specs: Sequence[Spec]) -> list[Array]:
        """Return uninitialized arrays that `send` doesn't copy.

        They are for the next message, of which they must be the first arrays, in this
        order. Their memory is reused for the message after that.
        """
        _, size = spans(specs)
        self._grow(size)
        self._placed = body_views(self._arena, specs)
        return list(self._placed)

    def send(self, message: Message, deadline: Deadline) -> None:
        """Send a message; its arrays may be reused when the reply is received.

        Raises:
            ChannelEnded: The connection is closed or broken.
            ChannelSilent: The other side received nothing until the deadline.
            Aborted: `abort` or `close` was called.
        """
        arrays = [np.ascontiguousarray(a) for a in message.arrays]
        specs = [
            (str(a.dtype.name), tuple(np.shape(b)))
            for a, b in zip(arrays, message.arrays, strict=True)
        ]
        meta: dict[str, Any] = {**message.meta, "arrays": specs}
        places, size = spans(specs)
        shared = self._shared and size >= _LEAST_SHARED_BYTES
        if shared:
            shared = self._share(arrays, specs, size)
        text = json.dumps(meta).encode()
        prefix = _PREFIX.pack(len(text))
        parts: list[memoryview | bytes] = []
        length = len(prefix) + len(text) + TAG_BYTES
        if not shared:
            end = 0
            for array, (start, stop) in zip(arrays, places, strict=True):
                if start > end:
                    parts.append(_ZEROS[: start - end])
                if stop > start:
                    parts.append(octets(array))
                end = stop
            length += size
        header = pack_header(message.frame, length, message.call)
        try:
            if shared and self._fresh:
                self._give_segment(deadline)
            head = header + prefix + text
            self._send([head + self._auth.sign(head), *parts], deadline)
        except OSError as error:
            # Another thread may have closed the channel before the segment was made.
            self._drop_fresh()
            raise self._broken(error) from error
        self._placed = []
        length = len(prefix) + len(text) + TAG_BYTES + size
        self.traffic.count(sent=HEADER_BYTES + length)

    def receive(self, deadline: Deadline, bound: int) -> Message:
        """Wait for a message.

        Args:
            deadline: When to give up.
            bound: The most bytes that it may have.

        Raises:
            ChannelEnded: The connection is closed or broken.
            ChannelSilent: Nothing was received by the deadline.
            ProtocolError: The received bytes aren't a message, or are too many.
            Aborted: `abort` or `close` was called.
        """
        try:
            return self._receive(deadline, bound)
        except OSError as error:
            raise self._broken(error) from error

    def _receive(self, deadline: Deadline, bound: int) -> Message:
        while True:
            head = bytearray(HEADER_BYTES)
            descriptors = self._fill_head(head, deadline)
            self.answered = now()
            try:
                frame, length, call = unpack_header(head)
                if frame is FrameType.DESCRIPTOR:
                    self._take_segment(head, descriptors, length, deadline)
                    continue
                if descriptors:
                    raise ProtocolError(f"A {frame.name} frame has a file descriptor.")
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            break
        least = _PREFIX.size + TAG_BYTES
        if length < least or length > bound + MAX_CONTROL + least:
            raise ProtocolError(
                f"A {frame.name} frame has an unexpected length. Received: {length} "
                f"bytes, expected at most {bound + MAX_CONTROL}."
            )
        # A small message at once: a call of the socket costs more than its bytes.
        rest = bytearray(min(length, _TOGETHER_BYTES))
        self._fill(memoryview(rest), deadline)
        (text_bytes,) = _PREFIX.unpack_from(rest)
        if text_bytes > min(MAX_CONTROL, length - least):
            raise ProtocolError(
                f"A {frame.name} frame is too long. Received: {text_bytes} bytes of "
                f"text, expected at most {MAX_CONTROL}."
            )
        end = _PREFIX.size + text_bytes
        if len(rest) < end + TAG_BYTES:
            more = bytearray(end + TAG_BYTES - len(rest))
            self._fill(memoryview(more), deadline)
            rest += more
        self._auth.check(rest[end : end + TAG_BYTES], head, rest[:end])
        meta = to_json(bytes(rest[_PREFIX.size : end]))
        specs = read_specs(meta.pop("arrays", []))
        inline, size = length - end - TAG_BYTES, spans(specs)[1]
        if inline not in (0, size) or size > bound:
            raise ProtocolError(
                f"A {frame.name} frame is too long, or not as long as its arrays. "
                f"Received: {inline} bytes here for {size} bytes of {specs[:10]}, "
                f"expected at most {bound}."
            )
        body = self._body(size, rest[end + TAG_BYTES :], inline, deadline)
        self.traffic.count(received=HEADER_BYTES + least + text_bytes + size)
        return Message(frame, call, meta, body_views(body, specs))

    def _body(
        self, size: int, begun: bytearray, inline: int, deadline: Deadline
    ) -> npt.NDArray[np.uint8]:
        if size > inline:
            if self._theirs is None or self._theirs.size < size:
                raise ProtocolError("A message refers to memory that isn't shared.")
            return self._theirs[:size]
        if self._room.size < size:
            self._room = np.empty(size, np.uint8)
        if size:
            self._room[: len(begun)] = begun
            self._fill(self._room[len(begun) : size].data, deadline)
        return self._room[:size]

    # Shared memory.

    def _grow(self, size: int) -> None:
        if self._arena.size >= size:
            return
        rounded = _LEAST_SHARED_BYTES
        while rounded < size:
            rounded += rounded // 2
        rounded = -(-rounded // 4096) * 4096
        if self._shared and size >= _LEAST_SHARED_BYTES:
            try:
                descriptor = create_segment(rounded)
            except (SharedMemoryFull, OSError) as error:
                log.log_in_background(
                    logging.WARNING,
                    "kerasdist continues without shared memory to a parameter server, "
                    "more slowly: %s",
                    error,
                )
                self._shared = False
            else:
                self._drop_fresh()
                self._fresh.append(descriptor)
                self._arena = map_segment(descriptor, rounded)
                return
        # Smaller than any segment, or there are none.
        self._arena = np.empty(size, np.uint8)

    def _share(self, arrays: list[Array], specs: Sequence[Spec], size: int) -> bool:
        """Copy the arrays into the segment; return False if there is none.

        Placed arrays are the first in a message: they are in their place already.
        """
        placed = self._placed
        before = self._arena
        self._grow(size)
        if not self._shared:
            return False
        for array, room in zip(arrays, body_views(self._arena, specs), strict=True):
            there = self._arena is before and any(array is each for each in placed)
            if not there or array.ctypes.data != room.ctypes.data:
                np.copyto(room, array.reshape(room.shape))
        return True

    def _give_segment(self, deadline: Deadline) -> None:
        size = struct.pack("!Q", self._arena.size)
        fresh = self._fresh[:1]
        frame = pack_header(FrameType.DESCRIPTOR, len(size)) + size
        frame += self._auth.sign(frame)
        self._sock.settimeout(_seconds(deadline))
        sent = socket.send_fds(self._sock, [frame], fresh)
        self._drop_fresh()
        if sent < len(frame):
            self._send([frame[sent:]], deadline)

    def _drop_fresh(self) -> None:
        with contextlib.suppress(IndexError):
            os.close(self._fresh.pop())

    def _take_segment(
        self, head: bytearray, descriptors: list[int], length: int, deadline: Deadline
    ) -> None:
        text, tag = bytearray(8), bytearray(TAG_BYTES)
        if length == len(text):
            self._fill(memoryview(text), deadline)
            self._fill(memoryview(tag), deadline)
            self._auth.check(tag, head, text)
        size = int.from_bytes(text, "big")
        if len(descriptors) != 1 or not 0 < size <= _MOST_SEGMENT_BYTES:
            raise ProtocolError(
                f"A segment can't be shared. Received: {len(descriptors)} descriptors, "
                f"{size} bytes."
            )
        self._theirs = None
        self._theirs = map_segment(descriptors[0], size)

    # Bytes.

    def _fill_head(self, head: bytearray, deadline: Deadline) -> list[int]:
        if not self._unix:
            self._fill(memoryview(head), deadline)
            return []
        descriptors: list[int] = []
        view = memoryview(head)
        try:
            while view:
                receive = functools.partial(receive_descriptor, self._sock, len(view))
                data, found = self._in_time(receive, deadline)
                descriptors += found
                if not data:
                    raise self._ended("was closed")
                view[: len(data)] = data
                view = view[len(data) :]
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors

    def _fill(self, view: memoryview, deadline: Deadline) -> None:
        while view:
            receive = functools.partial(self._sock.recv_into, view)
            count = self._in_time(receive, deadline)
            if not count:
                raise self._ended("was closed")
            view = view[count:]

    def _send(self, parts: list[memoryview | bytes], deadline: Deadline) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            send = functools.partial(self._sock.sendmsg, left[:_MOST_BUFFERS])
            sent = self._in_time(send, deadline)
            done = 0
            while done < len(left) and sent >= len(left[done]):
                sent -= len(left[done])
                done += 1
            del left[:done]
            if sent:
                left[0] = left[0][sent:]

    def _in_time(self, transfer: Callable[[], _Result], deadline: Deadline) -> _Result:
        """Call a function of the socket until its deadline."""
        while True:
            self._sock.settimeout(_seconds(deadline))
            try:
                return transfer()
            except TimeoutError as error:
                if self._aborted:
                    raise Aborted from error
                if deadline.expired:
                    seconds = deadline.seconds
                    raise ChannelSilent(f"silent for {seconds:g} s") from error

    def _ended(self, how: str) -> Exception:
        return Aborted() if self._aborted else ChannelEnded(f"the connection {how}")

    def _broken(self, error: OSError) -> Exception:
        return self._ended(f"broke ({error.strerror or error})")

    def abort(self) -> None:
        """End every wait, now and later, with `Aborted`. Safe from any thread."""
        self._aborted = True
        # The other side may be faster, or it is closed already.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release sockets and memory. Can be called twice."""
        self.abort()
        self._sock.close()
        self._drop_fresh()
        self._placed = []
        self._theirs = None
        self._arena = self._room = np.empty(0, np.uint8)


def _seconds(deadline: Deadline) -> float:
    return min(max(deadline.remaining(), 0.001), _LONGEST_WAIT)
