"""Connections between two processes of a job, and the faults of such connections.

Who moves bytes knows nothing of jobs: it reports faults of one peer with the exceptions
below, and its user derives the consequence for the job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from typing import Any, NamedTuple

from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import (
    MAX_CONTROL,
    Call,
    FrameType,
    pack_header,
    read_exactly,
    read_header,
    to_json,
)
from kerasdist.transport.handshake import TAG_BYTES, FrameAuthenticator

# A connection between two processes of a job, after its handshake.


class Connection:
    """A connected socket, with the authentication of its frames.

    Args:
        sock: The socket; owned from now on.
        auth: This end's keys.

    Attributes:
        sock: The socket. Bulk data go through it as they are.
        auth: Signs and checks every frame that isn't bulk data.
    """

    __slots__ = ("auth", "sock")

    def __init__(self, sock: socket.socket, auth: FrameAuthenticator) -> None:
        self.sock = sock
        self.auth = auth

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for `select` and the like."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    @property
    def ended(self) -> bool:
        """Whether the other side has closed. The socket doesn't block afterwards."""
        try:
            self.sock.setblocking(False)
            return self.sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def write(self, kind: FrameType, payload: bytes, deadline: Deadline) -> None:
        """Write one frame.

        Raises:
            TimeoutError: The other side received nothing until the deadline.
            OSError: The connection is broken.
        """
        frame = pack_header(kind, len(payload)) + payload
        self.sock.settimeout(max(deadline.remaining(), 0.001))
        self.sock.sendall(frame + self.auth.sign(frame))

    def read(self, deadline: Deadline) -> tuple[FrameType, bytes]:
        """Read one frame.

        Raises:
            TimeoutError: It wasn't there by the deadline.
            EOFError: The connection was closed.
            ProtocolError: It isn't a frame, isn't authentic, or is too long.
            OSError: The connection is broken.
        """
        header, kind, length = read_header(self.sock, deadline, MAX_CONTROL)
        payload = read_exactly(self.sock, length, deadline)
        tag = read_exactly(self.sock, TAG_BYTES, deadline)
        self.auth.check(tag, header, payload)
        return kind, payload

    def write_json(
        self, kind: FrameType, value: dict[str, Any], deadline: Deadline
    ) -> None:
        """Write one frame that holds a JSON object. Raises as `write`."""
        self.write(kind, json.dumps(value).encode(), deadline)

    def read_json(self, deadline: Deadline) -> tuple[FrameType, dict[str, Any]]:
        """Read one frame that holds a JSON object. Raises as `read`."""
        kind, payload = self.read(deadline)
        return kind, to_json(payload)


def connection_pair(
    first: socket.socket, second: socket.socket
) -> tuple[Connection, Connection]:
    """Return both ends of a connection in this process, of two connected sockets."""
    one, other = os.urandom(32), os.urandom(32)
    return (
        Connection(first, FrameAuthenticator(one, other)),
        Connection(second, FrameAuthenticator(other, one)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A rank in messages: its rank in the job and its address."""

    rank: int
    address: str

    def __str__(self) -> str:
        """Return its name, for instance `rank 2 (10.0.0.3:2222)`."""
        return f"rank {self.rank} ({self.address})"


class Collective(NamedTuple):
    """One collective, as this rank takes part in it.

    Attributes:
        call: Its fingerprint, which the other ranks must have, too.
        deadline: When to give up.
    """

    call: Call
    deadline: Deadline


class TransportFault(Exception):
    """A fault of the connection to `peer`; caught by the collectives."""

    def __init__(self, peer: Peer, message: str) -> None:
        super().__init__(message)
        self.peer = peer


class PeerClosed(TransportFault):
    """The peer's end of the connection is closed."""


class PeerSilent(TransportFault):
    """The peer sent nothing, or received nothing, until the deadline."""


class CallMismatch(TransportFault):
    """The peer is in another collective.

    Attributes:
        mine: The call of this rank.
        theirs: The call of the peer.
    """

    def __init__(self, peer: Peer, mine: Call, theirs: Call) -> None:
        super().__init__(peer, f"{peer} is in {theirs}, this rank in {mine}")
        self.mine = mine
        self.theirs = theirs


class Aborted(Exception):
    """`abort` or `close` was called on this transport."""


def connection_broke(peer: Peer, error: OSError) -> PeerClosed:
    """Translate an error of a connected socket, which can't be used any more.

    All error numbers are treated alike: besides a reset there are time-outs of TCP
    itself, lost routes and interfaces that are down.
    """
    return PeerClosed(peer, f"its connection broke ({error.strerror})")
