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

# A session: the connected workers of one strategy.
#
# They first connect to the chief, see above; these connections stay open, and the
# failure detector uses them. The connections for data are made afterwards, between the
# ranks that need them, through the same listeners (`Session.dial`, `Session.answer`).


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
        if cluster.rank is None:
            raise ValueError(f"A session is of workers. Received: {cluster!r}.")
        # As they arrive: tuples as lists, for instance.
        self._settings = json.loads(json.dumps(settings))
        self._addresses = cluster.workers
        self.rank = cluster.rank
        self.size = cluster.size
        self.timeouts = timeouts
        self._secret = checked_secret(cluster.workers, os.environ)
        self._stop = stop or Cancellation()
        self._release = threading.Lock()
        self.controls: dict[int, Connection] = {}
        # On the chief: until when those that have connected wait, what they have sent,
        # and when the connections of others have ended.
        self._arrived: dict[int, tuple[Deadline, StartupHello]] = {}
        self._gone: dict[int, float] = {}
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
            self._deadline = Deadline(timeouts.startup)
            start = self._gather if self.rank == 0 else self._report
            self.members: tuple[StartupRecord, ...] = start()
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

    def hosts(self) -> list[list[int]]:
        """Return each host's ranks, in order; the hosts in the order of their first."""
        ranks: dict[str, list[int]] = {}
        for member in self.members:
            ranks.setdefault(member.host, []).append(member.rank)
        return [*ranks.values()]

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

    # The start.

    def _report(self) -> tuple[StartupRecord, ...]:
        """Connect to the chief: steps 1 and 3 of a worker that isn't the chief.

        Returns:
            All workers by rank.

        Raises:
            StartupError, AuthenticationError, ProtocolError, Aborted: See `Session`.
        """
        chief = self._addresses[0]
        connected = threading.Event()

        def attempt() -> tuple[Connection, StartupRoster]:
            left = self._deadline.remaining()
            hello = StartupHello(member=self._me, settings=self._settings, seconds=left)
            connection, roster = register(
                chief,
                self._secret,
                hello_of(self.name, "control", self.rank, hello),
                StartupRoster,
                self._deadline,
                self._stop,
                grace=_GRACE_SECONDS,
                connected=connected,
            )
            # Two epochs of an elastic job may have one name.
            if tuple(m.address for m in roster.members) != self._addresses:
                connection.close()
                raise errors.ProtocolError("The roster holds other addresses.")
            return connection, roster

        try:
            self.controls[0], roster = retry(
                *(attempt, self._deadline, 0, chief, self._stop), connected=connected
            )
        except Refused as refused:
            raise refused.to_startup_error() from None
        return roster.members

    def _gather(self) -> tuple[StartupRecord, ...]:
        """Wait for all workers: steps 2 and 3, on the chief.

        Returns:
            All workers by rank.

        Raises:
            StartupError: See `Session`. All connected workers were sent a refusal.
            Aborted: `stop` was set. It is noticed within half a second.
        """
        me = f"rank 0 ({self._addresses[0]})"
        try:
            with WaitingNotice("rank 0", self._sight, self._deadline, goal=me):
                self._wait_for_all()
            self._check_settings()
        except errors.StartupError as error:
            for connection in self.controls.values():
                refuse(connection, str(error), error.missing)
            raise
        others = (self._arrived[rank][1].member for rank in sorted(self._arrived))
        members = (self._me, *others)
        for connection in self.controls.values():
            # Of one that died since the failure detector notices that.
            answer(connection, StartupRoster(members))
        return members

    def _wait_for_all(self) -> None:
        while True:
            for rank, connection in list(self.controls.items()):
                if connection.ended:
                    self.controls.pop(rank).close()
                    self._gone[rank] = time.monotonic()
            if self._stop.is_set():
                raise Aborted
            if len(self.controls) == self.size - 1:
                return
            # The worker with the shortest wait gets the reasons too.
            waits = [
                self._deadline,
                *(self._arrived[rank][0] for rank in self.controls),
            ]
            first = min(waits, key=Deadline.remaining)
            if first.expired:
                raise self._missing(first)
            seconds = min(first.remaining(), 0.5)
            arrived = self._listener.pending.take_any(
                self.name, "control", seconds, self._stop
            )
            for rank, connection, value in arrived:
                try:
                    hello = self._read_hello(rank, value)
                except errors.ProtocolError as error:
                    refuse(connection, str(error))
                    continue
                older = self.controls.pop(rank, None)
                if older is not None and not older.ended:
                    refuse(older, _twice(self._arrived[rank][1].member, hello.member))
                elif older is not None:
                    older.close()
                self._arrived[rank] = Deadline(hello.seconds), hello
                self.controls[rank] = connection

    def _read_hello(self, rank: int, value: dict[str, Any]) -> StartupHello:
        hello = read_record(value, StartupHello, "A hello")
        member, seconds = hello.member, hello.seconds
        if not 0 < rank < self.size or member.rank != rank:
            raise errors.ProtocolError(f"There is no such rank. Received: rank={rank}.")
        if member.address != self._addresses[rank]:
            raise errors.ProtocolError(
                f"Rank {rank} has another address. Received: {member.address!r}, "
                f"expected {self._addresses[rank]!r}."
            )
        if not 0 <= seconds <= 1e9:
            raise errors.ProtocolError(f"A hello is damaged. Received: {seconds=!r}.")
        return hello

    def _sight(self) -> Sight:
        """Return which workers are here, in the thread of the notice."""
        here = [0, *sorted(self.controls.copy())]
        elsewhere = self._listener.pending.others(self.name, "control")
        left = self._gone.copy()

        def why(rank: int) -> str:
            if rank in elsewhere:
                return _ELSEWHERE
            if rank in left:
                ago = time.monotonic() - left[rank]
                return f"it was here, and its connection ended {ago:.0f} s ago"
            return ""

        refused = self._listener.refusals()
        return Sight(
            missing=[
                Absent(f"rank {rank}", self._addresses[rank], why(rank))
                for rank in range(1, self.size)
                if rank not in here
            ],
            here=ranks_in_words(here),
            refused=refused[-1] if refused else "",
        )

    def _check_settings(self) -> None:
        differing = {
            rank: hello.settings
            for rank, (_, hello) in sorted(self._arrived.items())
            if hello.settings != self._settings
        }
        if not differing:
            return
        shown = "".join(f"\n  rank {r}: {theirs}" for r, theirs in differing.items())
        raise errors.StartupError(
            f"Workers were started with different arguments. Received:\n  rank 0: "
            f"{self._settings}{shown}\nAll workers must run the same script with the "
            "same arguments of the strategy.",
            dict.fromkeys(differing, "its arguments differ"),
        )

    def _missing(self, waited: Deadline) -> errors.StartupError:
        """Return the error that names missing ranks, with reasons found from here."""
        addresses = self._addresses
        ranks = [rank for rank in range(1, len(addresses)) if rank not in self.controls]
        elsewhere = self._listener.pending.others(self.name, "control")

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
        refused = self._listener.refusals()
        return missing_error(missing, addresses, waited.seconds, refused)


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
