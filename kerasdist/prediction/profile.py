"""The step of one worker as it was measured, and the link between two hosts.

A link is measured, too, or named as `--network 10G`.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.ring import PIECE_BYTES


class HostLink(NamedTuple):
    """The time of a message, or of a collective: `latency + bytes * byte`.

    All links of a job are alike, and each process sends and receives at the same time.

    Attributes:
        latency: Seconds of an empty one, with the work of the processes for it.
        byte: Seconds for each byte.
    """

    latency: float
    byte: float

    def seconds(self, size: float) -> float:
        """Return the seconds of one of some bytes."""
        return self.latency + size * self.byte


# An exchange takes 54 us over TCP without a network, 24 in a host's memory
# (benchmarks/growth); the rest is a usual network's.
_LATENCY = 100e-6
LOOPBACK = HostLink(20e-6, 0.13e-9)
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
    # Other work makes a link look slower, never faster.
    small, large = (
        min(seconds_of_all_reduce(communicator, size) for _ in range(3))
        for size in (4, LARGE_BYTES)
    )
    # The inverse of `simulation.all_reduce` for a ring.
    latency = small / (ranks - 1)
    chunk = -(-LARGE_BYTES // ranks)
    pieces = -(-chunk // PIECE_BYTES)
    step = large / (2 * (ranks - 1))
    return HostLink(latency, max(step - pieces * latency, 0.0) / chunk)


# The measured step.


class GradientMessage(NamedTuple):
    """A collective of a step.

    Attributes:
        kind: "all_reduce" or "all_gather".
        size: The bytes of each rank.
        ready: The part of the gradients that is computed before it, 0 to 1.
    """

    kind: str
    size: int
    ready: float


class Stages(NamedTuple):
    """A division of the model into stages, each on a device of its own.

    Attributes:
        devices: Number of devices.
        micro_batches: Number of parts into which a batch is cut.
        memory: Bytes that the fullest device needs.
        share: The slowest stage's part of the work, 0 to 1.
        moved: Bytes that enter stages from others in a step.
    """

    devices: int
    micro_batches: int
    memory: float
    share: float
    moved: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """The step of one worker.

    Attributes:
        rows: Samples of a step.
        compute: Seconds of the forward and the backward pass, of each measured step.
        input: Seconds in which a step waits for its batch.
        update: Seconds of the optimizer's update.
        outside: Seconds between two steps.
        messages: What a worker sends in a step, in order; of one that has no others,
            what it would send.
        weights: Bytes of all weights that are trained.
        steps: Steps of an epoch; 0 if that isn't known.
        link: The measured link; None with one worker, or if all are on one host.
        speeds: How fast each measured worker computes, beside the first one.
        tables: Bytes of the weights of which a step changes some rows only.
        stages: Divisions of the model, first that of one device; empty if what it needs
            isn't known.
    """

    rows: float
    compute: tuple[float, ...]
    input: float = 0.0
    update: float = 0.0
    outside: float = 0.0
    messages: tuple[GradientMessage, ...] = ()
    weights: int = 0
    steps: int = 0
    link: HostLink | None = None
    speeds: tuple[float, ...] = ()
    tables: int = 0
    stages: tuple[Stages, ...] = ()

    def __post_init__(self) -> None:
        wrong = not self.compute or min(self.compute) <= 0 or self.rows <= 0
        if wrong or min(self.input, self.update, self.outside) < 0:
            raise ValueError(
                "A profile must have rows and the seconds of at least one step, all of "
                f"them positive. Received: {self}."
            )


def messages_of(
    buckets: Sequence[tuple[int, Sequence[tuple[str, int]]]],
) -> tuple[GradientMessage, ...]:
    """Return the messages of a step.

    A bucket is ready when the backward pass has computed it and those before it: passes
    take as long as their gradients are large.

    Args:
        buckets: For each bucket of gradients, in the order in which they are sent, its
            bytes, and the kinds and bytes of its collectives.
    """
    total = sum(size for size, _ in buckets) or 1
    found, known = [], 0
    for size, collectives in buckets:
        known += size
        found += [GradientMessage(*each, known / total) for each in collectives]
    return tuple(found)


def all_reduces_of(buckets: Sequence[int]) -> tuple[GradientMessage, ...]:
    """Return the messages of buckets of some bytes that are sent as they are."""
    return messages_of([(size, [("all_reduce", size)]) for size in buckets])
