"""The start of a session: its workers connect to the chief.

C: rank 0, the chief      W: every other rank

1. W -> C   connect to the chief's address, handshake, hello with W's record
            (`StartupRecord`), its settings and how long it waits; repeated until the
            deadline
2. C        waits for all ranks, no longer than any of them; checks that all
            have the same settings
3. C -> W   ROSTER: every rank's member record     -> the session is open
       or   REFUSAL: the reason, and the reasons for each missing rank
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kerasdist import errors
from kerasdist.cluster import Cluster
from kerasdist.transport.base import Aborted, Connection, Peer
from kerasdist.transport.deadline import Cancellation, Deadline, Timeouts
from kerasdist.transport.framing import read_record
from kerasdist.transport.rendezvous.dial import (
    PROBE_SECONDS,
    Refused,
    answer,
    dial_address,
    hello_of,
    refuse,
    register,
    retry,
)
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.waiting_notice import (
    Absent,
    Sight,
    WaitingNotice,
    ranks_in_words,
    why_unreachable,
)
from kerasdist.transport.tls import checked_secret

# A session: the connected workers of one strategy.
#
# They first connect to the chief (`kerasdist.transport.rendezvous.startup`); these
# connections stay open, and the failure detector uses them. The connections for data
# are made afterwards, between the ranks that need them, through the same listeners
# (`Session.dial`, `Session.answer`).


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
                deadline=Deadline(timeouts.startup),
                listener=self._listener,
            )
            found = arrival.gather() if self.rank == 0 else arrival.report()
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
        name = member.unix_name if member.host == self._me.host else None
        hello = {"session": self._number.session, "purpose": purpose, "rank": self.rank}
        address, stop = member.address, self._stop
        connection = retry(
            lambda: dial_address(
                *(address, self._secret, hello, deadline, stop), unix_name=name
            ),
            *(deadline, rank, address, stop),
        )
        if stop.is_set():
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


# The record of one worker that all others have.


def host_key() -> str:
    """Return a text that is equal on two workers if they can share memory.

    It has the running kernel, the mount of /dev/shm and the network namespace: so two
    containers count as two hosts unless they share both, and so do the test
    hosts that are namespaces of one machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        shm = os.stat("/dev/shm")
        net = os.stat("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"
    return f"{boot}-{shm.st_dev}-{shm.st_ino}-{net.st_ino}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupRecord:
    """The record of one worker.

    Attributes:
        rank: Its rank.
        address: Its address in the cluster.
        host: The identity of its host, see `host_key`.
        unix_name: The name of its Unix socket.
        pid: Its process number on its host.
        replicas: Number of its replicas.
    """

    rank: int
    address: str
    host: str
    unix_name: str
    pid: int
    replicas: int

    @property
    def peer(self) -> Peer:
        """Its name in messages."""
        return Peer(self.rank, self.address)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartupHello:
    """The hello of a worker to the chief.

    Attributes:
        member: Its record.
        settings: Its settings; JSON values.
        seconds: How long it waits.
    """

    member: StartupRecord
    settings: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class StartupRoster:
    """The chief's answer when all workers are there: all of them, by rank."""

    members: tuple[StartupRecord, ...]


# Seconds that the others wait longer than the chief, to get the chief's reasons.
_GRACE_SECONDS = 8.0
_MOST_PROBES = 256
_ELSEWHERE = (
    "it connected, but for another session than rank 0's: does it have the same list "
    "of workers, and create its strategies in the same order?"
)


@dataclasses.dataclass
class _PendingPeer:
    """A worker that is connected to the chief and waits for the others."""

    connection: Connection
    member: StartupRecord
    settings: object
    patience: Deadline


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A worker's part in the start of a session.

    Attributes:
        session: The name of the session.
        me: Its own record.
        settings: Its settings; JSON values.
        addresses: All workers' addresses, by rank.
        secret: The job's secret.
        stop: When another thread sets it, the start ends with `Aborted`. The chief
            notices it within half a second.
        deadline: When to give up.
        listener: This worker's listener.
        pending: On the chief, the workers that are connected.
        gone: On the chief, when the connections of others have ended.
    """

    session: str
    me: StartupRecord
    settings: dict[str, Any]
    addresses: tuple[str, ...]
    secret: bytes
    stop: Cancellation
    deadline: Deadline
    listener: Listener
    pending: dict[int, _PendingPeer] = dataclasses.field(default_factory=dict)
    gone: dict[int, float] = dataclasses.field(default_factory=dict)

    def report(self) -> tuple[tuple[StartupRecord, ...], dict[int, Connection]]:
        """Connect to the chief: steps 1 and 3 of a worker that isn't the chief.

        Returns:
            All workers by rank, and the connection to the chief, now the caller's.

        Raises:
            StartupError, AuthenticationError, ProtocolError, Aborted: See `Session`.
        """
        chief = self.addresses[0]
        connected = threading.Event()

        def attempt() -> tuple[Connection, StartupRoster]:
            left = self.deadline.remaining()
            hello = StartupHello(member=self.me, settings=self.settings, seconds=left)
            connection, roster = register(
                chief,
                self.secret,
                hello_of(self.session, "control", self.me.rank, hello),
                StartupRoster,
                self.deadline,
                self.stop,
                grace=_GRACE_SECONDS,
                connected=connected,
            )
            fault = ""
            if [m.rank for m in roster.members] != list(range(len(self.addresses))):
                fault = "The roster doesn't hold all ranks."
            elif tuple(m.address for m in roster.members) != self.addresses:
                fault = "The roster holds other addresses."
            if fault:
                connection.close()
                raise errors.ProtocolError(fault)
            return connection, roster

        def look() -> Sight | None:
            if not connected.is_set():
                return None
            why = "rank 0 waits for them, see its output"
            return Sight([Absent("other workers", "", why)], here="rank 0")

        try:
            connection, roster = retry(
                *(attempt, self.deadline, 0, chief, self.stop), connected=look
            )
        except Refused as refused:
            raise refused.to_startup_error() from None
        return roster.members, {0: connection}

    def gather(self) -> tuple[tuple[StartupRecord, ...], dict[int, Connection]]:
        """Wait for all workers: steps 2 and 3, on the chief.

        Returns:
            All workers by rank, and the connection to each of them but this one, now
            the caller's.

        Raises:
            StartupError: See `Session`. All connected workers were sent a refusal.
            Aborted: `stop` was set.
        """
        me = f"rank 0 ({self.addresses[0]})"
        try:
            with WaitingNotice("rank 0", self._sight, self.deadline, goal=me):
                self._wait_for_all()
            self._check_settings()
        except errors.StartupError as error:
            for peer in self.pending.values():
                refuse(peer.connection, str(error), error.missing)
            raise
        except BaseException:
            for peer in self.pending.values():
                peer.connection.close()
            raise
        others = (self.pending[rank].member for rank in sorted(self.pending))
        members = (self.me, *others)
        for peer in self.pending.values():
            # Of one that died since the failure detector notices that.
            answer(peer.connection, StartupRoster(members))
        return members, {rank: peer.connection for rank, peer in self.pending.items()}

    def _wait_for_all(self) -> None:
        size = len(self.addresses)
        while True:
            for rank, peer in list(self.pending.items()):
                if peer.connection.ended:
                    self.pending.pop(rank).connection.close()
                    self.gone[rank] = time.monotonic()
            if self.stop.is_set():
                raise Aborted
            if len(self.pending) == size - 1:
                return
            # The worker with the shortest wait gets the reasons too.
            waits = [self.deadline, *(g.patience for g in self.pending.values())]
            first = min(waits, key=Deadline.remaining)
            if first.expired:
                raise self._missing(first)
            seconds = min(first.remaining(), 0.5)
            arrived = self.listener.pending.take_any(
                self.session, "control", seconds, self.stop
            )
            for rank, connection, hello in arrived:
                try:
                    peer = self._receive(rank, connection, hello)
                except errors.ProtocolError as error:
                    refuse(connection, str(error))
                    continue
                older = self.pending.pop(rank, None)
                self.pending[rank] = peer
                if older is not None and not older.connection.ended:
                    refuse(older.connection, _twice(older.member, peer.member))
                elif older is not None:
                    older.connection.close()

    def _receive(
        self, rank: int, connection: Connection, hello: dict[str, Any]
    ) -> _PendingPeer:
        found = read_record(hello, StartupHello, "A hello")
        member, seconds = found.member, found.seconds
        if not 0 < rank < len(self.addresses) or member.rank != rank:
            raise errors.ProtocolError(f"There is no such rank. Received: rank={rank}.")
        if member.address != self.addresses[rank]:
            raise errors.ProtocolError(
                f"Rank {rank} has another address. Received: {member.address!r}, "
                f"expected {self.addresses[rank]!r}."
            )
        if not 0 <= seconds <= 1e9:
            raise errors.ProtocolError(f"A hello is damaged. Received: {seconds=!r}.")
        return _PendingPeer(connection, member, found.settings, Deadline(seconds))

    def _sight(self) -> Sight:
        """Return which workers are here, in the thread of the notice."""
        here = [0, *sorted(self.pending.copy())]
        elsewhere = self.listener.pending.others(self.session, "control")
        left = self.gone.copy()

        def why(rank: int) -> str:
            if rank in elsewhere:
                return _ELSEWHERE
            if rank in left:
                ago = time.monotonic() - left[rank]
                return f"it was here, and its connection ended {ago:.0f} s ago"
            return ""

        refused = self.listener.refusals()
        return Sight(
            missing=[
                Absent(f"rank {rank}", self.addresses[rank], why(rank))
                for rank in range(1, len(self.addresses))
                if rank not in here
            ],
            here=ranks_in_words(here),
            refused=refused[-1] if refused else "",
        )

    def _check_settings(self) -> None:
        differing = {
            rank: peer.settings
            for rank, peer in sorted(self.pending.items())
            if peer.settings != self.settings
        }
        if not differing:
            return
        shown = "".join(f"\n  rank {r}: {theirs}" for r, theirs in differing.items())
        raise errors.StartupError(
            f"Workers were started with different arguments. Received:\n  rank 0: "
            f"{self.settings}{shown}\nAll workers must run the same script with the "
            "same arguments of the strategy.",
            dict.fromkeys(differing, "its arguments differ"),
        )

    def _missing(self, waited: Deadline) -> errors.StartupError:
        """Return the error that names missing ranks, with reasons found from here."""
        addresses = self.addresses
        ranks = [rank for rank in range(1, len(addresses)) if rank not in self.pending]
        elsewhere = self.listener.pending.others(self.session, "control")

        def reason(rank: int) -> str:
            if rank in elsewhere:
                return _ELSEWHERE
            return why_unreachable(addresses[rank], PROBE_SECONDS) or (
                "it listens there but hasn't connected to rank 0; can it reach "
                f"{addresses[0]}, and does it hold the same KERASDIST_SECRET?"
            )

        most = min(_MOST_PROBES, len(ranks))
        with ThreadPoolExecutor(most, "kerasdist-probe") as pool:
            missing = dict(zip(ranks, pool.map(reason, ranks), strict=True))
        refused = self.listener.refusals()
        return missing_error(missing, addresses, waited.seconds, refused)


def _twice(older: StartupRecord, newer: StartupRecord) -> str:
    return (
        f"Two processes connected as rank {older.rank}. Received: process {older.pid} "
        f"(this one) and process {newer.pid}, which connected later and takes part. "
        "Each worker needs a task index of its own: look at TF_CONFIG (or what sets "
        "it) where both run, and end the one that is too many."
    )


def missing_error(
    missing: dict[int, str],
    addresses: Sequence[str],
    seconds: float,
    refused: Sequence[str],
) -> errors.StartupError:
    """Return the error that names missing ranks.

    Args:
        missing: The reason why each of them is missing.
        addresses: All workers' addresses, by rank.
        seconds: How long they were waited for.
        refused: Connections that this worker has refused, with the reasons.
    """
    lines = [
        f"\n  rank {rank} ({addresses[rank]}): {why}" for rank, why in missing.items()
    ]
    if refused:
        lines.append("\nConnections that were refused: " + "; ".join(refused))
    return errors.StartupError(
        f"{len(missing)} of {len(addresses)} workers didn't connect within "
        f"{seconds:.3g} s:" + "".join(lines) + "\nStart the missing workers "
        "(look at their output first), run `kerasdist doctor` where they run, or "
        "give them more time with `startup_timeout=`.",
        missing,
    )
