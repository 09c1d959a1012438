"""The hosts of a job, and the tasks on each."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import ipaddress
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kerasdist.cluster.address import is_this_host

# The options of `kerasdist run` for several hosts.

WITH_VALUE = ("-H", "--hosts", "--hostfile", "--ssh", "--python", "-x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The settings of a job on several hosts.

    Attributes:
        hosts: The hosts, in the order of their workers.
        ssh: The command that connects.
        python: The path of Python there.
        exported: The variables that `-x` names, and their values.
    """

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    python: str
    exported: Mapping[str, str]

    @property
    def slots(self) -> int:
        """The number of workers for which there is room."""
        return sum(host.slots for host in self.hosts)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to those of `run`."""
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST[:SLOTS],...",
        help="hosts that ssh reaches without a password, each with its number of "
        "workers (default of SLOTS: 1)",
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="a file with a host in each line, as `host slots=2`",
    )
    parser.add_argument(
        "--ssh",
        metavar="COMMAND",
        help="with hosts: the command that connects, with its options (default: ssh)",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="with hosts: the path of Python there (default: that of this one)",
    )
    parser.add_argument(
        "-x",
        dest="exported",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="with hosts: a variable for the workers. Those of kerasdist, TensorFlow, "
        "Keras and Python (KERASDIST_*, TF_*, KERAS_*, PYTHON* and the like) are "
        "passed on without it",
    )


def read_options(
    arguments: argparse.Namespace, faults: list[str]
) -> HostOptions | None:
    """Return the settings; None if no hosts are given.

    Args:
        arguments: The parsed arguments.
        faults: Takes a message about each value that can't be used.
    """
    if arguments.hosts is None and arguments.hostfile is None:
        given = {"--ssh": arguments.ssh, "--python": arguments.python}
        given["-x"] = arguments.exported[0] if arguments.exported else None
        faults += [
            f"{name} is an option for jobs on several hosts. Received: {name} {text} "
            "without -H or --hostfile"
            for name, text in given.items()
            if text is not None
        ]
        return None
    hosts: list[Host] = []
    if arguments.hosts is not None and arguments.hostfile is not None:
        faults.append("-H and --hostfile can't be used together")
    elif arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts, faults)
    else:
        try:
            with open(arguments.hostfile, encoding="utf-8") as file:
                hosts = parse_hostfile(arguments.hostfile, file.read(), faults)
        except (OSError, UnicodeDecodeError) as error:
            faults.append(
                "--hostfile must be a text file. Received: --hostfile "
                f"{shlex.quote(arguments.hostfile)}: {error}"
            )
    if arguments.bind == "cores":
        faults.append("--bind cores isn't possible with several hosts")
    ssh = tuple(shlex.split(arguments.ssh or "ssh"))
    if not ssh or shutil.which(ssh[0]) is None:
        faults.append(
            f"there is no command {arguments.ssh or 'ssh'!r}. On Debian and Ubuntu: "
            "apt-get install openssh-client"
        )
    return HostOptions(
        hosts=tuple(hosts),
        ssh=ssh,
        python=arguments.python or sys.executable,
        exported=_exported(arguments.exported, faults),
    )


def _exported(texts: Sequence[str], faults: list[str]) -> Mapping[str, str]:
    exported = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in os.environ):
            faults.append(
                "-x must be the name of a variable that is set, or NAME=VALUE. "
                f"Received: -x {shlex.quote(text)}"
            )
        else:
            exported[name] = value if equals else os.environ[name]
    return exported


# The commands by which a Python program runs on a host.

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


# "name", "user@name", "name:slots", "[address]:slots".
_HOST = re.compile(
    r"(?:(?P<user>[^@\s:,]+)@)?"
    r"(?:\[(?P<address>[0-9a-fA-F:.%\w]+)\]|(?P<name>[^@\s:,\[\]]+))"
    r"(?::(?P<slots>[1-9]\d*))?"
)
_FORM = "NAME[:SLOTS], [IPV6][:SLOTS] or USER@NAME[:SLOTS]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host.

    Attributes:
        name: Its name or address, by which ssh and the other hosts reach it.
        user: The user's name there; empty: ssh knows it.
        slots: The number of workers for which it has room.
    """

    name: str
    user: str = ""
    slots: int = 1

    @property
    def target(self) -> str:
        """The destination for ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def in_address(self) -> str:
        """Its name in front of a port: an IPv6 address has brackets."""
        return f"[{self.name}]" if ":" in self.name else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of one task.

    Attributes:
        host: Its host.
        family: The family of its socket's address.
        address: The address to which its host binds that socket.
    """

    host: Host
    family: int
    address: tuple[str | int, ...]

    @property
    def text(self) -> str:
        """The address for the other tasks, `"host:port"`."""
        return f"{self.host.in_address}:{self.address[1]}"


def parse_hosts(text: str, faults: list[str]) -> list[Host]:
    """Return the hosts of `-H a:2,b:2`.

    Args:
        text: The option's value.
        faults: Takes a message about each part that can't be used.
    """
    hosts = []
    for part in text.split(","):
        match = _HOST.fullmatch(part.strip())
        if match is None:
            faults.append(
                f"-H must be a list of hosts with commas between, each {_FORM}. "
                f"Received: {part.strip()!r} in -H {text}"
            )
        else:
            hosts.append(_host(match))
    return _distinct(hosts, "-H", faults)


def parse_hostfile(path: str, text: str, faults: list[str]) -> list[Host]:
    """Return the hosts of a hostfile: a line each, as `name`, `name slots=2`, `name:2`.

    Args:
        path: The file's path, for messages.
        text: Its text; what follows a `#` is a comment.
        faults: Takes a message about each line that can't be used.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        joined = ":".join([words[0], *(w.removeprefix("slots=") for w in words[1:])])
        match = _HOST.fullmatch(joined) if len(words) < 3 else None
        if match is None:
            faults.append(
                f"Each line of a hostfile must be {_FORM}, or NAME slots=SLOTS. "
                f"Received: {line.strip()!r} in line {number} of {path}"
            )
        else:
            hosts.append(_host(match))
    if not hosts and not faults:
        faults.append(f"--hostfile {path} has no host")
    return _distinct(hosts, "--hostfile", faults)


def _host(match: re.Match[str]) -> Host:
    return Host(
        name=match["address"] or match["name"],
        user=match["user"] or "",
        slots=int(match["slots"] or 1),
    )


def _distinct(hosts: list[Host], option: str, faults: list[str]) -> list[Host]:
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        faults.append(
            f"{option} must have each host once, with its number of workers. Received: "
            f"{', '.join(twice)} several times"
        )
    local = [name for name in names if _is_loopback(name)]
    if local and len(hosts) > 1:
        faults.append(
            f"{option} must have names by which the hosts reach each other. Received: "
            f"{local[0]}, which is another host on each of them. Expected this host's "
            "name or address in the network of the others"
        )
    return hosts


def _is_loopback(name: str) -> bool:
    """Return whether a name means on each host that host itself, by its text."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    return name.lower().rstrip(".") in ("localhost", "ip6-localhost")


def assign(
    hosts: Sequence[Host], workers: int, servers: int
) -> Mapping[tuple[str, int], Host]:
    """Return the host of each task: workers by slots, then servers in turn.

    Args:
        hosts: The hosts; there are enough slots.
        workers: Number of workers.
        servers: Number of parameter servers, which need no slots.
    """
    slots = [host for host in hosts for _ in range(host.slots)]
    used = list(dict.fromkeys(slots[:workers]))
    found = {("worker", rank): slots[rank] for rank in range(workers)}
    for index in range(servers):
        found["ps", index] = used[index % len(used)]
    return found
