"""TLS: a task's certificates, and the handshake before the one that proves the secret.

    c: the side that connects     s: the side that listens

    1. c -> s, s -> c   TLS 1.3's handshake: each verifies the other's certificate
    2. s -> c           one byte: s has accepted c's certificate

In TLS 1.3 c has finished before s has seen its certificate, so without 2. it would
learn of a refusal in the midst of what follows. A side without TLS is recognized by its
first byte: s sends it a REFUSAL, which c understands with and without TLS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kerasdist.errors import AuthenticationError, ClusterError, ProtocolError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import MAGIC, FrameType, pack_header, write_frame
from kerasdist.transport.handshake import NEEDS_TLS, job_secret
from kerasdist.transport.memory import close_in_children

# The check of all settings that protect a job's connections, before it starts.


def checked_secret(addresses: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Check the job's secret and this task's certificates; return the secret.

    Args:
        addresses: The addresses of the job's tasks.
        environ: The environment, see `job_secret` and `Credentials`.

    Raises:
        ClusterError: There is no secret where one is needed; it is too short; or the
            certificates can't be used.
    """
    secret = job_secret(addresses, environ)
    credentials = Credentials.read(environ)
    if credentials is not None:
        credentials.check()
    return secret


# The reasons, in words, for which a TLS handshake has failed.

# Of OpenSSL's `X509_V_ERR_...`.
_VERIFICATIONS = {
    9: "isn't valid yet (is a clock wrong?)",
    10: "has expired",
    18: "is self-signed, and not signed by the job's CA",
    19: "isn't signed by the job's CA, but by another one",
    20: "isn't signed by the job's CA",
    21: "isn't signed by the job's CA",
    26: "isn't for this purpose: its extended key usage must have both serverAuth and "
    "clientAuth, or be absent",
}
# Parts of the names that OpenSSL's versions have for the alerts of TLS.
_ALERTS = {
    "UNKNOWN_CA": "isn't signed by that task's CA",
    "CERTIFICATE_EXPIRED": "has expired or isn't valid yet, by that task's clock",
    "CERTIFICATE_REQUIRED": "is missing",
    "UNSUPPORTED_CERTIFICATE": "isn't for this purpose",
    "BAD_CERTIFICATE": "isn't valid",
    "CERTIFICATE_REVOKED": "was revoked",
    "CERTIFICATE_UNKNOWN": "isn't acceptable",
}


def why_not_verified(error: ssl.SSLCertVerificationError) -> str:
    """Complete "the certificate ...", without a full stop."""
    known = _VERIFICATIONS.get(error.verify_code)
    return known or f"isn't valid ({error.verify_message})"


def why_refused(error: ssl.SSLError) -> str | None:
    """Complete "this task's certificate ...", if the other side has refused it."""
    name = error.reason or ""
    if "ALERT" not in name:
        return None
    return next((text for part, text in _ALERTS.items() if part in name), None)


# This task's certificate, its key and the job's CA, as `KERASDIST_TLS` names them.

VARIABLE = "KERASDIST_TLS"
_EXPECTED = (
    'Expected "certificate,key,ca": three files in PEM format, which exist on each '
    "host. docs/tls.md shows how to make them."
)
# A handshake with oneself takes two turns of each side.
_TURNS = 4


class _Encrypted(Exception):
    """The key needs a password, which no process could be asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The files that make up this task's side of a TLS connection.

    They are read for each connection, so certificates can be renewed while a job runs.

    Attributes:
        certificate: The path of this task's certificate, with those between it and the
            CA, if there are any.
        key: The path of the certificate's private key, without a password.
        ca: The path of the certificates of the job's CA.
    """

    certificate: str
    key: str
    ca: str

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Credentials | None:
        """Return what `KERASDIST_TLS` names, without a look at the files.

        Returns:
            The paths; None if the variable isn't set: then nothing is encrypted.

        Raises:
            ClusterError: These aren't three paths.
        """
        text = environ.get(VARIABLE, "")
        if not text.strip():
            return None
        paths = [path.strip() for path in text.split(",")]
        if len(paths) != 3 or not all(paths):
            raise ClusterError(
                f"{VARIABLE} can't be used: it doesn't have three paths. "
                f"Received: {text!r}. {_EXPECTED}"
            )
        return cls(certificate=paths[0], key=paths[1], ca=paths[2])

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Return the settings of one side of a connection: it verifies the other one.

        Args:
            server: Whether this side listens.

        Raises:
            ClusterError: The files can't be used any more.
        """
        protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(protocol)
        # Addresses change in clusters: the CA decides who belongs to the job, and the
        # handshake inside the tunnel which task of it this is.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The end of a stream is judged by authenticated frames, as without TLS.
        context.options |= getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
        if server:
            context.num_tickets = 0  # no connection is resumed
        try:
            context.load_verify_locations(self.ca)
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, _Encrypted) as error:
            raise ClusterError(self._message(self._explain(error))) from error
        return context

    def check(self) -> None:
        """Check that another task with certificates of the same CA can accept these.

        Raises:
            ClusterError: It can't; the message has all the reasons.
        """
        fault = _verify(self.context(server=True), self.context(server=False))
        if fault is not None:
            fault = f"the certificate {self.certificate!r} {fault}"
            raise ClusterError(self._message(fault))

    def _files(self) -> dict[str, str]:
        return {"certificate": self.certificate, "key": self.key, "CA": self.ca}

    def _explain(self, error: OSError | _Encrypted) -> str:
        """Find out which files can't be loaded."""
        if isinstance(error, _Encrypted):
            return (
                f"the key {self.key!r} is encrypted with a password, which a job can't "
                "ask for (`openssl pkey -in KEY -out PLAIN` decrypts it)"
            )
        unreadable = [
            f"the {name} {path!r} can't be read ({failed.strerror})"
            for name, path in self._files().items()
            if (failed := _reading_error(path)) is not None
        ]
        if unreadable:
            return "; ".join(unreadable)
        for name, path in (("certificate", self.certificate), ("CA", self.ca)):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
            except ssl.SSLError:
                return f"the {name} {path!r} isn't a certificate in PEM format"
        if "MISMATCH" in (getattr(error, "reason", None) or ""):
            return (
                f"the key {self.key!r} doesn't belong to the certificate "
                f"{self.certificate!r}"
            )
        return f"the key {self.key!r} isn't a private key in PEM format"

    def _message(self, fault: str) -> str:
        shown = ",".join(self._files().values())
        return f"{VARIABLE} can't be used: {fault}. Received: {shown!r}. {_EXPECTED}"


def tls_fault(environ: Mapping[str, str]) -> str | None:
    """Describe why the certificates that are set can't be used; None if they can."""
    try:
        credentials = Credentials.read(environ)
        if credentials is not None:
            credentials.check()
    except ClusterError as error:
        return str(error)
    return None


def _reading_error(path: str) -> OSError | None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return error
    return None


def _no_password() -> str:
    raise _Encrypted


def _verify(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Connect both sides in memory; return why one refuses the certificate."""
    first, second = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(first, second), server.wrap_bio(second, first, True))
    for _ in range(_TURNS):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return why_not_verified(error)
            except ssl.SSLError as error:
                return f"can't be used for TLS 1.3 ({error.reason or error})"
    return None


# A socket whose bytes are encrypted, with the semantics of a plain one.
#
# Python's `SSLSocket` differs from a socket in what its users here rely on: it has no
# `sendmsg`, raises errors of its own when it would block, and after `shutdown` it is a
# plain socket, which returns the encrypted bytes. Two threads may not use it at once
# (OpenSSL's state isn't safe; Python guards it only from 3.13 on). So here every call
# of OpenSSL is made with a lock and doesn't block; the waits are outside of it, and one
# thread can read while another one writes or shuts down.
#
# OpenSSL takes one record (at most 16 KiB) at a time from the kernel, so after a `recv`
# with room for a record nothing is left that `poll` can't see. After a shorter one
# something may be: see `holds_bytes`.

_Result = TypeVar("_Result")

_RECORD_BYTES = 1 << 14
# Encrypted in one call, so that an exchange reads in between.
_MOST_WRITTEN = 1 << 18
_LONGEST_WAIT = 1e6


class TlsSocket(ssl.SSLSocket):
    """A TLS connection. Made by `wrap`; `do_handshake` must be called first.

    The end of the stream is that of the TCP connection: whether a process has left in
    good order is what authenticated frames say.
    """

    # `SSLContext.wrap_socket` creates it without a call of `__init__`.
    _seconds: float | None = None
    _lock: threading.Lock
    _process: int
    _ahead: bytes

    def settimeout(self, value: float | None, /) -> None:
        """See `socket.settimeout`. The descriptor itself never blocks."""
        self._seconds = value

    def setblocking(self, flag: bool, /) -> None:
        """See `socket.setblocking`."""
        self._seconds = None if flag else 0.0

    def gettimeout(self) -> float | None:
        """See `socket.gettimeout`."""
        return self._seconds

    def do_handshake(self, block: bool = False) -> None:
        """Make the connection a TLS connection, until the time-out."""
        self._repeat(super().do_handshake)

    def peek_plain(self, count: int) -> bytes:
        """Return the first bytes that have arrived, before the handshake."""
        return self._repeat(
            lambda: socket.socket.recv(self, count, socket.MSG_PEEK),
        )

    def send_plain(self, data: bytes) -> None:
        """Send a few bytes as they are, in the place of a handshake."""
        self._repeat(lambda: socket.socket.send(self, data))

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """See `socket.recv`; of the flags, with MSG_PEEK alone."""
        if flags & socket.MSG_PEEK:
            if not self._ahead:
                self._ahead = self._repeat(lambda: self.read(buflen))
            return self._ahead[:buflen]
        if self._ahead:
            found, self._ahead = self._ahead[:buflen], self._ahead[buflen:]
            return found
        return self._repeat(lambda: self.read(buflen))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """See `socket.recv_into`."""
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        if not view:
            return 0
        if self._ahead:
            found = self.recv(len(view))
            view[: len(found)] = found
            return len(found)
        # With a buffer `read` returns the number of bytes.
        return self._repeat(lambda: int(self.read(len(view), view)))

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Iterable[Any], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """See `socket.recvmsg_into`. Only the first buffer that isn't empty is used."""
        for buffer in buffers:
            if len(buffer):
                return self.recv_into(buffer), [], 0, None
        return 0, [], 0, None

    def send(self, data: Any, flags: int = 0) -> int:
        """See `socket.send`. If it would block, it must be called again.

        Until it has succeeded, the data must begin with the same bytes: a part of them
        may have been sent.
        """
        with memoryview(data).cast("B") as view, view[:_MOST_WRITTEN] as part:
            return self._repeat(lambda: self.write(part))

    def sendmsg(  # type: ignore[override]
        self,
        buffers: Iterable[Any],
        ancdata: Iterable[Any] = (),
        flags: int = 0,
        address: Any = None,
    ) -> int:
        """See `socket.sendmsg` and `send`. Small buffers are sent as one record."""
        parts = list(buffers)
        if not parts:
            return 0
        if len(parts) == 1 or len(parts[0]) >= _RECORD_BYTES:
            return self.send(parts[0])
        return self.send(_first_record(parts))

    def sendall(self, data: Any, flags: int = 0) -> None:
        """See `socket.sendall`."""
        with memoryview(data).cast("B") as view:
            done = 0
            while done < len(view):
                with view[done:] as rest:
                    done += self.send(rest)

    def shutdown(self, how: int, /) -> None:
        """See `socket.shutdown`: of the TCP connection, from any thread."""
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        """See `socket.close`."""
        # Another thread of the parent may have held the lock at the fork.
        if os.getpid() != self._process:
            super().close()
            return
        with self._lock:
            super().close()

    @property
    def binding(self) -> bytes:
        """A number of 32 or 48 bytes, which the ends of this connection alone know.

        It's the client's Finished message: a MAC, with a key of this connection alone,
        of its whole handshake, which contains both certificates (RFC 8446, 4.4.4).
        """
        with self._lock:
            found = self.get_channel_binding("tls-unique")
        if not found:
            raise ssl.SSLError("OpenSSL doesn't tell the handshake's Finished message")
        return found

    @property
    def holds_bytes(self) -> bool:
        """Whether bytes were received that `poll` doesn't report."""
        with self._lock:
            return bool(self._ahead) or self.pending() > 0

    def _repeat(self, operation: Callable[[], _Result]) -> _Result:
        """Call what doesn't block until it succeeds or the time-out has passed."""
        until = math.inf
        while True:
            try:
                with self._lock:
                    return operation()
            except (ssl.SSLWantReadError, BlockingIOError):
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ssl.SSLError:  # a ValueError too, if a certificate isn't accepted
                raise
            except ValueError as error:  # closed by another thread
                raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from error
            seconds = self._seconds
            if seconds == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if seconds is not None:
                if until == math.inf:
                    until = time.monotonic() + seconds
                elif time.monotonic() >= until:
                    raise TimeoutError("timed out")
            left = min(until - time.monotonic(), _LONGEST_WAIT)
            poll = select.poll()
            poll.register(self, event)
            poll.poll(max(left, 0.0) * 1000)


def wrap(
    sock: socket.socket, credentials: Credentials | None, *, server: bool
) -> socket.socket:
    """Return a TLS socket in the place of a connected socket, before the handshake.

    Args:
        sock: The socket; it can't be used any more afterwards.
        credentials: This side's; None: it doesn't use TLS, and the socket is returned.
        server: Whether this side has accepted the connection: then `accept_tls` makes
            the handshake, else `connect_tls`.

    Raises:
        ClusterError: The certificates can't be read any more. The socket is closed.
        OSError: The connection is broken. The socket is closed.
    """
    if credentials is None:
        return sock
    seconds = sock.gettimeout()
    try:
        context = credentials.context(server=server)
        context.sslsocket_class = TlsSocket
        wrapped = context.wrap_socket(
            sock,
            server_side=server,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
        )
    except BaseException:
        sock.close()
        raise
    if not isinstance(wrapped, TlsSocket):
        raise TypeError(f"Received: {type(wrapped).__name__}, expected a TlsSocket.")
    wrapped._lock = threading.Lock()
    wrapped._process = os.getpid()
    wrapped._ahead = b""
    socket.socket.settimeout(wrapped, 0.0)
    wrapped.settimeout(seconds)
    close_in_children(wrapped)
    return wrapped


def binding_of(sock: socket.socket) -> bytes:
    """Return what tells a connection from all others, after the handshake.

    Empty for a socket without TLS.
    """
    return sock.binding if isinstance(sock, TlsSocket) else b""


def holds_bytes(sock: socket.socket) -> bool:
    """Return whether a socket has received bytes that `poll` doesn't report."""
    return isinstance(sock, TlsSocket) and sock.holds_bytes


def _first_record(parts: Sequence[Any]) -> bytes:
    found = bytearray()
    for part in parts:
        with memoryview(part).cast("B") as view:
            found += view[: _RECORD_BYTES - len(found)]
        if len(found) == _RECORD_BYTES:
            break
    return bytes(found)


_ACCEPTED = b"\x01"
_MOST_DRAINED = 16
# What OpenSSL says when the other side's bytes aren't TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
# The first byte of a TLS connection: a record of its handshake.
_HELLO = 0x16
_SAME = f"Set {VARIABLE} on all tasks of the job, or on none."
_RENEW = (
    f"All tasks' certificates in {VARIABLE} must be valid and signed by the same CA "
    "(`openssl verify -CAfile CA CERTIFICATE`)."
)


def connect_tls(sock: socket.socket, deadline: Deadline, address: str) -> None:
    """Make the handshake of the side that connects. Does nothing on a plain socket.

    Args:
        sock: See `wrap`.
        deadline: When to give up.
        address: The other side's, for messages.

    Raises:
        AuthenticationError: One side refuses the other's certificate, or the other
            side doesn't use TLS.
        ProtocolError: The other side doesn't follow TLS.
        EOFError, OSError: The connection has ended.
    """
    if not isinstance(sock, TlsSocket):
        return
    sock.settimeout(max(deadline.remaining(), 0.001))
    try:
        sock.do_handshake()
        if sock.recv(1) != _ACCEPTED:
            raise EOFError("the connection was closed")
    except ssl.SSLCertVerificationError as error:
        _drain(sock)
        raise _not_verified(error, address) from error
    except ssl.SSLEOFError as error:
        raise EOFError("the connection was closed") from error
    except ssl.SSLError as error:
        raise _translated(error, address) from error


def accept_tls(sock: socket.socket, deadline: Deadline, where: str) -> None:
    """Make the handshake of the side that listens.

    On a plain socket it only checks that the other side doesn't use TLS.

    Args:
        sock: See `wrap`.
        deadline: When to give up.
        where: The other side's address, for messages.

    Raises:
        As `connect_tls`.
    """
    sock.settimeout(max(deadline.remaining(), 0.001))
    encrypted = isinstance(sock, TlsSocket)
    first = sock.peek_plain(1) if isinstance(sock, TlsSocket) else _peek(sock)
    if not first:
        raise EOFError("the connection was closed")
    if (first[0] == _HELLO) != encrypted:
        _refuse(sock, first, deadline, where)
    if not isinstance(sock, TlsSocket):
        return
    try:
        sock.do_handshake()
        sock.sendall(_ACCEPTED)
    except ssl.SSLCertVerificationError as error:
        _drain(sock)
        raise _not_verified(error, where) from error
    except ssl.SSLEOFError as error:
        raise EOFError("the connection was closed") from error
    except ssl.SSLError as error:
        _drain(sock)
        raise _translated(error, where) from error


def _peek(sock: socket.socket) -> bytes:
    return sock.recv(1, socket.MSG_PEEK)


def _refuse(sock: socket.socket, first: bytes, deadline: Deadline, where: str) -> None:
    """Refuse a side that uses TLS if this one doesn't, or the other way round."""
    if not isinstance(sock, TlsSocket):
        write_frame(sock, FrameType.REFUSAL, b"", deadline)
        _drain(sock)
        raise AuthenticationError(
            f"The process at {where} uses TLS, and this one doesn't. "
            f"Received: {VARIABLE} isn't set here. {_SAME}"
        )
    if first != MAGIC[:1]:
        raise ProtocolError(
            f"The process at {where} doesn't begin with TLS's handshake. Received: "
            f"{first!r} as first byte. Another program is connected to this port."
        )
    # It fits in any socket's buffer.
    sock.send_plain(pack_header(FrameType.REFUSAL, len(NEEDS_TLS)) + NEEDS_TLS)
    _drain(sock)
    raise AuthenticationError(
        f"The process at {where} doesn't use TLS, and this one does. {_SAME}"
    )


def _not_verified(
    error: ssl.SSLCertVerificationError, where: str
) -> AuthenticationError:
    return AuthenticationError(
        f"The certificate of the process at {where} {why_not_verified(error)}. {_RENEW}"
    )


def _translated(error: ssl.SSLError, where: str) -> AuthenticationError | ProtocolError:
    reason = error.reason or str(error)
    refused = why_refused(error)
    if refused is not None:
        return AuthenticationError(
            f"The process at {where} has refused this task's certificate: it "
            f"{refused}. {_RENEW}"
        )
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return AuthenticationError(
            f"The process at {where} has no certificate. {_RENEW}"
        )
    if any(name in reason for name in _NO_TLS):
        return AuthenticationError(
            f"The process at {where} doesn't use TLS, and this one does. {_SAME} If "
            "that isn't a task of this job, choose another port."
        )
    return ProtocolError(
        f"The TLS handshake with the process at {where} failed. Received: {reason}; "
        "expected TLS 1.3, with certificates."
    )


def _drain(sock: socket.socket) -> None:
    """Let the last bytes arrive: unread ones would turn the end into a reset."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        for _ in range(_MOST_DRAINED):
            if not socket.socket.recv(sock, 1 << 16, socket.MSG_DONTWAIT):
                return
