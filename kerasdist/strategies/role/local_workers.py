"""The workers of a job that run on this worker's host.

They are known from the workers' addresses alone, the same for every source of the
cluster's settings: launchers' variables, such as `LOCAL_RANK`, count servers and lost
workers, too, and differ between launchers.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist.cluster.address import address_fault, split_address
from kerasdist.cluster.this_host import is_this_host


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


def _host(address: str) -> str:
    if address_fault(address) is None:
        return split_address(address)[0].lower().rstrip(".")
    return address.partition(",")[0]
