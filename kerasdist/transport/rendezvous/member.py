"""The record of one worker that all others have."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

from kerasdist.errors import ProtocolError
from kerasdist.transport.base import Peer


def host_key() -> str:
    """Return a text that is equal on two workers if they can share memory.

    It has the running kernel, the mount of /dev/shm and the network namespace: so two
    containers count as two hosts unless they share both, and so do the test
    hosts that are namespaces of one machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        shm = os.stat("/dev/shm")
        net = os.stat("/proc/self/ns/net")
    except OSError:
        return f"{socket.gethostname()}-{os.getpid()}"
    return f"{boot}-{shm.st_dev}-{shm.st_ino}-{net.st_ino}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """The record of one worker.

    Attributes:
        rank: Its rank.
        address: Its address in the cluster.
        host: The identity of its host, see `host_key`.
        unix_name: The name of its Unix socket.
        pid: Its process number on its host.
        replicas: Number of its replicas.
    """

    rank: int
    address: str
    host: str
    unix_name: str
    pid: int
    replicas: int

    @property
    def peer(self) -> Peer:
        """Its name in messages."""
        return Peer(self.rank, self.address)

    @classmethod
    def from_json(cls, value: Any) -> Member:
        """Return the member that `dataclasses.asdict` wrote.

        Raises:
            ProtocolError: It isn't one.
        """
        kinds = {"rank": int, "address": str, "host": str}
        kinds |= {"unix_name": str, "pid": int, "replicas": int}
        if (
            not isinstance(value, dict)
            or value.keys() != kinds.keys()
            or any(not isinstance(value[name], kinds[name]) for name in kinds)
        ):
            raise ProtocolError(f"A member record is damaged. Received: {value!r}.")
        return cls(**value)
