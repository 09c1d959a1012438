"""The workers of a job that run on this worker's host.

They are known from the workers' addresses alone, the same for every source of the
cluster's settings: launchers' variables, such as `LOCAL_RANK`, count servers and lost
workers, too, and differ between launchers.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from collections.abc import Sequence

from kerasdist.cluster.address import address_fault, split_address

__all__ = ["is_this_host", "local_ranks"]


def local_ranks(addresses: Sequence[str], rank: int) -> list[int]:
    """Return the ranks of the workers on a worker's host, in ascending order.

    A worker is there if its host is written as that worker's own, or belongs to this
    host: a worker may be "localhost" and another one "127.0.0.1".

    Args:
        addresses: The workers' addresses by rank, `"host:port"`; of MPI's processes
            `"host, pid 123"`.
        rank: This worker's rank.
    """
    hosts = [_host(address) for address in addresses]
    return [
        number
        for number, host in enumerate(hosts)
        if host == hosts[rank] or is_this_host(host)
    ]


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


def _host(address: str) -> str:
    if address_fault(address) is None:
        return split_address(address)[0].lower().rstrip(".")
    return address.partition(",")[0]
