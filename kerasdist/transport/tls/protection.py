"""The check of all settings that protect a job's connections, before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kerasdist.transport.tls.credentials import Credentials
from kerasdist.transport.wire.secret import job_secret


def checked_secret(addresses: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Check the job's secret and this task's certificates; return the secret.

    Args:
        addresses: The addresses of the job's tasks.
        environ: The environment, see `job_secret` and `Credentials`.

    Raises:
        ClusterError: There is no secret where one is needed; it is too short; or the
            certificates can't be used.
    """
    secret = job_secret(addresses, environ)
    credentials = Credentials.read(environ)
    if credentials is not None:
        credentials.check()
    return secret
