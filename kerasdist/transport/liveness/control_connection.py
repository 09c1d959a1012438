"""A non-blocking control connection, with its partly received and queued frames."""

from __future__ import annotations

import socket

from kerasdist.errors import ProtocolError
from kerasdist.transport.connection import Connection
from kerasdist.transport.wire.frame_auth import TAG_BYTES
from kerasdist.transport.wire.framing import (
    HEADER_BYTES,
    MAX_CONTROL,
    Call,
    FrameType,
    pack_header,
    unpack_header,
)


class ControlConnection:
    """A control connection that never blocks. Not safe for several threads.

    Args:
        connection: The connection; owned from now on.
        now: The time, on the monotonic clock.

    Attributes:
        sock: The socket.
        received: When the last frame was received.
    """

    def __init__(self, connection: Connection, now: float) -> None:
        connection.sock.setblocking(False)
        self.sock = connection.sock
        self._auth = connection.auth
        self.received = now
        self._inbox = bytearray()
        self._outbox = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether there are queued bytes."""
        return bool(self._outbox)

    def post(self, kind: FrameType, payload: bytes, call: Call) -> None:
        """Queue a frame; `flush` sends it."""
        frame = pack_header(kind, len(payload), call) + payload
        self._outbox += frame + self._auth.sign(frame)

    def flush(self) -> None:
        """Send as much as the kernel takes now. A broken connection takes all."""
        while self._outbox:
            try:
                sent = self.sock.send(self._outbox)
            except BlockingIOError:
                return
            except OSError:  # `frames` raises it
                self._outbox.clear()
                return
            del self._outbox[:sent]

    def frames(self) -> list[tuple[FrameType, Call, bytes]]:
        """Return the frames that were received completely.

        Raises:
            EOFError: The connection is closed; the text has the reason, if known.
            ProtocolError: The bytes aren't a frame, or it isn't authentic.
        """
        try:
            data = self.sock.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(error.strerror or "") from error
        if not data:
            raise EOFError
        self._inbox += data
        frames = []
        while len(self._inbox) >= HEADER_BYTES:
            kind, length, call = unpack_header(self._inbox[:HEADER_BYTES])
            if length > MAX_CONTROL:
                raise ProtocolError(
                    f"A {kind.name} frame is too long. Received: {length} bytes, "
                    f"expected at most {MAX_CONTROL}."
                )
            end = HEADER_BYTES + length
            if len(self._inbox) < end + TAG_BYTES:
                break
            frame = bytes(self._inbox[:end])
            self._auth.check(self._inbox[end : end + TAG_BYTES], frame)
            frames.append((kind, call, frame[HEADER_BYTES:]))
            del self._inbox[: end + TAG_BYTES]
        return frames

    def close(self) -> None:
        """Close the connection; sent frames still arrive."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
            # Closing a socket that holds unread bytes resets the connection, and
            # that could overtake the last frame sent.
            while self.sock.recv(1 << 16):
                pass
        except OSError:  # nothing more to read now, or it is broken
            pass
        self.sock.close()
