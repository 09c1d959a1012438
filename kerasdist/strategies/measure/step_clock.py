"""The times of the parts of a training step, measured where they run.

    outside │ input │ compute  │ exchange │ update │ outside
            │       │          │          │        │
          begin   ready    gradients   reduced    end

`begin` is when Keras calls the step's graph; `ready` to `end` are read inside of it, by
operations that wait for the event, and cost some microseconds each. Their sums are in
one variable in host memory, which is read once in a window of many steps: sums of
differences are differences of sums. So a step calls no Python for it, also if several
steps are one execution of a graph.

While the clock runs all steps are measured, by a graph of their own
(`_keras.training.instrumented_step`); the graph of a `fit` without a clock has no
marks. benchmarks/board_cost measures the cost. A call that traces isn't counted.

The parts of an exchange are reported by the communicator (`transport.tracing`).
Exchanges of weights with parameter servers are in the graph a part of the update, and
are subtracted from it.

On GPUs the marks show how far the host has got. It waits for the device at the latest
when gradients are sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.collectives.ops import Array
from kerasdist.strategies.data.batch_split import rows_of, split_part
from kerasdist.strategies.measure.communication import SpanSums, Work
from kerasdist.strategies.measure.counters import (
    BEGIN,
    END,
    GRADIENTS,
    READY,
    REDUCED,
    ROWS,
    SLOTS,
    STEPS,
    UPDATES,
    StepCounters,
    time_after,
    time_after_all,
)
from kerasdist.strategies.measure.step_times import StepTimes, times_of

__all__ = ["StepClock"]


class StepClock:
    """The clock of one strategy's steps.

    Args:
        devices: This worker's devices, one replica each.
        communicator: The communicator of the workers.
        in_turn: Whether waiting is for other workers, and not for servers at work.

    Attributes:
        rank: This worker's rank in the job.
        communicator: The communicator of the workers.
        running: Whether steps are measured.
        asked: Whether the next call is measured in any case, even if the clock is
            stopped.
        marks: See `StepTimer`.
        batch: The specification of a replica's batch; None before a step was traced.
    """

    def __init__(
        self, devices: Sequence[str], communicator: Communicator, *, in_turn: bool
    ) -> None:
        self.rank = communicator.rank
        self.communicator = communicator
        self.running = self.asked = self.marks = False
        self.batch: Any = None
        self._replicas = len(devices)
        self._host = _tf.host_of(devices[0])
        self._in_turn = in_turn
        self._spans = SpanSums(communicator.size)
        self._summed = StepCounters(self._host)
        # Sums at the beginning of the window, and when the clock started.
        self._before, self._started = np.zeros(SLOTS), np.zeros(SLOTS)
        self._in_call = self._is_eager = False
        # The state before a call that traces.
        self._traced: tuple[Array, Work] | None = None
        # When the call and the window began, and when the last call ended.
        self._entered = self._since = self._left = 0.0
        # Seconds inside of the window's calls, and whether they are several steps each.
        self._inside, self._several = 0.0, False
        # Seconds of waiting for data, the same at the end of the last step, and seconds
        # of waiting for other workers that no graph's clock measures.
        self._waited = self._waited_before = self._met = 0.0
        # The same for this call.
        self._call_waited = self._call_met = 0.0

    # For readers of the times.

    def start(self) -> None:
        """Start measuring."""
        if self.running:
            return
        self.running = True
        self._left = time.time()
        self._waited = self._waited_before = 0.0
        self._spans.take()
        self._started = self._summed.read()
        self._begin_window(self._started)

    def stop(self) -> None:
        """Stop measuring."""
        self.running = False

    def begin_epoch(self) -> None:
        """Exclude the time between the last step and now from the training."""
        gap = time.time() - self._left
        self._since += gap
        self._left += gap
        self._waited = self._waited_before

    @property
    def rows_per_step(self) -> float:
        """Return this worker's samples per step; 0.0 if no step was measured."""
        sums = self._summed.read() - self._started
        return float(sums[ROWS] / sums[STEPS]) if sums[STEPS] else 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the block from the training."""
        running, asked = self.running, self.asked
        self.running = self.asked = False
        try:
            yield
        finally:
            self.running, self.asked = running, asked
            self.begin_epoch()

    def take(self) -> StepTimes:
        """Return the times of the steps since the last call; eagerly."""
        now = self._summed.read()
        times = times_of(
            now - self._before,
            self._spans.take(),
            rank=self.rank,
            seconds=max(self._left - self._since, 0.0),
            inside=self._inside if self._several else None,
            waited=self._waited_before,
            met=self._met,
            in_turn=self._in_turn,
        )
        self._begin_window(now)
        return times

    def _begin_window(self, now: Array) -> None:
        """Begin a window with the next step."""
        self._before = now
        self._since = self._left
        # Waiting since the end of the last step is a part of the next one.
        self._waited -= self._waited_before
        self._inside = self._waited_before = self._met = 0.0

    # For the train function.

    def enter(self) -> None:
        """Begin a call of the train function."""
        self.asked = False
        self._in_call = True
        self.communicator.add_recorder(self._spans)
        self._entered = time.time()

    def leave(self, executions: int) -> None:
        """End a call, which has taken this many steps at a time, 0 if it has failed."""
        left = time.time()
        self._in_call = False
        self.communicator.remove_recorder(self._spans)
        waited, met, eager = self._call_waited, self._call_met, self._is_eager
        self._call_waited = self._call_met = 0.0
        self._is_eager = False
        if self._traced is not None:
            sums, spans = self._traced
            self._traced = None
            self._before = self._before + self._summed.read() - sums
            self._spans.give_back(spans)
            self._since += left - self._left
            self._waited = self._waited_before
        else:
            self._met += met
            if eager:
                self._waited += waited  # before its step began
            self._waited_before = self._waited
            if executions > 1:
                self._several = True
                self._inside += left - self._entered
            elif executions and not eager:
                self._several = False
                # A graph with one thread would read the clock too late.
                self._summed.add_eagerly({}, {BEGIN: self._entered})
        self._left = left

    def _note_trace(self) -> None:
        """Keep the state before a graph that is being traced runs."""
        if self._in_call and self._traced is None:
            with tf.init_scope():
                self._traced = self._summed.read(), self._spans.take()

    def waited(
        self, seconds: float, *, others: bool = False, between: bool = False
    ) -> None:
        """See `StepTimer.waited`."""
        if between:
            self._waited += seconds
        elif self._in_call and others:
            self._call_met += seconds
        elif self._in_call:
            self._call_waited += seconds

    def step(self, run: Callable[[Any], Any], data: Any) -> Any:
        """See `StepTimer.step`."""
        parts = [_tf.select_replica(index, data) for index in range(self._replicas)]
        rows = sum(rows_of(part) for part in parts)
        # The batch of the model that was trained last.
        batch, _, _ = split_part(parts[0])
        self.batch = tf.nest.map_structure(
            tf.type_spec_from_value, batch, expand_composites=False
        )
        counts = {STEPS: 1.0, ROWS: rows}
        if _tf.executing_eagerly():
            self._is_eager = True
            begin = time.time()
            outputs = run(data)
            times = {BEGIN: begin, READY: begin, END: time.time()}
            self._summed.add_eagerly(counts, times)
            return outputs
        self._note_trace()
        with tf.device(self._host):
            ready = time_after(parts)
        # A graph with one thread would otherwise read the clock after the step.
        with tf.control_dependencies([ready]):
            outputs = run(data)
        with tf.device(self._host):
            self._summed.add(counts, {READY: ready, END: time_after(outputs)})
        return outputs

    def exchange(
        self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Reduce gradients, in replica context; return what `reduce` does.

        Args:
            gradients: The gradients.
            reduce: Reduces them, given tensors that its last bucket waits for.
        """
        # Nothing is sent before the slowest replica here has finished.
        ready = time_after_all(gradients) if self._replicas > 1 else None
        if _tf.local_replica_id() > 0:
            return reduce(())
        if _tf.executing_eagerly():
            begin = time.time()
            reduced = reduce(())
            times = {GRADIENTS: begin, REDUCED: time.time()}
            self._summed.add_eagerly({UPDATES: 1.0}, times)
            return reduced
        self._note_trace()
        with tf.device(self._host):
            before = time_after(gradients if ready is None else ready)
        # With several replicas here a merge call reduces, in another thread.
        reduced = reduce([before] if self._replicas == 1 else ())
        # Updates don't wait for that: each begins as early as without clocks.
        with tf.device(self._host):
            after = time_after(reduced)
            self._summed.add({UPDATES: 1.0}, {GRADIENTS: before, REDUCED: after})
        return reduced
