"""The callback that charts how a job scales, `ScalingTensorBoard`.

Each worker measures its own steps (`strategies.measure.step_clock`). After a window of
steps all workers exchange a few numbers, and the chief writes the figures that follow
from them:

    every worker   steps ...  │  steps ...      │  ...            end of `fit`
    all                       all-gather        all-gather        all-gather
    chief                     figures -> file   figures -> file   verdict

A window ends after a number of steps that all workers know, so no worker waits for one
that is in another window. Where workers don't wait for each other, it ends with the
epoch.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections import Counter
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras.data.epoch_iterators import fits_arrays
from kerasdist._keras.shared_state import JobCallback
from kerasdist.callbacks import bottleneck, summaries
from kerasdist.callbacks.bottleneck import Verdict, judge
from kerasdist.callbacks.job_view import (
    Baseline,
    ElasticView,
    Events,
    JobView,
    Windows,
    WorkerTotals,
    check_arguments,
    is_number,
    is_whole,
)
from kerasdist.callbacks.summaries import Figures, Scalars, Summaries, combine
from kerasdist.collectives import gather_json
from kerasdist.prediction import report
from kerasdist.prediction.noise import GradientNorms, add_norms
from kerasdist.prediction.simulation import Prediction
from kerasdist.strategies.measure.communication import link_speed
from kerasdist.strategies.measure.stages import idle_parts
from kerasdist.transport import log

_PATHS = (str, bytes, os.PathLike)
# After this many calls one worker's speed is measured: the first call traces.
_CALIBRATE = 2
# After this many calls their duration is read, where no window ends soon.
_LOOK = 9
# The noise of gradients changes slowly, and one window shows it badly: at the end of a
# window this part of what earlier ones have shown remains.
_KEPT_NORMS = 0.9


class ScalingTensorBoard(JobCallback):
    """Writes the parts of a job's speed, over all workers, and its bottleneck.

        board = kerasdist.callbacks.ScalingTensorBoard("logs", baseline=5_200)
        model.fit(x, y, batch_size=256, callbacks=[board])

    Give it on all workers; the chief writes. Open `tensorboard --logdir logs` and look
    at the tabs "Custom Scalars", which has a layout ready, and "Text", which names in
    words the limit of the job and the change to make first. The same is printed at the
    end of `fit`.

    Args:
        log_dir: Folder of TensorBoard's files; the run is called "scaling", and lines
            that share a chart are runs below it.
        baseline: Examples per second of one worker, for the scaling efficiency.
            Train with one worker and this callback to get the number. With
            `ModelParallelStrategy` that of one device, by `RingStrategy()`.
        calibrate: Measure the baseline instead, early in each `fit` (asynchronous
            workers: after its first epoch), in a few seconds: the chief takes steps
            alone, on a whole global batch of zeros, while the others wait; then the
            state is restored. The time between two steps (callbacks, Python) is taken
            to be as in training, data to be there at once. Alone means one worker with
            all its devices; with `ModelParallelStrategy` its first device, with a copy
            of the whole model and whole batches, if that fits there.
        update_freq: When to write: after this many batches, "epoch", or "auto": often
            at first, and never so often that it costs a hundredth of the time. With
            asynchronous workers always after each epoch.
        prediction: A file with what `kerasdist predict --json` has printed: it's shown
            beside what is measured. Only the chief needs it.
        verbose: 0: log nothing at the end of `fit`.

    Attributes:
        figures: The `summaries.Figures` of the whole `fit`, when it has
            ended; None before that, and on all workers but the chief.
        verdict: The job's limit (`callbacks.bottleneck.Verdict`); likewise.

    Raises:
        ValueError: An argument is wrong; or, when `fit` begins, on all workers:
            `log_dir` can't be written to, `prediction` can't be read, or there's
            another such callback.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        baseline: float | None = None,
        calibrate: bool = False,
        update_freq: int | str = "auto",
        prediction: str | os.PathLike[str] | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        is_freq = isinstance(update_freq, int) and is_whole(update_freq, 1)
        right = {
            f"log_dir={log_dir!r}; expected the path of a folder": (
                isinstance(log_dir, _PATHS)
            ),
            f"baseline={baseline!r}; expected a positive number of examples per "
            "second, or None": baseline is None
            or (is_number(baseline) and baseline > 0),
            f"calibrate={calibrate!r}; expected True or False": (
                isinstance(calibrate, bool)
            ),
            f"baseline={baseline!r} and calibrate={calibrate!r}; expected one of "
            "them": baseline is None or calibrate is not True,
            f"update_freq={update_freq!r}; expected 'auto', 'epoch' or a positive "
            "number of batches": is_freq or update_freq in ("auto", "epoch"),
            f"prediction={prediction!r}; expected the path of a file, or None": (
                prediction is None or isinstance(prediction, _PATHS)
            ),
        }
        check_arguments("ScalingTensorBoard", right)
        self.log_dir = os.fsdecode(log_dir)
        self.figures: Figures | None
        self.verdict: Verdict | None
        self._speed = (None if baseline is None else float(baseline), calibrate)
        self._update_freq = update_freq
        self._prediction = prediction
        self._predicted: dict[int, Prediction] = {}
        self._verbose = verbose
        self._summaries: Summaries | None = None
        self._active = self._arrays = False
        self._job: JobView
        self._forget(1)

    def _forget(self, steps_per_call: int) -> None:
        """Discard the state of an earlier `fit`."""
        self.figures = self.verdict = None
        self._link: float | None = None
        self._baseline = Baseline(*self._speed)
        # Calls that have begun, and the one before which something is to be done next.
        self._calls = 0
        self._due = 0.0
        self._epoch_began: float | None = None
        self._windows = Windows(self._update_freq, steps_per_call)
        self._steps = 0
        self._forget_sums()
        self._events = Events()
        self._changes: ElasticView | None = None
        # The same, of a worker that has joined, until its first step is over.
        self._joined: ElasticView | None = None

    def _forget_sums(self) -> None:
        """Discard the sums of the steps so far."""
        self._totals: dict[int, WorkerTotals] = {}
        self._seconds = 0.0
        # Of each worker, mostly those of the newest windows.
        self._recent: list[GradientNorms] = []

    # Called by Keras.

    def set_model(self, model: Any) -> None:
        """See `keras.callbacks.Callback.set_model`."""
        super().set_model(model)
        self._job = JobView(model)
        self._active = self._job.clock is not None
        if not self._active:
            kind = type(model.distribute_strategy).__name__
            # A script that is tried without a strategy needs no `if`.
            warnings.warn(
                "ScalingTensorBoard measures kerasdist's strategies only, and writes "
                f"nothing here. Received: a model with {kind}. "
                "Build and compile it in `with kerasdist.RingStrategy().scope():`, "
                "which works for one worker, too.",
                stacklevel=2,
            )
            self._due = math.inf
            return
        # A `fit` that was interrupted from outside leaves it running.
        self._job.clock.stop()

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_begin`."""
        if not self._active:
            return
        self._forget(self._job.steps_per_call)
        if self._job.clock.running:
            raise ValueError(
                "A `fit` must have only one ScalingTensorBoard. Received: a second "
                f"one, log_dir={self.log_dir!r}. Give one of them."
            )
        self._open()
        self._job.clock.start()
        self._job.take()  # of an earlier `fit`
        self._steps = self._job.steps_taken()
        self._events = Events(self._job.happened())
        self._link = link_speed(self._job.communicator)
        self._arrays = fits_arrays()
        hooks = self._job.hooks
        if hooks is not None and hooks.elastic is not None:
            self._changes = ElasticView(hooks.elastic, self._job.clock)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_begin`."""
        if not self._active or self._joined is not None:
            return  # of one that has joined the others are in the midst of it
        if self._job.in_step:
            # The chief may have written a file: no step may include the wait for that.
            self._job.communicator.barrier()
            self._epoch_began = time.monotonic()
        self._job.clock.begin_epoch()
        self._due = self._calls

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_begin`.

        Overriding `on_train_batch_end` would cost a collective per batch, because such
        callbacks may stop training.
        """
        # Hot path: a step may take only a millisecond.
        if self._calls >= self._due or (
            self._changes is not None and self._changes.has_changed
        ):
            self._before_call()
        self._calls += 1
        self._windows.calls += 1

    def _before_call(self) -> None:
        """Run the work that is due before this call, and schedule the next."""
        self._follow_changes()
        if self._epoch_began is not None:
            # The iterator was made, which may have read its first batches.
            made = time.monotonic() - self._epoch_began
            self._job.clock.waited(made, between=True)
            self._epoch_began = None
        if self._job.in_step:
            if self._calls == _CALIBRATE and self._baseline.missing:
                self._events.add(self._baseline.measure(self._job))
            if not self._windows.left:
                self._end_window()
        if self._calls == _LOOK:
            self._choose_sample()
        ahead = [due for due in (_CALIBRATE, _LOOK) if due > self._calls]
        if self._job.in_step:
            ahead.append(self._calls + max(self._windows.left, 1))
        self._due = min(ahead, default=math.inf)

    def _follow_changes(self) -> bool:
        """Begin to measure the present workers, if they have changed.

        All of them do so at the same step, and a new one begins there, too.
        """
        if self._joined is not None:
            # The change by which this worker has joined.
            self._changes, self._joined = self._joined, None
        changes = self._changes
        if changes is None or not changes.has_changed:
            return False
        self._job.take()
        self._windows = Windows(self._update_freq, self._job.steps_per_call)
        self._calls = 0
        self._forget_sums()
        new = changes.take()
        steps = self._job.steps_taken()
        for change in new if self._job.is_chief else ():
            self._steps = max(steps - 1, 0)
            self._put({"": {"job/workers": change.before}})
            self._steps = steps
            self._events.add(change.text)
            numbers = {
                "job/workers": float(change.workers),
                "job/pause_seconds": change.seconds,
                "job/goodput_percent": changes.goodput_percent(),
            }
            self._put({"": numbers})
        return True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_end`."""
        if not self._active:
            return
        if not self._job.in_step:
            self._baseline.agree(self._job.communicator)
            if self._baseline.missing:
                self._events.add(self._baseline.measure(self._job))
        if self._follow_changes():
            return
        if not self._job.in_step or self._update_freq == "epoch":
            self._end_window()

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_end`."""
        if not self._active:
            return
        self._follow_changes()
        if self._job.in_step and self._windows.calls:
            self._end_window()
        if self._baseline.missing:
            self._events.add(
                "`fit` was over before the speed of one worker could be measured."
            )
        self._job.clock.stop()
        self._conclude()

    def on_failure(self, error: BaseException) -> None:
        """Write the figures up to an error that ended `fit`, on the chief."""
        if not self._active:
            return
        self._job.clock.stop()
        self._events.add(f"`fit` ended with {type(error).__name__}: {error}")
        self._conclude()

    # A worker that joins.

    def _state_for_newcomers(self) -> dict[str, Any]:
        """See `JobCallback._state_for_newcomers`."""
        return {
            "baseline": self._baseline.state(),
            "changes": None if self._changes is None else self._changes.state(),
            "link": self._link,
        }

    def _adopt_state(self, state: dict[str, Any]) -> None:
        """See `JobCallback._adopt_state`.

        The others begin to measure again after the step in which this worker has
        joined, see `_follow_changes`, and so does it.
        """
        if not self._active:
            return
        self._baseline.adopt(state["baseline"])
        self._link = state["link"]
        if self._changes is not None and state["changes"] is not None:
            self._changes.adopt(state["changes"])
        self._joined, self._changes = self._changes, None
        self._calls, self._due = 0, 1.0

    def _make_file(self) -> str:
        """Make the file, if there is none; return what is wrong."""
        try:
            folder = os.path.join(self.log_dir, "scaling")
            self._summaries = self._summaries or Summaries(folder)
        except (OSError, tf.errors.OpError) as error:
            return getattr(error, "message", None) or str(error)
        return ""

    def _open(self) -> None:
        """Make the file, on the chief; all workers call it, and fail if that does."""
        # Another worker may become the chief.
        fault = self._read_prediction()
        if self._job.is_chief and (wrong := self._make_file()):
            fault = (
                "`log_dir` must be a folder that the chief can write to. Received: "
                f"log_dir={self.log_dir!r}: {wrong}"
            )
        fault = gather_json(self._job.communicator, fault)[0]
        if fault:
            raise ValueError(fault)

    def _read_prediction(self) -> str:
        """Read the predictions, if there are any; return what is wrong."""
        if self._prediction is None:
            return ""
        try:
            with open(self._prediction, encoding="utf-8") as file:
                self._predicted = report.from_json(json.load(file))
        except (OSError, ValueError) as error:
            return (
                "`prediction` must be a file that `kerasdist predict --json` has "
                f"printed. Received: prediction={self._prediction!r}: {error}"
            )
        return ""

    def _file(self) -> Summaries | None:
        """Return the file to write to, if there is one; a new chief makes one."""
        changes = self._changes
        if self._summaries is None and changes and changes.writable:
            fault = self._make_file()
            changes.writable = not fault
            if fault:
                # Training must not end because of it.
                warnings.warn(
                    "The new chief can't write the figures of ScalingTensorBoard. "
                    f"Received: log_dir={self.log_dir!r}: {fault}. Use a folder that "
                    "all workers share.",
                    stacklevel=2,
                )
        return self._summaries

    def _choose_sample(self) -> None:
        """Choose the calls to measure; workers in step measure the same ones."""
        seconds = self._job.clock.seconds_per_step * self._job.steps_per_call
        if self._job.in_step:
            found = self._job.communicator.all_reduce([np.float64(seconds)], "max")
            seconds = float(found[0])
        if seconds:
            self._job.clock.measure(seconds)

    # A window of steps.

    def _end_window(self) -> None:
        """End the window; all workers call it at the same step."""
        begin = time.monotonic()
        self._choose_sample()
        sent = [self._job.take(), self._windows.state()]
        rows = gather_json(self._job.communicator, sent)
        every = [WorkerTotals.from_json(totals) for totals, _ in rows]
        self._windows.begin(every[0].times, rows[0][1])
        if not self._job.is_chief:
            return
        ranks = tuple(one.times.rank for one in every)
        self._events.note_workers(self._job.happened(), ranks)
        new = [one.norms for one in every]
        self._recent = add_norms(self._recent, new, _KEPT_NORMS)
        for rank, one in zip(ranks, every, strict=True):
            before = self._totals.get(rank)
            self._totals[rank] = one if before is None else before.plus(one)
        # A worker without a batch in an epoch measures no time, although it passes.
        self._seconds += max(one.times.seconds for one in every)
        self._steps = self._job.steps_taken()
        figures = self._figures(every, self._recent)
        numbers: Scalars = {"": {}}
        if figures is not None:
            numbers = summaries.scalars(figures, self._job.rate())
        if self._changes is not None:
            numbers[""]["job/goodput_percent"] = self._changes.goodput_percent()
        self._put(numbers, sum((one.reads for one in every), Counter[int]()))
        self._windows.cost(time.monotonic() - begin)

    def _put(self, numbers: Scalars, reads: Any = None, verdict: str = "") -> None:
        file = self._file()
        if file is not None:
            texts = {summaries.VERDICT: verdict, summaries.EVENTS: self._events.take()}
            file.write(self._steps, numbers, texts, reads)

    def _figures(
        self,
        every: list[WorkerTotals],
        norms: list[GradientNorms],
        seconds: float | None = None,
    ) -> Figures | None:
        times = [one.times for one in every]
        idle: tuple[float, ...] = ()
        if every and times[0].steps:
            # Perhaps no step of this window was measured.
            found = (every[0].stages, self._totals[times[0].rank].stages)
            step = times[0].seconds / times[0].steps
            idle = idle_parts(found[0], step) or idle_parts(found[1], step)
        reads = sum((one.reads for one in every), Counter[int]())
        used = {one.times.rank: one.machine for one in every if one.machine.seconds}
        return combine(
            times,
            predicted=self._predicted.get(len(times)),
            seconds=seconds,
            arrays=self._arrays,
            link=self._link,
            baseline=self._baseline.speed(times),
            staleness=dict(reads),
            idle=idle,
            machines=used,
            **self._job.facts(norms),
        )

    def _conclude(self) -> None:
        """Write and log the verdict on the whole `fit`."""
        if not self._job.is_chief or (file := self._file()) is None:
            return
        every = [self._totals[rank] for rank in sorted(self._totals)]
        norms = [one.norms for one in every]
        self.figures = self._figures(every, norms, self._seconds)
        text = ""
        if self.figures is not None:
            self.verdict = judge(self.figures)
            text = bottleneck.to_markdown(self.figures, self.verdict)
            if self._verbose:
                log.info("%s", bottleneck.to_text(self.figures, self.verdict))
        self._put({}, verdict=text)
        self._changes = None
        file.close()
        self._summaries = None
