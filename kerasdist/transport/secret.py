"""The job's secret, and when a job may do without."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from kerasdist.cluster.address import split_address
from kerasdist.errors import ClusterError

__all__ = ["is_loopback", "job_secret"]


def is_loopback(address: str) -> bool:
    """Whether `"host:port"` can only be reached from this machine, by its text."""
    host = split_address(address)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: where it leads is the network's to say
        return False


def job_secret(workers: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the secret that this job's workers prove to each other.

    Args:
        workers: The job's addresses.
        environ: Where `KERASDIST_SECRET` and `KERASDIST_INSECURE` are.

    Raises:
        ClusterError: There is no secret, an address can be reached from other
            machines, and nobody has opted out.
    """
    secret = environ.get("KERASDIST_SECRET", "")
    if secret:
        return secret.encode()
    open_addresses = [address for address in workers if not is_loopback(address)]
    if open_addresses and environ.get("KERASDIST_INSECURE", "") != "1":
        raise ClusterError(
            "This job has no secret, and its workers can be reached from other "
            "machines. Received: KERASDIST_SECRET is not set, "
            f"workers={open_addresses}. Set KERASDIST_SECRET to the same random text "
            "on all workers (for example the output of `openssl rand -hex 32`; on "
            "Kubernetes from a Secret). "
            "Without it only loopback addresses are accepted, unless you set "
            "KERASDIST_INSECURE=1 on a network that nobody else can reach."
        )
    return b""
