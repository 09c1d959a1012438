"""The command `kerasdist env`: collects the parts of the report and prints them."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import resource
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kerasdist._version import __version__
from kerasdist.cli.allocator import ALLOCATORS, find_allocator
from kerasdist.cli.ask_tensorflow import ANSWER, ask_tensorflow, python_command
from kerasdist.cluster import resolve
from kerasdist.errors import ClusterError
from kerasdist.placement.advice import counted, human_bytes

# The machine of `kerasdist env`: system, cores, memory, limits, network.

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
# What control groups of version 1 call unlimited is a little less than 2**63.
_UNLIMITED = 1 << 60
_LIMITS = {
    "open files (ulimit -n)": resource.RLIMIT_NOFILE,
    "processes (ulimit -u)": resource.RLIMIT_NPROC,
    "file size (ulimit -f)": resource.RLIMIT_FSIZE,
    "locked memory (ulimit -l)": resource.RLIMIT_MEMLOCK,
    "address space (ulimit -v)": resource.RLIMIT_AS,
}


def system() -> dict[str, Any]:
    """Return the operating system, the CPU and its cores."""
    found: dict[str, Any] = {"kernel": platform.platform()}
    with contextlib.suppress(OSError):
        found["distribution"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        models = re.findall(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
        found["CPU"] = models[0] if models else platform.machine()
    found["cores"] = os.cpu_count()
    found["cores of this process"] = len(os.sched_getaffinity(0))
    return found


def memory() -> dict[str, Any]:
    """Return the machine's memory, and that of /dev/shm, in bytes."""
    found: dict[str, Any] = {}
    lines = dict(
        re.findall(r"^(\w+):\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    )
    for key, name in (
        ("total_bytes", "MemTotal"),
        ("available_bytes", "MemAvailable"),
        ("swap_bytes", "SwapTotal"),
    ):
        if name in lines:
            found[key] = int(lines[name]) * 1024
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        return {**found, "/dev/shm": {"unreadable": str(error)}}
    found["/dev/shm"] = {
        "total_bytes": shm.f_blocks * shm.f_frsize,
        "free_bytes": shm.f_bavail * shm.f_frsize,
    }
    return found


def control_group(root: str = "/sys/fs/cgroup") -> dict[str, Any]:
    """Return the limits of this process's control group, and of those above it.

    Args:
        root: Where control groups are.
    """
    top = Path(root)
    own = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(), re.M)
    folder = top / own[1].lstrip("/") if own is not None else top
    # In a container the path may be one outside of it: then its own is the root.
    folders = [each for each in (folder, *folder.parents) if each.is_relative_to(top)]
    found: dict[str, Any] = {}
    for each in folders:
        for key, name in (
            ("cpu.max", "cpu.max"),
            ("memory_limit_bytes", "memory.max"),
            ("memory_limit_bytes", "memory/memory.limit_in_bytes"),
            ("processes", "pids.max"),
        ):
            with contextlib.suppress(OSError, ValueError):
                text = (each / name).read_text().strip()
                if text.startswith("max"):
                    continue
                value: Any = int(text) if text.isdecimal() else text
                if key == "cpu.max":
                    quota, period = text.split()
                    key, value = "cores", int(quota) / int(period)
                if key == "memory_limit_bytes" and value > _UNLIMITED:
                    continue
                # Each may only lower what those above it allow.
                found[key] = min(value, found.get(key, value))
    return found or {"limits": "none"}


def limits() -> dict[str, str]:
    """Return this process's limits: those that hold, and those it may raise them to."""
    found = {}
    for name, number in _LIMITS.items():
        soft, hard = resource.getrlimit(number)
        texts = [
            "unlimited" if each == resource.RLIM_INFINITY else str(each)
            for each in (soft, hard)
        ]
        found[name] = texts[0] if texts[0] == texts[1] else f"{texts[0]} of {texts[1]}"
    return found


def network() -> dict[str, Any]:
    """Return the host's name and its interfaces with their addresses.

    Of IPv4 each interface's first address.
    """
    found: dict[str, Any] = {"host name": socket.gethostname()}
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net") / name
        words = []
        for file in ("operstate", "mtu", "speed"):
            # A speed can't be read where there is none.
            with contextlib.suppress(OSError):
                text = (folder / file).read_text().strip()
                prefix, unit = {"mtu": ("MTU ", ""), "speed": ("", " Mbit/s")}.get(
                    file, ("", "")
                )
                if text != "-1":
                    words.append(f"{prefix}{text}{unit}")
        found[name] = ", ".join([*_addresses(name), *words])
    return found


def _addresses(interface: str) -> list[str]:
    found = []
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(sock.fileno(), _GET_ADDRESS, request)
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            words = line.split()
            if words[-1] == interface:
                found.append(str(ipaddress.IPv6Address(bytes.fromhex(words[0]))))
    return found


# Environment variables for a report that others read: secrets are hidden.

HIDDEN = "(hidden)"
_PREFIXES = (
    *("KERASDIST_", "KERAS_", "TF_", "XLA_", "CUDA_", "NVIDIA_", "NCCL_", "OMP_"),
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "I_MPI_", "MPI_", "PRTE_", "PYTHON"),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX")
_WORDS = (
    r"secret|token|passw|passphrase|credential|private|cookie|jwt"
    r"|(?:^|[_-])(?:auth|key)(?:$|[_-])|api_?key"
)
_IS_SECRET = re.compile(_WORDS, re.IGNORECASE)
# "name=value" and "name": "value" inside of a value; user and password of an address.
_INSIDE = re.compile(
    rf"""([\w-]*(?:{_WORDS})[\w-]*["']?\s*[=:]\s*)"""
    r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^\s,;&"'}]+)""",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"(://)[^/\s@]+@")
_LEAST = 6  # characters: a shorter secret could be a part of any word


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter for a job, by name, without secrets."""
    return {
        name: HIDDEN if value and _IS_SECRET.search(name) else _without(value)
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def hide_secrets(value: Any, environ: Mapping[str, str]) -> Any:
    """Return a report without the values of the environment's secrets.

    Args:
        value: Text, or lists and dictionaries with it.
        environ: The environment: all of it, not only what is shown.
    """
    # A path isn't a secret, and is a part of many others.
    secrets = sorted(
        {
            text
            for name, text in environ.items()
            if _IS_SECRET.search(name)
            and len(text) >= _LEAST
            and not text.startswith("/")
        },
        key=len,
        reverse=True,
    )
    return _each_text(value, lambda text: _replaced(text, secrets))


def _replaced(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _without_inside(text)


def _without(text: str) -> str:
    """Return a variable's value with the secrets in it hidden."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_without_keys(json.loads(text)))
        except (ValueError, RecursionError):
            pass  # it isn't JSON
    return _without_inside(text)


def _without_inside(text: str) -> str:
    return _IN_ADDRESS.sub(rf"\1{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", text))


def _without_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: HIDDEN if _IS_SECRET.search(key) else _without_keys(each)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_without_keys(each) for each in value]
    return _without(value) if isinstance(value, str) else value


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _each_text(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


# The software of `kerasdist env`: versions, extras, TensorFlow's devices.

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


_TENSORFLOW_SECONDS = 60.0


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `env` to the command line."""
    parser = commands.add_parser(
        "env",
        help="print what a report of a bug needs",
        description="Print versions, machine, limits, network, GPUs, launcher and "
        "environment variables, with secrets hidden, for a report of a bug. A part "
        "that can't be read contains the reason. The exit code is 0.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--no-tensorflow",
        action="store_true",
        help="don't import TensorFlow, which takes seconds, to list its devices",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )
    parser.set_defaults(parser=parser, handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    seconds = 0.0 if arguments.no_tensorflow else _TENSORFLOW_SECONDS
    found = report(os.environ, seconds)
    if arguments.document is not None:
        arguments.document.update(found)
    else:
        for name, part in found.items():
            _print(name, part)
    return 0


def report(environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return the report, by part.

    Args:
        environ: The environment.
        seconds: How long TensorFlow may take to list its devices; 0: it isn't asked.
    """
    parts: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "extras": extras,
        "system": system,
        "memory": memory,
        "control_group": control_group,
        "limits": limits,
        "network": network,
        "allocator": lambda: _allocator(environ),
        "launcher": lambda: _launcher(environ),
        "variables": lambda: shown_variables(environ),
        "gpus": lambda: gpus(seconds),
    }
    found = {}
    for name, read in parts.items():
        try:
            found[name] = read()
        except Exception as error:
            # Whatever it is: the rest of the report is needed all the more.
            reason = f"{type(error).__name__}: {error}"
            found[name] = {"unreadable": reason}
    shown: dict[str, Any] = hide_secrets(found, environ)
    return shown


def _allocator(environ: Mapping[str, str]) -> dict[str, str]:
    preload = environ.get("LD_PRELOAD", "")
    loaded = [name for name in ALLOCATORS if f"lib{name}." in preload]
    return {
        "loaded": loaded[0] if loaded else "that of the C library",
        "installed": find_allocator() or "none",
    }


def _launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what started this process, and its place in the job."""
    found: dict[str, Any] = {}
    signs = {
        "kerasdist run": "KERASDIST_REPORT_FD",
        "Slurm": "SLURM_JOB_ID",
        "Open MPI": "OMPI_COMM_WORLD_SIZE",
        "MPI (PMI)": "PMI_SIZE",
        "PMIx": "PMIX_RANK",
        "Kubernetes": "KUBERNETES_SERVICE_HOST",
        "Ray": "RAY_JOB_ID",
    }
    found["signs of"] = [name for name, sign in signs.items() if sign in environ]
    try:
        place = resolve(environ=environ)
    except ClusterError as error:
        # What was received is among the variables.
        text = str(error).partition("\nReceived: ")[0]
        return {**found, "place": {"unreadable": text}}
    who = f"{place.task_type} {place.task_index}"
    rank = f"server of {counted(place.size, 'worker')}"
    if place.rank is not None:
        rank = f"rank {place.rank} of {place.size}"
    settings = "no settings" if place.source == "none" else place.source
    return {**found, "place": f"{rank} ({who}), by {settings}"}


def _print(name: str, part: Any, indent: str = "") -> None:
    """Print a part as lines of `name: value`, those inside of it indented."""
    name = name.replace("control_group", "control group")
    if isinstance(part, dict):
        if set(part) == {"unreadable"}:
            print(f"{indent}{name}: can't be read: {part['unreadable']}")
            return
        print(f"{indent}{name}:{'' if part else ' none'}")
        for key, value in part.items():
            _print(key, value, f"{indent}  ")
        return
    if isinstance(part, list):
        part = ", ".join(map(str, part)) or "none"
    elif name.endswith("_bytes"):
        name, part = name.removesuffix("_bytes").replace("_", " "), human_bytes(part)
    print(f"{indent}{name}: {part}")
