"""The callback that traces some steps on all ranks, `Timeline`."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kerasdist._keras.shared_state import JobCallback
from kerasdist.callbacks.job_view import JobView, check_arguments, is_whole
from kerasdist.collectives import gather_json
from kerasdist.strategies.measure.communication import Span, SpanList
from kerasdist.strategies.measure.stages import (
    COMPUTE,
    Offset,
    StageClock,
    clock_offset,
)
from kerasdist.transport import log
from kerasdist.transport.tracing import NAMES, now

# A rank keeps at most this many spans: a window of steps should be short.
_MOST_SPANS = 200_000

_PERFETTO = "at https://ui.perfetto.dev"
_TENSORBOARD = "in TensorBoard (pip install tensorboard-plugin-profile)"
# By the ending of a path; that of a folder has none.
_VIEWERS = {"": f"{_TENSORBOARD} or {_PERFETTO}", ".pb": _TENSORBOARD}
_ENDINGS = (".json", ".json.gz", ".xplane.pb")


class Timeline(JobCallback):
    """Writes a trace of some steps of `fit`, of all workers.

    For each rank: the step and in it computing, exchanging gradients and updating; each
    collective (a bucket of gradients) and in it packing, waiting for others, receiving
    and reducing; sending. The chief writes one file of all ranks, in Chrome's trace
    format for https://ui.perfetto.dev, or in that of TensorBoard's plugin "profile"; or
    both, for each `fit` once more, in TensorBoard's folder.

    Times are those of rank 0's clock. The offsets of the others' clocks are estimated
    by repeated barriers, before and after the steps; the error of the estimate is in
    the file (`otherData`, `clock_error_us`) and in the line that the chief prints.

    Outside of the steps nothing is recorded: the remaining cost is comparing two
    numbers per step. For the stages of a model on several devices the step gets clocks,
    which are traced in the step before the first.

    With `ParameterServerStrategy(mode="async")` each rank counts its own steps, and the
    file is written at the end of the epoch in which all have taken them.

    Args:
        path: The file: `.json` or `.json.gz` for Perfetto, `.xplane.pb` for
            TensorBoard. A name without an ending is the folder of `tensorboard
            --logdir`, and gets `plugins/profile/<date>/timeline.xplane.pb` and
            `timeline.trace.json.gz`. Folders are made.
        steps: The first step that is recorded, and the one after the last: numbers of
            steps in this `fit`, from 0. With `steps_per_execution` whole executions.
        verbose: Whether the chief logs a line when the file is written: 1 or 0.

    Raises:
        ValueError: `path` or `steps` is wrong.

    Example:
    ```python
    timeline = kerasdist.callbacks.Timeline("trace.json", steps=(10, 20))
    model.fit(x, y, callbacks=[timeline])
    ```
    """

    never_stops = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: tuple[int, int] = (10, 20),
        *,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        self.path = Path(path)
        right = {
            f"path={str(path)!r}; expected a name in {', '.join(_ENDINGS)}, or of a "
            "folder, without an ending": (
                not self.path.suffix or self.path.name.endswith(_ENDINGS)
            ),
            f"steps={steps!r}; expected two numbers, the first step and the one after "
            "the last": _is_window(steps),
        }
        check_arguments("Timeline", right)
        self.steps = int(steps[0]), int(steps[1])
        self.verbose = verbose
        self._job: JobView
        self._taken = self._batch = self._begun = self._before = 0
        self._done = True
        self._log = SpanList(None, _MOST_SPANS)
        # Whether the record has begun; that of a worker which joins later than others'.
        self._opened = False
        self._record = Record()
        # The worker, by its rank at the start, whose clock offsets are relative to.
        self._reference = 0

    # Called by Keras.

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count steps."""
        self._log.listen(False)  # an earlier `fit` may have failed
        self._taken = 0
        self._done = self._opened = False
        self._record = Record()
        self._job = JobView(self.model)
        communicator = None if self._job.hooks is None else self._job.communicator
        self._log = SpanList(communicator, _MOST_SPANS)
        if not self._job.in_step:
            # These workers have no collectives inside an epoch.
            self._open()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin the record of an execution, of one step or several."""
        self._batch = batch
        if self._done or self._taken >= self.steps[1]:
            return
        ahead, count = self.steps[0] - self._taken, self._job.steps_per_call
        if ahead < 2 * count and self._stage_clock is not None:
            # Stages' clocks are another graph: the call before the window traces it.
            self._job.clock.asked = True
        if ahead >= count:
            return
        if not self._opened:
            self._open()
        if not self._log.listening:
            self._log.listen(True)
            self._before = self._log.step
            clock = self._stage_clock
            # One worker may have stages on other machines.
            error = 0 if clock is None else clock.align()
            if error:
                self._record.offsets = [Offset(now(), 0, error)]
        self._look()  # drop the spans before
        self._begun = now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record an execution; after the last one of the window write the file."""
        if self._done:
            return
        ended = now()
        first, count = self._taken, batch - self._batch + 1
        self._taken += count
        if not self._log.listening:
            return
        name = f"step {first}" if count == 1 else f"steps {first} to {self._taken - 1}"
        self._record.executions.append(
            Span(name, self._begun, ended, step=self._before)
        )
        self._before = self._log.step
        self._record.stages += self._look()
        if self._taken >= self.steps[1]:
            self._log.listen(False)
            if self._job.in_step:
                self._write()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop recording: the time between two epochs isn't part of the trace."""
        if self._done:
            return
        self._log.listen(False)
        hooks = self._job.hooks
        if hooks is None or not hooks.dynamic:
            return
        if not hooks.consensus.any_of(self._taken < self.steps[1]):
            self._write()

    def on_train_end(self, logs: Any = None) -> None:
        """Write the file with the steps there were, if `fit` had fewer."""
        if self._done:
            return
        self._log.listen(False)
        if self._opened:
            self._write()
        elif self.verbose and self._job.is_chief:
            log.info(
                "%s",
                f"kerasdist: {self.path} isn't written: `fit` ended after "
                f"{self._taken} step(s), before step {self.steps[0]}.",
            )

    def on_failure(self, error: BaseException) -> None:
        """Stop recording: `fit` ends with this error."""
        del error
        self._done = True
        self._log.listen(False)

    # The record.

    @property
    def _stage_clock(self) -> StageClock | None:
        """The clock of this worker's stages; None if there is none to read."""
        clock = self._job.stage_clock
        # Of an execution's several steps there are only sums.
        several = self._job.steps_per_call > 1
        return None if clock is None or several or not clock.can_look else clock

    def _look(self) -> list[Span]:
        """Return the spans of this worker's stages in a step."""
        return [] if self._stage_clock is None else self._stage_clock.look()

    def _open(self) -> None:
        """Begin the record; for workers in step this is a collective."""
        self._opened = True
        self._align()

    def _align(self) -> None:
        communicator, offsets = self._log.communicator, self._record.offsets
        if communicator is None:
            return
        found = clock_offset(communicator)
        chief = communicator.ranks[0]
        if chief != self._reference:
            # Offsets from the clock of a chief that was lost.
            offsets.clear()
        self._reference = chief
        if communicator.size == 1 and not self._job.in_step:
            return  # it joined later, and is alone: its offset is known at the end
        offsets.append(found)

    def _write(self) -> None:
        """Gather the records of all ranks; the chief writes the file."""
        self._done = True
        record, communicator = self._record, self._log.communicator
        record.spans, record.dropped = self._log.spans, self._log.dropped
        self._align()
        if not record.offsets:
            record.offsets.append(Offset(now(), 0, 0))
        records = [record]
        if communicator is not None:
            record.rank = communicator.rank
            record.host = communicator.peers[record.rank].address
            every = gather_json(communicator, vars(record), compressed=True)
            if not self._job.is_chief:
                return
            records = [Record.from_json(each) for each in every]
        paths = [self.path]
        if not self.path.suffix:
            # A run of its own, as TensorFlow's profiler names them: the plugin caches
            # its conversion of a run, and would continue to show that.
            run = time.strftime("%Y_%m_%d_%H_%M_%S")
            folder = self.path / "plugins" / "profile" / run
            endings = (".trace.json.gz", ".xplane.pb")
            paths = [folder / f"timeline{ending}" for ending in endings]
        for path in paths:
            _replace(path, records)
        if self.verbose:
            count = sum(len(each.spans) for each in records)
            error = max(each.error for each in records) / 1000
            log.info(
                "%s",
                f"kerasdist: the timeline of {len(records)} rank(s) is in {self.path}: "
                f"{len(record.executions)} call(s) of the training step, {count} "
                f"span(s) of communication, clocks right to {error:.1f} us. Open it "
                f"{_VIEWERS.get(self.path.suffix, _PERFETTO)}.",
            )


def _is_window(steps: Any) -> bool:
    try:
        first, stop = steps
    except (TypeError, ValueError):
        return False
    return is_whole(first, 0) and is_whole(stop, 1) and bool(stop > first)


def _replace(path: Path, records: list[Record]) -> None:
    """Write one file; a reader gets the one before until the new one is complete."""
    if path.suffix == ".pb":
        data = xspace(records)
    else:
        data = json.dumps(trace(records), separators=(",", ":")).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(data)
    partial.replace(path)


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
        spans = [span for lane in process.lanes for span in lane.spans]
        events = _numbered(plane.event_metadata, (span.name for span in spans))
        stats = _numbered(plane.stat_metadata, ("bytes", "what"))
        for lane in process.lanes:
            # Lines are sorted by their numbers.
            line = plane.lines.add(
                id=lane.number, display_id=lane.number, name=lane.title
            )
            for span in lane.spans:
                event = line.events.add(
                    metadata_id=events[span.name],
                    offset_ps=1000 * span.begin,
                    duration_ps=1000 * (span.end - span.begin),
                )
                for name, value in _args(span).items():
                    kind = "str_value" if name == "what" else "uint64_value"
                    event.stats.add(metadata_id=stats[name], **{kind: value})
    return bytes(space.SerializeToString())


def _numbered(entries: Any, names: Iterable[str]) -> dict[str, int]:
    """Put names into a plane's table, with numbers from 1: entries of 0 aren't kept."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names), 1)}
    for name, number in numbers.items():
        entries[number].id, entries[number].name = number, name
    return numbers


# The records of all ranks as one trace in Chrome's format.
#
# Pure functions of numbers; `Timeline` records and gathers, `xspace` has the same trace
# in TensorBoard's format. A rank is a process of the trace, and has these lanes
# ("threads"):
#
#     step        step ⊃ compute, exchange, update
#     collectives the collective, or exchange with servers, ⊃ pack, wait, receive,
#                 reduce
#     send        sending, while the worker waits and receives
#     server i    the exchange with a further parameter server
#     stage i     the work of one device of a model on several, by micro-batch
#
# Times are microseconds on rank 0's clock since the first span.

_STEP, _COLLECTIVES, _SEND, _SERVERS = 0, 1, 2, 3
_STAGES = 500
# Perfetto distinguishes threads by their numbers alone, whatever their process, and
# takes 0 for none: so each rank has its own thousand, and lanes begin with 1.
_NUMBERS = 1000
_NEVER = 1 << 62


@dataclass
class Record:
    """The record of one rank.

    Attributes:
        rank: Its rank.
        host: Its name.
        offsets: The lead of its clock over rank 0's: at the begin and the end, see
            `strategies.measure.stages`.
        executions: Its calls of the function that takes steps: their numbers in this
            `fit`, and that of the communicator when it began.
        spans: The spans of its communicator.
        dropped: Number of spans that weren't kept.
        stages: The spans of its stages: a stage is a thread.
    """

    rank: int = 0
    host: str = "this worker"
    offsets: list[Offset] = field(default_factory=list)
    executions: list[Span] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    stages: list[Span] = field(default_factory=list)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Record:
        """Return the record that has these attributes, of what JSON has."""
        spans = {
            name: [Span(*each) for each in found[name]]
            for name in ("executions", "spans", "stages")
        }
        offsets = [Offset(*each) for each in found["offsets"]]
        return cls(**{**found, **spans, "offsets": offsets})

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
        spans: The spans on the trace's clock; a span is before those that it contains.
    """

    number: int
    title: str
    spans: tuple[Span, ...]


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
        lanes: dict[tuple[int, str], list[Span]] = {}
        for lane, title, span in _lanes(record):
            begin, end = record.aligned(span.begin), record.aligned(span.end)
            moved = span._replace(begin=begin - start, end=end - start)
            lanes.setdefault((lane, title), []).append(moved)
        for spans in lanes.values():
            spans.sort(key=lambda each: (each.begin, -each.end))
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
                "ts": span.begin / 1000,
                "dur": (span.end - span.begin) / 1000,
                "cat": _category(lane.number),
                "args": _args(span),
            }
            for lane in process.lanes
            for span in lane.spans
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
    spans = (*record.executions, *record.spans, *record.stages)
    times = [each.begin for each in spans]
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


def _parts(execution: Span, spans: Sequence[Span]) -> Iterator[Span]:
    """Yield an execution as a span, and its parts, derived from its collectives."""
    yield execution
    exchanges: dict[int, tuple[int, int]] = {}
    for span in spans:
        inside = execution.begin <= span.begin and span.end <= execution.end
        if not inside or span.name in NAMES:
            continue
        # Before the first bucket of a step others may exchange something.
        if span.name != "push_pull" and span.step <= execution.step:
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
