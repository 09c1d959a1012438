"""One side of the control connections of a job: its chief, or all its other ranks.

    python player.py chief RANKS JOB             prints its port, then takes orders
    python player.py ranks RANKS JOB PORT        sends the heartbeats of the others

The chief is the library's failure detector, on real connections over TCP. The others
are connections of one process, each with its own keys, and with heartbeats at a moment
of the interval of its own. An empty line on the standard input is the order to print
the figures so far.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import resource
import select
import socket
import sys
import time

from kerasdist.transport.base import Connection, Peer
from kerasdist.transport.deadline import Timeouts
from kerasdist.transport.framing import HEADER_BYTES, Call, FrameType
from kerasdist.transport.handshake import TAG_BYTES, FrameAuthenticator
from kerasdist.transport.liveness.failure_detector import FailureDetector
from kerasdist.transport.liveness.heartbeat import ControlConnection

TIMEOUTS = Timeouts()
# Seconds between two collectives of a job that trains, and of one with slow steps.
SECONDS = {"training": 0.1, "slow steps": 20.0}


def place(job: str, rank: int, ranks: int) -> int:
    """Return the number of the collective that a rank is in now."""
    if job == "waiting":
        return 7 - (rank == ranks - 1)
    # All are in the same one: the clock is that of the machine.
    return int(time.monotonic() / SECONDS[job])


def connection(sock: socket.socket, rank: int, *, chief: bool) -> Connection:
    """Return a connection of the chief and a rank, with keys that both can make."""
    keys = [hashlib.sha256(b"%d %d" % (rank, side)).digest() for side in range(2)]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock, FrameAuthenticator(keys[chief], keys[not chief]))


def answer(**figures: float) -> None:
    """Print figures, for an order on the standard input."""
    sys.stdin.readline()
    print(json.dumps(figures), flush=True)


def chief(ranks: int, job: str) -> None:
    controls = {}
    with socket.create_server(("127.0.0.1", 0), backlog=ranks) as listener:
        print(listener.getsockname()[1], flush=True)
        for _ in range(ranks - 1):
            sock, _ = listener.accept()
            rank = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "big")
            controls[rank] = connection(sock, rank, chief=True)
    peers = [Peer(rank, f"127.0.0.1:{rank}") for rank in range(ranks)]
    failures = []
    supervisor = FailureDetector(0, peers, controls, TIMEOUTS, failures.append)
    while not failures:
        supervisor.call = Call(place(job, 0, ranks), "barrier")
        # A script's thread sets `call`, here as seldom as the figures need it.
        if select.select([sys.stdin], [], [], min(1.0, SECONDS.get(job, 1.0)))[0]:
            used = resource.getrusage(resource.RUSAGE_SELF)
            answer(user=used.ru_utime, system=used.ru_stime)
    sys.exit(f"The job has failed: {failures[0]}")


def others(ranks: int, job: str, port: int) -> None:
    controls: dict[int, tuple[int, ControlConnection]] = {}
    poll = select.epoll()
    poll.register(sys.stdin, select.EPOLLIN)
    interval, began = TIMEOUTS.heartbeat_interval, time.monotonic()
    due = []
    for rank in range(1, ranks):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(rank.to_bytes(4, "big"))
        control = ControlConnection(connection(sock, rank, chief=False), began)
        controls[sock.fileno()] = rank, control
        poll.register(sock, select.EPOLLIN)
        due.append((began + interval * rank / ranks, rank, control))
    received = frames = 0
    while True:
        while due[0][0] <= time.monotonic():
            at, rank, control = due[0]
            call = Call(place(job, rank, ranks), "barrier")
            control.post(FrameType.HEARTBEAT, b"", call)
            control.flush()
            heapq.heapreplace(due, (at + interval, rank, control))
        for fd, _ in poll.poll(max(0.0, due[0][0] - time.monotonic())):
            if fd == sys.stdin.fileno():
                answer(bytes=received, frames=frames)
                continue
            for _, _, payload in controls[fd][1].frames():
                frames += 1
                received += HEADER_BYTES + len(payload) + TAG_BYTES


if __name__ == "__main__":
    role, count, name, *more = sys.argv[1:]
    if role == "chief":
        chief(int(count), name)
    else:
        with contextlib.suppress(EOFError, BrokenPipeError):  # the chief has ended
            others(int(count), name, int(more[0]))
