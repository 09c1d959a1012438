"""Connect to a worker that may not be there yet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from kerasdist import errors
from kerasdist.cluster.address import split_address
from kerasdist.transport import handshake
from kerasdist.transport.deadline import Deadline
from kerasdist.transport.forks import close_in_children
from kerasdist.transport.reach import why_unreachable

__all__ = ["PROBE_SECONDS", "dial_tcp", "dial_unix", "retry"]

_Result = TypeVar("_Result")

# How long to look why somebody can't be reached.
PROBE_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
# Longer than a worker needs from the moment its launcher listens for it until it
# accepts; after that the attempt was in vain, and another may not be.
_HANDSHAKE_SECONDS = 60.0


def dial_tcp(
    address: str, secret: bytes, hello: dict[str, Any], deadline: Deadline
) -> socket.socket:
    """Connect to the worker at `address`, prove the secret, say hello.

    Raises:
        OSError, EOFError: It can't be reached now.
        AuthenticationError, ProtocolError: See `handshake.knock`.
    """
    seconds = min(max(deadline.remaining(), 0.001), _CONNECT_SECONDS)
    try:
        sock = socket.create_connection(split_address(address), timeout=seconds)
    except UnicodeError as error:
        raise OSError(f"its host name can't be looked up ({error})") from error
    close_in_children(sock)
    return _knock(sock, secret, hello, deadline, address)


def dial_unix(
    name: str, secret: bytes, hello: dict[str, Any], deadline: Deadline, address: str
) -> socket.socket:
    """Connect inside this host to the worker that listens at `name`.

    Raises:
        As `dial_tcp`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(sock)
    try:
        sock.settimeout(min(max(deadline.remaining(), 0.001), _CONNECT_SECONDS))
        sock.connect(name)
    except BaseException:
        sock.close()
        raise
    return _knock(sock, secret, hello, deadline, address)


def _knock(
    sock: socket.socket,
    secret: bytes,
    hello: dict[str, Any],
    deadline: Deadline,
    where: str,
) -> socket.socket:
    limit = Deadline(min(deadline.remaining(), _HANDSHAKE_SECONDS))
    try:
        handshake.knock(sock, secret, hello, limit, where)
    except BaseException:
        sock.close()
        raise
    return sock


def retry(
    attempt: Callable[[], _Result],
    deadline: Deadline,
    rank: int,
    address: str,
    stop: threading.Event,
) -> _Result | None:
    """Try until it works or the deadline passes: machines start minutes apart.

    Args:
        attempt: What to try; an OSError or EOFError means "not yet".
        deadline: When to give up.
        rank: Whom it's about, for messages.
        address: Where it listens.
        stop: When this is set, give up and return None.

    Raises:
        StartupError: It didn't work by the deadline.
        ProtocolError: What is at the address isn't this version of kerasdist.
    """
    number = 0
    while not stop.is_set():
        try:
            return attempt()
        except errors.ProtocolError as error:
            raise errors.ProtocolError(
                f"Rank {rank} isn't what answers at its address {address}. {error}"
            ) from error
        except (OSError, EOFError) as error:
            if isinstance(error, errors.KerasDistError):
                raise
            if deadline.expired:
                why = why_unreachable(address, PROBE_SECONDS) or str(error)
                raise errors.StartupError(
                    f"Rank {rank} ({address}) couldn't be reached within "
                    f"{deadline.seconds:g} s: {why}. Is it running (look at its output "
                    "first), and is its address right? `kerasdist doctor` shows what "
                    "can be reached from here.",
                    {rank: why},
                ) from error
        stop.wait(min(0.05 * 1.5 ** min(number, 8), deadline.remaining()))
        number += 1
    return None
