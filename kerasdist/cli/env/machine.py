"""The machine of `kerasdist env`: system, cores, memory, limits, network."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import platform
import re
import resource
import socket
import struct
from pathlib import Path
from typing import Any

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
