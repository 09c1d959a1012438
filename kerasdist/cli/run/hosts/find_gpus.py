"""The GPUs of this host that a job may use, found without TensorFlow.

The text of this module is also sent through ssh to other hosts, so it uses the
standard library alone.
"""

from __future__ import annotations

import glob
import re
import subprocess
from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
# Seconds. Without the persistence daemon the driver is loaded for each call.
_SECONDS = 30.0
_LINE = re.compile(r"\s*(GPU|MIG) .*\(UUID: ([^\s)]+)\)")


def find_gpus(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES has them, and why they can't be listed.

    What an outer launcher has set, Slurm for instance, is kept: numbers, and UUIDs of
    GPUs and of parts of them (MIG). Otherwise the driver's `nvidia-smi` lists all;
    UUIDs mean the same GPU in whatever order CUDA counts.

    Args:
        environ: The environment of the job.

    Returns:
        The names, and a text that is empty unless there may be GPUs that can't be
        listed: then there are no names.
    """
    given = environ.get(VARIABLE)
    if given is not None:
        return _given(given), ""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            env=dict(environ),
        )
    except FileNotFoundError:
        if glob.glob("/dev/nvidia[0-9]*"):
            return [], "there is no command nvidia-smi, but /dev has GPUs"
        return [], ""
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi -L hasn't answered within {_SECONDS:.0f} s"
    except OSError as error:
        return [], f"nvidia-smi can't be run: {error}"
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        said = [*text.split("\n"), *done.stderr.decode(errors="replace").split("\n")]
        first = next(filter(None, map(str.strip, said)), "")
        return [], f"nvidia-smi -L has ended with {done.returncode}: {first}"
    return _listed(text), ""


def _given(text: str) -> list[str]:
    """Return the names that the variable has: those before the first invalid one."""
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        valid = name.isdecimal() or name.startswith(("GPU-", "MIG-"))
        if not valid or name in names:
            break
        names.append(name)
    return names


def _listed(text: str) -> list[str]:
    """Return the UUIDs of `nvidia-smi -L`: of a divided GPU those of its parts."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        kind, name = match.groups()
        if kind == "MIG" and found and found[-1][0] == "GPU":
            found.pop()
        found.append((kind, name))
    return [name for _, name in found]
