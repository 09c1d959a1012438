"""The command `kerasdist env`: what this machine and its software are, as a report.

What `kerasdist doctor` judges, and the allocators of `kerasdist run --malloc`, are read
here, too. Nothing is imported for that, and TensorFlow is asked in a process of its
own: one that crashes or hangs doesn't affect this process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes.util
import importlib.metadata
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kerasdist._version import __version__
from kerasdist.cli.console import Command, json_option, options_of
from kerasdist.cli.run.hosts.probe import PACKAGES, version_of
from kerasdist.cluster import resolve
from kerasdist.errors import ClusterError
from kerasdist.placement.plan import counted, human_bytes

# The machine: system, cores, memory, limits, network.

# Files of control groups, of version 1, too.
_CONTROLS = {
    "cpu.max": "cores",
    "memory.max": "memory_limit_bytes",
    "memory/memory.limit_in_bytes": "memory_limit_bytes",
    "pids.max": "processes",
}
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
    whole = psutil.virtual_memory()
    found: dict[str, Any] = {
        "total_bytes": whole.total,
        "available_bytes": whole.available,
        "swap_bytes": psutil.swap_memory().total,
    }
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return {**found, "/dev/shm": {"unreadable": str(error)}}
    return {**found, "/dev/shm": {"total_bytes": shm.total, "free_bytes": shm.free}}


def control_group(root: str = "/sys/fs/cgroup") -> dict[str, Any]:
    """Return the limits of this process's control group, and of those above it.

    Args:
        root: Where control groups are.
    """
    top = Path(root)
    own = re.search(r"^0::(.*)$", Path("/proc/self/cgroup").read_text(), re.M)
    folder = top / own[1].lstrip("/") if own is not None else top
    found: dict[str, Any] = {}
    # In a container the path may be one outside of it: then its own is the root.
    for each in (folder, *folder.parents):
        for name, key in _CONTROLS.items() if each.is_relative_to(top) else ():
            # "max" isn't a number: there is no limit.
            with contextlib.suppress(OSError, ValueError):
                number, *period = map(int, (each / name).read_text().split())
                value = number / period[0] if period else number
                # Each may only lower what those above it allow.
                if value <= _UNLIMITED:
                    found[key] = min(value, found.get(key, value))
    return found or {"limits": "none"}


def limits() -> dict[str, str]:
    """Return this process's limits: those that hold, and those it may raise them to."""
    found = {}
    for name, number in _LIMITS.items():
        soft, hard = (
            "unlimited" if each == resource.RLIM_INFINITY else str(each)
            for each in resource.getrlimit(number)
        )
        found[name] = soft if soft == hard else f"{soft} of {hard}"
    return found


def network() -> dict[str, Any]:
    """Return the host's name and its interfaces with their addresses."""
    found: dict[str, Any] = {"host name": socket.gethostname()}
    addresses = psutil.net_if_addrs()
    for name, state in psutil.net_if_stats().items():
        words = [
            each.address.partition("%")[0]
            for each in addresses.get(name, ())
            if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
        words += ["up" if state.isup else "down", f"MTU {state.mtu}"]
        if state.speed:
            words.append(f"{state.speed} Mbit/s")
        found[name] = ", ".join(words)
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
    # All of the rest behind a quote that isn't closed.
    r"""(?:"(?:\\.|[^"\\])*(?:"|\Z)|'(?:\\.|[^'\\])*(?:'|\Z)|[^\s,;&"'}]+)""",
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
    secrets = [
        text
        for name, text in environ.items()
        # A path isn't a secret, and is a part of many others.
        if _IS_SECRET.search(name) and len(text) >= _LEAST and text[0] != "/"
    ]

    def without(text: str) -> str:
        # A secret may be a part of another one.
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return _without_inside(text)

    return _each_text(value, without)


def _without(text: str) -> str:
    """Return a variable's value with the secrets in it hidden."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return json.dumps(_each_text(json.loads(text), _without, _IS_SECRET.search))
        except (ValueError, RecursionError):
            pass  # it isn't JSON
    return _without_inside(text)


def _without_inside(text: str) -> str:
    return _IN_ADDRESS.sub(rf"\1{HIDDEN}@", _INSIDE.sub(rf"\1{HIDDEN}", text))


def _each_text(
    value: Any,
    change: Callable[[str], str],
    hides: Callable[[str], object] = lambda key: False,
) -> Any:
    """Return a value with all its texts changed, and those of some keys hidden."""
    if isinstance(value, dict):
        return {
            key: HIDDEN if hides(key) else _each_text(each, change, hides)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_each_text(each, change, hides) for each in value]
    return change(value) if isinstance(value, str) else value


# The software: versions, extras, allocators, TensorFlow's devices.

# What a report names, too, where it's installed.
_OTHERS = ("tensorboard", "protobuf", "h5py", "ml_dtypes", "mpi4py")
ALLOCATORS = ("jemalloc", "tcmalloc_minimal", "tcmalloc", "mimalloc")
# What the script prints before its answer, at the beginning of a line.
_ANSWER = "DEVICES"
LIST_DEVICES = f"""
import json
import tensorflow as tf
built = tf.sysconfig.get_build_info()
print("\\n{_ANSWER}" + json.dumps({{
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
LISTING = (sys.executable, "-P", "-c", LIST_DEVICES)


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages; nothing is imported."""
    found = {
        "kerasdist": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
    }
    for name in (*itertools.chain(*PACKAGES.values()), *_OTHERS):
        if (version := version_of(name)) is not None:
            found[name] = version
    for name, names in PACKAGES.items():
        if not found.keys() & set(names):
            found[name] = "not installed"
    return found


def extras() -> dict[str, str]:
    """Return of each extra of kerasdist whether it's installed."""
    wanted: dict[str, set[str]] = collections.defaultdict(set)
    for requirement in importlib.metadata.requires("kerasdist") or []:
        of_extra = re.match(r"([\w.-]+).*extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if of_extra is not None:
            wanted[of_extra[2]].add(of_extra[1])
    found = {}
    for extra, names in sorted(wanted.items()):
        missing = ", ".join(sorted(name for name in names if not version_of(name)))
        found[extra] = f"{missing} missing" if missing else "installed"
    return found


def find_allocator() -> str | None:
    """Return the file name of an installed allocator, as the loader finds it.

    glibc gives the memory of large tensors back to the system when they are dropped
    and takes it again in the next step, page by page. The `ALLOCATORS` keep it. What
    is gained depends on the model: `benchmarks/fit`.
    """
    return next(filter(None, map(ctypes.util.find_library, ALLOCATORS)), None)


def preloading(library: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make the loader load `library` first.

    Args:
        library: A path, or a name that the loader finds.
        environ: What is set already: other libraries are loaded after it.
    """
    if os.sep in library:
        library = str(Path(library).resolve())
    others = environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{others}" if others else library}


def loaded_allocator(environ: Mapping[str, str]) -> str | None:
    """Return which of `ALLOCATORS` is loaded first; None: the C library's is used."""
    preload = environ.get("LD_PRELOAD", "")
    return next((name for name in ALLOCATORS if f"lib{name}." in preload), None)


def _ask_tensorflow(seconds: float, command: Sequence[str]) -> Any:
    """Return TensorFlow's version and devices; if it fails, a dictionary with why.

    Args:
        seconds: How long it may take.
        command: The command that prints them, as `LIST_DEVICES` does.
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
        text = f"TensorFlow didn't list its devices within {seconds:g} s"
        return {"unreadable": text}
    finally:
        # Also its children, if it hangs or has left some behind.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    _, mark, answer = out.decode(errors="replace").rpartition(f"\n{_ANSWER}")
    if process.returncode == 0 and mark:
        return json.loads(answer)
    last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    how = f"exit code {process.returncode}"
    return {"unreadable": f"TensorFlow can't be imported ({how}): {last[0]}"}


def gpus(
    seconds: float,
    command: Sequence[str] = LISTING,
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
    found["TensorFlow"] = "not asked (--no-tensorflow)"
    if seconds:
        # Whatever the error is: the driver's part is known all the same.
        try:
            found["TensorFlow"] = _ask_tensorflow(seconds, command)
        except Exception as error:
            found["TensorFlow"] = {"unreadable": str(error)}
    return found


_OPTIONS = (
    *options_of("""
--no-tensorflow
    don't import TensorFlow, which takes seconds, to list its devices
"""),
    json_option("text"),
)
_TENSORFLOW_SECONDS = 60.0
# The variable by which each launcher is known.
_SIGNS = {
    "kerasdist run": "KERASDIST_REPORT_FD",
    "Slurm": "SLURM_JOB_ID",
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "MPI (PMI)": "PMI_SIZE",
    "PMIx": "PMIX_RANK",
    "Kubernetes": "KUBERNETES_SERVICE_HOST",
    "Ray": "RAY_JOB_ID",
}


def _run(arguments: argparse.Namespace) -> int:
    seconds = 0.0 if arguments.no_tensorflow else _TENSORFLOW_SECONDS
    found = report(os.environ, seconds)
    arguments.document.update(found)
    if not arguments.json:
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
        "allocator": lambda: {
            "loaded": loaded_allocator(environ) or "that of the C library",
            "installed": find_allocator() or "none",
        },
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


def _launcher(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what started this process, and its place in the job."""
    signs = [name for name, sign in _SIGNS.items() if sign in environ]
    try:
        place = resolve(environ=environ)
    except ClusterError as error:
        # What was received is among the variables.
        text = str(error).partition("\nReceived: ")[0]
        return {"signs of": signs, "place": {"unreadable": text}}
    who = f"{place.task_type} {place.task_index}"
    rank = f"server of {counted(place.size, 'worker')}"
    if place.rank is not None:
        rank = f"rank {place.rank} of {place.size}"
    settings = "no settings" if place.source == "none" else place.source
    return {"signs of": signs, "place": f"{rank} ({who}), by {settings}"}


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


COMMAND = Command(
    name="env",
    handler=_run,
    options=_OPTIONS,
    help="print what a report of a bug needs",
    description="Print versions, machine, limits, network, GPUs, launcher and "
    "environment variables, with secrets hidden, for a report of a bug. A part that "
    "can't be read contains the reason. The exit code is 0.",
)
