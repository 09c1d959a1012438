"""How long the parts of a step of training take, measured where they happen.

    outside │ input │ compute  │ exchange │ update │ outside
            │       │          │          │        │
          begin   ready    gradients   reduced    end

`begin` is when Keras calls the step's graph; `ready` to `end` are read inside of it, by
operations that wait for what the mark stands for, which cost a microsecond each. Their
sums lie in one variable in host memory, which is read once in a window of many steps:
sums of differences are differences of sums. So a step calls no Python for it, also
where several steps are one execution of a graph.

What an exchange consists of is told by the communicator (`transport.spans`). Exchanges
of weights with parameter servers are a part of the update, as far as the graph knows:
they are taken out of it.

Graphs get the marks when they are traced while the clock runs; until somebody starts it
there are none. A call that has traced isn't counted, nor is what came before it in the
same window.

On GPUs the marks tell when the host has got on so far. It waits for the device at the
latest where gradients are sent.
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
from kerasdist.strategies.rows import count_rows, split_total
from kerasdist.strategies.spans import SpanSums
from kerasdist.strategies.step_times import StepTimes

__all__ = ["StepClock"]

# What the variable holds: counts, and sums of times.
_STEPS, _ROWS, _BEGIN, _READY, _END, _GRADIENTS, _REDUCED, _UPDATES = range(8)


class StepClock:
    """The clock of one strategy's steps.

    Args:
        devices: This worker's devices, one replica each.
        communicator: Between the workers.
        in_turn: Whether who waits waits for other workers, and not for servers at work.

    Attributes:
        rank: This worker's rank in the job.
        communicator: Between the workers.
        running: Whether steps are measured.
        marks: See `StepTimer`.
        batch: What a replica's batch is made of, as TensorFlow describes it; None
            before a step was traced.
    """

    def __init__(
        self, devices: Sequence[str], communicator: Communicator, *, in_turn: bool
    ) -> None:
        self.rank = communicator.rank
        self.running = False
        self.marks = False
        self.batch: Any = None
        self._replicas = len(devices)
        self._host = _tf.host_of(devices[0])
        self.communicator = communicator
        self._in_turn = in_turn
        self._spans = SpanSums(communicator.size)
        with tf.device(self._host):
            self._totals = tf.Variable(
                tf.zeros([8], tf.float64), trainable=False, name="kerasdist_clock"
            )
        # Times are counted from here: sums of small numbers are exact.
        self._base = time.time()
        self._eager = np.zeros(8)
        self._before = np.zeros(8)
        self._traced = self._is_eager = False
        self._entered = self._left = self._since = 0.0
        # Seconds inside of calls, and of them those of calls that are several steps.
        self._inside = self._several = 0.0
        self._waited = self._met = 0.0

    # For who wants to know.

    def start(self) -> bool:
        """Measure from now on.

        Returns:
            Whether steps that were traced before must be traced again.
        """
        if self.running:
            return False
        self.running = True
        self.communicator.listen(self._spans)
        self._forget()
        return True

    def stop(self) -> None:
        """Measure no longer; steps that were traced keep their marks."""
        if self.running:
            self.running = False
            self.communicator.unlisten(self._spans)

    def begin_epoch(self) -> None:
        """What lies between the last step and now is no part of the training."""
        gap = time.time() - self._left
        self._since += gap
        self._left += gap

    @property
    def rows_per_step(self) -> float:
        """Samples that this worker trains on per step; 0.0: no step was measured."""
        sums = self._sums()
        # Those before may be another model's.
        for found in (sums - self._before, sums):
            if found[_STEPS]:
                return float(found[_ROWS] / found[_STEPS])
        return 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What stands inside is no part of the training."""
        self.running = False
        try:
            yield
        finally:
            self.running = True
            self.begin_epoch()

    def take(self) -> StepTimes:
        """What the steps have taken since this was called last; eagerly."""
        now = self._sums()
        steps, rows, begin, ready, end, gradients, reduced, updates = now - self._before
        spans = self._spans.take()
        seconds = self._left - self._since
        inside = end - ready
        whole = max(self._inside - self._several, 0.0)
        outside = max(seconds - self._inside, 0.0)
        if self._several:
            # Where the next batch is fetched in the midst of an execution.
            waiting = max(self._inside - inside, 0.0)
        else:
            waiting = max(ready - begin, 0.0)
            outside += max(whole - (end - begin), 0.0)
        waiting += self._waited
        outside = max(outside - self._waited - self._met, 0.0)
        exchange = reduced - gradients
        if updates == steps and steps:
            compute, update = gradients - ready, end - reduced
        else:
            # Several optimizers in one step, or none: the rest isn't told apart.
            compute, update = inside - exchange, 0.0
        servers = min(spans.seconds("push_pull"), update or inside)
        if update:
            update -= servers
        else:
            compute -= servers
        exchange = max(exchange, 0.0) + servers
        late = min(spans.late, exchange) if self._in_turn else 0.0
        packing = spans.share("pack") * exchange
        times = StepTimes(
            rank=self.rank,
            steps=float(steps),
            rows=float(rows),
            seconds=max(seconds, 0.0),
            input=float(waiting),
            compute=float(max(compute, 0.0)),
            pack=float(packing),
            exchange=float(exchange - packing + self._met),
            update=float(max(update, 0.0)),
            outside=float(outside),
            late=float(min(late, exchange - packing) + self._met),
            sent=float(spans.sent),
            collectives=float(spans.count),
            reduced=float(spans.reduced),
            communicating=float(spans.communicating),
        )
        self._forget(now)
        return times

    def _sums(self) -> Array:
        return np.asarray(self._totals.numpy()) + self._eager

    def _forget(self, now: Array | None = None) -> None:
        """Begin a window with the step that comes next."""
        self._before = self._sums() if now is None else now
        if now is None:
            self._left = time.time()
            self._spans.take()
        self._since = self._left
        self._inside = self._several = self._waited = self._met = 0.0

    # For who takes steps.

    def enter(self) -> None:
        """Keras calls the function that takes steps."""
        self._entered = time.time()
        self._is_eager = False
        self._spans.open = True

    def leave(self, executions: int) -> None:
        """It has returned; it takes so many steps at a time, 0 if it has failed."""
        self._spans.open = False
        if self._traced:
            self._traced = False
            self._forget()
            return
        self._left = time.time()
        self._inside += self._left - self._entered
        if executions > 1:
            self._several += self._left - self._entered
        elif executions and not self._is_eager:
            # A graph with one thread would read the clock too late.
            self._eager[_BEGIN] += self._entered - self._base

    def waited(
        self, seconds: float, *, others: bool = False, between: bool = False
    ) -> None:
        """Outside of graphs so many seconds were spent waiting: for data, or others.

        Where no step is taken, e.g. in an evaluation, that isn't counted, but if it's
        known to be `between` two steps.
        """
        if not self._spans.open and not between:
            return
        if others:
            self._met += seconds
        else:
            self._waited += seconds

    def step(self, run: Callable[[Any], Any], data: Any) -> Any:
        """See `StepTimer.step`."""
        parts = [_tf.select_replica(index, data) for index in range(self._replicas)]
        rows = sum(_rows(part) for part in parts)
        # Of whichever model is trained now.
        batch, _ = split_total(parts[0])
        self.batch = tf.nest.map_structure(
            tf.type_spec_from_value, batch, expand_composites=False
        )
        if _tf.executing_eagerly():
            begin = time.time()
            self._is_eager = True
            outputs = run(data)
            end = time.time()
            for slot, value in (
                (_STEPS, 1),
                (_ROWS, float(rows)),
                (_BEGIN, begin - self._base),
                (_READY, begin - self._base),
                (_END, end - self._base),
            ):
                self._eager[slot] += value
            return outputs
        self._traced = True
        with tf.device(self._host):
            ready = _after(parts)
        # What has one thread would else read the clock after the step.
        with tf.control_dependencies([ready]):
            outputs = run(data)
        with tf.device(self._host):
            self._add(
                {
                    _STEPS: tf.constant(1, tf.float64),
                    _ROWS: tf.cast(rows, tf.float64),
                    _READY: ready - self._base,
                    _END: _after(outputs) - self._base,
                }
            )
        return outputs

    def exchange(
        self, gradients: Sequence[Any], reduce: Callable[[Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Reduce gradients, in replica context; return what `reduce` does.

        Args:
            gradients: The gradients.
            reduce: Reduces them. It's given tensors that its last bucket waits for.
        """
        if _tf.local_replica_id() > 0:
            return reduce(())
        if _tf.executing_eagerly():
            begin = time.time()
            reduced = reduce(())
            self._eager[_GRADIENTS] += begin - self._base
            self._eager[_REDUCED] += time.time() - self._base
            self._eager[_UPDATES] += 1
            return reduced
        self._traced = True
        with tf.device(self._host):
            before = _after(gradients)
        # With several replicas here a merge call reduces, which is another thread's.
        reduced = reduce([before] if self._replicas == 1 else ())
        with tf.device(self._host):
            after = _after(reduced)
            self._add(
                {
                    _GRADIENTS: before - self._base,
                    _REDUCED: after - self._base,
                    _UPDATES: tf.constant(1, tf.float64),
                }
            )
        with tf.control_dependencies([after]):
            return [
                gradient if gradient is None else _tf.same(gradient)
                for gradient in reduced
            ]

    def _add(self, values: dict[int, Any]) -> None:
        zero = tf.constant(0, tf.float64)
        self._totals.assign_add(tf.stack([values.get(slot, zero) for slot in range(8)]))


def _rows(part: Any) -> Any:
    """Number of rows of a replica's batch; 0 where it has no first dimension."""
    batch, _ = split_total(part)
    try:
        return count_rows(batch)
    except ValueError:
        return tf.constant(0, tf.int64)


def _after(values: Any) -> Any:
    """The time when all tensors in a nest are there; float64, scalar, in seconds."""
    tensors = [
        tensor
        for tensor in tf.nest.flatten(values, expand_composites=True)
        if tf.is_tensor(tensor)
    ]
    with tf.control_dependencies(tensors):
        return tf.timestamp()
