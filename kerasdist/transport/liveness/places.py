"""The collective that each rank of a job is in, by its last heartbeat.

    C: rank 0          W: every other rank

    1. W -> C  HEARTBEAT  in its header is the number of W's collective
    2. C -> W  HEARTBEAT  if 1. has the number of W's heartbeat before it: the numbers
                          of all ranks that have changed since the last 2.

W needs the others' numbers only when it has waited for a collective until the time is
over, in which there are at least four heartbeats. So a rank that moves on gets none.
All numbers are 0 at first. Each change is sent once: a connection keeps the order of
its frames and ends if one is missing (`kerasdist.transport.wire.frame_auth`).
"""

from __future__ import annotations

import struct

from kerasdist.errors import ProtocolError

# First rank, number of ranks, number of their collective.
_RUN = struct.Struct("!IIQ")
# The place of a rank of which nothing is known: not behind any.
_UNKNOWN = 1 << 64


class Places:
    """The number of each rank's collective. Not safe for several threads.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._places = [_UNKNOWN] * size
        # The number of all changes, at each rank's last one, and when it was sent them.
        self._changes = 0
        self._changed = [0] * size
        self._sent = [0] * size

    def behind(self, place: int) -> list[int]:
        """Return the ranks that haven't reached a collective, in order."""
        return [rank for rank, known in enumerate(self._places) if known < place]

    def note(self, rank: int, place: int) -> bytes:
        """Note a rank's collective, on the chief; return what must be sent to it.

        Returns:
            An argument of `receive`; empty: nothing needs to be sent.
        """
        if self._places[rank] != place:
            self._places[rank] = place
            self._changes += 1
            self._changed[rank] = self._changes
            return b""
        sent, self._sent[rank] = self._sent[rank], self._changes
        if sent == self._changes:
            return b""
        runs: list[list[int]] = []
        for other, changed in enumerate(self._changed):
            if changed > sent:
                number = self._places[other]
                if runs and runs[-1][2] == number and sum(runs[-1][:2]) == other:
                    runs[-1][1] += 1
                else:
                    runs.append([other, 1, number])
        return b"".join(_RUN.pack(*run) for run in runs)

    def receive(self, payload: bytes) -> None:
        """Note what the chief has sent.

        Raises:
            ProtocolError: It's damaged.
        """
        if len(payload) % _RUN.size:
            raise ProtocolError(
                f"A heartbeat has the wrong length. Received: {len(payload)} bytes, "
                f"expected a multiple of {_RUN.size}."
            )
        size = len(self._places)
        # Unknown ones become 0.
        self._places = [place % _UNKNOWN for place in self._places]
        for first, count, place in _RUN.iter_unpack(payload):
            if first + count > size:
                raise ProtocolError(
                    f"A heartbeat is damaged. Received: {count} ranks from {first} on, "
                    f"expected ranks below {size}."
                )
            self._places[first : first + count] = [place] * count
