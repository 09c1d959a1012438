"""The doctor's check of this task's certificates."""

from __future__ import annotations

from collections.abc import Mapping

from kerasdist.cli.doctor.findings import Finding
from kerasdist.cluster import Cluster
from kerasdist.transport.tls.credentials import tls_fault
from kerasdist.transport.wire.handshake import is_loopback


def check_encryption(
    cluster: Cluster | None, environ: Mapping[str, str]
) -> list[Finding]:
    """Check whether the job's connections are encrypted, and the certificates fit.

    Args:
        cluster: The cluster; None if the settings have none.
        environ: The environment.
    """
    fault = tls_fault(environ)
    if fault is not None:
        text, _, remedy = fault.partition(" Expected ")
        return [Finding(level="fault", text=text, remedy=f"expected {remedy}")]
    if environ.get("KERASDIST_TLS", "").strip():
        text = (
            "KERASDIST_TLS is set, and the certificate is valid: TCP connections are "
            "encrypted"
        )
        return [Finding(level="ok", text=text)]
    addresses = () if cluster is None else (*cluster.workers, *cluster.servers)
    local = all(is_loopback(address) for address in addresses)
    why = (
        "and isn't needed: no address can be reached from other machines"
        if local
        else "so nothing is encrypted between the machines"
    )
    return [Finding(level="ok", text=f"KERASDIST_TLS isn't set, {why}")]
