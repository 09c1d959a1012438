"""Joining a running job: this worker waits for the end of the others' epoch.

The protocol is in `kerasdist.ps.server.collectives`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kerasdist import errors
from kerasdist.ps.client.client import ServerClient
from kerasdist.transport.deadline import Deadline


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The point at which a worker joined.

    Attributes:
        met: Number of the last collective before.
        ranks: All live workers, this one among them.
        facts: The others' facts.
    """

    met: int
    ranks: tuple[int, ...]
    facts: dict[str, Any]


def enter(client: ServerClient, fit: int) -> Entry:
    """Wait until the others are between two epochs, and join them.

    Args:
        client: This worker's client; it joins later (`client.joining`).
        fit: Number of the `fit` that it is in, from 1.

    Raises:
        CollectiveTimeout: The others have sent no requests for as long as a collective
            may take.
        CollectiveError: It is too late; see `kerasdist.errors`.
    """
    seen = -1
    deadline = Deadline(client.timeouts.collective)
    while True:
        found = client.request("joining the others", {"do": "enter", "fit": fit})
        entry = found.get("entered")
        if isinstance(entry, dict):
            break
        # An epoch may take longer than any wait inside of it.
        if found.get("requests") != seen:
            seen = int(found.get("requests", 0))
            deadline = Deadline(client.timeouts.collective)
        if deadline.expired:
            raise client.fail(
                errors.CollectiveTimeout(
                    f"Rank {client.rank} waited for the end of the others' epoch, and "
                    f"none of them took a step in {deadline.seconds:g} s. Are they "
                    "busy with other work? Give them more time with `timeout=`."
                )
            )
    return Entry(
        int(entry["met"]),
        tuple(int(rank) for rank in entry["ranks"]),
        dict(entry["facts"]),
    )
