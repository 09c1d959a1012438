"""The links between processes: measured, or named as `--network 10G`."""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import numpy as np

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.ring import PIECE_BYTES


class HostLink(NamedTuple):
    """The time of a message from one process to another: `latency + bytes * byte`.

    All links of a job are alike, and each process sends and receives at the same time.

    Attributes:
        latency: Seconds of an empty message, with the work of both processes for it.
        byte: Seconds for each byte.
    """

    latency: float
    byte: float

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of some bytes."""
        return self.latency + size * self.byte


# Latencies are those of kerasdist's exchange of an empty message, measured between two
# processes of one machine, over memory and over TCP (benchmarks/prediction). A switch
# and a network card add some microseconds.
_LATENCY = 150e-6
LOOPBACK = HostLink(60e-6, 0.15e-9)
# TCP's headers leave this part of the bits for data.
_PAYLOAD = 0.95
_PATTERN = re.compile(
    r"(\d+(?:\.\d+)?)\s*([MG])(?:bit(?:/s)?|bps)?(?:[,/ ]+(\d+(?:\.\d+)?)\s*(us|ms))?",
    re.IGNORECASE,
)


def parse_link(text: str) -> HostLink:
    """Return the link that a text names.

    Args:
        text: "loopback", bits per second as "100M" or "25G", or these and a latency, as
            "1G,2ms" or "100G,80us".

    Raises:
        ValueError: It's none.
    """
    if text.strip().lower() == "loopback":
        return LOOPBACK
    match = _PATTERN.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"A network must be 'loopback' or its bits per second. Received: {text!r}; "
            "expected for instance '10G', '100M' or, with a latency, '1G,2ms'."
        )
    number, unit, latency, scale = match.groups()
    bits = float(number) * {"M": 1e6, "G": 1e9}[unit.upper()]
    seconds = _LATENCY
    if latency is not None:
        seconds = float(latency) * {"us": 1e-6, "ms": 1e-3}[scale.lower()]
    return HostLink(seconds, 8 / (bits * _PAYLOAD))


# Measuring a link by all-reduces of two sizes.

LARGE_BYTES = 4 << 20
_TIMES = 3


def seconds_of_all_reduce(communicator: Communicator, size: int) -> float:
    """Return the median seconds of an all-reduce of some bytes, alike on all ranks."""
    buffer = np.zeros(max(size // 4, 1), np.float32)
    taken = []
    for _ in range(_TIMES + 1):
        communicator.barrier()
        begin = time.perf_counter()
        communicator.all_reduce([buffer])
        taken.append(time.perf_counter() - begin)
    # The first one allocates memory.
    mine = np.float64(np.median(taken[1:]))
    return float(communicator.all_reduce([mine], "max")[0])


def measure_link(communicator: Communicator) -> HostLink | None:
    """Measure the link between workers on hosts of their own; all ranks call it.

    Returns:
        None if there is one worker, or if all are on one host.
    """
    ranks = communicator.size
    if ranks == 1 or not communicator.piece_bytes or communicator.within_host:
        return None
    # The inverse of `prediction.schedules.all_reduce` for a ring.
    latency = seconds_of_all_reduce(communicator, 4) / (ranks - 1)
    chunk = -(-LARGE_BYTES // ranks)
    pieces = -(-chunk // PIECE_BYTES)
    large = seconds_of_all_reduce(communicator, LARGE_BYTES) / (2 * (ranks - 1))
    return HostLink(latency, max(large - pieces * latency, 0.0) / chunk)
