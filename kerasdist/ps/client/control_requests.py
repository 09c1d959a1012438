"""Control requests: a worker's requests to server 0 besides gradients and weights.

It assigns batches, and keeps first values; each server has statistics of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kerasdist.collectives.ops import Array
from kerasdist.ps.channel.channel import Message
from kerasdist.ps.client.job import Build, Job
from kerasdist.ps.server.batch_queue import REMEMBERED
from kerasdist.transport.wire.framing import Call, FrameType


class ControlRequests(Job):
    """The control requests of a worker's client; see `kerasdist.ps.client.client`."""

    def __init__(self) -> None:
        # By dataset: the epoch, and this worker's last claims in it.
        self._claims: dict[int, tuple[int, tuple[int, ...]]] = {}
        # Number of variables that steps have created.
        self._created = 0

    @property
    def claims(self) -> Mapping[int, tuple[int, Sequence[int]]]:
        """This worker's last claims, for a restarted server."""
        # Not the dictionary itself: another thread may claim from another server.
        return dict(self._claims)

    def claim(
        self, dataset: int, epoch: int, *, limit: int | None = None, last: int = -1
    ) -> int | None:
        """Get the next number of a queue: each is assigned to one worker only.

        Args:
            dataset: Number of the dataset, the same on all workers.
            epoch: Number of its epoch: it only increases, and has a queue of its own.
            limit: Length of the queue; None: it's endless.
            last: The last one that this worker got of this queue, or -1; `END` ends the
                queue for all.

        Returns:
            The number, from 0; None: there are none left.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        meta = {
            "do": "claim",
            "dataset": dataset,
            "epoch": epoch,
            "limit": -1 if limit is None else limit,
            "last": last,
        }
        with self.calling("claiming a batch"):
            number = int(self.request("claiming a batch", meta)["number"])
            if number < 0:
                return None
            present, before = self._claims.get(dataset, (epoch, ()))
            kept = before[1 - REMEMBERED :] if present == epoch else ()
            self._claims[dataset] = epoch, (*kept, number)
        return number

    def first_value(self, value: Array) -> Array:
        """Return the first value of a variable that a step creates: any worker's.

        Workers don't wait for each other. All create such variables in one order.

        Args:
            value: This worker's value, of a numeric dtype.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        meta = {"do": "first", "number": self._created}
        request = Message(FrameType.REQUEST, Call(0), meta, (value,))
        others: list[Build | None] = [None] * (self.servers - 1)
        with self.calling("creating a variable"):
            self._created += 1
            reply = self.request_all([lambda _: request, *others])[0]
            return np.array(reply.arrays[0]) if reply.arrays else value

    def request(self, what: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Send server 0 a request without arrays; return the reply's JSON object.

        Args:
            what: In words, for messages.
            meta: The request.

        Raises:
            CollectiveError: See `kerasdist.errors`.
        """
        request = Message(FrameType.REQUEST, Call(0), meta, ())
        with self.calling(what):
            others: list[Build | None] = [None] * (self.servers - 1)
            return dict(self.request_all([lambda _: request, *others])[0].meta)

    def stats(self) -> list[dict[str, Any]]:
        """Return each server's statistics of its tables and workers.

        Returns:
            A dictionary per server: "tables" (each with "bytes", "version", "clocks" by
            rank and "observed": by rank the number of its reads by staleness),
            "workers", "events", "requests", "updates", "snapshots". Keys are texts.
        """
        request = Message(FrameType.REQUEST, Call(0), {"do": "stats"}, ())
        with self.calling("a request for statistics"):
            replies = self.request_all([lambda _: request] * self.servers)
            return [dict(reply.meta) for reply in replies]
