"""The times of the parts of a training step, measured where they run.

    outside │ input │ compute  │ exchange │ update │ outside
            │       │          │          │        │
          begin   ready    gradients   reduced    end

`begin` is when Keras calls the step's graph; `ready` to `end` are read inside of it, by
operations that wait for the event, and cost some microseconds each. Their sums are in
one variable in host memory, which is read once in a window of many steps: sums of
differences are differences of sums. So a step calls no Python for it, also if several
steps are one execution of a graph.

Of short steps not all are measured: marks and recording
would take a noticeable part of them (benchmarks/board_cost). So there's another graph
(`_keras.training.train_step`), with marks, which is called now and then; the
usual one always counts steps and rows. The number of steps and rows, and their total
time, are those of all steps; the parts of a step are those of the measured ones.

The parts of an exchange are reported by the communicator (`transport.tracing`).
Exchanges of weights with parameter servers are in the graph a part of the update, and
are subtracted from it.

The graph with marks is traced only after the clock was started. A call that traces
isn't counted while the clock runs.

On GPUs the marks show how far the host has got. It waits for the device at the latest
when gradients are sent.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.collectives.row_exchange import Array
from kerasdist.strategies.data.batch_split import rows_of, split_part
from kerasdist.strategies.measure import communication
from kerasdist.strategies.measure.communication import Slot, SpanSums, StepTimes

# The parts of one step, from its clocks and the communicator's spans.


def parts_of_a_step(sums: Array, *, several: bool, in_turn: bool) -> StepTimes:
    """Return the times and bytes of one step, on average.

    Args:
        sums: The sums of the measured steps; at least one step.
        several: Whether their calls are several steps each.
        in_turn: Whether waiting is for other workers, and not for servers at work.
    """
    steps = sums[Slot.MEASURED]
    begin, ready, end, gradients, reduced = sums[Slot.BEGIN : Slot.SENT]
    running, exchange = end - ready, max(reduced - gradients, 0.0)
    # Where the next batch is fetched within an execution, the fetch's end counts.
    waiting = sums[Slot.INSIDE] - running if several else ready - begin
    waiting -= sums[Slot.MET_MEASURED]
    if sums[Slot.UPDATES] == steps:
        compute, update = gradients - ready, end - reduced
    else:
        # With several optimizers in one step, or none, the rest can't be divided.
        compute, update = running - exchange, 0.0
    servers = min(sums[Slot.SERVERS], update or running)
    if update:
        update -= servers
    else:
        compute -= servers
    exchange += servers
    packing = sums[Slot.PACKING] / (sums[Slot.PARTS] or 1.0) * exchange
    late = min(sums[Slot.LATE], exchange - packing) if in_turn else 0.0
    found = {
        "input": max(waiting, 0.0),
        "compute": max(compute, 0.0),
        "pack": packing,
        "exchange": exchange - packing,
        "update": max(update, 0.0),
        "late": late,
        "sent": sums[Slot.SENT],
        "communicating": sums[Slot.COMMUNICATING],
    }
    means: dict[str, Any] = {
        name: float(value / steps) for name, value in found.items()
    }
    return StepTimes(**means)


# The choice of the calls that are measured: rows of some, at random times.
#
#     counted   ● ● ● ● ●                 ● ● ● ● ● ●                 ● ● ●  ...
#     warming             ●                           ●
#     measured              ● ● ● ● ● ● ●               ● ● ● ● ● ● ●
#
# The first call of a row is slower than others, because the graph that measures hasn't
# run for a while: it warms up. A row begins at random, so that periodic events (a slow
# batch, a message) aren't met always or never; but the random numbers are the same on
# all workers, so that workers that take each step together measure the same ones.

# For calls up to this many seconds, the length of a row, including the warm-up. Longer
# calls are all measured: that costs little (benchmarks/board_cost), and a second graph
# of them may take long to trace.
_ROWS = ((0.02, 8), (0.1, 3))
# Seconds from one row to the next. A row costs up to a millisecond, most of it while
# caches are filled for one graph and then for the other (benchmarks/board_cost).
_SECONDS = 0.5
# At most one call in this many is in a row.
_SHARE = 5


def rows_for(seconds: float) -> tuple[int, int]:
    """Return the calls of a row and of a period, for calls that take `seconds`.

    (0, 0) means that all are measured.
    """
    for most, row in _ROWS:
        if 0 < seconds < most:
            return row, max(math.ceil(_SECONDS / seconds), row * _SHARE)
    return 0, 0


class Sampling:
    """Decides for each call whether it's measured; initially all are.

    Attributes:
        measured: Whether the current call is.
        warming: Whether a measured call is a warm-up, and doesn't count.
    """

    def __init__(self) -> None:
        self.measured, self.warming = True, False
        self._chance = random.Random(0)
        # The lengths of a row and a period, calls until the next row, left of this one.
        self._calls = self._period = self._ahead = self._row = 0

    def set(self, row: int, period: int) -> None:
        """Set the number of calls in a row and in a period from here on.

        All calls are measured if a period has no others. Otherwise the next one isn't:
        it is preceded by the end of a window, which is no part of most steps.
        """
        others = period - row
        self._calls, self._period = (row, period) if others > 0 else (0, 0)
        self._row = 0
        self._ahead = self._chance.randint(1, others) if self._period else 0

    def next(self, *, asked: bool = False) -> bool:
        """Begin the next call; `asked` requests its measurement.

        Returns:
            Whether it is measured.
        """
        before = self.measured
        if self._ahead:
            self._ahead -= 1
            self.measured = False
        else:
            self._choose()
        if asked and not self.measured:
            # After a call that wasn't measured its graph warms up, too.
            self.measured, self.warming = True, not before
        return self.measured

    def _choose(self) -> None:
        self.measured, self.warming = True, False
        if not self._period:
            return
        self.warming = not self._row
        if self.warming:
            self._row = self._calls
        self._row -= 1
        if not self._row:
            # On average one row in a period.
            self._ahead = self._chance.randint(0, 2 * (self._period - self._calls))


class StepClock:
    """The clock of one strategy's steps.

    Args:
        devices: This worker's devices, one replica each.
        communicator: The communicator of the workers.
        in_turn: Whether waiting is for other workers, and not for servers at work.
        rank: Returns this worker's rank in the job, which may change; by default that
            of the communicator.

    Attributes:
        communicator: The communicator of the workers.
        running: Whether steps are observed, and some of them measured.
        asked: Whether the next call is to be measured in any case, even if the clock
            is stopped.
        always: Whether each call is `asked` for.
        timed: Whether the current call is measured.
        several: Whether measured calls are several steps each.
        marks: See `StepTimer`.
        lost: Seconds of steps that were begun again, since the clock was made.
        batch: The specification of a replica's batch; None before a step was traced.
    """

    def __init__(
        self,
        devices: Sequence[str],
        communicator: Communicator,
        *,
        in_turn: bool,
        rank: Callable[[], int] | None = None,
    ) -> None:
        self._rank = rank
        self.running = self.asked = self.timed = self.marks = False
        self.always = False
        self._in_call = False
        self.lost = 0.0
        # Whether this call, or the time before it, needs work in `_look_back`.
        self._noted = False
        self.batch: Any = None
        self._replicas = len(devices)
        self._host = _tf.host_of(devices[0])
        self.communicator = communicator
        self._in_turn = in_turn
        self._spans = SpanSums(communicator)
        self._summed = communication.StepCounters(self._host)
        # Sums at the beginning of the window, and when the clock started.
        self._before, self._started = np.zeros((2, len(Slot)))
        # Those of calls that don't count.
        self._left_out = np.zeros(len(Slot))
        self._is_eager = False
        # The sums before a call that traces or warms up, and the first of them that it
        # doesn't count in.
        self._excluded: tuple[Array, int] | None = None
        self._entered = self._left = self._since = 0.0
        self.several = False
        # Seconds of waiting for data since the last step.
        self._pending = 0.0
        # In this call, of waiting for data and for other workers.
        self._call_waited = self._call_met = 0.0
        self._sampling = Sampling()
        # Of one step, as last measured.
        self._usual = StepTimes()

    @property
    def rank(self) -> int:
        """This worker's rank in the job."""
        return self.communicator.rank if self._rank is None else self._rank()

    # For readers of the times.

    def start(self) -> None:
        """Start measuring."""
        if self.running:
            return
        self.running = True
        self._sampling = Sampling()
        self._usual = StepTimes()
        self._started = self._before = self.sums()
        self._left = self._since = time.time()
        self._pending = 0.0

    def stop(self) -> None:
        """Stop measuring."""
        if self.running:
            self.running = self.timed = False
            self._spans.listen(False)

    def begin_epoch(self) -> None:
        """Exclude the time between the last step and now from the training."""
        gap = time.time() - self._left
        self._since += gap
        self._left += gap
        self._pending = 0.0

    def measure(self, seconds: float) -> None:
        """Set how many calls are measured from here on, for calls of this duration.

        Workers that take each step together call it at the same point, with the same
        number.
        """
        self._sampling.set(*rows_for(seconds))

    @property
    def rows_per_step(self) -> float:
        """Return this worker's samples per step; 0.0 if no step was measured."""
        sums = self.sums()
        # All of the window's steps may have been left out.
        for found in (sums - self._before, sums - self._started):
            if found[Slot.STEPS]:
                return float(found[Slot.ROWS] / found[Slot.STEPS])
        return 0.0

    @property
    def seconds_per_step(self) -> float:
        """Return the seconds of a step since the last `take`; 0 if there was none."""
        steps = float((self.sums() - self._before)[Slot.STEPS])
        return max(self._left - self._since, 0.0) / steps if steps else 0.0

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the block from the training."""
        running, asked = self.running, self.asked
        self.running = self.asked = False
        self._spans.listen(False)
        sums = self.sums()
        try:
            yield
        finally:
            # Graphs count even if the clock is stopped.
            self._leave_out(sums)
            self.running, self.asked = running, asked
            self.begin_epoch()

    def take(self) -> StepTimes:
        """Return the times of the steps since the last call; eagerly."""
        # 1. The window's sums, and from them the parts of one measured step.
        now = self.sums()
        sums = now - self._before
        steps, seconds = float(sums[Slot.STEPS]), max(self._left - self._since, 0.0)
        if sums[Slot.MEASURED]:
            self._usual = parts_of_a_step(
                sums, several=self.several, in_turn=self._in_turn
            )
        waited, met = float(sums[Slot.WAITED]), float(sums[Slot.MET])
        # 2. Extrapolate to all steps of the window; without a measured step these steps
        # count like those of the last window.
        times = self._usual.scaled(steps)
        times = times._replace(
            rank=self.rank,
            steps=steps,
            rows=float(sums[Slot.ROWS]),
            seconds=seconds,
            # Values that are known for all calls aren't extrapolated from some.
            input=times.input + waited,
            exchange=times.exchange + met,
            late=times.late + met,
        )
        # 3. Scale to the window's time: measured steps may have been the longer ones.
        whole = sum(getattr(times, name) for name in communication.PHASES)
        if whole > seconds:
            times = times.scaled(seconds / whole, (*communication.PHASES, "late"))
        times = times._replace(outside=max(seconds - whole, 0.0))
        # Waiting since the end of the last step is a part of the next one.
        self._before, self._since = now, self._left
        return times

    def sums(self) -> Array:
        """Return sums by `Slot`, whose differences count."""
        return self._summed.read() + self._spans.read() - self._left_out

    # For the train function.

    def enter(self, *, always: bool = False) -> bool:
        """Begin a call of the train function.

        Args:
            always: Whether to measure it in any case.

        Returns:
            Whether this call is measured.
        """
        self._in_call = True
        self.timed = self._sampling.next(asked=self.asked) or always
        self.asked = self.always
        if self.timed:
            if self._sampling.warming and not always:
                self._excluded = self.sums(), Slot.MEASURED
            self._spans.listen(True)
            self._entered = time.time()
        return self.timed

    def leave(self, executions: int) -> None:
        """End a call, which has taken this many steps at a time, 0 if it has failed."""
        left = time.time()
        self._in_call = False
        if self.timed or self._noted:
            self._look_back(executions, left)
        # Most calls do nothing else: this runs in each step, however short.
        self._left = left

    def _look_back(self, executions: int, left: float) -> None:
        """Evaluate a call that needs more than counting."""
        waited, met, eager = self._call_waited, self._call_met, self._is_eager
        self._call_waited = self._call_met = 0.0
        self._noted = self._is_eager = False
        timed, self.timed = self.timed, False
        if timed:
            self._spans.listen(False)
        excluded, self._excluded = self._excluded, None
        pending, self._pending = self._pending, 0.0
        if excluded is not None:
            self._leave_out(*excluded)
            if not excluded[1]:
                self._since += left - self._left
                return
        # A graph's clock measures the waiting in a call itself.
        pending += waited if eager else 0.0
        found: dict[Slot, float] = {Slot.WAITED: pending, Slot.MET: met}
        if timed and excluded is None:
            # The graph's clock counts it as input, like all before the step.
            found[Slot.MET_MEASURED] = 0.0 if eager else met
            self.several = executions > 1
            if self.several:
                found[Slot.INSIDE] = left - self._entered
            elif executions and not eager:
                # A graph with one thread would read the clock too late.
                found[Slot.BEGIN] = self._entered
        self._summed.add_eagerly(found)

    def _leave_out(self, before: Array, first: int = 0) -> None:
        """Remove what was added to the sums since then, from index `first` on."""
        self._left_out[first:] += (self.sums() - before)[first:]

    def _note_trace(self) -> None:
        """Keep the state before a graph that is being traced runs."""
        if not self._in_call or (self._excluded and not self._excluded[1]):
            return
        self._noted = True
        with tf.init_scope():
            sums = self._excluded[0] if self._excluded else self.sums()
            self._excluded = sums, 0

    def waited(
        self, seconds: float, *, others: bool = False, between: bool = False
    ) -> None:
        """See `StepTimer.waited`."""
        if between:
            self._pending += seconds
        elif self._in_call and others:
            self._call_met += seconds
        elif self._in_call:
            self._call_waited += seconds
        else:
            return
        self._noted = True

    def awaited(self, seconds: float) -> None:
        """Count seconds in which a forward or backward pass waited for others."""
        if self.timed:
            self._summed.add_eagerly({Slot.AWAITED: seconds})

    def repeated(self, seconds: float) -> None:
        """See `StepTimer.repeated`."""
        self.lost += seconds

    def step(self, run: Callable[[Any], Any], data: Any) -> Any:
        """See `StepTimer.step`."""
        parts = [_tf.select_replica(index, data) for index in range(self._replicas)]
        rows = sum(rows_of(part) for part in parts)
        # The batch of the model that was trained last.
        batch, _, _ = split_part(parts[0])
        self.batch = tf.nest.map_structure(
            tf.type_spec_from_value, batch, expand_composites=False
        )
        counts = {Slot.STEPS: 1.0, Slot.ROWS: rows}
        if tf.executing_eagerly():
            self._is_eager = self._noted = self._in_call
            begin = time.time()
            outputs = run(data)
            times = {Slot.BEGIN: begin, Slot.READY: begin, Slot.END: time.time()}
            if self.timed:
                counts |= {Slot.MEASURED: 1.0, **times}
            self._summed.add_eagerly(counts)
            return outputs
        self._note_trace()
        if not self.timed:
            outputs = run(data)
            with tf.device(self._host):
                self._summed.count(tf.cast(rows, tf.int64))
            return outputs
        with tf.device(self._host):
            ready = communication.time_after(parts)
        # A graph with one thread would otherwise read the clock after the step.
        with tf.control_dependencies([ready]):
            outputs = run(data)
        with tf.device(self._host):
            times = {Slot.READY: ready, Slot.END: communication.time_after(outputs)}
            self._summed.add({**counts, Slot.MEASURED: 1.0, **times})
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
        ready = communication.time_after_all(gradients) if self._replicas > 1 else None
        if _tf.local_replica_id() > 0:
            return reduce(())
        if tf.executing_eagerly():
            begin = time.time()
            reduced = reduce(())
            times = {Slot.GRADIENTS: begin, Slot.REDUCED: time.time()}
            self._summed.add_eagerly({Slot.UPDATES: 1.0, **times})
            return reduced
        self._note_trace()
        with tf.device(self._host):
            before = communication.time_after(gradients if ready is None else ready)
        # With several replicas here a merge call reduces, in another thread.
        reduced = reduce([before] if self._replicas == 1 else ())
        # Updates don't wait for that: each begins as early as without clocks.
        with tf.device(self._host):
            after = communication.time_after(reduced)
            times = {Slot.GRADIENTS: before, Slot.REDUCED: after}
            self._summed.add({Slot.UPDATES: 1.0, **times})
        return reduced
