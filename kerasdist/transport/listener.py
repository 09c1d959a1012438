"""The one place where a process listens: accept, check, hand over to a session.

A process listens at its address of the cluster once, however many strategies it
holds: each strategy is a session, every connection says in its hello which
session it is for, and waits in that session's mailbox until it is asked for.
The same accept thread serves a Unix socket (in Linux's abstract namespace: no
file to leave behind) for connections inside the host.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import threading
from typing import Any

from kerasdist.cluster.address import split_address
from kerasdist.errors import (
    AddressInUseError,
    AuthenticationError,
    ClusterError,
    ProtocolError,
)
from kerasdist.transport import handshake
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.forks import close_in_children

__all__ = ["Listener"]

_LOG = logging.getLogger("kerasdist")
_HANDSHAKE_SECONDS = 10.0
# So many may be in their handshake at once: a whole job's workers come together.
# When there are more, the oldest goes: a worker is done in milliseconds.
_MOST_HANDSHAKES = 256
_MOST_WAITING = 4096
# How long to wait before accepting again when the process has no room for it.
_PAUSE_SECONDS = 0.1

_Key = tuple[str, str, int]


class Listener:
    """Accepts authenticated connections for all sessions of this process.

    Use `Listener.acquire`; every acquire needs one `release`.

    Attributes:
        unix_name: Name of the Unix socket, for workers on this host.
    """

    _lock = threading.Lock()
    _open: dict[str, Listener] = {}  # noqa: RUF012 - the process's, not the class's

    def __init__(self, address: str, secret: bytes) -> None:
        self.address = address
        self.unix_name = f"\0kerasdist-{os.getpid()}-{secrets.token_hex(8)}"
        self._secret = secret
        self._users = 0
        self._changed = threading.Condition()
        # In the order in which they came; a rank may have come more than once.
        self._waiting: dict[_Key, list[tuple[socket.socket, dict[str, Any]]]] = {}
        # In the order in which they began.
        self._shaking: dict[socket.socket, None] = {}
        self._threads: set[threading.Thread] = set()
        self._refused: collections.deque[str] = collections.deque(maxlen=20)
        self._closed = False
        with contextlib.ExitStack() as undo:
            inherited = _inherited(split_address(address)[1])
            self._handed_down = inherited is not None
            self._tcp = undo.enter_context(inherited or _listen(address))
            self._unix = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._unix.bind(self.unix_name)
            self._unix.listen(128)
            self._wake, self._woken = socket.socketpair()
            undo.callback(self._wake.close)
            undo.callback(self._woken.close)
            # Also what wakes the thread up by its end.
            for sock in (self._tcp, self._unix, self._wake, self._woken):
                close_in_children(sock)
            self._thread = threading.Thread(
                target=self._accept, name=f"kerasdist-listener {address}", daemon=True
            )
            self._thread.start()
            undo.pop_all()

    @classmethod
    def acquire(cls, address: str, secret: bytes) -> Listener:
        """Return this process's listener at `address`; start it if there's none.

        Raises:
            AddressInUseError: Another process listens there, or the address
                isn't this machine's.
            ClusterError: A strategy of this process listens there with another
                secret.
        """
        with cls._lock:
            listener = cls._open.get(address)
            if listener is None:
                listener = cls._open[address] = cls(address, secret)
            elif listener._secret != secret:
                raise ClusterError(
                    "The job secret has changed while another strategy of this "
                    f"process uses the old one. Received: address={address!r}. Keep "
                    "KERASDIST_SECRET as it is, or close the other strategy first."
                )
            listener._users += 1
            return listener

    def release(self) -> None:
        """Give the listener back; the last one closes it."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._open.pop(self.address, None)
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._wake.close()
            self._thread.join(_HANDSHAKE_SECONDS)
            # Before another listener may take the address: it must be free, also where
            # a forked child has a copy. The launcher's is for the next strategy.
            if not self._handed_down:
                _shut_down(self._tcp)
            _shut_down(self._unix)
            for sock in (self._tcp, self._unix, self._woken):
                sock.close()
        with self._changed:
            threads = list(self._threads)
            for sock in self._shaking:
                _shut_down(sock)
            waiting = [sock for came in self._waiting.values() for sock, _ in came]
            self._waiting.clear()
        for thread in threads:
            thread.join(_HANDSHAKE_SECONDS)
        for sock in waiting:
            sock.close()

    def refusals(self) -> list[str]:
        """Whom this listener has sent away, and why, the last few, oldest first."""
        with self._changed:
            return list(self._refused)

    def others(self, session: str, purpose: str) -> dict[int, str]:
        """Who came for the same purpose, but for other sessions: by rank, where."""
        with self._changed:
            return {
                rank: other
                for other, why, rank in self._waiting
                if why == purpose and other != session
            }

    def interrupt(self) -> None:
        """Let everybody who waits look again whether it still makes sense."""
        with self._changed:
            self._changed.notify_all()

    def take(
        self,
        session: str,
        purpose: str,
        rank: int,
        deadline: Deadline,
        stop: threading.Event,
    ) -> socket.socket | None:
        """Wait for a connection of `rank` for this session and purpose.

        If it has come more than once, the newest counts.

        Returns:
            The connected socket, now the caller's; None if it hadn't come by the
            deadline, or before `stop` was set (and `interrupt` called).
        """
        key = (session, purpose, rank)
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._waiting or self._closed or stop.is_set(),
                deadline.remaining(),
            )
            found = self._waiting.pop(key, [])
        for older, _ in found[:-1]:
            older.close()
        return found[-1][0] if found else None

    def take_any(
        self,
        session: str,
        purpose: str,
        seconds: float,
        stop: threading.Event | None = None,
    ) -> list[tuple[int, socket.socket, dict[str, Any]]]:
        """Take all connections for this session and purpose; wait for the first.

        Args:
            session: Which session.
            purpose: Which purpose.
            seconds: How long to wait.
            stop: When this is set (and `interrupt` called), wait no longer.

        Returns:
            Rank, connected socket and hello of each, in the order of a rank's.
        """
        with self._changed:

            def here() -> list[_Key]:
                return [key for key in self._waiting if key[:2] == (session, purpose)]

            self._changed.wait_for(
                lambda: self._closed or here() or (stop is not None and stop.is_set()),
                seconds,
            )
            return [
                (key[2], sock, hello)
                for key in here()
                for sock, hello in self._waiting.pop(key)
            ]

    def _accept(self) -> None:
        poll = select.poll()
        for sock in (self._tcp, self._unix, self._woken):
            sock.setblocking(False)
            poll.register(sock, select.POLLIN)
        while not self._closed:
            poll.poll()
            for server in (self._tcp, self._unix):
                if self._closed:
                    return
                try:
                    sock, source = server.accept()
                except (BlockingIOError, ConnectionError):
                    continue
                except OSError as error:
                    # No file descriptor or memory for it now; it stays in line.
                    _LOG.warning("kerasdist can't accept a connection: %s", error)
                    select.select([self._woken], [], [], _PAUSE_SECONDS)
                    continue
                local = server is self._unix
                self._begin(sock, "this host" if local else f"{source[0]}:{source[1]}")

    def _begin(self, sock: socket.socket, where: str) -> None:
        close_in_children(sock)
        thread = threading.Thread(
            target=self._welcome,
            args=(sock, where),
            name="kerasdist-handshake",
            daemon=True,
        )
        with self._changed:
            if len(self._shaking) >= _MOST_HANDSHAKES:
                oldest = next(iter(self._shaking))
                del self._shaking[oldest]
                _shut_down(oldest)
            self._shaking[sock] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no room for a thread
            _LOG.warning("kerasdist can't answer %s: %s", where, error)
            with self._changed:
                del self._shaking[sock]
                self._threads.discard(thread)
            sock.close()

    def _welcome(self, sock: socket.socket, where: str) -> None:
        kept = False
        try:
            sock.setblocking(True)
            hello = handshake.receive(
                sock, self._secret, Deadline(_HANDSHAKE_SECONDS), where
            )
            kept = self._keep(sock, hello)
        except EOFError:
            # A look whether somebody listens (`kerasdist doctor`, start-up of
            # other ranks) ends like this: nothing to report.
            pass
        except (AuthenticationError, ProtocolError, OSError) as error:
            reason = f"{where}: {type(error).__name__}: {error}"
            if not self._closed:
                _LOG.warning("kerasdist refused a connection from %s", reason)
            with self._changed:
                self._refused.append(reason)
        finally:
            with self._changed:
                self._shaking.pop(sock, None)
                self._threads.discard(threading.current_thread())
                if not kept:
                    sock.close()

    def _keep(self, sock: socket.socket, hello: dict[str, Any]) -> bool:
        try:
            key = (str(hello["session"]), str(hello["purpose"]), int(hello["rank"]))
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(
                f"A hello is incomplete. Received: {hello!r}."
            ) from None
        with self._changed:
            count = sum(len(came) for came in self._waiting.values())
            if self._closed or count >= _MOST_WAITING:
                return False
            # A worker that was started again comes again.
            self._waiting.setdefault(key, []).append((sock, hello))
            self._changed.notify_all()
        return True


def _shut_down(sock: socket.socket) -> None:
    """End a connection that another thread is using; that thread closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    loopback = host in ("localhost", "::1") or host.startswith("127.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, UnicodeError) as error:
            elsewhere = isinstance(error, (socket.gaierror, UnicodeError)) or (
                error.errno == errno.EADDRNOTAVAIL
            )
            if loopback or not elsewhere:
                raise
            # The name that others use for this worker needn't be an address of
            # this machine: a Kubernetes service is not. Its port is what counts.
            sock.bind(("::" if family == socket.AF_INET6 else "", port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        raise AddressInUseError(
            f"This worker can't listen at its address {address}: {error.strerror}. "
            f"Received: {address!r} as this task's entry of the cluster. Is another "
            "job or an earlier process of this one still running there? End it "
            f"(`ss -ltnp 'sport = :{port}'` shows who it is) or choose another port."
        ) from error
    return sock


def _inherited(port: int) -> socket.socket | None:
    """A copy of the launcher's socket at this port, if there is one.

    The launcher holds the port from before this process began, so nobody can take
    it in between. It stays open for a later strategy.
    """
    number = os.environ.get("KERASDIST_LISTEN_FD", "")
    if not number.isdigit():
        return None
    try:
        copy = os.dup(int(number))
    except (OSError, OverflowError):
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # it isn't a socket
        os.close(copy)
        return None
    with contextlib.suppress(OSError):
        internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if (
            internet
            and sock.getsockname()[1] == port
            and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            return sock
    sock.close()
    return None
