"""The job's secret, and the conditions under which a job needs none."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence

from kerasdist.cluster.address import split_address
from kerasdist.errors import ClusterError

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
