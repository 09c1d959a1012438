"""The hosts of a job, and the tasks on each."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
from collections.abc import Mapping, Sequence

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
