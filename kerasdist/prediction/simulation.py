"""The steps of a job with many workers, on virtual clocks.

Steps are simulated many times. In each, every worker's computing takes as long as one
of the measured steps did: all wait for the slowest of them.

    computing  | forward | gradients 0 | gradients 1 | gradients 2 |
    messages                           | 0 ..... | 1 ..... |       | 2 ..... |
    update                                       | 0 |     | 1 |             | 2 |

A third of computing is the forward pass. Messages are sent in their order, when they
are ready (`profile.GradientMessage`), and each part of the weights is updated when its
message has arrived.

Asynchronous workers don't wait for each other, but in the queue of the servers. There
events are simulated one by one: a worker's gradients are computed, the servers take
them when they are free, the worker goes on with the reply.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kerasdist.collectives.ring import PIECE_BYTES, sends_whole
from kerasdist.collectives.row_exchange import Array
from kerasdist.prediction.profile import LOOPBACK, GradientMessage, HostLink, Profile

# The seconds of each collective, by the schedules of `kerasdist.collectives`.
#
# A collective of one group begins when its last rank arrives, and ends for all at the
# same time: in a ring each rank has received from all others after size-1 exchanges, so
# that it waits for the slowest one. With equal links each exchange of the ring takes
# the same time, and these functions are the sum of all exchanges
# (`tests/prediction` plays the schedules event by event, and compares).


def all_reduce(size: int, workers: int, setup: Setup) -> float:
    """Return the seconds of an all-reduce of `size` bytes."""
    inside, hosts = min(setup.per_host, workers), setup.hosts(workers)
    between = _ring_all_reduce(size, hosts, setup.link)
    if inside == 1:
        return between
    # The sum inside of each host, the ring of leaders, the broadcast in each host.
    return _inside(size, inside) * (1 if hosts == 1 else 2) + between


def all_gather(size: int, workers: int, setup: Setup) -> float:
    """Return the seconds of an all-gather of `size` bytes of each rank."""
    inside, hosts = min(setup.per_host, workers), setup.hosts(workers)
    between = (hosts - 1) * setup.link.seconds(size * inside)
    if inside == 1:
        return between
    own = _inside(size * inside, inside)
    if hosts == 1:
        return own
    return own + between + _inside(size * workers, inside)


def _ring_all_reduce(size: int, ranks: int, link: HostLink) -> float:
    if ranks == 1:
        return 0.0
    if sends_whole(size, ranks):
        return (ranks - 1) * link.seconds(size)
    chunk = -(-size // ranks)
    pieces = max(1, -(-chunk // PIECE_BYTES))
    return 2 * (ranks - 1) * (pieces * link.latency + chunk * link.byte)


def _inside(size: int, ranks: int) -> float:
    """Return the seconds in the memory of a host: log2(ranks) messages, and bytes."""
    # `byte` is that of an all-reduce's buffer.
    return math.ceil(math.log2(ranks)) * LOOPBACK.latency + size * LOOPBACK.byte


def exchange_with_servers(size: int, workers: int, setup: Setup) -> float:
    """Return the seconds in which `workers` at once send to servers, and get replies.

    Each server has an equal part of the bytes. A message is as slow as the fuller one
    of two links: a worker's, with all parts, or a server's, with a part of each worker.
    """
    busiest = max(size, workers * size / setup.servers)
    return 2 * setup.link.seconds(busiest)


# The steps.

FORWARD = 1 / 3
# Simulated steps, and the most random numbers of one simulation.
_STEPS = 400
_MOST_NUMBERS = 4_000_000
# Simulated steps of all asynchronous workers together.
_EVENTS = 4_000
# The part by which predictions may differ from what is measured: low and high are that
# much lower and higher. It's three times that of benchmarks/prediction, where computing
# isn't real, unless cores were the limit.
_ERROR = 0.1
# Parts of a step that are worth to be named as its limit.
_LEAST = 0.05
# The chief's work for the heartbeat of one worker, in seconds for each second
# (benchmarks/heartbeats: 3.3 % of a core for 1,000 of them), and what it may be.
_HEARTBEAT = 33e-6
_MOST_HEARTBEATS = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The kind of job.

    Attributes:
        strategy: "ring"; "sync" or "async" for parameter servers.
        servers: Number of parameter servers.
        per_host: Workers of each host; with several the transport is hierarchical.
        link: The link between two hosts.
        local_steps: Steps that each worker takes by itself before weights are averaged.
        speeds: How fast workers compute, beside the measured one; others' are 1.
        balance: Whether workers get rows by their speeds, see `strategies.balance`.
    """

    link: HostLink
    strategy: str = "ring"
    servers: int = 1
    per_host: int = 1
    local_steps: int = 1
    speeds: tuple[float, ...] = ()
    balance: bool = False

    def hosts(self, workers: int) -> int:
        """Return the number of hosts of some workers."""
        return -(-workers // self.per_host)

    def speeds_of(self, workers: int) -> Array:
        """Return the speeds of some workers, each of which has rows of its own."""
        speeds = np.ones(workers)
        given = np.asarray(self.speeds[:workers], np.float64)
        speeds[: given.size] = given
        return np.full(workers, speeds.mean()) if self.balance else speeds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The simulated steps of a number of workers.

    Attributes:
        step_s: Seconds of a step, the mean.
        low: Seconds that nine of ten steps exceed, less the error of predictions.
        high: Seconds that one of ten steps exceeds, and the error of predictions.
        examples_per_s: Samples per second of all workers.
        efficiency: Their part of the samples of as many workers that need no network
            and wait for no one, 0 to 1.
        limit: "compute", "input", "stragglers" (the slowest worker of each step),
            "latency" and "bandwidth" of the network, "servers", "control plane".
    """

    step_s: float
    low: float
    high: float
    examples_per_s: float
    efficiency: float
    limit: str


def predict(profile: Profile, setup: Setup, workers: int) -> Prediction:
    """Predict the steps of a job whose workers are each as the measured one.

    Args:
        profile: The measured step. Each worker takes as many rows: the global batch
            grows with the number of workers.
        setup: The kind of job.
        workers: Number of workers.

    Raises:
        ValueError: A number isn't positive.
    """
    numbers = (workers, setup.servers, setup.per_host, setup.local_steps)
    if min(numbers) < 1 or min(setup.speeds, default=1.0) <= 0:
        raise ValueError(
            f"Numbers must be positive. Received: workers={workers}, {setup}."
        )
    rest = profile.update + profile.input + profile.outside
    each = float(np.mean(profile.compute)) / setup.speeds_of(workers) + rest
    # Of workers that wait for nothing, as fast together as all of them.
    alone = 1 / float((1 / each).mean())
    taken = _steps(profile, setup, workers)
    mean = float(taken.mean())
    if workers == 1:
        limit = "input" if profile.input > _LEAST * alone else "compute"
    else:
        limit = _limit(profile, setup, workers, mean, alone)
    return Prediction(
        step_s=mean,
        low=float(np.percentile(taken, 10)) * (1 - _ERROR),
        high=float(np.percentile(taken, 90)) * (1 + _ERROR),
        examples_per_s=workers * profile.rows / mean,
        efficiency=alone / mean,
        limit=limit,
    )


def _limit(
    profile: Profile, setup: Setup, workers: int, mean: float, alone: float
) -> str:
    """Name what costs most: what a step saves without it."""
    if setup.strategy == "ring" and workers * _HEARTBEAT > _MOST_HEARTBEATS:
        return "control plane"
    fast = dataclasses.replace(setup, link=HostLink(setup.link.latency, 0.0))
    free = dataclasses.replace(setup, link=HostLink(0.0, 0.0))
    without_bytes = float(_steps(profile, fast, workers).mean())
    without = float(_steps(profile, free, workers).mean())
    lost = {
        "servers" if setup.strategy != "ring" else "bandwidth": mean - without_bytes,
        "latency": without_bytes - without,
        "stragglers": without - alone,
        "input": profile.input,
    }
    worst = max(lost, key=lambda name: lost[name])
    return worst if lost[worst] > _LEAST * mean else "compute"


def arrivals(
    compute: Any, messages: Sequence[GradientMessage], seconds: Sequence[float]
) -> list[Any]:
    """Return when each message has arrived, from the beginning of a step.

    Args:
        compute: Seconds of the forward and the backward pass; an array of several steps
            gives arrays.
        messages: The messages, in order.
        seconds: The seconds of each.
    """
    ends: list[Any] = []
    for message, taken in zip(messages, seconds, strict=True):
        ready = compute * (FORWARD + (1 - FORWARD) * message.ready)
        ends.append(np.maximum(ready, ends[-1] if ends else 0.0) + taken)
    return ends


def _steps(profile: Profile, setup: Setup, workers: int) -> Array:
    """Return the seconds of simulated steps, float64 of shape (steps,)."""
    if setup.strategy == "async":
        return _asynchronous(profile, setup, workers)
    rest = profile.input + profile.outside
    every = setup.local_steps
    slowest = _slowest(profile.compute, setup.speeds_of(workers), every)
    if every > 1:
        # Each worker updates by itself; then the weights are averaged.
        average = all_reduce(profile.weights, workers, setup) if workers > 1 else 0.0
        return (slowest + every * (profile.update + rest) + average) / every
    updated = np.zeros_like(slowest)
    before = 0.0
    messages = profile.messages if workers > 1 else ()
    seconds = [_seconds(message, workers, setup) for message in messages]
    for message, ends in zip(
        messages, arrivals(slowest, messages, seconds), strict=True
    ):
        part = message.ready - before
        updated = np.maximum(ends, updated) + part * profile.update
        before = message.ready
    left = (1 - before) * profile.update
    return np.maximum(updated, slowest) + left + rest


def _seconds(message: GradientMessage, workers: int, setup: Setup) -> float:
    if setup.strategy == "sync":
        return exchange_with_servers(message.size, workers, setup)
    schedule = {"all_reduce": all_reduce, "all_gather": all_gather}[message.kind]
    return schedule(message.size, workers, setup)


def _slowest(samples: Any, speeds: Array, steps: int) -> Array:
    """Draw the seconds that the slowest of all workers computes for some steps."""
    workers = speeds.size
    measured = np.sort(np.asarray(samples, np.float64))
    if speeds.min() == speeds.max():
        measured, speeds = measured / speeds[0], np.ones(1)
    if steps == 1 and speeds.size == 1:
        # Equally likely values of the largest of `workers` uniform numbers.
        largest = ((np.arange(_STEPS) + 0.5) / _STEPS) ** (1 / workers)
        places = np.minimum((largest * measured.size).astype(int), measured.size - 1)
        return np.asarray(measured[places])
    count = max(1, min(_STEPS, _MOST_NUMBERS // (workers * steps)))
    drawn = np.random.default_rng(0).choice(measured, (count, workers, steps))
    return np.asarray((drawn.sum(2) / speeds).max(1))


def _asynchronous(profile: Profile, setup: Setup, workers: int) -> Array:
    """Return the seconds between two steps of a worker, for each of its steps."""
    random = np.random.default_rng(0)
    rest = profile.input + profile.outside
    size = sum(message.size for message in profile.messages) or profile.weights
    # The servers take their parts of a worker's gradients at the same time, one worker
    # after the other: all of them together are one queue.
    busy = (2 * setup.link.byte * size + profile.update) / setup.servers
    own = 2 * setup.link.byte * size
    free_at, steps = 0.0, max(6, _EVENTS // workers)
    drawn = random.choice(profile.compute, (steps, workers))
    drawn = drawn / setup.speeds_of(workers) + rest
    clocks = [(float(first), worker, 0.0, 0) for worker, first in enumerate(drawn[0])]
    heapq.heapify(clocks)
    taken: list[float] = []
    # Fast workers take more of all steps.
    for event in range(steps * workers):
        ready, worker, begun, done = heapq.heappop(clocks)
        free_at = max(free_at, ready) + busy
        end = max(free_at, ready + own) + 2 * setup.link.latency
        done += 1
        if event >= steps * workers // 3:  # at first all are ready at the same time
            taken.append(end - begun)
        again = end + float(drawn[done % steps, worker])
        heapq.heappush(clocks, (again, worker, end, done))
    return np.asarray(taken)
