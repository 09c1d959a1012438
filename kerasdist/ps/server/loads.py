"""What each server has to carry, in bytes: counted, checked and put into words.

With mode="async" that is its part of a table, known from the table's layout. With
mode="sync" servers hold nothing: there it is what one worker sends to it in a step,
known when the first step is over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.ps.layout import Layout

__all__ = ["Load", "Tally", "loads_from_json", "loads_of", "share_in_words"]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one server has to carry.

    Attributes:
        size: Bytes.
        pieces: Of how many pieces: of variables, or of buffers.
    """

    size: int
    pieces: int


class Tally:
    """Counts what a worker sends to each server in its first step.

    Args:
        servers: Number of servers.
    """

    def __init__(self, servers: int) -> None:
        self._step = 0
        self._loads = [Load(0, 0)] * servers

    def count(self, step: int, sizes: Sequence[int]) -> list[list[int]] | None:
        """Count one collective.

        Args:
            step: The step that it belongs to; 0: before the first one.
            sizes: Bytes to each server, in order; none to those that are left out.

        Returns:
            Bytes and pieces of each server, when this collective belongs to a later
            step than the first; else None.
        """
        if step < 1:
            return None
        self._step = self._step or step
        if step > self._step:
            return [[load.size, load.pieces] for load in self._loads]
        for server, size in enumerate(sizes):
            load = self._loads[server]
            self._loads[server] = Load(load.size + size, load.pieces + (size > 0))
        return None


def loads_from_json(value: Any, servers: int) -> list[Load]:
    """Return what `Tally.count` has told.

    Raises:
        ProtocolError: It isn't that.
    """
    try:
        loads = [Load(int(size), int(pieces)) for size, pieces in value]
    except (TypeError, ValueError, OverflowError):
        loads = []
    if len(loads) != servers or any(min(x.size, x.pieces) < 0 for x in loads):
        raise ProtocolError(f"A list of loads is damaged. Received: {value!r:.200}.")
    return loads


def loads_of(layout: Layout) -> list[Load]:
    """Return what each server holds of a table."""
    pieces = [0] * layout.servers
    for piece in layout.pieces:
        pieces[piece.server] += 1
    return [
        Load(size, count)
        for size, count in zip(layout.server_bytes(), pieces, strict=True)
    ]


def share_in_words(loads: Sequence[Load], server: int) -> str:
    """Say what one server carries beside all.

    For instance `1,200 bytes in 2 pieces, 60.0 % of 2,000 bytes`.
    """
    mine, total = loads[server], sum(load.size for load in loads)
    share = 100 * mine.size / total if total else 0.0
    noun = "piece" if mine.pieces == 1 else "pieces"
    return (
        f"{mine.size:,} bytes in {mine.pieces:,} {noun}, "
        f"{share:.1f} % of {total:,} bytes"
    )
