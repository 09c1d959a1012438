"""The load of each server in bytes: counted, checked and put into words.

With mode="async" that is its part of a table, known from the table's layout. With
mode="sync" servers hold nothing: there it is the bytes that one worker sends to it in a
step, known when the first step is finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.ps.layout import Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The load of one server.

    Attributes:
        size: Bytes.
        pieces: Number of pieces: of variables, or of buffers.
    """

    size: int
    pieces: int


def loads_from_json(value: Any, servers: int) -> list[Load]:
    """Return the loads that the chief counted: size and pieces for each server.

    Raises:
        ProtocolError: The value is damaged.
    """
    try:
        loads = [Load(int(size), int(pieces)) for size, pieces in value]
    except (TypeError, ValueError, OverflowError):
        loads = []
    if len(loads) != servers or any(min(x.size, x.pieces) < 0 for x in loads):
        raise ProtocolError(f"A list of loads is damaged. Received: {value!r:.200}.")
    return loads


def loads_of(layout: Layout) -> list[Load]:
    """Return each server's part of a table."""
    pieces = [0] * layout.servers
    for piece in layout.pieces:
        pieces[piece.server] += 1
    return [
        Load(size, count)
        for size, count in zip(layout.server_bytes(), pieces, strict=True)
    ]


def share_in_words(loads: Sequence[Load], server: int) -> str:
    """Return one server's load and share as text.

    For instance `1,200 bytes in 2 pieces, 60.0 % of 2,000 bytes`.
    """
    mine, total = loads[server], sum(load.size for load in loads)
    share = 100 * mine.size / total if total else 0.0
    noun = "piece" if mine.pieces == 1 else "pieces"
    return (
        f"{mine.size:,} bytes in {mine.pieces:,} {noun}, "
        f"{share:.1f} % of {total:,} bytes"
    )
