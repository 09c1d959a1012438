"""Connections between workers: framing, handshake, sockets, shared memory."""

from kerasdist.transport.timeouts import Timeouts

__all__ = ["Timeouts"]
