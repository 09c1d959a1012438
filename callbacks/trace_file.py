"""The records of all ranks as one trace in Chrome's format.

Pure functions of numbers; `callbacks.timeline` records and gathers,
`callbacks.trace_file` has the same trace in TensorBoard's format. A rank is a
process of the trace, and has these lanes ("threads"):

    step        step ⊃ compute, exchange, update
    collectives the collective, or exchange with servers, ⊃ pack, wait, receive, reduce
    send        sending, while the worker waits and receives
    server i    the exchange with a further parameter server
    stage i     the work of one device of a model on several, by micro-batch

Times are microseconds on rank 0's clock since the first span.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kerasdist.strategies.measure.communication import Span
from kerasdist.strategies.measure.stages import COMPUTE, Offset
from kerasdist.transport.tracing import NAMES

# The records of all ranks in the format of TensorBoard's trace viewer.
#
# The plugin "profile" of TensorBoard (`tensorboard-plugin-profile`, XProf) reads the
# profiler's own files, `<logdir>/plugins/profile/<run>/<name>.xplane.pb`: an `XSpace`
# with a plane per process, a line per lane, and the names and attributes of its events
# in tables. Of planes that aren't a device's or TensorFlow's own it shows those whose
# name begins as `_PREFIX` does.

_PREFIX = "/device:CUSTOM:"


def xspace(records: Sequence[Record]) -> bytes:
    """Make the file's contents.

    Args:
        records: Of all ranks.
    """
    # TensorFlow installs it, but it isn't part of TensorFlow's API.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    for process in processes(records):
        plane = space.planes.add(id=process.rank, name=_PREFIX + process.title)
        events, stats = _Table(plane.event_metadata), _Table(plane.stat_metadata)
        for lane in process.lanes:
            # Lines are sorted by their numbers.
            line = plane.lines.add(
                id=lane.number, display_id=lane.number, name=lane.title
            )
            _fill(line, lane, events, stats)
    return bytes(space.SerializeToString())


def _fill(line: Any, lane: Lane, events: _Table, stats: _Table) -> None:
    for begin, end, span in lane.spans:
        event = line.events.add(
            metadata_id=events.number(span.name),
            offset_ps=1000 * begin,
            duration_ps=1000 * (end - begin),
        )
        for name, value in _args(span).items():
            kind = "str_value" if name == "what" else "uint64_value"
            event.stats.add(metadata_id=stats.number(name), **{kind: value})


class _Table:
    """Names of a plane, each with a number from 1: entries of 0 aren't kept."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of this name."""
        found = self._numbers.setdefault(name, len(self._numbers) + 1)
        self._entries[found].id, self._entries[found].name = found, name
        return found


_STEP, _COLLECTIVES, _SEND, _SERVERS = 0, 1, 2, 3
_STAGES = 500
# Perfetto distinguishes threads by their numbers alone, whatever their process, and
# takes 0 for none: so each rank has its own thousand, and lanes begin with 1.
_NUMBERS = 1000
_NEVER = 1 << 62


class Execution(NamedTuple):
    """One call of the function that takes steps.

    Attributes:
        first: Number of its first step in this `fit`.
        steps: The number of its steps.
        begin: When it began, in nanoseconds.
        end: When it ended.
        before: The communicator's number of steps when it began.
    """

    first: int
    steps: int
    begin: int
    end: int
    before: int = 0


@dataclass
class Record:
    """The record of one rank.

    Attributes:
        rank: Its rank.
        host: Its name.
        offsets: The lead of its clock over rank 0's: at the begin and the end, see
            `strategies.measure.stages`.
        executions: Its steps.
        spans: The spans of its communicator.
        dropped: Number of spans that weren't kept.
        stages: The spans of its stages: a stage is a thread.
    """

    rank: int
    host: str
    offsets: list[Offset]
    executions: list[Execution] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    stages: list[Span] = field(default_factory=list)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Record:
        """Return the record that has these attributes, of what JSON has."""
        kinds = {"offsets": Offset, "executions": Execution}
        kinds |= {"spans": Span, "stages": Span}
        lists = {
            name: [kind(*each) for each in found[name]] for name, kind in kinds.items()
        }
        return cls(**{**found, **lists})

    def aligned(self, time: int) -> int:
        """Convert a time of this rank's clock to rank 0's clock."""
        first, last = self.offsets[0], self.offsets[-1]
        passed, drift = last.at - first.at, last.ahead - first.ahead
        # Clocks drift apart evenly.
        drifted = drift * (time - first.at) // passed if passed > 0 else 0
        return time - first.ahead - drifted

    @property
    def error(self) -> int:
        """The largest error of an aligned time, in nanoseconds."""
        return max(offset.error for offset in self.offsets)


class Lane(NamedTuple):
    """Spans that contain each other or don't overlap.

    Attributes:
        number: Its index among the rank's lanes, from 0.
        title: Its name.
        spans: The spans with begin and end in nanoseconds on the trace's clock; a span
            is before those that it contains.
    """

    number: int
    title: str
    spans: tuple[tuple[int, int, Span], ...]


class Process(NamedTuple):
    """A rank in the trace.

    Attributes:
        rank: Its rank.
        title: Its name.
        lanes: Its lanes.
    """

    rank: int
    title: str
    lanes: tuple[Lane, ...]


def processes(records: Sequence[Record]) -> list[Process]:
    """Return all ranks on one clock, which begins with the first span.

    Args:
        records: Of all ranks.
    """
    start = min((_begin(record) for record in records), default=0)
    # Perfetto sorts processes by their titles: rank 2 must be before rank 10.
    digits = len(str(max((record.rank for record in records), default=0)))
    found = []
    for record in records:
        lanes: dict[tuple[int, str], list[tuple[int, int, Span]]] = {}
        for lane, title, span in _lanes(record):
            begin, end = record.aligned(span.begin), record.aligned(span.end)
            lanes.setdefault((lane, title), []).append(
                (begin - start, end - start, span)
            )
        for spans in lanes.values():
            spans.sort(key=lambda each: (each[0], -each[1]))
        title = f"rank {record.rank:0{digits}} ({record.host})"
        ordered = (Lane(*lane, tuple(spans)) for lane, spans in sorted(lanes.items()))
        found.append(Process(record.rank, title, tuple(ordered)))
    return found


def trace(records: Sequence[Record]) -> dict[str, Any]:
    """Make the trace: an object to be written as JSON.

    Args:
        records: Of all ranks.
    """
    events: list[dict[str, Any]] = []
    for process in processes(records):
        number = _NUMBERS * (process.rank + 1)
        events += _names(process, number)
        events += [
            {
                "name": span.name,
                "ph": "X",
                "pid": number,
                "tid": number + 1 + lane.number,
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "cat": _category(lane.number),
                "args": _args(span),
            }
            for lane in process.lanes
            for begin, end, span in lane.spans
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": "kerasdist",
            "clock": "rank 0's",
            "clock_error_us": {
                str(record.rank): record.error / 1000 for record in records
            },
            "spans_dropped": sum(record.dropped for record in records),
        },
    }


def _category(lane: int) -> str:
    other = "stage" if lane >= _STAGES else "communication"
    return "step" if lane == _STEP else other


def _begin(record: Record) -> int:
    times = [each.begin for each in record.executions]
    times += [each.begin for each in (*record.spans, *record.stages)]
    return record.aligned(min(times)) if times else 0


def _names(process: Process, number: int) -> Iterator[dict[str, Any]]:
    def meta(kind: str, lane: int, **args: Any) -> dict[str, Any]:
        thread = number + 1 + lane
        return {"name": kind, "ph": "M", "pid": number, "tid": thread, "args": args}

    yield meta("process_name", 0, name=process.title)
    yield meta("process_sort_index", 0, sort_index=process.rank)
    for lane in process.lanes:
        yield meta("thread_name", lane.number, name=lane.title)
        yield meta("thread_sort_index", lane.number, sort_index=lane.number)


def _args(span: Span) -> dict[str, Any]:
    args = {"bytes": span.size, "what": span.what}
    return {name: value for name, value in args.items() if value}


def _lanes(record: Record) -> Iterator[tuple[int, str, Span]]:
    """Yield each span of a rank with its lane's number and name."""
    for execution in record.executions:
        for span in _parts(execution, record.spans):
            yield _STEP, "step", span
    # Collectives run one after the other, in any of TensorFlow's threads.
    main = {span.thread for span in record.spans if span.name not in NAMES}
    others: dict[int, int] = {}
    for span in record.spans:
        if span.thread in main and span.name != "send":
            yield _COLLECTIVES, "collectives", span
        elif span.thread in main:
            yield _SEND, "send", span
        else:
            number = others.setdefault(span.thread, len(others))
            yield _SERVERS + number, f"server {number + 1}", span
    for span in _apart(record.stages):
        yield _STAGES + span.thread, f"stage {span.thread}", span


def _apart(stages: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans of stages without overlaps."""
    for stage in sorted({span.thread for span in stages}):
        mine = [span for span in stages if span.thread == stage]
        mine.sort(key=lambda each: each.begin)
        parts = _in_turn([span for span in mine if span.name != COMPUTE])
        yield from parts
        for span in mine:
            if span.name == COMPUTE:
                # Work for no micro-batch fills the gaps.
                pieces = list(_gaps(span, parts))
                yield from pieces
                parts = sorted([*parts, *pieces], key=lambda each: each.begin)


def _in_turn(parts: Sequence[Span]) -> list[Span]:
    """Return the spans of micro-batches, each cut where the next begins.

    A stage begins none before the last one ends; but a clock may be read late, by
    more than a small one takes.
    """
    begins: list[int] = []
    for span in parts:
        begins.append(max(span.begin, begins[-1] + 1 if begins else 0))
    following = [*begins, _NEVER][1:]
    return [
        span._replace(begin=begin, end=max(begin, min(span.end, limit)))
        for span, begin, limit in zip(parts, begins, following, strict=True)
    ]


def _gaps(span: Span, others: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of a span between others, which are disjoint and in order."""
    begin = span.begin
    for other in others:
        if other.begin >= span.end:
            break
        if begin < other.begin:
            yield span._replace(begin=begin, end=other.begin)
        begin = max(begin, other.end)
    if begin < span.end:
        yield span._replace(begin=begin)


def _parts(execution: Execution, spans: Sequence[Span]) -> Iterator[Span]:
    """Yield an execution as a span, and its parts, derived from its collectives."""
    first, last = execution.first, execution.first + execution.steps - 1
    name = f"step {first}" if first == last else f"steps {first} to {last}"
    yield Span(name, execution.begin, execution.end)
    exchanges: dict[int, tuple[int, int]] = {}
    for span in spans:
        inside = execution.begin <= span.begin and span.end <= execution.end
        if not inside or span.name in NAMES:
            continue
        # Before the first bucket of a step others may exchange something.
        if span.name != "push_pull" and span.step <= execution.before:
            continue
        begin, end = exchanges.get(span.step, (span.begin, span.end))
        exchanges[span.step] = min(begin, span.begin), max(end, span.end)
    end = execution.begin
    before, between, after = "compute", "update, compute", "update"
    if not exchanges or any(span.name == "push_pull" for span in spans):
        # Workers that share weights through servers update first, then exchange.
        before = between = after = "compute, update"
    for number, step in enumerate(sorted(exchanges)):
        begin, finished = exchanges[step]
        if begin > end:
            yield Span(between if number else before, end, begin)
        yield Span("exchange", begin, finished)
        end = max(end, finished)
    if end < execution.end:
        yield Span(after, end, execution.end)
