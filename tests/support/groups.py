"""Groups of ranks in one process, a thread per rank, for tests.

    with Group("shared", 3) as group:
        results = group.run(lambda c: c.all_reduce([np.ones(3)]))

A kind of group says what its ranks talk through; `KINDS` has all of them.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from closing import Closing
from kerasdist.cluster import Cluster
from kerasdist.collectives import Communicator, Job, connect
from kerasdist.collectives.checked import SingleCommunicator
from kerasdist.collectives.ring import RingCommunicator
from kerasdist.collectives.shared_memory import SharedMemoryCommunicator
from kerasdist.transport import log
from kerasdist.transport.base import Connection, Peer, connection_pair
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.liveness.failure_protocol import Supervisor
from kerasdist.transport.memory import SEGMENT_NAME
from kerasdist.transport.rendezvous.listener import Listener
from kerasdist.transport.rendezvous.startup import Session
from kerasdist.transport.sockets import SocketTransport
from pace import bound
from waiting import wait_until
from workers import free_ports

SECRET = b"a secret of the tests"
# On which host each rank is, for groups of workers on several hosts.
LAYOUTS = ("aa", "ab", "aab", "abb", "abab", "abc", "abcab")
# One or two of each implementation, with an odd and an even number of ranks.
KINDS = [
    *(("single", 1), ("unix", 1), ("unix", 2), ("unix", 5), ("shared", 3)),
    *(("shared", 4), ("server", 3), ("servers_tcp", 2), ("tcp", 3)),
    *(("connected_shared", 3), ("aab", 3), ("abab", 4)),
]
# All others, of the soak tests.
FURTHER_KINDS = [
    *((kind, size) for kind in ("shared", "tcp") for size in (2, 5)),
    *((layout, len(layout)) for layout in LAYOUTS if layout not in ("aab", "abab")),
    ("server", 1),
]


def each_kind() -> list[Any]:
    """Parameters of tests: `KINDS`, and in the soak tests the further ones."""
    further = [kind for kind in FURTHER_KINDS if kind not in KINDS]
    return [*KINDS, *(pytest.param(kind, marks=pytest.mark.soak) for kind in further)]


def in_threads(
    count: int, work: Callable[[int], Any], timeout: float = 60.0
) -> list[Any]:
    """Calls `work(0)`, ..., `work(count - 1)` at once; returns what they return.

    Raises the first one's exception. Fails the test if one is still running after
    `timeout` seconds.
    """
    results = outcomes(count, work, timeout)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def outcomes(count: int, work: Callable[[int], Any], timeout: float = 60) -> list[Any]:
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(bound(timeout))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        pytest.fail(f"{', '.join(stuck)} still waited after {timeout} s.")
    return results


def connections(pair: Any = None) -> tuple[Connection, Connection]:
    """Both ends of a connection, as after a handshake."""
    return connection_pair(*(pair or socket.socketpair()))


def socket_ring(size: int, pair: Callable[[], Any] = socket.socketpair) -> Any:
    """Transports in a ring, as `connect` makes them between hosts."""
    peers = [Peer(rank, f"ring:{rank}") for rank in range(size)]
    links = [pair() for _ in range(size)]  # link r: from r to r + 1
    return [
        SocketTransport(
            rank,
            peers,
            {(rank + 1) % size: links[rank][0]},
            {(rank - 1) % size: links[rank - 1][1]},
        )
        for rank in range(size)
    ]


def socket_mesh(size: int) -> list[SocketTransport]:
    """Transports in which all are connected, as `connect` makes them on a host."""
    peers = [Peer(rank, f"mesh:{rank}") for rank in range(size)]
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends[low][high], ends[high][low] = socket.socketpair()
    return [SocketTransport(r, peers, ends[r], ends[r]) for r in range(size)]


def cluster_on(
    addresses: Sequence[str], rank: int, servers: Sequence[str] = ()
) -> Cluster:
    size, workers = len(addresses), tuple(addresses)
    where = {"workers": workers, "servers": tuple(servers)}
    return Cluster(rank=rank, size=size, task_index=rank, **where)


def addresses_of(size: int) -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(size)]


def join(
    addresses: Sequence[str],
    rank: int,
    timeouts: Timeouts | None = None,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Session:
    return Session(
        cluster_on(addresses, rank),
        settings=settings or {},
        timeouts=timeouts or Timeouts(startup=20),
        **options,
    )


@contextlib.contextmanager
def listener_at(
    address: str | None = None, secret: bytes = SECRET, **options: Any
) -> Iterator[Listener]:
    """A listener, by default on a free port, released after the block."""
    made = Listener.acquire(address or addresses_of(1)[0], secret, **options)
    try:
        yield made
    finally:
        made.release()


def close_all(things: Sequence[Any]) -> None:
    in_threads(len(things), lambda rank: things[rank].close())


def connect_all(size: int, timeouts: Timeouts | None = None, **options: Any) -> Any:
    """Connects `size` workers on free ports; returns their jobs by rank.

    `options` are those of `connect`; `hosts` has each rank's host.
    """
    addresses = addresses_of(size)
    hosts = options.pop("hosts", None)
    timeouts = timeouts or Timeouts(startup=20, collective=20, heartbeat=10)

    def join(rank: int) -> Job:
        host = hosts[rank] if hosts else None
        cluster = cluster_on(addresses, rank)
        return connect(cluster, timeouts=timeouts, host=host, **options)

    jobs = outcomes(size, join)
    errors = [job for job in jobs if isinstance(job, BaseException)]
    if errors:
        close_all([job for job in jobs if isinstance(job, Job)])
        raise errors[0]
    return jobs


@contextlib.contextmanager
def nothing_stays_open() -> Iterator[None]:
    """Fails the test if the block leaves a socket or a thread of kerasdist's."""
    before = open_sockets()
    yield
    for thread in threading.enumerate():
        if "look-up" in thread.name:
            # Nobody can end a question to a name server; it ends by itself.
            thread.join(bound(30.0))
    # The thread that writes log lines ends when there is none left.
    log.flush(5.0)
    wait_until(lambda: not _threads_left(), "the end of kerasdist's threads", 3.0)
    assert open_sockets() == before


def _threads_left() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("kerasdist")]


def open_sockets() -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:
            continue
        count += target.startswith(("socket:", f"/memfd:{SEGMENT_NAME}"))
    return count


class Ranks(Closing):
    """A group of ranks, each in a thread of this process.

    `members` is what each rank's work is given.
    """

    members: Sequence[Any]

    def run(self, work: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
        """Calls `work` with each rank's member at once; see `in_threads`."""
        members = self.members
        return in_threads(len(members), lambda rank: work(members[rank]), timeout)

    def outcomes(self, work: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
        members = self.members
        return outcomes(len(members), lambda rank: work(members[rank]), timeout)


class Group(Ranks):
    def __init__(
        self, kind: str, size: int, *, timeout: float = 20.0, heartbeat: float = 10.0
    ) -> None:
        self.size = size
        self.jobs: list[Job] = []
        self.communicators: list[Communicator] = []
        self._servers: Any = None
        timeouts = Timeouts(startup=20, collective=timeout, heartbeat=heartbeat)
        alone = Supervisor()
        if kind.startswith("server"):
            from servers import Servers  # it's made of the functions here

            link = "memory" if size == 1 else "shared_memory"
            count, link = (2, "tcp") if kind == "servers_tcp" else (1, link)
            self._servers = Servers(
                size, count, kind=link, mode="sync", timeouts=timeouts
            )
            self.communicators = [c.communicator for c in self._servers.clients]
        elif kind == "single":
            self.communicators = [SingleCommunicator()]
        elif kind == "shared":
            self.communicators = [
                SharedMemoryCommunicator(transport, alone, timeout)
                for transport in socket_mesh(size)
            ]
        elif kind == "unix":
            self.communicators = [
                RingCommunicator(transport, alone, timeout)
                for transport in socket_ring(size)
            ]
        else:
            # Different hosts: so it is really TCP and not the host's own sockets.
            transport, hosts = {
                "tcp": ("tcp", "abcdef"),
                "connected_shared": ("shared_memory", None),
            }.get(kind, ("hierarchical", kind))
            self.jobs = connect_all(size, timeouts, transport=transport, hosts=hosts)
            self.communicators = [job.communicator for job in self.jobs]
        self.members = self.communicators

    def close(self) -> None:
        close_all(self.jobs or self.communicators)
        if self._servers is not None:
            self._servers.close()
