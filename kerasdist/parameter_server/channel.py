"""The channel contract: messages with arrays between one worker and one server.

A message is a frame (`kerasdist.transport.framing`) whose payload is

    4 bytes     M, the length of the JSON object
    8 bytes     B, the length of the body
    M bytes     the JSON object; under "arrays" the dtype and shape of each array
    B bytes     the arrays one after the other, each at a multiple of 64

On one host the body is in memory that both share, and only the rest is sent through the
socket. Requests and replies alternate: a received message can be read until the next
one is sent, and no longer, since its memory is reused.

Implementations: sockets with and without shared memory
(`kerasdist.parameter_server.socket_channel`), and queues in one process, here. One
contract test suite runs on all of them.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kerasdist.collectives.row_exchange import Array
from kerasdist.errors import ProtocolError
from kerasdist.parameter_server.layout import dtype_of
from kerasdist.transport.base import Aborted
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import Call, FrameType
from kerasdist.transport.tracing import now

# The dtype's name and the shape of an array in a message.
Spec = tuple[str, tuple[int, ...]]
_ALIGNMENT = 64
_MOST_ARRAYS = 1 << 16


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


class Channel(abc.ABC):
    """One side of a connection between a worker and a server.

    Attributes:
        kind: "tcp", "shared_memory" or "memory".
        bytes_sent: Bytes of all messages sent, those in shared memory too.
        bytes_received: Bytes of all messages received.
        answered: When the last message received began to arrive, see
            `transport.tracing`.
    """

    kind: str

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.answered = 0

    @abc.abstractmethod
    def place(self, specs: Sequence[Spec]) -> list[Array]:
        """Return uninitialized arrays that `send` doesn't copy.

        They are for the next message, of which they must be the first arrays, in this
        order. Their memory is reused for the message after that.
        """

    @abc.abstractmethod
    def send(self, message: Message, deadline: Deadline) -> None:
        """Send a message; its arrays may be reused when the reply is received.

        Raises:
            ChannelEnded: The connection is closed or broken.
            ChannelSilent: The other side received nothing until the deadline.
            Aborted: `abort` or `close` was called.
        """

    @abc.abstractmethod
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

    @abc.abstractmethod
    def abort(self) -> None:
        """End every wait, now and later, with `Aborted`. Safe from any thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release sockets and memory. Can be called twice."""


def spans(specs: Sequence[Spec]) -> tuple[list[tuple[int, int]], int]:
    """Return each array's first byte and end in a body; and the body's bytes."""
    found = []
    end = 0
    for name, shape in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + dtype_of(name).itemsize * math.prod(shape)
        found.append((start, end))
    return found, end


def read_specs(value: Any) -> list[Spec]:
    """Return the dtypes and shapes in a message's "arrays".

    Raises:
        ProtocolError: They are damaged.
    """
    try:
        if len(value) > _MOST_ARRAYS:
            raise ValueError(f"{len(value)} arrays")
        specs = [(str(name), tuple(int(n) for n in shape)) for name, shape in value]
        for name, shape in specs:
            dtype_of(name)
            if any(n < 0 for n in shape) or len(shape) > 32:
                raise ValueError(f"shape {shape}")
    except (TypeError, ValueError, OverflowError, ImportError) as error:
        raise ProtocolError(f"A message's arrays are damaged: {error}.") from None
    return specs


def body_views(body: npt.NDArray[np.uint8], specs: Sequence[Spec]) -> list[Array]:
    """Return the arrays of a body, which must have exactly their bytes."""
    places, _ = spans(specs)
    return [
        body[start:end].view(dtype_of(name)).reshape(shape)
        for (name, shape), (start, end) in zip(specs, places, strict=True)
    ]


class _Pipe:
    """The queues that both ends of a memory channel share."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.queues: tuple[queue.SimpleQueue[Message | None], ...] = (
            queue.SimpleQueue(),
            queue.SimpleQueue(),
        )


class MemoryChannel(Channel):
    """One end of a channel inside one process: arrays are handed over as they are."""

    kind = "memory"

    def __init__(self, pipe: _Pipe, side: int) -> None:
        super().__init__()
        self._pipe = pipe
        self._in = pipe.queues[side]
        self._out = pipe.queues[1 - side]
        self._aborted = False
        self._room: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def place(self, specs: Sequence[Spec]) -> list[Array]:
        """See `Channel.place`."""
        _, size = spans(specs)
        if self._room.size < size:
            self._room = np.empty(size, np.uint8)
        return body_views(self._room, specs)

    def send(self, message: Message, deadline: Deadline) -> None:
        """See `Channel.send`. The queue takes everything at once."""
        self._check()
        self.bytes_sent += sum(array.nbytes for array in message.arrays)
        self._out.put(message)

    def receive(self, deadline: Deadline, bound: int) -> Message:
        """See `Channel.receive`."""
        try:
            message = self._in.get(timeout=deadline.remaining())
        except queue.Empty:
            self._check()
            raise ChannelSilent(f"silent for {deadline.seconds:g} s") from None
        self.answered = now()
        if message is None:
            self._in.put(None)
            self._check()
            raise ChannelEnded("the other side has closed it")
        size = sum(array.nbytes for array in message.arrays)
        if size > bound:
            raise ProtocolError(
                f"A message is too long. Received: {size} bytes, expected at most "
                f"{bound}."
            )
        self.bytes_received += size
        return message

    def _check(self) -> None:
        if self._aborted:
            raise Aborted
        if self._pipe.ended.is_set():
            raise ChannelEnded("the other side has closed it")

    def abort(self) -> None:
        """See `Channel.abort`."""
        self._aborted = True
        self._pipe.ended.set()
        for each in self._pipe.queues:
            each.put(None)

    close = abort


def memory_pair() -> tuple[MemoryChannel, MemoryChannel]:
    """Return the two connected ends of a channel inside this process."""
    pipe = _Pipe()
    return MemoryChannel(pipe, 0), MemoryChannel(pipe, 1)
