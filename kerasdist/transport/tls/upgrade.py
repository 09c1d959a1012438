"""The TLS handshake of both sides, before the one that proves the secret.

    c: the side that connects     s: the side that listens

    1. c -> s, s -> c   TLS 1.3's handshake: each verifies the other's certificate
    2. s -> c           one byte: s has accepted c's certificate

In TLS 1.3 c has finished before s has seen its certificate, so without 2. it would
learn of a refusal in the midst of what follows. A side without TLS is recognized by its
first byte: s sends it a REFUSAL, which c understands with and without TLS.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from kerasdist.errors import AuthenticationError, ProtocolError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.tls.credentials import (
    VARIABLE,
    Credentials,
    why_not_verified,
    why_refused,
)
from kerasdist.transport.tls.tls_socket import TlsSocket, wrap
from kerasdist.transport.wire.framing import MAGIC, FrameType, pack_header, write_frame
from kerasdist.transport.wire.handshake import NEEDS_TLS

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


def wrap_dialed(sock: socket.socket, credentials: Credentials | None) -> socket.socket:
    """Return the socket with which `connect_tls` can be called, in the place of `sock`.

    Raises:
        ClusterError: The certificates can't be read any more.
        OSError: The connection is broken.
    """
    if credentials is None:
        return sock
    try:
        context = credentials.context(server=False)
    except BaseException:
        sock.close()
        raise
    return wrap(sock, context, server=False)


def wrap_accepted(
    sock: socket.socket, credentials: Credentials | None
) -> socket.socket:
    """Return the socket with which `accept_tls` can be called, in the place of `sock`.

    Raises:
        As `wrap_dialed`.
    """
    if credentials is None:
        return sock
    try:
        context = credentials.context(server=True)
    except BaseException:
        sock.close()
        raise
    return wrap(sock, context, server=True)


def connect_tls(sock: socket.socket, deadline: Deadline, address: str) -> None:
    """Make the handshake of the side that connects. Does nothing on a plain socket.

    Args:
        sock: See `wrap_dialed`.
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
        sock: See `wrap_accepted`.
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
