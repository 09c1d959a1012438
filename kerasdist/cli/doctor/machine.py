"""The doctor's checks of this machine: software, devices, memory, cores."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from kerasdist._tested import TESTED_VERSIONS
from kerasdist._version import __version__
from kerasdist.cli.allocator import ALLOCATORS, find_allocator
from kerasdist.cli.ask_tensorflow import ANSWER, TensorFlowError, ask_tensorflow
from kerasdist.cluster import Cluster
from kerasdist.errors import SharedMemoryFull
from kerasdist.transport.credentials import tls_fault
from kerasdist.transport.handshake import is_loopback
from kerasdist.transport.memory import create_segment

# The doctor's check of this task's certificates.


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


# The result of one check of `kerasdist doctor`.
#
# A check returns findings and prints nothing. A fault of the machine or the settings is
# a finding with a remedy, never an exception.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        level: `"ok"`, `"warn"` (works, but may surprise) or `"fault"` (a job can't
            run like this).
        text: What was found.
        remedy: The action to take; empty if none is needed.
    """

    level: Literal["ok", "warn", "fault"]
    text: str
    remedy: str = ""


_MiB = 1024**2
_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "numpy": ("numpy",),
}
_LIST_DEVICES = f"""
import json
import tensorflow as tf
print("\\n{ANSWER}" + json.dumps([
    (device.name.removeprefix("/physical_device:"), device.device_type)
    for device in tf.config.list_physical_devices()
]))
"""


def check_versions(environ: Mapping[str, str]) -> list[Finding]:
    """Check the versions, without importing TensorFlow."""
    found = [
        Finding(level="ok", text=f"kerasdist {__version__}"),
        Finding(level="ok", text=f"Python {platform.python_version()}"),
    ]
    for name, distributions in _DISTRIBUTIONS.items():
        version = _version(distributions)
        wanted, _ = TESTED_VERSIONS.get(name, ("0", ""))
        if version is None:
            found.append(
                Finding(
                    level="fault",
                    text=f"{name} isn't installed",
                    remedy=f"{sys.executable} -m pip install {name}",
                )
            )
        elif _numbers(version) < _numbers(wanted):
            found.append(
                Finding(
                    level="fault",
                    text=f"{name} {version} is too old, at least {wanted} is needed",
                    remedy=f"{sys.executable} -m pip install '{name}>={wanted}'",
                )
            )
        else:
            found.append(Finding(level="ok", text=f"{name} {version}"))
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        found.append(
            Finding(
                level="fault",
                text=f"Keras uses another backend: KERAS_BACKEND={backend!r}",
                remedy="unset KERAS_BACKEND, or set it to tensorflow",
            )
        )
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        found.append(
            Finding(
                level="fault",
                text="tf.keras is Keras 2: TF_USE_LEGACY_KERAS is set",
                remedy="unset TF_USE_LEGACY_KERAS",
            )
        )
    return found


def _version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def check_devices(
    seconds: float,
    command: Sequence[str] = (sys.executable, "-P", "-c", _LIST_DEVICES),
    drivers: str = "/proc/driver/nvidia/gpus",
) -> list[Finding]:
    """List TensorFlow's devices, in a process of its own.

    Args:
        seconds: How long it may take.
        command: The command that prints the devices.
        drivers: Folder with one entry for each GPU that the driver knows.
    """
    try:
        devices: list[tuple[str, str]] = ask_tensorflow(command, seconds)
    except TensorFlowError as error:
        remedy = f"look at the output of `{sys.executable} -c 'import tensorflow'`"
        return [Finding(level="fault", text=str(error), remedy=remedy)]
    found = [Finding(level="ok", text=f"device {name}") for name, _ in devices]
    gpus = sum(kind == "GPU" for _, kind in devices)
    with contextlib.suppress(OSError):
        known = len(os.listdir(drivers))
        if known > gpus:
            found.append(
                Finding(
                    level="warn",
                    text=f"the driver knows {known} GPUs, TensorFlow sees {gpus}",
                    remedy="look at CUDA_VISIBLE_DEVICES, and whether TensorFlow has "
                    "its CUDA libraries (pip install 'tensorflow[and-cuda]')",
                )
            )
    return found


def check_shared_memory() -> list[Finding]:
    """Try to allocate memory that workers of this machine can share."""
    try:
        os.close(create_segment(_MiB))
    except (SharedMemoryFull, OSError) as error:
        return [
            Finding(
                level="fault",
                text=f"memory can't be shared: {error}",
                remedy="give the container or the process more memory, or use "
                "transport='tcp'",
            )
        ]
    return [Finding(level="ok", text="workers of this machine can share memory")]


def check_cores() -> list[Finding]:
    """Count the cores that this process may use."""
    total = os.cpu_count() or 1
    usable = total
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {total} cores can be used"
    quota = _quota(Path("/sys/fs/cgroup/cpu.max"))
    if quota is not None and quota < usable:
        return [
            Finding(
                level="warn",
                text=f"{text}, but this container gets the time of {quota:g}",
                remedy="TensorFlow starts a thread for each core: set "
                f"TF_NUM_INTRAOP_THREADS={max(1, int(quota))}, or raise the limit",
            )
        ]
    return [Finding(level="ok", text=text)]


def check_allocator(environ: Mapping[str, str]) -> list[Finding]:
    """Find the allocator that is in use."""
    loaded = [
        name for name in ALLOCATORS if f"lib{name}." in environ.get("LD_PRELOAD", "")
    ]
    if loaded:
        text = f"memory is allocated with {loaded[0]} (LD_PRELOAD)"
    elif (library := find_allocator()) is not None:
        text = f"{library} is installed: `kerasdist run --malloc auto` uses it"
    else:
        text = "memory is allocated with the C library"
    return [Finding(level="ok", text=text)]


def _quota(path: Path) -> float | None:
    """Return the container's limit of CPU time, in cores; None if there is none."""
    try:
        quota, period = path.read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # "max", or another system
        return None
