"""Sums over steps: of their times, and of the spans of `transport.tracing`."""

from __future__ import annotations

import enum
import operator
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist.collectives import Communicator
from kerasdist.collectives.row_exchange import Array
from kerasdist.transport.tracing import NAMES, Recorder

# The speed of the link between the workers when nothing else runs.

# Large enough that the bandwidth matters, not the round trip; on a network of
# 100 Mbit/s it takes a second.
_BYTES = 4 << 20
_TIMES = 3


def link_speed(communicator: Communicator) -> float | None:
    """Measure how many bytes per second a worker sends in an all-reduce.

    All workers call it at the same point.

    Args:
        communicator: The communicator of the workers.

    Returns:
        The best of several results; the same on all workers. None for one worker.
    """
    if communicator.size == 1:
        return None
    buffer = np.zeros(_BYTES // 4, np.float32)
    best = 0.0
    communicator.all_reduce([buffer])  # allocates buffers
    for _ in range(_TIMES):
        communicator.barrier()
        recorder = SpanSums(communicator)
        recorder.listen(True)
        try:
            communicator.all_reduce([buffer])
        finally:
            recorder.listen(False)
        sums = recorder.read()
        if sums[Slot.COMMUNICATING]:
            best = max(best, sums[Slot.SENT] / sums[Slot.COMMUNICATING])
    return float(communicator.all_reduce([np.float64(best)], "max")[0]) or None


# Counts and times of steps, summed where the steps run: in a graph, or eagerly.


class Slot(enum.IntEnum):
    """The places of sums: counts of all steps, then those of the measured ones.

    From `BEGIN` on they are times, and from `SENT` on sums of spans: bytes, seconds
    until the first byte arrived, of all collectives and exchanges with servers, of
    these exchanges, of packing, and of all parts of collectives but sending. The last
    ones are seconds: inside of measured calls that are several steps each; of waiting
    for data, and for other workers, that no graph's clock measures; of the latter in
    measured calls; and in which passes waited for others.
    """

    STEPS, ROWS, MEASURED, UPDATES, BEGIN, READY, END, GRADIENTS, REDUCED = range(9)
    SENT, LATE, COMMUNICATING, SERVERS, PACKING, PARTS = range(9, 15)
    INSIDE, WAITED, MET, MET_MEASURED, AWAITED = range(15, 20)


# Those that a graph adds to, and of these the times.
_IN_GRAPHS = Slot.SENT
_CLOCKS = range(Slot.BEGIN, Slot.SENT)


# The number of a count's bits that are for samples.
_BITS = 40


class StepCounters:
    """The sums, by `Slot`: one variable in host memory.

    Args:
        host: The name of the host's device.
    """

    def __init__(self, host: str) -> None:
        self._totals = _tf.own_variable(np.zeros(_IN_GRAPHS), tf.float64, host)
        # For steps that are only counted: steps in the upper bits, samples in the lower
        # ones. As one number they cost one small operation in each step.
        self._counted = _tf.own_variable(0, tf.int64, host)
        self._seen = 0
        # Times are relative to this: sums of small numbers are exact.
        self._base = time.time()
        self._eager = np.zeros(len(Slot))

    def read(self) -> Array:
        """Return all sums but those of spans, by `Slot`, times in seconds; eagerly.

        After more than 16 million steps or 10^12 samples between two calls the sums are
        wrong; the differences of later ones are right again.
        """
        now = int(self._counted.numpy())
        new = (now - self._seen) % (1 << 64)  # int64 wraps around
        self._seen = now
        self._eager[Slot.STEPS] += new >> _BITS
        self._eager[Slot.ROWS] += new & ((1 << _BITS) - 1)
        sums = self._eager.copy()
        sums[:_IN_GRAPHS] += self._totals.numpy()
        return sums

    def count(self, rows: Any) -> None:
        """Count one step with its number of samples, in a graph, on the host; int64."""
        self._counted.assign_add(rows + (1 << _BITS), read_value=False)

    def add(self, values: dict[Slot, Any]) -> None:
        """Add to the sums, in a graph, on the host; times are those of `time_after`."""
        parts, bases = [tf.constant(0, tf.float64)] * _IN_GRAPHS, np.zeros(_IN_GRAPHS)
        for slot, value in values.items():
            parts[slot] = tf.cast(value, tf.float64)
            bases[slot] = self._base if slot in _CLOCKS else 0.0
        self._totals.assign_add(tf.stack(parts) - bases, read_value=False)

    def add_eagerly(self, values: dict[Slot, Any]) -> None:
        """Add to the sums; times are those of `time.time`."""
        for slot, value in values.items():
            base = self._base if slot in _CLOCKS else 0.0
            self._eager[slot] += float(value) - base


def time_after(values: Any) -> Any:
    """Return the time when all tensors of a nest are ready; float64, scalar, in s."""
    with tf.control_dependencies(_tensors(values)):
        return tf.timestamp()


def time_after_all(values: Any) -> Any:
    """Return the time when all local replicas are ready; in replica context."""

    def meet(strategy: Any, parts: Any) -> Any:
        return time_after([strategy.experimental_local_results(part) for part in parts])

    replica = tf.distribute.get_replica_context()
    return replica.merge_call(meet, args=(_tensors(values),))


def _tensors(values: Any) -> list[Any]:
    flat = tf.nest.flatten(values, expand_composites=True)
    return [value for value in flat if tf.is_tensor(value)]


# The times of one worker's steps in a window.

# The parts of a step, without the time between steps.
PHASES = ("input", "compute", "pack", "exchange", "update")
# All fields of a step that are determined from the measured steps.
PARTS = (*PHASES, "late", "sent", "communicating")


class StepTimes(NamedTuple):
    """Sums over the steps of one worker.

    The phases follow each other: they add up to `seconds`. `steps`, `rows`, `seconds`
    are of all steps; values measured in some of them are extrapolated to all.

    Attributes:
        rank: The worker's rank in the job.
        steps: Number of steps.
        rows: Number of samples that this worker has trained on.
        seconds: From the beginning of the first step to the end of the last one,
            without the time between epochs.
        input: Seconds until the batch was ready.
        compute: Seconds of the forward and backward pass.
        pack: Seconds of copying data into the buffers that are sent.
        exchange: Seconds of communication, without packing, that no computation
            hides, including waiting for others.
        update: Seconds of the optimizer's update.
        outside: Seconds between the steps: callbacks, the progress bar, calls.
        late: Seconds of `exchange` in which the others hadn't arrived yet, as far as
            this worker can tell.
        sent: Bytes that this worker has sent to other processes.
        communicating: Seconds of all collectives, also of those that computation hides.
    """

    rank: int = 0
    steps: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    input: float = 0.0
    compute: float = 0.0
    pack: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    outside: float = 0.0
    late: float = 0.0
    sent: float = 0.0
    communicating: float = 0.0

    def plus(self, other: StepTimes) -> StepTimes:
        """Return the sums of both; the rank is this one's."""
        return StepTimes(*map(operator.add, self, other))._replace(rank=self.rank)

    def scaled(self, by: float, names: Iterable[str] = PARTS) -> StepTimes:
        """Return them with some of the numbers multiplied."""
        return self._replace(**{name: by * getattr(self, name) for name in names})


# Recorders of the spans of communication.


class Span(NamedTuple):
    """An activity of a worker, in nanoseconds of its clock.

    Attributes:
        name: Its kind; see `kerasdist.transport.tracing`.
        begin: When it began.
        end: When it ended.
        size: Its bytes, 0 if unknown.
        what: Details, in words.
        thread: The number of its thread; of a stage's work that of the stage.
        step: The number of the communicator's step.
    """

    name: str
    begin: int
    end: int
    size: int = 0
    what: str = ""
    thread: int = 0
    step: int = 0


class SpanRecorder(Recorder):
    """A recorder of a communicator's spans, which listens now and then.

    Args:
        communicator: The communicator; None if there is nothing to record.

    Attributes:
        communicator: The same.
        listening: Whether it records.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self.communicator = communicator
        self.listening = False

    def listen(self, listening: bool) -> None:
        """Record from now on, or no more."""
        if listening == self.listening:
            return
        self.listening = listening
        if self.communicator is not None and listening:
            self.communicator.add_recorder(self)
        elif self.communicator is not None:
            self.communicator.remove_recorder(self)


class SpanList(SpanRecorder):
    """A recorder that keeps single spans.

    Args:
        communicator: The communicator; None if there is nothing to record.
        most: It keeps at most this many.

    Attributes:
        spans: The spans.
        dropped: Number of spans that weren't kept.
    """

    def __init__(self, communicator: Communicator | None, most: int) -> None:
        super().__init__(communicator)
        self._most = most
        self.spans: list[Span] = []
        self.dropped = 0

    @property
    def step(self) -> int:
        """The communicator's number of steps."""
        return 0 if self.communicator is None else self.communicator.step

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: object = ""
    ) -> None:
        """See `transport.tracing.Recorder.add`."""
        if len(self.spans) >= self._most:
            self.dropped += 1
            return
        thread = threading.get_ident()
        self.spans.append(Span(name, begin, end, size, str(what), thread, self.step))


_NANO = 1e-9


class SpanSums(SpanRecorder):
    """A recorder that adds up spans."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        # The bytes that each rank sends per byte of a buffer in a ring.
        self._ring = 2 * (communicator.size - 1) / communicator.size
        self._lock = threading.Lock()
        # Those of `Slot`: attributes are faster than places.
        self._sent = self._late = self._communicating = 0.0
        self._servers = self._packing = self._parts = 0.0
        # Of the collective that runs: bytes sent and packed, and whether any arrived.
        self._sending = self._packed = 0
        self._begun = False

    def read(self) -> Array:
        """Return all sums of spans, by `Slot`."""
        sums = np.zeros(len(Slot))
        with self._lock:
            sums[Slot.SENT : Slot.INSIDE] = (
                *(self._sent, self._late, self._communicating),
                *(self._servers, self._packing, self._parts),
            )
        return sums

    def add(
        self, name: str, begin: int, end: int, size: int = 0, what: object = ""
    ) -> None:
        """See `transport.tracing.Recorder.add`."""
        del what
        seconds = (end - begin) * _NANO
        with self._lock:
            if name not in NAMES:
                self._communicating += seconds
                self._servers += seconds * (name == "push_pull")
                # Within a host nothing is sent: the others read the packed bytes. And
                # of TensorFlow's own collectives only the size is known.
                self._sent += self._sending or self._packed or int(self._ring * size)
                self._sending = self._packed = 0
                self._begun = False
            elif name == "send":  # in parallel to the others
                self._sending += size
            else:
                self._parts += seconds
                if name == "pack":
                    self._packed += size
                    self._packing += seconds
                elif name == "wait":
                    self._late += seconds * (not self._begun)
                    self._begun = True
