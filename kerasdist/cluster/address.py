"""Addresses of workers as text, `"host:port"`; the network isn't used."""

from __future__ import annotations

import functools
import ipaddress
import re
import socket

# The names and addresses of this host, by the system's resolver and routes.


@functools.cache
def is_this_host(host: str) -> bool:
    """Return whether a name or an IP address belongs to this host.

    False for a name that can't be resolved. Nothing is sent to it.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(is_own_address(family, address) for family, _, _, _, address in found)


def is_own_address(family: int, address: tuple[object, ...]) -> bool:
    """Return whether the kernel would send from `address` to `address`."""
    try:
        if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            return True
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return bool(sock.getsockname()[0] == address[0])
    except (OSError, ValueError):
        return False  # no route, or a family that this host doesn't have


# Underscores aren't allowed in host names, but Docker and Compose make them.
_HOST_NAME = re.compile(r"[\w.-]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def address_fault(address: object) -> str | None:
    """Describe why `address` isn't `"host:port"`; None if it is.

    Args:
        address: The value that stands where an address should be.
    """
    if not isinstance(address, str):
        return f"is a {type(address).__name__}, not a text"
    if not address.strip():
        return "is empty"
    if address != address.strip():
        return "has white space around it"
    if _SCHEME.match(address):
        return "has a scheme in front (leave out everything up to '://')"
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket:
            return "has a '[' without a ']'"
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return "has something in brackets that is no IPv6 address"
        if not rest.startswith(":"):
            return "has no port"
        port = rest[1:]
    else:
        host, colon, port = address.rpartition(":")
        if not colon:
            return "has no port"
        if not host:
            return "has no host"
        if ":" in host:
            return (
                "has more than one ':' (an IPv6 address is written in brackets, "
                "'[::1]:2222')"
            )
        if not _HOST_NAME.fullmatch(host):
            return f"has a host that can't be one, {host!r}"
    if not re.fullmatch("[0-9]+", port):
        return f"has a port that is no number, {port!r}"
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        return f"has a port outside 1..65535, {port}"
    return None


def split_address(address: str) -> tuple[str, int]:
    """Split a checked `"host:port"` or `"[v6]:port"`, brackets removed.

    Raises:
        ValueError: It isn't of that form.
    """
    fault = address_fault(address)
    if fault is not None:
        raise ValueError(
            f"An address {fault}. Received: address={address!r}. Expected "
            "'host:port', for example 'host1:2222'."
        )
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def same_address_key(address: str) -> tuple[str, int]:
    """Return a key that is equal for two spellings of one address, by text alone."""
    host, port = split_address(address)
    try:
        return str(ipaddress.ip_address(host)), port
    except ValueError:
        return host.lower().rstrip("."), port
