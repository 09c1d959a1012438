"""The facts about a host on which a job's tasks depend, and the ports of its tasks.

The text of this module is sent through ssh to each host, so it uses the standard
library alone. The process keeps the ports, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import sys
from typing import Any

_PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-intel"),
    "keras": ("keras", "keras-nightly"),
    "kerasdist": ("kerasdist",),
    "numpy": ("numpy",),
}


def facts(folder: str, command: list[str]) -> dict[str, Any]:
    """Return what must be the same on all hosts, in words.

    Args:
        folder: The working folder of the tasks.
        command: The arguments of their interpreter.
    """
    found: dict[str, Any] = {"Python": platform.python_version()}
    try:
        os.chdir(folder)
    except OSError as error:
        return {**found, "working folder": f"{folder}: {error.strerror}"}
    found["working folder"] = folder
    for name, distributions in _PACKAGES.items():
        found[name] = _version(distributions)
    found["script"] = _digest(command)
    return found


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "not installed"


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


def ports(host: str, count: int) -> list[socket.socket]:
    """Return sockets that are bound to free ports of this host, and don't listen."""
    found = []
    for _ in range(count):
        sock = _bound(host)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.append(sock)
    return found


def _bound(host: str) -> socket.socket:
    options = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    for family, kind, _, _, address in options:
        sock = socket.socket(family, kind)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
        else:
            return sock
    # Its name is that of a gateway in front of it.
    sock = socket.socket(options[0][0])
    sock.bind(("", 0))
    return sock


def gpus(program: str, exported: dict[str, str]) -> Any:
    """Return the names of this host's GPUs, and why they can't be listed.

    Args:
        program: The text of `kerasdist.cli.run.gpus.find`; empty: none are looked for.
        exported: Variables of the tasks that aren't this process's.
    """
    if not program:
        return [], ""
    found: dict[str, Any] = {"__name__": "kerasdist.cli.run.gpus.find"}
    exec(compile(program, "kerasdist", "exec"), found)
    return found["find_gpus"]({**os.environ, **exported})


def main() -> None:
    """Answer the one question on standard input, and keep the ports until it ends."""
    text = b""
    while not text.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            return
        text += data
    question = json.loads(text)
    sys.path[1:1] = filter(None, question["path"].split(os.pathsep))
    answer: dict[str, Any] = {"facts": facts(question["folder"], question["command"])}
    answer["gpus"] = gpus(question["find_gpus"], question["exported"])
    kept: list[socket.socket] = []
    try:
        kept = ports(question["host"], question["ports"])
    except OSError as error:
        answer["fault"] = f"it has no free port for {question['host']}: {error}"
    answer["addresses"] = [[sock.family, sock.getsockname()] for sock in kept]
    os.write(1, json.dumps(answer).encode() + b"\n")
    while os.read(0, 65536):
        pass


if __name__ == "__main__":
    main()
