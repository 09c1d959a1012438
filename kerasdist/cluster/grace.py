"""The time between SIGTERM and SIGKILL on the platform that runs a job."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from kerasdist.errors import ClusterError

GRACE_VARIABLE = "KERASDIST_GRACE_SECONDS"
# The default of Kubernetes (terminationGracePeriodSeconds) and Slurm (KillWait).
_SECONDS = 30.0


def grace_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds that the platform lets a process live after SIGTERM.

    Args:
        environ: The environment; the process's by default.

    Raises:
        ClusterError: The variable isn't a positive number.
    """
    environ = os.environ if environ is None else environ
    given = environ.get(GRACE_VARIABLE, "")
    if not given:
        return _SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ClusterError(
            f"The variable {GRACE_VARIABLE} must be a positive number of seconds. "
            f"Received: {given!r}. Set it to the time after which the platform kills a "
            "process that it has sent SIGTERM, or leave it unset for 30 s."
        )
    return seconds
