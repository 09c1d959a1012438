"""How long the devices of one replica are busy, measured in the graph of a step.

A stage works while it computes a micro-batch, forward or backward, the loss, or its
update: its visits (`placement.visits`). The time between two of them it has nothing to
do. Each visit has a clock at its begin and one at its end, which tell of each step:

    stage 0   |-F0-||-F1-|                |-B1-||-B0-||-update-|
    stage 1         |--F0--||--F1--||-loss-||-B1-||-B0-|       |-update-|

Their times since the step's first one are summed up in one variable in host memory,
which is read once in a window of many steps; or before and after a step, to know when
it did what. What begins waits for its clock. What ends doesn't: where all threads have
other things to do its clock is late, but not later than the begin of whatever waits for
that end. Visits of one device that overlap (a loss and what else is ready) count
once, by their mean times.

Graphs get clocks when they are traced while steps are measured (`step_clock`). The
first step of each is summed up apart: it's slower than others. Not on GPUs,
where an operation is over for the host when it has only begun; and not with
`run_eagerly=True`, where one device works at a time, and there's no graph.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._tf.graph import graph_clocks
from kerasdist.collectives.clock_sync import compare
from kerasdist.collectives.ops import Array
from kerasdist.placement.micro_batch_order import Part
from kerasdist.placement.visits import union_length

__all__ = ["COMPUTE", "StageClock", "StageSpan", "StageTimes"]

# What a span is called that is of no micro-batch, or of all of the batch.
COMPUTE = "compute"
# Questions to another machine about its clock.
_QUESTIONS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Sums over the steps that were measured.

    Attributes:
        steps: Number of steps.
        busy: For each stage the seconds in which it had something to do.
    """

    steps: float
    busy: tuple[float, ...]

    def plus(self, other: StageTimes) -> StageTimes:
        """The sums over both."""
        busy = zip(self.busy, other.busy, strict=True)
        return StageTimes(
            steps=self.steps + other.steps, busy=tuple(one + two for one, two in busy)
        )

    def idle(self, step_seconds: float) -> tuple[float, ...]:
        """For each stage the share of a step in which it had nothing to do, 0 to 1.

        Args:
            step_seconds: Seconds of a step, whatever they were spent on.
        """
        if not self.steps or not step_seconds:
            return ()
        whole = self.steps * step_seconds
        return tuple(max(0.0, 1.0 - busy / whole) for busy in self.busy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageSpan:
    """What one stage did without waiting, in one step.

    Attributes:
        stage: Its number.
        name: "forward 0" of micro-batch 0, "backward 0"; "compute" of all of the batch.
        begin: When it began, in seconds since 1970.
        end: When it ended.
    """

    stage: int
    name: str
    begin: float
    end: float


@dataclasses.dataclass
class _Graph:
    """What one graph of a step tells.

    Attributes:
        spans: Of each visit its stage, and where in `totals` its begins and end are.
        names: Of each visit what it is.
        totals: The number of steps, the sum of their begins, then sums of times: a row
            of the first step, and one of all others.
        before: The latter when somebody asked last.
        seen: Both rows' sum when somebody looked at a step last.
    """

    spans: list[tuple[int, list[int], int]]
    names: list[str]
    totals: Any
    before: Array
    seen: Array


class StageClock:
    """The clock of one replica's stages.

    Args:
        devices: Full names of the stages' devices.
        host: The device whose memory the sums are in.
    """

    def __init__(self, devices: Sequence[str], host: str) -> None:
        self._devices = tuple(devices)
        self._host = host
        self._graphs: list[_Graph] = []
        self._ahead: dict[str, float] = {}
        # Times are counted from here: sums of small numbers are exact.
        self._base = time.time()

    def mark(self, graph: Any, first: int, parts: Iterable[tuple[Any, Part]]) -> None:
        """Put clocks into the graph of a step that is measured.

        Args:
            graph: The graph, after the step was traced.
            first: How many operations it had before.
            parts: Operations at which micro-batches begin their ways.
        """
        if not graph_clocks.can_be_marked(self._devices):
            return
        found = graph_clocks.mark_visits(graph, first, parts, self._devices)
        if not found:
            return
        with tf.name_scope(f"{graph_clocks.CLOCK}/"):
            self._graphs.append(self._sum_up(found))

    def _sum_up(self, found: Sequence[graph_clocks.Marked]) -> _Graph:
        # On each device the times are packed, so that one tensor is sent.
        spans, names, packed, count = [], [], [], 2
        # All times in order, each with those that it can't be later than.
        limits: list[tuple[Any, ...]] = []
        for stage, device in enumerate(self._devices):
            times: list[Any] = []
            for one in (one for one in found if one.visit.device == device):
                begins = [count + len(times) + i for i in range(len(one.begins))]
                times += [*one.begins, one.end]
                limits += [(begin,) for begin in one.begins]
                # Those of other machines' clocks tell nothing of this one.
                here = [
                    begin
                    for begin in one.following
                    if _tf.host_of(begin.device) == _tf.host_of(device)
                ]
                limits.append((one.end, *here))
                spans.append((stage, begins, count + len(times) - 1))
                names.append(_name(one.visit.part))
            count += len(times)
            if times:
                with tf.device(device):
                    packed.append(tf.stack(times))
        totals = _tf.own_variable(np.zeros((2, count)), tf.float64)
        with tf.device(self._host):
            now = _earliest(tf.concat(packed, 0), limits)
            others = totals[0, 0]  # 0 in the first step, then 1
            begin = tf.reduce_min(now, keepdims=True)
            step = tf.ones([1], tf.float64)
            sums = tf.concat([step, begin - self._base, now - begin], 0)
            totals.assign_add(tf.stack([(1.0 - others) * sums, others * sums]))
        return _Graph(spans, names, totals, *np.zeros((2, count)))

    @property
    def can_look(self) -> bool:
        """Whether it can be told when the stages do what."""
        return graph_clocks.can_be_marked(self._devices)

    def align(self) -> float:
        """Find out by how much other machines' clocks are ahead of this one's.

        Each answers some questions: its clock was read after the question, and before
        the answer, see `collectives.clock_sync`.

        Returns:
            How far that may be wrong, in seconds; 0.0 where all stages are here.
        """
        error = 0.0
        for host in {_tf.host_of(device) for device in self._devices} - {self._host}:
            asked, theirs, told = np.zeros((3, _QUESTIONS), np.int64)
            for number in range(_QUESTIONS):
                asked[number] = time.time_ns()
                with tf.device(host):
                    theirs[number] = int(1e9 * float(tf.timestamp().numpy()))
                told[number] = time.time_ns()
            found = compare(asked, theirs, told)
            self._ahead[host] = -found.ahead / 1e9
            error = max(error, found.error / 1e9)
        return error

    def look(self) -> list[StageSpan]:
        """What the stages have done since this was called last, if that's one step.

        Nothing if it's several, or if that can't be told. Where stages are on other
        machines `align` must have been called.
        """
        found: list[StageSpan] = []
        if not self.can_look:
            return found
        for graph in self._graphs:
            now = np.asarray(graph.totals.numpy()).sum(0)
            sums, graph.seen = now - graph.seen, now
            if sums[0] != 1:
                continue
            first = self._base + float(sums[1])
            for (stage, begins, end), name in zip(
                graph.spans, graph.names, strict=True
            ):
                begin = min(sums[begin] for begin in begins)
                host = _tf.host_of(self._devices[stage])
                base = first - self._ahead.get(host, 0.0)
                found.append(
                    StageSpan(
                        stage=stage,
                        name=name,
                        begin=base + float(begin),
                        end=base + float(sums[end]),
                    )
                )
        return found

    def take(self) -> StageTimes:
        """What the stages have done since this was called last; eagerly."""
        total = StageTimes(steps=0.0, busy=(0.0,) * len(self._devices))
        for graph in self._graphs:
            now = np.asarray(graph.totals.numpy())[1]
            sums, graph.before = now - graph.before, now
            steps = float(sums[0])
            if not steps:
                continue
            lines: list[list[tuple[float, float]]] = [[] for _ in self._devices]
            for stage, begins, end in graph.spans:
                begin = min(sums[begin] for begin in begins)
                lines[stage].append((float(begin), float(sums[end])))
            busy = tuple(union_length(line) for line in lines)
            total = total.plus(StageTimes(steps=steps, busy=busy))
        return total


def _earliest(times: Any, limits: Sequence[tuple[Any, ...]]) -> Any:
    """Times that were read late, corrected by others that can't be earlier.

    Args:
        times: All of them: float64 of shape (n,).
        limits: For each its tensor, and those of others.
    """
    places = {limit[0].ref(): i for i, limit in enumerate(limits)}
    most = max(len(limit) for limit in limits)
    rows = [
        [places[each.ref()] for each in (*limit, *limit[:1] * (most - len(limit)))]
        for limit in limits
    ]
    return tf.reduce_min(tf.gather(times, rows), 1)


def _name(part: Part | None) -> str:
    if part is None:
        return COMPUTE
    return f"{'backward' if part.backward else 'forward'} {part.number}"
