"""The listener of a process: accepts and checks connections for all sessions.

A process listens at its address of the cluster once, however many strategies it
holds: each strategy is a session, every connection has its session in its hello,
and waits in that session's mailbox until it is taken.
The same accept thread serves a Unix socket (in Linux's abstract namespace: no
file to leave behind) for connections inside the host.
"""

from __future__ import annotations

import collections
import contextlib
import os
import secrets
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from kerasdist.cluster.address import split_address
from kerasdist.errors import (
    AddressInUseError,
    AuthenticationError,
    ClusterError,
    ProtocolError,
)
from kerasdist.transport import handshake
from kerasdist.transport.base import Connection
from kerasdist.transport.deadline import Deadline, daemon
from kerasdist.transport.framing import FrameType, write_frame
from kerasdist.transport.handshake import is_loopback, why_not_same_user
from kerasdist.transport.log import LimitedLog
from kerasdist.transport.memory import close_in_children
from kerasdist.transport.rendezvous.bind import inherited_socket, listen_at
from kerasdist.transport.tls import Credentials, accept_tls, binding_of, wrap

# Authenticated connections, which wait until a session takes them.

MOST_WAITING = 4096

_Key = tuple[str, str, int]


@dataclass(frozen=True, eq=False)
class _WaitingConnection:
    """A connection that waits until it's taken, and since when."""

    connection: Connection
    hello: dict[str, Any]
    since: float


class PendingConnections:
    """Connections by session, purpose and rank, as their hellos name these."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # In the order of arrival; a rank may have connected more than once.
        self._waiting: dict[_Key, list[_WaitingConnection]] = {}
        self._closed = False

    def put(self, connection: Connection, hello: dict[str, Any]) -> bool:
        """Keep a connection until it's taken; return False after `close`.

        Raises:
            ProtocolError: The hello is incomplete, or too many connections wait.
        """
        session, purpose = hello.get("session"), hello.get("purpose")
        rank = hello.get("rank")
        if (
            not isinstance(session, str)
            or not isinstance(purpose, str)
            or type(rank) is not int
        ):
            raise ProtocolError(f"A hello is incomplete. Received: {hello!r}.")
        with self._changed:
            if self._closed:
                return False
            if sum(len(each) for each in self._waiting.values()) >= MOST_WAITING:
                raise ProtocolError(
                    f"{MOST_WAITING} connections are waiting already; no more are kept."
                )
            # A worker that was started again connects again.
            arrived = self._waiting.setdefault((session, purpose, rank), [])
            arrived.append(_WaitingConnection(connection, hello, time.monotonic()))
            self._changed.notify_all()
        return True

    def take(
        self,
        session: str,
        purpose: str,
        rank: int,
        deadline: Deadline,
        stop: threading.Event,
    ) -> Connection | None:
        """Wait for a connection of `rank` for this session and purpose.

        If there is more than one, the newest counts.

        Returns:
            The connection, now the caller's; None if there was none by the deadline,
            or before `stop` was set (and `interrupt` called).
        """
        found = self.take_any(session, purpose, deadline.remaining(), stop, rank)
        for _, older, _ in found[:-1]:
            older.close()
        return found[-1][1] if found else None

    def take_any(
        self,
        session: str,
        purpose: str,
        seconds: float,
        stop: threading.Event | None = None,
        rank: int | None = None,
    ) -> list[tuple[int, Connection, dict[str, Any]]]:
        """Take all connections for this session and purpose; wait for the first.

        Args:
            session: The session.
            purpose: The purpose.
            seconds: How long to wait.
            stop: When this is set (and `interrupt` called), wait no longer.
            rank: The rank; None: any.

        Returns:
            Rank, connection and hello of each; those of one rank in order of arrival.
        """
        with self._changed:

            def here() -> list[_Key]:
                known = (key for key in self._waiting if key[:2] == (session, purpose))
                return [key for key in known if rank in (None, key[2])]

            self._changed.wait_for(
                lambda: self._closed or here() or (stop is not None and stop.is_set()),
                seconds,
            )
            return [
                (key[2], each.connection, each.hello)
                for key in here()
                for each in self._waiting.pop(key)
            ]

    def interrupt(self) -> None:
        """Wake all waits, which then check their `stop` events."""
        with self._changed:
            self._changed.notify_all()

    def others(self, session: str, purpose: str) -> dict[int, str]:
        """Return the other sessions of connections for the same purpose, by rank."""
        with self._changed:
            return {
                rank: other
                for other, why, rank in self._waiting
                if why == purpose and other != session
            }

    def drop_stale(self, seconds: float) -> None:
        """Close connections that have ended, or waited for longer than this."""
        oldest = time.monotonic() - seconds
        with self._changed:
            for key, arrived in list(self._waiting.items()):
                for each in list(arrived):
                    if each.since < oldest or each.connection.ended:
                        each.connection.close()
                        arrived.remove(each)
                if not arrived:
                    del self._waiting[key]

    def close(self) -> None:
        """Close all connections, and end all waits."""
        with self._changed:
            self._closed = True
            waiting = [each for key in self._waiting.values() for each in key]
            self._waiting.clear()
            self._changed.notify_all()
        for each in waiting:
            each.connection.close()


HANDSHAKE_SECONDS = 10.0
# Handshakes at once: a whole job's workers connect together. When there are more, the
# oldest is closed: a worker's handshake takes milliseconds.
MOST_HANDSHAKES = 256
# Seconds between two looks whether waiting connections have been closed.
LOOK_SECONDS = 5.0
# Seconds before accepting again when the process has no descriptors or memory.
_PAUSE_SECONDS = 0.1


class Listener:
    """Accepts authenticated connections for all sessions of this process.

    Use `Listener.acquire`; every acquire needs one `release`.

    Attributes:
        unix_name: Name of the Unix socket, for workers on this host.
        pending: The connections that have been accepted.
    """

    _open_lock = threading.Lock()
    _open: dict[str, Listener] = {}  # noqa: RUF012 - the process's, not the class's
    # Sessions that this process has left, by address, also before the present listener.
    _all_left: dict[str, set[str]] = {}  # noqa: RUF012 - likewise

    def __init__(self, address: str, secret: bytes, patience: float) -> None:
        self.address = address
        self._patience = patience
        self.unix_name = f"\0kerasdist-{os.getpid()}-{secrets.token_hex(8)}"
        self._secret = secret
        self._credentials = Credentials.read(os.environ)
        self._users = 0
        self.pending = PendingConnections()
        self._lock = threading.Lock()
        # In the order in which they began.
        self._shaking: dict[socket.socket, None] = {}
        self._threads: set[threading.Thread] = set()
        self._refused: collections.deque[str] = collections.deque(maxlen=20)
        self._left = self._all_left.setdefault(address, set())
        self._log = LimitedLog()
        self._closed = False
        with contextlib.ExitStack() as undo:
            inherited = inherited_socket(split_address(address)[1])
            self._handed_down = inherited is not None
            self._tcp = [inherited] if inherited is not None else _listen(address)
            for sock in self._tcp:
                undo.callback(sock.close)
            self._unix = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._unix.bind(self.unix_name)
            self._unix.listen(128)
            self._wake, self._woken = socket.socketpair()
            undo.callback(self._wake.close)
            undo.callback(self._woken.close)
            # Also the socket whose end wakes the thread.
            for sock in (*self._tcp, self._unix, self._wake, self._woken):
                close_in_children(sock)
            self._thread = daemon(f"kerasdist-listener {address}", self._accept)
            self._thread.start()
            undo.pop_all()

    @classmethod
    def acquire(cls, address: str, secret: bytes, patience: float = 300.0) -> Listener:
        """Return this process's listener at `address`; start it if there's none.

        Args:
            address: This task's, as the cluster's settings have it.
            secret: The job's secret.
            patience: Seconds that a connection may wait until it's taken.

        Raises:
            AddressInUseError: Another process listens there, or the address
                isn't this machine's.
            ClusterError: A strategy of this process listens there with another
                secret or other certificates.
        """
        with cls._open_lock:
            listener = cls._open.get(address)
            if listener is None:
                listener = cls._open[address] = cls(address, secret, patience)
            elif listener._secret != secret:
                raise ClusterError(
                    "The job secret has changed while another strategy of this "
                    f"process uses the old one. Received: address={address!r}. Keep "
                    "KERASDIST_SECRET as it is, or close the other strategy first."
                )
            elif listener._credentials != Credentials.read(os.environ):
                raise ClusterError(
                    "KERASDIST_TLS has changed while another strategy of this process "
                    f"uses the old one. Received: address={address!r}. Keep it as it "
                    "is, or close the other strategy first."
                )
            listener._users += 1
            listener._patience = max(listener._patience, patience)
            return listener

    def release(self) -> None:
        """Release the listener; the last release closes it."""
        with self._open_lock:
            self._users -= 1
            if self._users:
                return
            self._open.pop(self.address, None)
            self._closed = True
            self.pending.close()
            self._wake.close()
            self._thread.join(HANDSHAKE_SECONDS)
            # Before another listener may take the address: it must be free, also where
            # a forked child has a copy. The launcher's is for the next strategy.
            if not self._handed_down:
                for sock in self._tcp:
                    _shut_down(sock)
            _shut_down(self._unix)
            for sock in (*self._tcp, self._unix, self._woken):
                sock.close()
        with self._lock:
            threads = list(self._threads)
            for sock in self._shaking:
                _shut_down(sock)
        for thread in threads:
            thread.join(HANDSHAKE_SECONDS)
        self._log.flush()

    def leave(self, session: str) -> None:
        """Answer connections for a session by a REFUSAL from now on.

        While the process holds another strategy, it still listens, or listens again.
        """
        with self._lock:
            self._left.add(session)

    def enter(self, session: str) -> None:
        """Accept connections for a session again."""
        with self._lock:
            self._left.discard(session)

    def refusals(self) -> list[str]:
        """Return the last refused connections with reasons, oldest first."""
        with self._lock:
            return list(self._refused)

    def _accept(self) -> None:
        servers = (*self._tcp, self._unix)
        poll, pause = select.poll(), select.poll()
        for sock in (*servers, self._woken):
            sock.setblocking(False)
            poll.register(sock, select.POLLIN)
        pause.register(self._woken, select.POLLIN)
        look = time.monotonic() + LOOK_SECONDS
        while not self._closed:
            poll.poll(LOOK_SECONDS * 1000)
            for server in servers:
                if self._closed:
                    return
                try:
                    self._accept_one(server)
                except (BlockingIOError, ConnectionError):
                    continue
                except Exception as error:
                    # No file descriptor or memory for it now; it stays in the queue.
                    # Without this thread no process could connect any more.
                    self._log.warning("kerasdist can't accept a connection: %s", error)
                    pause.poll(_PAUSE_SECONDS * 1000)
            if time.monotonic() >= look:
                self._drop_stale()
                look = time.monotonic() + LOOK_SECONDS

    def _drop_stale(self) -> None:
        self.pending.drop_stale(self._patience + HANDSHAKE_SECONDS)

    def _accept_one(self, server: socket.socket) -> None:
        sock, source = server.accept()
        if server is self._unix:
            self._begin(sock, "this host")
        else:
            sock = wrap(sock, self._credentials, server=True)
            self._begin(sock, f"{source[0]}:{source[1]}")

    def _begin(self, sock: socket.socket, where: str) -> None:
        close_in_children(sock)
        thread = daemon("kerasdist-handshake", self._accept_handshake, sock, where)
        with self._lock:
            if len(self._shaking) >= MOST_HANDSHAKES:
                oldest = next(iter(self._shaking))
                del self._shaking[oldest]
                _shut_down(oldest)
            self._shaking[sock] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no room for a thread
            self._log.warning("kerasdist can't accept %s: %s", where, error)
            with self._lock:
                del self._shaking[sock]
                self._threads.discard(thread)
            sock.close()

    def _accept_handshake(self, sock: socket.socket, where: str) -> None:
        kept = False
        try:
            sock.setblocking(True)
            deadline = Deadline(HANDSHAKE_SECONDS)
            unix = sock.family == socket.AF_UNIX
            encrypted = self._credentials is not None and not unix
            # Another user's process is refused before it sends anything, unless a
            # refusal can be sent only after TLS's handshake.
            if not encrypted:
                self._check_user(sock, deadline)
            if not unix:
                accept_tls(sock, deadline, where)
            if encrypted:
                self._check_user(sock, deadline)
            hello, auth = handshake.receive(
                *(sock, self._secret, deadline, where, self.address),
                binding=binding_of(sock),
            )
            self._drop_stale()
            connection = Connection(sock, auth)
            with self._lock:
                left = hello.get("session") in self._left
            if left:
                connection.write_json(FrameType.REFUSAL, {}, deadline)
            else:
                kept = self.pending.put(connection, hello)
        except EOFError:
            # A probe (`kerasdist doctor`, start-up of other ranks) ends like this:
            # there is nothing to report.
            pass
        except Exception as error:
            # No received bytes may end a thread with a traceback.
            self._refuse(f"{where}: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._shaking.pop(sock, None)
                self._threads.discard(threading.current_thread())
                if not kept:
                    sock.close()

    def _refuse(self, reason: str) -> None:
        if not self._closed:
            self._log.warning("kerasdist refused a connection from %s", reason)
        with self._lock:
            self._refused.append(reason)

    def _check_user(self, sock: socket.socket, deadline: Deadline) -> None:
        """Check that a process belongs to this user, if there is no secret to prove."""
        if self._secret or not is_loopback(self.address):
            return
        why_not = why_not_same_user(sock)
        if why_not is not None:
            write_frame(sock, FrameType.REFUSAL, b"", deadline)
            raise AuthenticationError(
                f"Without KERASDIST_SECRET only processes of one user can form a job, "
                f"but {why_not}. If it belongs to the job, set KERASDIST_SECRET to the "
                "same value on all workers."
            )


def _shut_down(sock: socket.socket) -> None:
    """End a connection that another thread is using; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _listen(address: str) -> list[socket.socket]:
    port = split_address(address)[1]
    try:
        return listen_at(address)[0]
    except OSError as error:
        raise AddressInUseError(
            f"This worker can't listen at its address {address}: "
            f"{os.strerror(error.errno or 0)}. "
            f"Received: {address!r} as this task's entry of the cluster. Is another "
            "job or an earlier process of this one still running there? End it "
            f"(`ss -ltnp 'sport = :{port}'` shows it) or choose another port."
        ) from error
