"""Mutual proof of the job's secret at the beginning of every connection.

    c: the side that connects     s: the side that listens
    K: the job's secret           A: the address of s, as the cluster's settings have it

    1. c -> s   CHALLENGE  nonce Nc (32 random bytes)
    2. s -> c   CHALLENGE  nonce Ns
    3. c -> s   HELLO      the A that c has dialed, and the purpose (JSON): session,
                           purpose, rank, and further values of that purpose
    4. c -> s   PROOF      H("client")      s checks it, and whether A is its own
    5. s -> c   PROOF      H("server")      c checks it

    B        = the TLS connection's `tls.binding_of`; empty without TLS
    T        = SHA-256(version | Nc | Ns | B | the payload of 3.)
    H(label) = HMAC-SHA256(K, label | T)

T covers all messages before, so a proof holds for this connection, this address and
this purpose alone. With TLS it covers the TLS connection, too: who stands between c and
s, with a certificate of the CA, has a connection of his own with each of them, and
can't pass on the proofs. A process of the job proves nothing for another's address: one
that listens at an address without being the one that belongs there can't get a proof
from any other listener of the job. c proves first: a foreign process that only connects
gets nothing that depends on the secret. (One that listens at an address gets
H("client"), and may guess the secret from it offline: so short secrets are refused.)
The label keeps either side from sending back the other's proof.

A side that finds the other's proof to be wrong sends REFUSAL, so that both sides know
the reason; if the proof is right, but for another address, the REFUSAL holds
H("elsewhere").

Frames that follow are authenticated with keys of this connection, H("keys of c") and
H("keys of s"), each for the frames that this side sends
(`kerasdist.transport.handshake`); bulk data are not. Nothing is encrypted here:
the secret keeps foreign processes out of a job, it doesn't hide the gradients (RFC 2104
for HMAC). With `KERASDIST_TLS` all of this is inside of a TLS connection
(`kerasdist.transport.tls`); a REFUSAL that holds "tls" tells a side without
TLS about it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from kerasdist.cluster.address import split_address
from kerasdist.errors import AuthenticationError, ClusterError, ProtocolError
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import (
    VERSION,
    FrameType,
    read_frame,
    to_json,
    write_frame,
)

# A check that the process at the other end of a connection is this user's own.
#
# It's for connections inside one machine. Jobs without a secret rely on it.

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MOMENT_MILLISECONDS = 50
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")

_End = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


def why_not_same_user(sock: socket.socket) -> str | None:
    """Describe why a peer can't be taken for a process of this user.

    Args:
        sock: A connected Unix socket, or a TCP socket whose ends are both on this
            machine. Its peer must have accepted the connection already.

    Returns:
        None if it is one; else the reason, without a full stop.

    Raises:
        EOFError: The peer has closed: its socket has no owner any more.
        OSError: The connection is broken.
    """
    mine = os.geteuid()
    if sock.family == socket.AF_UNIX:
        size = _CREDENTIALS.size
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        user: int | None = _CREDENTIALS.unpack(found)[1]
    else:
        user = _owner(_end(sock.getpeername()), _end(sock.getsockname()))
    if user == mine:
        return None
    _check_open(sock)
    if user is None:
        return "the user of the process at the other end is unknown"
    return f"the other end is a process of user {user}, this one is of user {mine}"


def _check_open(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    # The end of a connection may arrive a moment after its socket has lost its owner.
    if poll.poll(_MOMENT_MILLISECONDS) and sock.recv(1, socket.MSG_PEEK) == b"":
        raise EOFError("the connection was closed")


def _owner(local: _End, remote: _End) -> int | None:
    """Return the user of the TCP socket with these ends; None if it isn't found."""
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as rows:
                next(rows)
                for row in rows:
                    fields = row.split(maxsplit=8)
                    # The port alone rules out nearly all rows.
                    if not fields[1].endswith(f":{local[1]:04X}"):
                        continue
                    if _parse(fields[1]) == local and _parse(fields[2]) == remote:
                        return int(fields[7])
        except OSError:  # no IPv6, or no /proc
            continue
    return None


def _end(name: tuple[str, int]) -> _End:
    return _plain(ipaddress.ip_address(name[0].partition("%")[0])), name[1]


def _parse(text: str) -> _End:
    """Read `0100007F:1F90`: four-byte words in the processor's order, and a port."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(ipaddress.ip_address(packed)), int(port, 16)


def _plain(
    host: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an IPv4 address for one that is written as an IPv6 address."""
    return getattr(host, "ipv4_mapped", None) or host


# The job's secret, and the conditions under which a job needs none.

# A process that listens at an address of the job, or reads the network's traffic, can
# try guesses against a proof for as long as it likes.
_LEAST_BYTES = 16


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach `"host:port"`, judged by its text."""
    host = split_address(address)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which the network resolves
        return False


def secret_fault(environ: Mapping[str, str]) -> str | None:
    """Describe why the secret that is set can't be used; None if it can, or isn't set.

    The text doesn't show the secret.
    """
    length = len(_bytes(environ))
    if not 0 < length < _LEAST_BYTES:
        return None
    return (
        f"KERASDIST_SECRET is too short. Received: {length} bytes, expected at least "
        f"{_LEAST_BYTES}, which can't be guessed. Set it to the output of `openssl "
        "rand -hex 32`, the same on all workers."
    )


def _bytes(environ: Mapping[str, str]) -> bytes:
    return environ.get("KERASDIST_SECRET", "").encode("utf-8", "surrogateescape")


def job_secret(workers: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the secret that this job's workers prove to each other.

    Args:
        workers: The job's addresses.
        environ: The environment, with `KERASDIST_SECRET` and `KERASDIST_INSECURE`.

    Raises:
        ClusterError: The secret is too short; or there is none, an address can be
            reached from other machines, and the user hasn't opted out.
    """
    fault = secret_fault(environ)
    if fault is not None:
        raise ClusterError(fault)
    secret = _bytes(environ)
    if secret:
        return secret
    open_addresses = [address for address in workers if not is_loopback(address)]
    if open_addresses and environ.get("KERASDIST_INSECURE", "") != "1":
        raise ClusterError(
            "This job has no secret, and its workers can be reached from other "
            "machines. Received: KERASDIST_SECRET is not set, "
            f"workers={open_addresses}. Set KERASDIST_SECRET to the same random text "
            "on all workers (for example the output of `openssl rand -hex 32`; on "
            "Kubernetes from a Secret). "
            "Without it only loopback addresses are accepted, unless you set "
            "KERASDIST_INSECURE=1 on a network that only this job can reach."
        )
    return b""


# Authentication of single frames, after the handshake.
#
#     k   key of one direction of one connection, from the handshake
#     n   number of the frame in that direction, from 0; it isn't sent
#
#     tag = the first 16 bytes of HMAC-SHA256(k, n | frame), behind the frame
#
# A frame that was changed, injected, left out, repeated, sent in another order, sent
# back, or taken from another connection has a tag that doesn't fit.

TAG_BYTES = 16


class FrameAuthenticator:
    """The keys and frame numbers of one end of one connection.

    Not safe for several threads: frames are signed in the order in which they are
    sent, and checked in the order in which they were received.

    Args:
        sending: Key of the frames that this end sends.
        receiving: Key of the frames that it receives.
    """

    __slots__ = ("_received", "_receiving", "_sending", "_sent")

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self._sending = sending
        self._receiving = receiving
        self._sent = 0
        self._received = 0

    def sign(self, *parts: bytes | bytearray) -> bytes:
        """Return the tag of the next frame to send.

        Args:
            parts: The parts of the frame.
        """
        tag = _tag(self._sending, self._sent, parts)
        self._sent += 1
        return tag

    def check(self, tag: bytes | bytearray, *parts: bytes | bytearray) -> None:
        """Check the tag of the next frame received.

        Raises:
            ProtocolError: It doesn't fit. All further frames of this connection are
                untrusted.
        """
        if not hmac.compare_digest(tag, _tag(self._receiving, self._received, parts)):
            raise ProtocolError(
                "A frame isn't the other side's, or not the next one: it was changed, "
                "repeated, left out or injected on the network."
            )
        self._received += 1


def _tag(key: bytes, number: int, parts: tuple[bytes | bytearray, ...]) -> bytes:
    frame = b"".join((number.to_bytes(8, "big"), *parts))
    return hmac.digest(key, frame, "sha256")[:TAG_BYTES]


# The payload of a REFUSAL by a side that uses TLS.
NEEDS_TLS = b"tls"

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO_BYTES = 1 << 16


class _Proofs:
    """The proofs and keys, which both sides can compute after the hello."""

    def __init__(
        self, secret: bytes, nonces: bytes, binding: bytes, hello: bytes
    ) -> None:
        # Only the hello has no fixed length on both sides, and it is last.
        transcript = bytes([VERSION]) + nonces + binding + hello
        self._secret = secret
        self._transcript = hashlib.sha256(transcript).digest()

    def of(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, label + b"\0" + self._transcript, "sha256")

    def check(self, label: bytes, proof: bytes) -> bool:
        return hmac.compare_digest(proof, self.of(label))

    def keys(self, mine: bytes, other: bytes) -> FrameAuthenticator:
        return FrameAuthenticator(
            self.of(b"keys of " + mine), self.of(b"keys of " + other)
        )


def authenticate_as_client(
    sock: socket.socket,
    secret: bytes,
    hello: dict[str, Any],
    deadline: Deadline,
    address: str,
    binding: bytes = b"",
) -> FrameAuthenticator:
    """Send a hello to the side that listens, prove the secret to it, check its proof.

    Args:
        sock: A connected blocking socket.
        secret: The job's secret.
        hello: The purpose of this connection; a small JSON object.
        deadline: When to give up.
        address: The other side's, as the cluster's settings have it.
        binding: See `tls.binding_of`.

    Returns:
        The authenticator of the frames that follow.

    Raises:
        AuthenticationError: The other side doesn't hold the secret, or refused this
            side's proof.
        ProtocolError: The other side isn't the one that belongs to the address, or
            doesn't follow the protocol.
        EOFError, OSError: See `framing.read_frame`.
    """
    mine = os.urandom(_NONCE_BYTES)
    write_frame(sock, FrameType.CHALLENGE, mine, deadline)
    theirs = _nonce(sock, deadline, address)
    text = json.dumps({"address": address, "hello": hello}).encode()
    proofs = _Proofs(secret, mine + theirs, binding, text)
    write_frame(sock, FrameType.HELLO, text, deadline)
    write_frame(sock, FrameType.PROOF, proofs.of(b"client"), deadline)
    kind, reply = read_frame(sock, deadline, bound=_PROOF_BYTES)
    if kind is FrameType.REFUSAL and proofs.check(b"elsewhere", reply):
        raise ProtocolError(
            f"The process that listens at {address} belongs to this job, but to "
            "another address. Is each address of the cluster written in the same way "
            "in the settings of all tasks, and does it lead to its own task?"
        )
    if kind is FrameType.REFUSAL:
        raise _wrong_secret(address)
    if kind is not FrameType.PROOF:
        raise _out_of_step(kind, FrameType.PROOF)
    if not proofs.check(b"server", reply):
        raise _wrong_secret(address)
    return proofs.keys(b"c", b"s")


def receive(
    sock: socket.socket,
    secret: bytes,
    deadline: Deadline,
    where: str,
    address: str,
    binding: bytes = b"",
) -> tuple[dict[str, Any], FrameAuthenticator]:
    """Authenticate a client: the listening side of `authenticate_as_client`.

    Args:
        sock: A connected blocking socket.
        secret: The job's secret.
        deadline: When to give up.
        where: The other side's address, for messages.
        address: This side's own, as the cluster's settings have it.
        binding: See `tls.binding_of`.

    Returns:
        The other side's hello, and the authenticator of the frames that follow.

    Raises:
        As `authenticate_as_client`. A side that doesn't hold the secret, that dialed
        another address or that has another version of the protocol was sent a REFUSAL.
    """
    try:
        theirs = _nonce(sock, deadline, where)
    except ProtocolError as error:
        if error.version is not None:
            # The other version can read no more of this than that the versions differ.
            write_frame(sock, FrameType.REFUSAL, b"", deadline)
        raise
    mine = os.urandom(_NONCE_BYTES)
    write_frame(sock, FrameType.CHALLENGE, mine, deadline)
    text = _expect(sock, FrameType.HELLO, deadline, _HELLO_BYTES, where)
    proofs = _Proofs(secret, theirs + mine, binding, text)
    proof = _expect(sock, FrameType.PROOF, deadline, _PROOF_BYTES, where)
    if not proofs.check(b"client", proof):
        write_frame(sock, FrameType.REFUSAL, b"", deadline)
        raise _wrong_secret(where)
    message = to_json(text)
    dialed, hello = message.get("address"), message.get("hello")
    if dialed != address:
        write_frame(sock, FrameType.REFUSAL, proofs.of(b"elsewhere"), deadline)
        raise ProtocolError(
            f"The process at {where} holds the job's secret, but dialed "
            f"another address. Received: {dialed!r}, this is {address!r}. Is each "
            "address of the cluster written in the same way in the settings of all "
            "tasks? If so, another process redirects its connections to here."
        )
    if not isinstance(hello, dict):
        raise ProtocolError(f"A hello is incomplete. Received: {message!r}.")
    write_frame(sock, FrameType.PROOF, proofs.of(b"server"), deadline)
    return hello, proofs.keys(b"s", b"c")


def _nonce(sock: socket.socket, deadline: Deadline, where: str) -> bytes:
    nonce = _expect(sock, FrameType.CHALLENGE, deadline, _NONCE_BYTES, where)
    if len(nonce) != _NONCE_BYTES:
        raise ProtocolError(
            f"A challenge has the wrong length. Received: {len(nonce)} bytes, "
            f"expected {_NONCE_BYTES}."
        )
    return nonce


def _expect(
    sock: socket.socket,
    wanted: FrameType,
    deadline: Deadline,
    bound: int,
    where: str,
) -> bytes:
    kind, payload = read_frame(sock, deadline, bound=bound)
    if kind is FrameType.REFUSAL and payload == NEEDS_TLS:
        raise AuthenticationError(
            f"The process at {where} uses TLS, and this one doesn't. Received: "
            "KERASDIST_TLS isn't set here. Set KERASDIST_TLS on all tasks of the job, "
            "or on none."
        )
    if kind is FrameType.REFUSAL:
        # Nothing is proved yet: the text of a foreign process isn't shown in messages.
        raise _wrong_secret(where)
    if kind is not wanted:
        raise _out_of_step(kind, wanted)
    return payload


def _out_of_step(kind: FrameType, wanted: FrameType) -> ProtocolError:
    return ProtocolError(
        f"The handshake is out of step. Received: a {kind.name} frame, expected "
        f"{wanted.name}."
    )


def _wrong_secret(where: str) -> AuthenticationError:
    return AuthenticationError(
        f"The worker at {where} doesn't hold the same job secret. Set the environment "
        "variable KERASDIST_SECRET to the same value on all workers (`kerasdist run` "
        "makes one for each job). If another job uses this address, choose another "
        "port."
    )
