"""Hosts out of network namespaces, and the links between them."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import secrets
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.places import ROOT, cluster_env, quiet_env
from common.processes import Driver, Team

__all__ = ["bytes_sent", "delayed", "make_hosts", "shape", "start_on_hosts"]


def make_hosts(count: int = 2) -> Any:
    """Return hosts, a context manager; ends the benchmark where none can be."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from hosts import Hosts

    if reason := Hosts.available():
        sys.exit(f"This benchmark can't run here: {reason}.")
    return Hosts(count)


def shape(hosts: Any, rate: int) -> None:
    """Let each host send no faster than a rate, in bits per second."""
    # A burst of a millisecond, or of some packets.
    burst = str(max(rate // 8000, 20_000))
    limit = ["tbf", "rate", f"{rate}bit", "burst", burst, "latency", "1000ms"]
    for host in range(len(hosts.names)):
        tc = [*hosts.prefix(host), "tc", "qdisc", "replace", "dev", "eth0", "root"]
        subprocess.run([*tc, *limit], check=True)


# From linux/if_tun.h.
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 1 << 16


@contextlib.contextmanager
def delayed(hosts: Any, seconds: float) -> Iterator[None]:
    """Let each frame between host 0 and the others arrive some seconds later.

    Host 0 keeps the switch for itself; the others get one of their own. Between the two
    a thread of this process hands on the frames of two TAP devices: that works where
    the kernel has no `netem`. It is meant for slow links.
    """

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def inside(*words: str) -> None:
        ip("-n", hosts.switch, "link", *words)

    with contextlib.ExitStack() as stack:
        taps = []
        for name in ("near", "far"):
            taps.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            stack.callback(os.close, taps[-1])
            device = f"kd{os.getpid()}{name}"
            wanted = struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI)
            fcntl.ioctl(taps[-1], _TUNSETIFF, wanted)
            ip("link", "set", device, "netns", hosts.switch, "name", name)
        inside("add", "others", "type", "bridge")
        for host in range(1, len(hosts.names)):
            inside("set", f"port{host}", "master", "others")
        inside("set", "near", "master", "bridge", "up")
        inside("set", "far", "master", "others", "up")
        inside("set", "others", "up")
        ended = threading.Event()
        relay = threading.Thread(target=_relay, args=(taps, seconds, ended))
        relay.start()
        stack.callback(relay.join)
        stack.callback(ended.set)
        yield


def _relay(taps: Sequence[int], seconds: float, ended: threading.Event) -> None:
    """Hand each frame of one TAP device to the other one, some seconds later."""
    held: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.poll()
    for tap in taps:
        poll.register(tap, select.POLLIN)
    while not ended.is_set():
        wait = held[0][0] - time.monotonic() if held else 0.1
        for tap, _ in poll.poll(max(wait, 0.0) * 1000):
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = os.read(tap, _FRAME_BYTES)
                    other = taps[1 - taps.index(tap)]
                    held.append((time.monotonic() + seconds, other, frame))
        while held and held[0][0] <= time.monotonic():
            _, tap, frame = held.popleft()
            # A full queue loses it, as a switch would.
            with contextlib.suppress(BlockingIOError):
                os.write(tap, frame)


def bytes_sent(hosts: Any) -> int:
    """Return how many bytes host 0 has sent, by the counter of its interface."""
    done = subprocess.run(
        [*hosts.prefix(0), "cat", "/sys/class/net/eth0/statistics/tx_bytes"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def start_on_hosts(
    driver: Driver,
    hosts: Any,
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    place: int = 0,
    python: str = sys.executable,
) -> Team:
    """Start a job with one worker on each host.

    Args:
        driver: Starts the processes.
        hosts: The hosts.
        name: Of the column.
        command: Of each process; the rank follows it, then the number of workers.
        env: What is special about their environment.
        place: A number of this job's own, for its ports.
        python: That of another environment.
    """
    size = len(hosts.names)
    port = 5000 + 100 * place
    addresses = [f"{hosts.address(host)}:{port + host}" for host in range(size)]
    secret = secrets.token_hex(32)
    return driver.start(
        name,
        lambda rank: [*hosts.prefix(rank), python, *command, str(rank), str(size)],
        size,
        lambda rank: {**quiet_env(), **cluster_env(addresses, rank, secret), **env},
    )
