"""The seconds of each collective, by the schedules of `kerasdist.collectives`.

A collective of one group begins when its last rank arrives, and ends for all at the
same time: in a ring each rank has received from all others after size-1 exchanges, so
that it waits for the slowest one. With equal links each exchange of the ring takes the
same time, and these functions are the sum of all exchanges
(`tests/prediction` plays the schedules event by event, and compares).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerasdist.collectives.ring import PIECE_BYTES, sends_whole
from kerasdist.prediction.links import LOOPBACK, HostLink


class Places(NamedTuple):
    """The places of a job's workers.

    Attributes:
        workers: Number of workers.
        per_host: Workers of each host; with several the transport is hierarchical.
        link: Between two hosts.
        local: Inside a host. The `byte` is that of an all-reduce's buffer.
    """

    workers: int
    per_host: int
    link: HostLink
    local: HostLink = LOOPBACK

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.workers // self.per_host)


def all_reduce(size: int, places: Places) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    inside = min(places.per_host, places.workers)
    between = _ring_all_reduce(size, places.hosts, places.link)
    if inside == 1:
        return between
    # The sum inside of each host, the ring of leaders, the broadcast in each host.
    return _inside(size, inside, places) * (1 if places.hosts == 1 else 2) + between


def all_gather(size: int, places: Places) -> float:
    """Return the seconds of an all-gather of `size` bytes of each rank."""
    inside = min(places.per_host, places.workers)
    between = (places.hosts - 1) * places.link.seconds(size * inside)
    if inside == 1:
        return between
    own = _inside(size * inside, inside, places)
    if places.hosts == 1:
        return own
    return own + between + _inside(size * places.workers, inside, places)


def _ring_all_reduce(size: int, ranks: int, link: HostLink) -> float:
    if ranks == 1:
        return 0.0
    if sends_whole(size, ranks):
        return (ranks - 1) * link.seconds(size)
    chunk = -(-size // ranks)
    pieces = max(1, -(-chunk // PIECE_BYTES))
    return 2 * (ranks - 1) * (pieces * link.latency + chunk * link.byte)


def _inside(size: int, ranks: int, places: Places) -> float:
    """Return the seconds in the memory of a host: log2(ranks) messages, and bytes."""
    return math.ceil(math.log2(ranks)) * places.local.latency + size * places.local.byte


def exchange_with_servers(
    size: int, workers: int, servers: int, link: HostLink
) -> float:
    """Return the seconds in which `workers` at once send to servers, and get replies.

    Each server has an equal part of the bytes. A message is as slow as the fuller one
    of two links: a worker's, with all parts, or a server's, with a part of each worker.
    """
    busiest = max(size, workers * size / servers)
    return 2 * link.seconds(busiest)
