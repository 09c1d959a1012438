"""The software of `kerasdist env`: versions, extras, TensorFlow's devices."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kerasdist._version import __version__
from kerasdist.cli.ask_tensorflow import ANSWER, ask_tensorflow, python_command

_PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "tf-nightly", "keras", "keras-nightly"),
    *("numpy", "tensorboard", "protobuf", "h5py", "ml_dtypes", "mpi4py"),
)
LIST_DEVICES = f"""
import json
import tensorflow as tf
built = tf.sysconfig.get_build_info()
print("\\n{ANSWER}" + json.dumps({{
    "version": tf.__version__,
    "cuda": built.get("cuda_version"),
    "cudnn": built.get("cudnn_version"),
    # Lists them without a context on any.
    "devices": [
        device.name.removeprefix("/physical_device:")
        for device in tf.config.list_physical_devices()
    ],
}}))
"""


def versions() -> dict[str, Any]:
    """Return the versions of Python and of packages; nothing is imported."""
    found = {
        "kerasdist": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    for name in ("tensorflow", "keras", "numpy"):
        if not any(key.startswith(name) or key == "tf-nightly" for key in found):
            found[name] = "not installed"
    return found


def extras() -> dict[str, str]:
    """Return of each extra of kerasdist whether it's installed."""
    wanted: dict[str, set[str]] = {}
    for requirement in importlib.metadata.requires("kerasdist") or []:
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra is not None and name is not None:
            wanted.setdefault(extra[1], set()).add(name[0])
    return {
        extra: ", ".join(missing) + " missing" if missing else "installed"
        for extra, names in sorted(wanted.items())
        for missing in [sorted(filter(_is_missing, names))]
    }


def _is_missing(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


def gpus(
    seconds: float,
    command: Sequence[str] | None = None,
    drivers: str = "/proc/driver/nvidia",
) -> dict[str, Any]:
    """Return the GPUs that the driver knows, and TensorFlow's devices.

    Args:
        seconds: How long TensorFlow may take; 0: it isn't asked.
        command: The command that prints its devices.
        drivers: The driver's folder.
    """
    folder = Path(drivers)
    found: dict[str, Any] = {"driver": "no NVIDIA driver"}
    with contextlib.suppress(OSError):
        found["driver"] = (folder / "version").read_text().splitlines()[0].strip()
        found["GPUs of the driver"] = [
            (re.findall(r"^Model:\s*(.*)$", each.read_text(), re.M) or ["unknown"])[0]
            for each in sorted((folder / "gpus").glob("*/information"))
        ]
    if seconds == 0:
        return {**found, "TensorFlow": "not asked (--no-tensorflow)"}
    try:
        command = command or python_command(LIST_DEVICES)
        return {**found, "TensorFlow": ask_tensorflow(command, seconds)}
    except Exception as error:
        # The driver's part is known all the same.
        return {**found, "TensorFlow": {"unreadable": str(error)}}
