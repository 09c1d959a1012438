"""Several hosts on one machine: network namespaces joined by a switch.

    with Hosts(2) as hosts:
        with Workers(script, 2, cluster=hosts.addresses, prefix=hosts.prefix) as job:
            job.succeed()

The switch is a namespace too, so nothing of it shows outside, and no firewall
rule of the machine applies to it. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import psutil

from closing import Closing
from pace import bound

_numbers = itertools.count()


def _ip(*args: str) -> str:
    command = ["ip", *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=bound(30), check=False
    )
    if done.returncode != 0:
        raise OSError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


class Hosts(Closing):
    """Network namespaces with an address each. Use it in a `with` statement.

    On exit, also after a failure, every process in them is killed and they are
    removed.
    """

    # What the names of this process's namespaces begin with.
    PREFIX = f"kerasdist-{os.getpid()}-"

    def __init__(self, count: int) -> None:
        job = f"{self.PREFIX}{next(_numbers)}"
        self.names = [f"{job}-host{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self.switch = f"{job}-switch"

    @staticmethod
    def available() -> str | None:
        return _why_unavailable()

    @classmethod
    def leftovers(cls) -> list[str]:
        # Where `ip netns` keeps them; asking `ip` itself is slow.
        folder = Path("/run/netns")
        names = os.listdir(folder) if folder.is_dir() else []
        return [name for name in names if name.startswith(cls.PREFIX)]

    def prefix(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]]

    def address(self, host: int) -> str:
        return self.addresses[host]

    def cut(self, host: int) -> None:
        """Pulls a host's cable: what it sends and is sent is lost."""
        _ip("-n", self.switch, "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{host}", "up")

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for i, (name, address) in enumerate(
                zip(self.names, self.addresses, strict=True)
            ):
                _ip("netns", "add", name)
                _ip(
                    *("-n", self.switch, "link", "add", f"port{i}", "type", "veth"),
                    *("peer", "name", "eth0", "netns", name),
                )
                _ip(
                    *("-n", self.switch, "link", "set", f"port{i}"),
                    *("master", "bridge", "up"),
                )
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        existing = set(self.leftovers())
        # A namespace lives on without its name while a process is in it.
        for name in existing.intersection([*self.names, self.switch]):
            for pid in _ip("netns", "pids", name).split():
                try:
                    psutil.Process(int(pid)).kill()
                except psutil.NoSuchProcess:
                    continue
            _ip("netns", "delete", name)


@functools.cache
def _why_unavailable() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (package iproute2)"
    try:
        with Hosts(1):
            return None
    except OSError as error:
        return f"network namespaces don't work on this machine: {error}"
