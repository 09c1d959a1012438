"""The commands by which a Python program runs on a host."""

from __future__ import annotations

import dataclasses
import shlex
import socket
import sys
from pathlib import Path

from kerasdist.cli.run.hosts.places import Host
from kerasdist.cluster.address import is_this_host

# Programs by one connection besides the first: sshd's MaxSessions is 10 by default.
MOST_SHARED = 9

# Reads the program from standard input, exactly, since lines for it follow.
_BOOT = """\
import os
def read(count):
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            raise SystemExit(1)
        data += part
    return data
exec(compile(read(int(read(8))), "kerasdist", "exec"), {"__name__": "__main__"})
"""
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
    """The way to run programs on hosts.

    Attributes:
        ssh: The command `ssh`, perhaps with options of the user's.
        python: The path of Python, the same on all hosts.
        control: The folder of the sockets by which connections to a host are shared.
    """

    ssh: tuple[str, ...]
    python: str
    control: Path

    def command(
        self, host: Host, *options: str, first: bool = False, alone: bool = False
    ) -> list[str]:
        """Return the command for a host; its program follows on standard input.

        Args:
            host: The host.
            *options: Options of the interpreter.
            first: Whether other commands share its connection.
            alone: Whether it has a connection of its own.
        """
        if is_here(host):
            return [sys.executable, "-P", *options, "-c", _BOOT]
        shared = f"ControlPath={'none' if alone else f'{self.control}/%C'}"
        return [
            *(*self.ssh, *_OPTIONS),
            *("-o", f"ControlMaster={'yes' if first else 'no'}", "-o", shared),
            *("--", host.target),
            shlex.join([self.python, "-P", *options, "-c", _BOOT]),
        ]


def is_here(host: Host) -> bool:
    """Return whether a host is this one, which needs no ssh."""
    if host.user:
        return False
    return host.name == socket.gethostname() or is_this_host(host.name)


def program_text(module: str) -> bytes:
    """Return a module's text as `command`'s programs are sent: its length, and it.

    Args:
        module: The path of its file.
    """
    text = Path(module).read_bytes()
    return b"%08d" % len(text) + text
