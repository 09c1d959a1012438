"""The callback that traces some steps on all ranks, `Timeline`."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

from kerasdist._keras.training.state import JobCallback
from kerasdist.callbacks.job_view import JobView
from kerasdist.callbacks.trace_file import Execution, Record, trace, xspace
from kerasdist.collectives import gather_json
from kerasdist.strategies.measure.communication import Span, SpanList
from kerasdist.strategies.measure.stages import Offset, StageClock, clock_offset
from kerasdist.strategies.sync.extended import DataParallelStrategy
from kerasdist.transport import log
from kerasdist.transport.tracing import now

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
        faults = []
        if self.path.suffix and not self.path.name.endswith(_ENDINGS):
            faults.append(
                f"path={str(path)!r}; expected a name in {', '.join(_ENDINGS)}, or of "
                "a folder, without an ending"
            )
        try:
            first, stop = steps
            right = first == int(first) >= 0 and stop == int(stop) > first
        except (TypeError, ValueError):
            right = False
        if not right:
            faults.append(
                f"steps={steps!r}; expected two numbers, the first step and the one "
                "after the last"
            )
        if faults:
            raise ValueError(
                "`Timeline` can't be made. Received: " + "; and ".join(faults) + "."
            )
        self.steps = int(first), int(stop)
        self.verbose = verbose
        self._job: JobView
        self._taken = self._batch = self._begun = self._before = 0
        self._done = True
        self._log = SpanList(None, _MOST_SPANS)
        self._record: Record | None = None
        # The worker, by its rank at the start, whose clock offsets are relative to.
        self._reference = 0

    # Called by Keras.

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to count steps."""
        self._log.listen(False)  # an earlier `fit` may have failed
        self._taken = 0
        self._done = False
        self._record = None
        self._job = JobView(self.model)
        strategy = self.model.distribute_strategy
        is_job = isinstance(strategy, DataParallelStrategy)
        self._log = SpanList(strategy.communicator if is_job else None, _MOST_SPANS)
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
        if self._record is None:
            self._open()
        if not self._log.listening:
            self._log.listen(True)
            self._before = self._log.step
            clock, record = self._stage_clock, self._record
            # One worker may have stages on other machines.
            error = 0 if clock is None else clock.align()
            if error and record is not None:
                record.offsets = [Offset(now(), 0, error)]
        self._look()  # drop the spans before
        self._begun = now()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record an execution; after the last one of the window write the file."""
        if self._done:
            return
        ended = now()
        first, count = self._taken, batch - self._batch + 1
        self._taken += count
        if self._record is None or not self._log.listening:
            return
        self._record.executions.append(
            Execution(first, count, self._begun, ended, self._before)
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
        if self._record is not None:
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

    def _state_for_newcomers(self) -> dict[str, Any]:
        """See `JobCallback._state_for_newcomers`."""
        return {
            "taken": self._taken,
            "done": self._done,
            "recording": self._record is not None,
            "reference": self._reference,
        }

    def _adopt_state(self, state: dict[str, Any]) -> None:
        """See `JobCallback._adopt_state`: its record begins later than the others'."""
        self._taken, self._done = state["taken"], state["done"]
        self._reference = state["reference"]
        if state["recording"] and self._log.communicator is not None:
            self._record = self._new_record()

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
        self._record = self._new_record()
        self._align()

    def _new_record(self) -> Record:
        communicator = self._log.communicator
        if communicator is None:
            return Record(0, "this worker", [Offset(now(), 0, 0)])
        here = communicator.peers[communicator.rank].address
        return Record(communicator.rank, here, [])

    def _align(self) -> None:
        communicator, record = self._log.communicator, self._record
        if communicator is None or record is None:
            return
        found = clock_offset(communicator)
        chief = communicator.ranks[0]
        if chief != self._reference:
            # Offsets from the clock of a chief that was lost.
            record.offsets.clear()
        self._reference = chief
        if communicator.size == 1 and not self._job.in_step:
            return  # it joined later, and is alone: its offset is known at the end
        record.offsets.append(found)

    def _write(self) -> None:
        """Gather the records of all ranks; the chief writes the file."""
        self._done = True
        record, communicator = self._record, self._log.communicator
        if record is None:
            return
        record.spans, record.dropped = self._log.spans, self._log.dropped
        records = [record]
        if communicator is not None:
            self._align()
            record.rank = communicator.rank
            if not record.offsets:
                record.offsets.append(Offset(now(), 0, 0))
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
