"""A connection between two processes of a job, after its handshake."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any

from kerasdist.transport.deadline import Deadline
from kerasdist.transport.wire.framing import (
    MAX_CONTROL,
    FrameType,
    pack_header,
    read_exactly,
    read_header,
    to_json,
)
from kerasdist.transport.wire.handshake import TAG_BYTES, FrameAuthenticator


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

    def read(
        self, deadline: Deadline, *, bound: int = MAX_CONTROL
    ) -> tuple[FrameType, bytes]:
        """Read one frame.

        Raises:
            TimeoutError: It wasn't there by the deadline.
            EOFError: The connection was closed.
            ProtocolError: It isn't a frame, isn't authentic, or is longer than `bound`
                bytes.
            OSError: The connection is broken.
        """
        header, kind, length = read_header(self.sock, deadline, bound)
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
