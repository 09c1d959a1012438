"""The launcher's standard error, which the chief takes when its start is over.

Until then the launcher copies the chief's lines, and takes out those that TensorFlow
writes when it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kerasdist.transport.liveness.launcher_pipe import (
    descriptor_in_words,
    descriptor_named,
)

STDERR_VARIABLE = "KERASDIST_STDERR_FD"


def stderr_environ(real: int, copied: int) -> dict[str, str]:
    """Return the variable that names both to the chief.

    Args:
        real: A copy of the launcher's standard error, which the chief inherits.
        copied: What the chief has as its standard error at the start.
    """
    return {STDERR_VARIABLE: f"{descriptor_in_words(real)}/{os.fstat(copied).st_ino}"}


def take_stderr(environ: Mapping[str, str] | None = None) -> None:
    """Let standard error be the launcher's, if this process's one is copied by it.

    A script that has made its standard error another file keeps that.

    Args:
        environ: The environment with `KERASDIST_STDERR_FD`; the process's by default.
    """
    environ = os.environ if environ is None else environ
    named, _, inode = environ.get(STDERR_VARIABLE, "").partition("/")
    real = descriptor_named(named, lambda mode: True)
    if real is None:
        return
    try:
        if str(os.fstat(2).st_ino) == inode:
            if sys.__stderr__ is not None:
                sys.__stderr__.flush()
            os.dup2(real, 2)
        os.close(real)
    except (OSError, ValueError):
        # It was closed, by the script or by another thread.
        return
