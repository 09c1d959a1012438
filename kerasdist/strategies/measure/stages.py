"""The busy times of one replica's devices, measured in the graph of a step.

A stage works while it computes a micro-batch, forward or backward, the loss, or its
update: its visits (`placement.micro_batch_order`). Between two of them it is idle. Each
visit has a clock at its begin and one at its end, which show for each step:

    stage 0   |-F0-||-F1-|                |-B1-||-B0-||-update-|
    stage 1         |--F0--||--F1--||-loss-||-B1-||-B0-|       |-update-|

Their times since the step's first one are summed in one variable in host memory, which
is read once in a window of many steps; or before and after a step, for the times of
that step. The beginning of a visit waits for its clock. The end doesn't: when all
threads are busy its clock is late, but not later than the beginning of the visits that
wait for that end. Visits of one device that overlap (a loss and other work) count once,
by their mean times.

Graphs get clocks when they are traced while steps are measured (`step_clock`). The
first step of each is summed separately, because it's slower. Not supported are GPUs,
where an operation has ended for the host when it has only begun; and
`run_eagerly=True`, where one device works at a time, and there's no graph.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf import graph_clocks
from kerasdist.collectives.communicator import Communicator
from kerasdist.collectives.row_exchange import Array
from kerasdist.placement.micro_batch_order import MicroBatch, union_length
from kerasdist.strategies.measure.communication import Span
from kerasdist.transport.tracing import now

# The offsets of ranks' clocks, estimated by repeated barriers.
#
#     1. r     reads its clock: a
#     2. all   barrier
#     3. 0     reads its clock: t
#     4. all   barrier
#     5. r     reads its clock: b
#
# Rank 0 reads after r has reached the first barrier and before r leaves the second one.
# So at the moment of t the clock of r was between a and b, and r is ahead of rank 0 by
# at least a - t and at most b - t. Each round gives such bounds, and all of them hold:
# the tightest ones of many rounds differ by less than a round trip.

_ROUNDS = 16


class Offset(NamedTuple):
    """The lead of this rank's clock over rank 0's, in nanoseconds.

    Attributes:
        at: The time of the estimate, by this rank's clock.
        ahead: The estimate.
        error: Its largest error, to either side.
    """

    at: int
    ahead: int
    error: int


def clock_offset(
    communicator: Communicator,
    *,
    clock: Callable[[], int] = now,
    rounds: int = _ROUNDS,
) -> Offset:
    """Estimate the lead of this rank's clock; all ranks call it.

    Args:
        communicator: Between the ranks.
        clock: This rank's clock, in nanoseconds.
        rounds: Number of rounds.

    Raises:
        CollectiveError: See `kerasdist.errors`.
    """
    if communicator.size == 1:
        return Offset(at=clock(), ahead=0, error=0)
    before, middle, after = np.zeros((3, rounds), np.int64)
    communicator.barrier()  # from here on all ranks are in step
    for number in range(rounds):
        before[number] = clock()
        communicator.barrier()
        middle[number] = clock()
        communicator.barrier()
        after[number] = clock()
    (theirs,) = communicator.broadcast([middle], 0)
    if communicator.rank == 0:
        return Offset(at=int(after[-1]), ahead=0, error=0)
    return compare(before, theirs, after)


def compare(before: Array, theirs: Array, after: Array) -> Offset:
    """Return the lead of a clock over another one.

    Args:
        before: Times of this clock, int64 of shape (rounds,), in nanoseconds.
        theirs: Times of the other clock, each read after that moment.
        after: Times of this clock, each after that.
    """
    least = int((before - theirs).max())
    most = int((after - theirs).min())
    # Clocks run at speeds that differ a little: bounds of long rounds may cross.
    error = max(most - least, 0) // 2 + 1
    return Offset(at=int(after[-1]), ahead=(least + most) // 2, error=error)


# The name of a span that belongs to no micro-batch, or to all of the batch.
COMPUTE = "compute"
# How often another machine is asked for its clock.
_QUESTIONS = 16


def idle_parts(sums: Sequence[float], step_seconds: float) -> tuple[float, ...]:
    """Return for each stage the share of a step in which it was idle, 0 to 1.

    Args:
        sums: See `StageClock.take`.
        step_seconds: Seconds of a step in all.
    """
    whole = sums[0] * step_seconds if sums else 0.0
    return tuple(max(0.0, 1.0 - busy / whole) for busy in sums[1:]) if whole else ()


class _Visit(NamedTuple):
    """An uninterrupted piece of work of one stage, in a graph.

    Attributes:
        stage: The number of the stage.
        name: "forward 0" for micro-batch 0, "backward 0"; "compute" for the whole
            batch.
        begins: The places in `_Graph.totals` of times after which it begins.
        end: The place of its end.
    """

    stage: int
    name: str
    begins: list[int]
    end: int

    def times(self, sums: Array) -> tuple[float, float]:
        """Return its begin and end from the sums of one step, or of several."""
        return float(min(sums[place] for place in self.begins)), float(sums[self.end])


@dataclasses.dataclass
class _Graph:
    """The visits in one graph of a step, and the sums of their times.

    Attributes:
        visits: The visits.
        totals: The number of steps, the sum of their begins, then sums of times: a row
            of the first step, and one of all others.
        before: The latter row at the last `take`.
        seen: The sum of both rows at the last `look`.
    """

    visits: list[_Visit]
    totals: Any
    before: Array
    seen: Array


# The places in `_Graph.totals` before those of times.
_STEPS, _BEGIN, _FIRST = range(3)


class StageClock:
    """The clock of one replica's stages.

    Args:
        devices: Full names of the stages' devices.
        host: The device in whose memory the sums are.

    Attributes:
        can_look: Whether the times of single visits can be determined.
    """

    def __init__(self, devices: Sequence[str], host: str) -> None:
        self._devices = tuple(devices)
        self.can_look = graph_clocks.can_be_marked(devices)
        self._host = host
        self._graphs: list[_Graph] = []
        self._ahead: dict[str, float] = {}
        # Times are relative to this: sums of small numbers are exact.
        self._base = time.time()

    def mark(
        self, graph: Any, first: int, parts: Iterable[tuple[Any, MicroBatch]]
    ) -> None:
        """Put clocks into the graph of a step that is measured.

        Args:
            graph: The graph, after the step was traced.
            first: How many operations it had before the step.
            parts: Operations at which micro-batches begin.
        """
        if not self.can_look:
            return
        found = graph_clocks.mark_visits(graph, first, parts, self._devices)
        if not found:
            return
        with tf.name_scope(f"{graph_clocks.CLOCK}/"):
            self._graphs.append(self._sum_up(found))

    def _sum_up(self, found: Sequence[graph_clocks.Marked]) -> _Graph:
        # On each device the times are packed, so that one tensor is sent.
        visits, packed, count = [], [], _FIRST
        # All times in order, each with those that it can't be later than.
        limits: list[tuple[Any, ...]] = []
        for stage, device in enumerate(self._devices):
            times: list[Any] = []
            for one in (one for one in found if one.visit.device == device):
                begins = [count + len(times) + i for i in range(len(one.begins))]
                times += [*one.begins, one.end]
                limits += [(begin,) for begin in one.begins]
                # Times of other machines' clocks can't be compared with this one's.
                here = [
                    begin
                    for begin in one.following
                    if _tf.host_of(begin.device) == _tf.host_of(device)
                ]
                limits.append((one.end, *here))
                name = _name(one.visit.part)
                visits.append(_Visit(stage, name, begins, count + len(times) - 1))
            count += len(times)
            if times:
                with tf.device(device):
                    packed.append(tf.stack(times))
        totals = _tf.own_variable(np.zeros((2, count)), tf.float64)
        with tf.device(self._host):
            now = _earliest(tf.concat(packed, 0), limits)
            others = totals[0, _STEPS]  # 0 in the first step, then 1
            begin = tf.reduce_min(now, keepdims=True)
            step = tf.ones([1], tf.float64)
            sums = tf.concat([step, begin - self._base, now - begin], 0)
            totals.assign_add(tf.stack([(1.0 - others) * sums, others * sums]))
        return _Graph(visits, totals, *np.zeros((2, count)))

    def align(self) -> int:
        """Determine by how much other machines' clocks are ahead of this one's.

        Each answers some requests: its clock was read after the request, and before the
        answer, see `strategies.measure.stages`.

        Returns:
            The possible error in nanoseconds; 0 if all stages are on this machine.
        """
        error = 0
        for host in {_tf.host_of(device) for device in self._devices} - {self._host}:
            asked, theirs, answered = np.zeros((3, _QUESTIONS), np.int64)
            for number in range(_QUESTIONS):
                asked[number] = time.time_ns()
                with tf.device(host):
                    theirs[number] = int(1e9 * float(tf.timestamp().numpy()))
                answered[number] = time.time_ns()
            found = compare(asked, theirs, answered)
            self._ahead[host] = -found.ahead / 1e9
            error = max(error, found.error)
        return error

    def look(self) -> list[Span]:
        """Return the work of the stages since the last call, if that was one step.

        Returns nothing for several steps, or if it can't be determined. With stages on
        other machines `align` must have been called. Times are those of `now`.
        """
        found: list[Span] = []
        ahead = now() - time.time_ns()
        for graph in self._graphs:
            totals = np.asarray(graph.totals.numpy()).sum(0)
            sums, graph.seen = totals - graph.seen, totals
            if sums[_STEPS] != 1:
                continue
            first = self._base + float(sums[_BEGIN])
            for visit in graph.visits:
                host = _tf.host_of(self._devices[visit.stage])
                base = first - self._ahead.get(host, 0.0)
                begin, end = (
                    int((base + each) * 1e9) + ahead for each in visit.times(sums)
                )
                found.append(Span(visit.name, begin, end, thread=visit.stage))
        return found

    def take(self) -> list[float]:
        """Return sums since the last call; eagerly.

        Returns:
            The number of steps that were measured, and for each stage the seconds in
            which it was busy.
        """
        total = np.zeros(1 + len(self._devices))
        for graph in self._graphs:
            totals = np.asarray(graph.totals.numpy())[1]
            sums, graph.before = totals - graph.before, totals
            if not sums[_STEPS]:
                continue
            total[0] += sums[_STEPS]
            for stage in range(len(self._devices)):
                visits = [v.times(sums) for v in graph.visits if v.stage == stage]
                total[1 + stage] += union_length(visits)
        return total.tolist()


def _earliest(times: Any, limits: Sequence[tuple[Any, ...]]) -> Any:
    """Correct times that were read late by others that can't be earlier.

    Args:
        times: All of them: float64 of shape (n,).
        limits: For each time its tensor, and those that it can't be later than.
    """
    places = {limit[0].ref(): i for i, limit in enumerate(limits)}
    most = max(len(limit) for limit in limits)
    rows = [
        [places[each.ref()] for each in (*limit, *limit[:1] * (most - len(limit)))]
        for limit in limits
    ]
    return tf.reduce_min(tf.gather(times, rows), 1)


def _name(part: MicroBatch | None) -> str:
    if part is None:
        return COMPUTE
    return f"{'backward' if part.backward else 'forward'} {part.number}"
