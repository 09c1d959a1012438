"""Questions to TensorFlow, in a process of its own.

A TensorFlow that crashes or hangs when it is imported doesn't affect this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# What the script prints before its answer, at the beginning of a line.
ANSWER = "DEVICES"


class TensorFlowError(Exception):
    """TensorFlow can't be imported, or didn't answer in time."""


def ask_tensorflow(command: Sequence[str], seconds: float) -> Any:
    """Return what a script prints as JSON after `ANSWER`.

    Args:
        command: The command that runs the script.
        seconds: How long it may take.

    Raises:
        TensorFlowError: It failed, or took longer.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1"},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TensorFlowError(
            f"TensorFlow didn't list its devices within {seconds:g} s"
        ) from None
    finally:
        # Also its children, if it hangs or has left some behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    _, mark, answer = out.decode(errors="replace").rpartition(f"\n{ANSWER}")
    if process.returncode != 0 or not mark:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        how = f"exit code {process.returncode}"
        raise TensorFlowError(f"TensorFlow can't be imported ({how}): {last[0]}")
    return json.loads(answer)


def python_command(script: str) -> list[str]:
    """Return the command that runs a script by this process's Python."""
    return [sys.executable, "-P", "-c", script]
