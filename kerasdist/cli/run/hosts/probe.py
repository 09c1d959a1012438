"""The facts about a host on which a job's tasks depend, and the ports of its tasks.

The text of this module is sent through ssh to each host, so it uses the standard
library alone. The process keeps the ports, and ends with its standard input. Before
that it answers further questions, each a line: whether it can connect to addresses.
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
    for name, distributions in _PACKAGES.items():
        found[name] = _version(distributions)
    if command:
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
        program: The text of `cli.run.hosts.find_gpus`; empty: none are looked for.
        exported: Variables of the tasks that aren't this process's.
    """
    if not program:
        return [], ""
    found: dict[str, Any] = {"__name__": "kerasdist.cli.run.hosts.find_gpus"}
    exec(compile(program, "kerasdist", "exec"), found)
    return found["find_gpus"]({**os.environ, **exported})


def unreachable(addresses: list[str], seconds: float) -> list[str | None]:
    """Return for each address why this host can't connect to it; None if it can."""
    from concurrent.futures import ThreadPoolExecutor

    # As tasks do; where kerasdist is missing, the error says so.
    from kerasdist.transport.rendezvous.waiting_notice import why_unreachable

    with ThreadPoolExecutor(_MOST_PROBES) as pool:
        return list(pool.map(lambda each: why_unreachable(each, seconds), addresses))


def _read_question() -> Any:
    """Return the next question; None when standard input has ended."""
    text = b""
    while not text.endswith(b"\n"):
        data = os.read(0, 65536)
        if not data:
            return None
        text += data
    return json.loads(text)


def main() -> None:
    """Answer questions on standard input, and keep the ports until it ends."""
    question = _read_question()
    if question is None:
        return
    sys.path[1:1] = filter(None, question["path"].split(os.pathsep))
    answer: dict[str, Any] = {"facts": facts(question["folder"], question["command"])}
    answer["gpus"] = gpus(question["find_gpus"], question["exported"])
    kept: list[socket.socket] = []
    try:
        kept = ports(question["host"], question["ports"])
    except OSError as error:
        answer["fault"] = f"it has no free port for {question['host']}: {error}"
    answer["addresses"] = [[sock.family, sock.getsockname()] for sock in kept]
    if question["listens"]:
        for sock in kept:
            sock.listen(1024)
    os.write(1, json.dumps(answer).encode() + b"\n")
    while (question := _read_question()) is not None:
        reasons = unreachable(question["addresses"], question["seconds"])
        os.write(1, json.dumps({"unreachable": reasons}).encode() + b"\n")


if __name__ == "__main__":
    main()
