"""Mutual proof of the job's secret at the beginning of every connection.

    c: the side that connects     s: the side that listens
    K: the job's secret           H(role, a, b) = HMAC-SHA256(K, role | a | b)

    1. c -> s   CHALLENGE  nonce Nc (32 random bytes)
    2. s -> c   CHALLENGE  nonce Ns
    3. s -> c   PROOF      H("server", Nc, Ns)      c checks it
    4. c -> s   PROOF      H("client", Ns, Nc)      s checks it
    5. c -> s   HELLO      who I am and what this connection is for (JSON)

Who finds the other's proof to be wrong says REFUSAL, so that both sides know why.
The role in the HMAC keeps either side from reflecting the other's proof. The
secret itself never travels, and nothing a stranger sends is looked at before
step 4 beyond 32 bytes. The stream that follows is not encrypted: the secret
keeps strangers out of a job, it doesn't hide the gradients (RFC 2104 for HMAC).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from typing import Any

from kerasdist.errors import AuthenticationError, ProtocolError
from kerasdist.transport.control import read_frame, to_json, write_frame, write_json
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.framing import FrameType

__all__ = ["knock", "receive"]

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO_BYTES = 1 << 16


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.new(secret, role + first + second, hashlib.sha256).digest()


def _expect(
    sock: socket.socket,
    wanted: FrameType,
    deadline: Deadline,
    bound: int,
    where: str,
) -> bytes:
    kind, payload = read_frame(sock, deadline, bound=bound)
    if kind is FrameType.REFUSAL:
        # Nobody has proved anything yet: a stranger's text isn't for our messages.
        raise _wrong_secret(where)
    if kind is not wanted:
        raise ProtocolError(
            f"The handshake is out of step. Received: a {kind.name} frame, expected "
            f"{wanted.name}."
        )
    return payload


def _wrong_secret(where: str) -> AuthenticationError:
    return AuthenticationError(
        f"The worker at {where} doesn't hold the same job secret. Set the environment "
        "variable KERASDIST_SECRET to the same value on all workers (`kerasdist run` "
        "makes one for each job). If another job uses this address, choose another "
        "port."
    )


def knock(
    sock: socket.socket,
    secret: bytes,
    hello: dict[str, Any],
    deadline: Deadline,
    where: str,
) -> None:
    """Prove the secret to the side that listens, check its proof, say hello.

    Args:
        sock: A connected blocking socket.
        secret: The job's secret.
        hello: What this connection is for; a small JSON object.
        deadline: When to give up.
        where: The other side's address, for messages.

    Raises:
        AuthenticationError: The other side doesn't hold the secret, or says
            that we don't; it has been told so.
        ProtocolError, EOFError, OSError: See `control.read_frame`.
    """
    mine = os.urandom(_NONCE_BYTES)
    write_frame(sock, FrameType.CHALLENGE, mine, deadline)
    theirs = _expect(sock, FrameType.CHALLENGE, deadline, _NONCE_BYTES, where)
    proof = _expect(sock, FrameType.PROOF, deadline, _PROOF_BYTES, where)
    if not hmac.compare_digest(proof, _proof(secret, b"server", mine, theirs)):
        write_frame(sock, FrameType.REFUSAL, b"", deadline)
        raise _wrong_secret(where)
    write_frame(
        sock, FrameType.PROOF, _proof(secret, b"client", theirs, mine), deadline
    )
    write_json(sock, FrameType.HELLO, hello, deadline)


def receive(
    sock: socket.socket, secret: bytes, deadline: Deadline, where: str
) -> dict[str, Any]:
    """The listening side of `knock`; returns the other side's hello.

    Raises:
        As `knock`. A side that doesn't hold the secret has been told so.
    """
    theirs = _expect(sock, FrameType.CHALLENGE, deadline, _NONCE_BYTES, where)
    if len(theirs) != _NONCE_BYTES:
        raise ProtocolError(
            f"A challenge has the wrong length. Received: {len(theirs)} bytes, "
            f"expected {_NONCE_BYTES}."
        )
    mine = os.urandom(_NONCE_BYTES)
    write_frame(sock, FrameType.CHALLENGE, mine, deadline)
    write_frame(
        sock, FrameType.PROOF, _proof(secret, b"server", theirs, mine), deadline
    )
    proof = _expect(sock, FrameType.PROOF, deadline, _PROOF_BYTES, where)
    if not hmac.compare_digest(proof, _proof(secret, b"client", mine, theirs)):
        write_frame(sock, FrameType.REFUSAL, b"", deadline)
        raise _wrong_secret(where)
    return to_json(_expect(sock, FrameType.HELLO, deadline, _HELLO_BYTES, where))
