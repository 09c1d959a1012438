"""Ways to encrypt what two processes send each other at the same time.

    KERASDIST_TLS=... python benchmarks/tls/streams.py WAY BYTES ROUNDS

Ways: tcp, socket, memory, threads, openssl. Prints the seconds of each round as a JSON
list. Each process is bound to a core. The bytes are the same in all ways, and checked
at the end.
"""

from __future__ import annotations

import json
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kerasdist.transport import tls
from kerasdist.transport.tls import Credentials

# Encrypted in one call, as in `kerasdist.transport.tls`.
PIECE = 1 << 18
_LONGEST = 60.0  # seconds until the other process is given up


class Memory:
    """TLS whose records go through memory: 256 KB in one call of OpenSSL."""

    def __init__(self, sock: socket.socket, given: Credentials, server: bool) -> None:
        self.sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        made = given.context(server=server)
        self._tls = made.wrap_bio(self._in, self._out, server_side=server)
        self._pending = memoryview(b"")
        self._taken = 0
        self._room = memoryview(bytearray(PIECE))
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                sock.sendall(self._out.read())
                self._in.write(sock.recv(1 << 16))
        sock.sendall(self._out.read())
        sock.setblocking(False)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, data: memoryview) -> int:
        if not self._taken:
            self._taken = self._tls.write(data[:PIECE])
            self._pending = memoryview(self._out.read())
        while self._pending:
            self._pending = self._pending[self.sock.send(self._pending) :]
        taken, self._taken = self._taken, 0
        return taken

    def recv_into(self, data: memoryview) -> int:
        while True:
            try:
                return int(self._tls.read(len(data), data))
            except ssl.SSLWantReadError:
                count = self.sock.recv_into(self._room)
                if not count:
                    return 0
                self._in.write(self._room[:count])


def exchange(stream: Any, outgoing: memoryview, incoming: memoryview) -> None:
    """Send and receive at the same time, in one thread."""
    poll = select.poll()
    while outgoing or incoming:
        moved = False
        try:
            while outgoing:
                outgoing = outgoing[stream.send(outgoing) :]
                moved = True
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        try:
            while incoming:
                count = stream.recv_into(incoming)
                if not count:
                    raise EOFError("the other process has ended")
                incoming = incoming[count:]
                moved = True
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        if not moved:
            mask = select.POLLOUT if outgoing else 0
            poll.register(stream, mask | (select.POLLIN if incoming else 0))
            if not poll.poll(_LONGEST * 1000):
                raise TimeoutError(f"the other process is silent for {_LONGEST:g} s")


def wrapped(sock: socket.socket, given: Credentials, server: bool) -> Any:
    """Return kerasdist's own socket."""
    stream: Any = tls.wrap(sock, given, server=server)
    stream.do_handshake()
    stream.setblocking(False)
    return stream


def steps_of(
    way: str, given: Credentials, socks: list[socket.socket], server: bool
) -> Callable[[memoryview, memoryview], None]:
    """What one round calls with the bytes to send and the room for others."""
    if way == "tcp":
        socks[0].setblocking(False)
        return lambda out, room: exchange(socks[0], out, room)
    if way == "memory":
        memory = Memory(socks[0], given, server)
        return lambda out, room: exchange(memory, out, room)
    streams = [wrapped(sock, given, server) for sock in socks]
    if way == "socket":
        return lambda out, room: exchange(streams[0], out, room)
    # A connection for each direction, each in a thread of its own: two threads can't
    # be in OpenSSL at once with one connection.
    sending, receiving = streams if server else reversed(streams)
    none = memoryview(b"")

    def in_threads(out: memoryview, room: memoryview) -> None:
        thread = threading.Thread(target=exchange, args=(sending, out, none))
        thread.start()
        exchange(receiving, none, room)
        thread.join()

    return in_threads


def in_memory(given: Credentials, size: int, rounds: int) -> list[float]:
    """Encrypt and decrypt without a socket: OpenSSL's own time."""
    ends = [(ssl.MemoryBIO(), ssl.MemoryBIO()) for _ in range(2)]
    one, other = (
        given.context(server=server).wrap_bio(*end, server_side=server)
        for server, end in zip((False, True), ends, strict=True)
    )
    (one_in, one_out), (other_in, other_out) = ends
    done = [False, False]
    while not all(done):
        for which, end in enumerate((one, other)):
            try:
                end.do_handshake()
                done[which] = True
            except ssl.SSLWantReadError:
                pass
        other_in.write(one_out.read())
        one_in.write(other_out.read())
    data, room = memoryview(bytearray(os.urandom(PIECE))), memoryview(bytearray(PIECE))
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(size // PIECE):
            one.write(data)
            other_in.write(one_out.read())
            left = room
            while left:
                left = left[int(other.read(len(left), left)) :]
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    way, size, rounds = sys.argv[1:]
    given = Credentials.read(os.environ)
    if given is None:
        raise SystemExit(
            "Received: no KERASDIST_TLS. Give it as to a task: docs/tls.md."
        )
    if way == "openssl":
        print(json.dumps(in_memory(given, int(size), int(rounds))))
        return
    socks = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_LONGEST)
        parent = os.fork()
        for _ in range(2 if way == "threads" else 1):
            if parent:
                sock = listener.accept()[0]
            else:
                sock = socket.create_connection(listener.getsockname())
            sock.settimeout(_LONGEST)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            socks.append(sock)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if parent else cores[-1]})
    step = steps_of(way, given, socks, server=bool(parent))
    data = bytearray(range(256)) * (int(size) // 256)
    room = bytearray(len(data))
    seconds = []
    for _ in range(int(rounds) + 1):
        began = time.perf_counter()
        step(memoryview(data), memoryview(room))
        seconds.append(time.perf_counter() - began)
    if data != room:
        raise SystemExit(f"{way}: other bytes have arrived")
    if parent:
        os.waitpid(parent, 0)
        print(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main()
