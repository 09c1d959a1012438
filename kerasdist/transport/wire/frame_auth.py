"""Authentication of single frames, after the handshake.

    k   key of one direction of one connection, from the handshake
    n   number of the frame in that direction, from 0; it isn't sent

    tag = the first 16 bytes of HMAC-SHA256(k, n | frame), behind the frame

A frame that was changed, injected, left out, repeated, sent in another order, sent
back, or taken from another connection has a tag that doesn't fit.
"""

from __future__ import annotations

import hmac

from kerasdist.errors import ProtocolError

TAG_BYTES = 16


class FrameAuthenticator:
    """The keys and frame numbers of one end of one connection.

    Not safe for several threads: frames are signed in the order in which they are
    sent, and checked in the order in which they were received.

    Args:
        sending: Key of the frames that this end sends.
        receiving: Key of the frames that it receives.
    """

    __slots__ = ("_received", "_receiving", "_sending", "_sent")

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending = sending
        self._receiving = receiving
        self._sent = 0
        self._received = 0

    def sign(self, *parts: bytes | bytearray) -> bytes:
        """Return the tag of the next frame to send.

        Args:
            parts: The parts of the frame.
        """
        tag = _tag(self._sending, self._sent, parts)
        self._sent += 1
        return tag

    def check(self, tag: bytes | bytearray, *parts: bytes | bytearray) -> None:
        """Check the tag of the next frame received.

        Raises:
            ProtocolError: It doesn't fit. All further frames of this connection are
                untrusted.
        """
        if not hmac.compare_digest(tag, _tag(self._receiving, self._received, parts)):
            raise ProtocolError(
                "A frame isn't the other side's, or not the next one: it was changed, "
                "repeated, left out or injected on the network."
            )
        self._received += 1


def _tag(key: bytes, number: int, parts: tuple[bytes | bytearray, ...]) -> bytes:
    frame = b"".join((number.to_bytes(8, "big"), *parts))
    return hmac.digest(key, frame, "sha256")[:TAG_BYTES]
