"""A session: the connected workers of one strategy.

They first connect to the chief (`kerasdist.transport.rendezvous.startup`); these
connections stay open, and the failure detector uses them. The connections for data are
made afterwards, between the ranks that need them, through the same listeners
(`Session.dial`, `Session.answer`).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.transport.base import Aborted, Connection, Peer
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts
from kerasdist.transport.rendezvous.dial import dial_tcp, dial_unix, retry
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.startup import (
    Arrival,
    StartupRecord,
    gather,
    host_key,
    report,
)
from kerasdist.transport.tls.credentials import checked_secret


class Session:
    """All workers of one strategy, connected.

    Args:
        cluster: This worker's rank and its peers; `size` >= 2.
        settings: The settings that must be the same on all workers, e.g. the
            transport. Small JSON values.
        timeouts: The time limit of each phase.
        host: Overrides `host_key()`, for tests.
        replicas: Number of this worker's replicas.
        name: See `name` below; by default the n-th of this cluster's in this process.
        stop: When another thread sets it, the start ends with `Aborted`.

    Attributes:
        members: All workers by rank.
        controls: The chief's connection to each other rank, or, on another
            rank, its connection to rank 0. The failure detector takes them over.

    Raises:
        ClusterError: There is no secret where one is needed.
        AddressInUseError: This worker's port is taken.
        StartupError: Ranks are missing, or have other settings.
        AuthenticationError: The chief doesn't hold the same secret.
        ProtocolError: The process at the chief's address isn't kerasdist.
        Aborted: `stop` was set.

    After an exception nothing of the session is left open.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        settings: dict[str, Any],
        timeouts: Timeouts,
        host: str | None = None,
        replicas: int = 1,
        name: str | None = None,
        stop: Cancellation | None = None,
    ) -> None:
        if cluster.rank is None or cluster.size < 2:
            raise ValueError(
                "A session needs at least two workers. "
                f"Received: rank={cluster.rank}, size={cluster.size}."
            )
        # As they arrive: tuples as lists, for instance.
        settings = json.loads(json.dumps(settings))
        self.rank = cluster.rank
        self.size = cluster.size
        self.timeouts = timeouts
        self._secret = checked_secret(cluster.workers, os.environ)
        self._stop = stop or Cancellation()
        self._release = threading.Lock()
        self.controls: dict[int, Connection] = {}
        self._number = _Number(cluster, name)
        address = cluster.workers[self.rank]
        try:
            self._listener = Listener.acquire(address, self._secret, timeouts.startup)
        except BaseException:
            self._number.release(used=False)
            raise
        try:
            self._me = StartupRecord(
                rank=self.rank,
                address=address,
                host=host or host_key(),
                unix_name=self._listener.unix_name,
                pid=os.getpid(),
                replicas=replicas,
            )
            arrival = Arrival(
                session=self._number.session,
                me=self._me,
                settings=settings,
                addresses=cluster.workers,
                secret=self._secret,
                stop=self._stop,
            )
            deadline = Deadline(timeouts.startup)
            if self.rank == 0:
                found = gather(arrival, deadline, self._listener)
            else:
                found = report(arrival, deadline)
            self.members: tuple[StartupRecord, ...] = found[0]
            self.controls = found[1]
        except BaseException:
            self._number.release(used=False)
            self.close()
            raise
        self._number.release(used=True)

    @property
    def name(self) -> str:
        """The name of this session, the same on all ranks."""
        return self._number.session

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All workers with their names in messages, by rank."""
        return tuple(member.peer for member in self.members)

    def local_ranks(self) -> list[int]:
        """Return the ranks on this worker's host, this one among them, in order."""
        mine = self.members[self.rank].host
        return [member.rank for member in self.members if member.host == mine]

    def leaders(self) -> list[int]:
        """Return the lowest rank of each host, in order."""
        first: dict[str, int] = {}
        for member in self.members:
            first.setdefault(member.host, member.rank)
        return sorted(first.values())

    def dial(self, purpose: str, rank: int, deadline: Deadline) -> socket.socket:
        """Connect to `rank` for `purpose`, for bulk data; it must `answer`.

        Ranks on the same host are reached by their Unix socket.

        Raises:
            StartupError: It couldn't be reached by the deadline.
            Aborted: `interrupt` was called.
        """
        member = self.members[rank]
        local = member.host == self._me.host
        hello = {"session": self._number.session, "purpose": purpose, "rank": self.rank}
        address = member.address

        secret, stop = self._secret, self._stop

        def attempt() -> Connection:
            if local:
                name = member.unix_name
                return dial_unix(name, secret, hello, deadline, address, stop)
            return dial_tcp(address, secret, hello, deadline, stop)

        connection = retry(attempt, deadline, rank, address, stop)
        if connection is None or stop.is_set():
            if connection is not None:
                connection.close()
            raise Aborted
        return connection.sock

    def answer(self, purpose: str, rank: int, deadline: Deadline) -> socket.socket:
        """Wait until `rank` has connected for `purpose`.

        Raises:
            StartupError: It didn't connect by the deadline.
            Aborted: `interrupt` was called.
        """
        taken = self._listener.pending.take(
            self._number.session, purpose, rank, deadline, self._stop
        )
        if taken is not None:
            return taken.sock
        if self._stop.is_set():
            raise Aborted
        peer = self.members[rank].peer
        raise errors.StartupError(
            f"{peer} didn't connect to this worker within "
            f"{deadline.seconds:g} s, although it was there at the start. "
            f"Can {peer.address} reach {self._me.address}?",
            {rank: "it didn't connect for data"},
        )

    def interrupt(self) -> None:
        """End every wait of `dial` and `answer`, now and later. From any thread."""
        self._stop.set()
        self._listener.pending.interrupt()

    def close(self) -> None:
        """Release the listener and the control connections. Can be called twice."""
        # Once, also if several threads call it (the lock stays held): the listener may
        # be another strategy's, too.
        if not self._release.acquire(blocking=False):
            return
        for connection in self.controls.values():
            connection.close()
        self._listener.release()


class _Number:
    """Names the n-th session of this process on this cluster, the same on all ranks.

    A start that fails doesn't count: when it's tried again, the other ranks, for which
    it may be the first try, must use the same name.
    """

    _lock = threading.Lock()
    _last: dict[str, int] = {}  # noqa: RUF012 - the process's, not the class's
    _pending: set[str] = set()  # noqa: RUF012 - the process's, not the class's

    def __init__(self, cluster: Cluster, name: str | None) -> None:
        digest = hashlib.sha256(",".join(cluster.workers).encode()).hexdigest()[:16]
        # Threads may play several ranks in tests.
        self._key = f"{digest} {cluster.rank}"
        with self._lock:
            self._value = self._last.get(self._key, 0) + 1
            while f"{self._key} {self._value}" in self._pending:
                self._value += 1
            self._pending.add(f"{self._key} {self._value}")
        self._counts = name is None
        self.session = name or f"{digest}.{self._value}"

    def release(self, *, used: bool) -> None:
        with self._lock:
            self._pending.discard(f"{self._key} {self._value}")
            if used and self._counts:
                self._last[self._key] = max(self._value, self._last.get(self._key, 0))
