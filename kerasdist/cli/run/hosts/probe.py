"""The facts about a host on which tasks depend, its GPUs, and the ports of its tasks.

The text of this module is sent through ssh to each host, so it uses the standard
library alone. The process keeps the ports, and ends with its standard input. Before
that it answers further questions, each a line: whether it can connect to addresses.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

# Of each package the distributions that may install it.
PACKAGES = {
    "tensorflow": (
        *("tensorflow", "tensorflow-cpu", "tensorflow-macos", "tensorflow-intel"),
        "tf-nightly",
    ),
    "keras": ("keras", "keras-nightly"),
    "numpy": ("numpy",),
}

_MOST_PROBES = 64


def facts(folder: str, command: list[str]) -> dict[str, Any]:
    """Return what must be the same on all hosts, in words.

    Args:
        folder: The working folder of the tasks.
        command: The arguments of their interpreter; empty: there is no script.
    """
    found: dict[str, Any] = {"Python": platform.python_version()}
    try:
        os.chdir(folder)
    except OSError as error:
        return {**found, "working folder": f"{folder}: {error.strerror}"}
    found["working folder"] = folder
    for name, distributions in {**PACKAGES, "kerasdist": ("kerasdist",)}.items():
        found[name] = version_of(*distributions) or "not installed"
    if command:
        found["script"] = _digest(command)
    return found


def version_of(*names: str) -> str | None:
    """Return the version of the first package that is installed; None if none is."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _digest(command: list[str]) -> str:
    """Return the digest of the script's text; else why there is none."""
    path: str | None = command[0]
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(command[1])
            path = None if spec is None else spec.origin
    if path is None:
        return "no such module"
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    try:
        with open(path, "rb") as file:
            return f"SHA-256 {hashlib.sha256(file.read()).hexdigest()[:16]}"
    except OSError as error:
        return f"{path}: {error.strerror}"


def bound(host: str, *, gateway: bool = False) -> socket.socket:
    """Return a socket that is bound to a free port, and doesn't listen.

    Args:
        host: The name or address of this host.
        gateway: Whether the name may be that of a gateway in front of it.

    Raises:
        OSError: It isn't an address of this host.
    """
    options = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    targets = [(family, address) for family, _, _, _, address in options]
    if gateway:
        targets.append((targets[0][0], ("", 0)))
    for family, address in targets:
        sock = socket.socket(family)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
            if (family, address) == targets[-1]:
                raise
        else:
            # Not before: ports would be shared.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return sock
    raise OSError(f"{host} has no address")


# The GPUs of this host that a job may use, found without TensorFlow.

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
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
    given = environ.get(GPU_VARIABLE)
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


def unreachable(addresses: list[str], seconds: float) -> list[str | None]:
    """Return for each address why this host can't connect to it; None if it can."""
    from concurrent.futures import ThreadPoolExecutor

    # As tasks do; where kerasdist is missing, the error says so.
    from kerasdist.transport.rendezvous.waiting_notice import why_unreachable

    with ThreadPoolExecutor(_MOST_PROBES) as pool:
        return list(pool.map(lambda each: why_unreachable(each, seconds), addresses))


def main() -> None:
    """Answer questions on standard input, and keep the ports until it ends."""
    questions = map(json.loads, sys.stdin.buffer)
    question = next(questions, None)
    if question is None:
        return
    sys.path[1:1] = filter(None, question["path"].split(os.pathsep))
    answer: dict[str, Any] = {"facts": facts(question["folder"], question["command"])}
    environ = {**os.environ, **question["exported"]}
    answer["gpus"] = find_gpus(environ) if question["finds_gpus"] else ([], "")
    kept: list[socket.socket] = []
    try:
        for _ in range(question["ports"]):
            kept.append(bound(question["host"], gateway=True))
    except OSError as error:
        answer["fault"] = f"it has no free port for {question['host']}: {error}"
    answer["addresses"] = [[sock.family, sock.getsockname()] for sock in kept]
    if question["listens"]:
        for sock in kept:
            sock.listen(1024)
    os.write(1, json.dumps(answer).encode() + b"\n")
    for question in questions:
        reasons = unreachable(question["addresses"], question["seconds"])
        os.write(1, json.dumps({"unreachable": reasons}).encode() + b"\n")


if __name__ == "__main__":
    main()
