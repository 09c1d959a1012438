"""A probe of a peer's address: the reason, in words, why it can't be reached."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import queue
import socket
import threading

from kerasdist.cluster.address import address_fault, split_address
from kerasdist.transport.deadline import Deadline

_REASONS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.EHOSTUNREACH: "no route to host: it is down, or a firewall rejects us",
    errno.ENETUNREACH: "its network can't be reached from here",
    errno.ECONNRESET: "the connection was reset by the other side",
    errno.EACCES: "a firewall on this machine forbids it",
    errno.EPERM: "a firewall on this machine forbids it",
    errno.EADDRNOTAVAIL: "this machine has no address from which it could connect",
}
_Target = tuple[str, int] | tuple[str, int, int, int]
_Found = list[tuple[socket.AddressFamily, _Target]]


def why_unreachable(address: str, timeout: float) -> str | None:
    """Try to open a TCP connection, and describe why it fails.

    The connection is closed at once: the listener gets one without data. An open
    connection doesn't prove that a worker is there: transparent proxies, such as the
    sidecars of a service mesh, accept any connection.

    Args:
        address: `"host:port"`, or `"[v6]:port"`.
        timeout: Seconds for the whole of it: looking up the name, and all the
            addresses that it has.

    Returns:
        None if a connection could be opened, else the reason in words, without a
        full stop.
    """
    fault = address_fault(address)
    if fault is not None:
        return f"its address {fault}"
    deadline = Deadline(timeout)
    found = look_up(*split_address(address), deadline)
    if isinstance(found, str):
        return found
    reasons: list[str] = []
    for i, (family, target) in enumerate(found):
        # Each address gets its share of what is left: a silent first one mustn't
        # hide a second one that accepts.
        share = deadline.remaining() / (len(found) - i)
        reason = _connect(family, target, share, deadline.seconds)
        if reason is None:
            return None
        if reason not in reasons:
            reasons.append(reason)
    return "; ".join(reasons)


def look_up(host: str, port: int, deadline: Deadline) -> _Found | str:
    """Resolve a name, or describe why that fails, without a full stop.

    `getaddrinfo` can't be interrupted and may take minutes, so it runs in a thread
    that is abandoned when the time is over (as a daemon it doesn't delay the exit).

    Returns:
        Families and socket addresses, at least one, in the system's order; or the
        reason in words.
    """
    with contextlib.suppress(OSError, ValueError):
        # Most are numbers, which need no name server.
        ipaddress.ip_address(host.partition("%")[0])
        return _resolve(host, port, socket.AI_NUMERICHOST)
    result: queue.SimpleQueue[_Found | str] = queue.SimpleQueue()

    def work() -> None:
        try:
            result.put(_resolve(host, port, 0) or "its host name has no address")
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                result.put(
                    "its host name doesn't resolve: the name server can't be reached "
                    "or has no entry yet"
                )
            else:
                result.put(f"its host name doesn't resolve ({error.strerror})")
        except (OSError, UnicodeError) as error:
            result.put(f"its host name doesn't resolve ({error})")

    threading.Thread(target=work, name="kerasdist-look-up", daemon=True).start()
    try:
        return result.get(timeout=deadline.remaining())
    except queue.Empty:
        return f"looking up its host name took longer than {deadline.seconds:g} s"


def _resolve(host: str, port: int, flags: int) -> _Found:
    found: _Found = []
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    for family, _, _, _, target in infos:
        item = (family, target)
        if item not in found:
            found.append(item)  # type: ignore[arg-type]
    return found


def _connect(
    family: socket.AddressFamily,
    target: _Target,
    seconds: float,
    total: float,
) -> str | None:
    """Connect to one address; return None, or the reason why it fails."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            # 0 would mean "don't wait at all" and end in a meaningless error.
            sock.settimeout(max(seconds, 0.001))
            sock.connect(target)
            # On one machine the kernel may choose the very port that is dialed as the
            # source of the connection: then this process is connected to itself.
            if sock.getsockname() == sock.getpeername():
                return _REASONS[errno.ECONNREFUSED]
    except TimeoutError:
        return f"no answer within {total:g} s"
    except OSError as error:
        number = error.errno or 0
        return _REASONS.get(number, os.strerror(number) if number else str(error))
    return None
