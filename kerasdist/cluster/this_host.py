"""The names and addresses of this host, by the system's resolver and routes."""

from __future__ import annotations

import functools
import ipaddress
import socket


@functools.cache
def is_this_host(host: str) -> bool:
    """Return whether a name or an IP address belongs to this host.

    False for a name that can't be resolved. Nothing is sent to it.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    """Return whether the kernel would send from `address` to `address`."""
    try:
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            return True
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return bool(sock.getsockname()[0] == address[0])
    except (OSError, ValueError):
        return False  # no route, or a family that this host doesn't have
