"""A view of a job, as callbacks read it: windows, changes, events, a baseline."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from kerasdist import _tf, errors
from kerasdist._keras.learning_rate import leaves_of, steps_of
from kerasdist._keras.protocols import ElasticHooks, hooks_of, stage_clock_of, timer_of
from kerasdist._keras.shared_state import whole_state
from kerasdist._keras.training.train_step import new_train_function
from kerasdist.callbacks.bottleneck import in_seconds
from kerasdist.collectives import Communicator, gather_json
from kerasdist.collectives.elastic.communicator import MembershipChange
from kerasdist.prediction.noise import (
    LEAST_STEPS,
    GradientNorms,
    noise_of,
)
from kerasdist.strategies.data.batch_split import slice_dataset
from kerasdist.strategies.measure.communication import StepTimes
from kerasdist.strategies.measure.machine import MachineReader, MachineUsage
from kerasdist.strategies.measure.stages import StageClock
from kerasdist.strategies.parameter_server import ParameterServerStrategy
from kerasdist.strategies.placed.placer import on_one_device
from kerasdist.strategies.sync.data import SharingExtended

# The arguments of a callback.


def check_arguments(callback: str, right: Mapping[str, bool]) -> None:
    """Check what a callback was given.

    Args:
        callback: Its name.
        right: By what was given and what is expected, whether it's right.

    Raises:
        ValueError: Some isn't; the message has all of them.
    """
    faults = "; and ".join(text for text, fine in right.items() if not fine)
    if faults:
        raise ValueError(f"`{callback}` can't be made. Received: {faults}.")


def is_number(value: Any) -> bool:
    """Return whether an argument is a finite number."""
    return (
        isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    )


def is_whole(value: Any, least: int) -> bool:
    """Return whether an argument is a whole number that isn't less than `least`."""
    return is_number(value) and value == int(value) >= least


# The lengths of windows of steps, in calls, which all workers know.
#
# A call is Keras's call of the train function: one step, or `steps_per_execution`.

# Calls of the first window with "auto", and the fewest of any other.
_FIRST = 10
# A window lasts at least this many times as long as writing it; otherwise at most
# these seconds.
_TIMES_COST = 500
_MOST_SECONDS = 5.0
# While a job is young its windows are a part of its age: there is something to see.
_PART_OF_AGE = 20
_NEVER = 1 << 62


class Windows:
    """The windows of one `fit`: the length of the present one, and its calls so far.

    Lengths only depend on numbers that the chief sends to all workers at the end of a
    window, so that the next one ends at the same step everywhere.

    Args:
        update_freq: Steps of a window; "epoch": the caller ends it; or "auto".
        steps_per_call: The number of steps of a call.
        now: A clock, in seconds.

    Attributes:
        calls: The number of calls in this window so far.
    """

    def __init__(
        self,
        update_freq: int | str,
        steps_per_call: int = 1,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.calls = 0
        self._update_freq = update_freq
        self._steps_per_call = steps_per_call
        self._now = now
        self._began = now()
        self._cost = 0.0
        self._length = self._usual()

    @property
    def left(self) -> int:
        """The number of calls that remain in this window."""
        return max(self._length - self.calls, 0)

    def state(self) -> list[float]:
        """Return this worker's calls, a window's cost and age in seconds."""
        return [float(self.calls), self._cost, self._now() - self._began]

    def begin(self, times: StepTimes, state: Sequence[float]) -> None:
        """Begin the next window.

        Args:
            times: The chief's times of the window that has ended.
            state: The chief's `state` at its end.
        """
        self.calls = 0
        calls, cost, age = state
        if self._update_freq != "auto" or not calls or not times.seconds:
            self._length = self._usual()
            return
        seconds = min(_MOST_SECONDS, age / _PART_OF_AGE)
        seconds = max(seconds, _TIMES_COST * cost)
        # Of the steps that were counted, without those that were traced.
        per_call = times.seconds / max(times.steps / self._steps_per_call, 1.0)
        self._length = max(_FIRST, round(seconds / per_call))

    def cost(self, seconds: float) -> None:
        """Note the duration of a window's end; an outlier is soon forgotten."""
        self._cost = max(self._cost / 2, seconds)

    def _usual(self) -> int:
        if isinstance(self._update_freq, int):
            return max(1, self._update_freq // self._steps_per_call)
        return _FIRST if self._update_freq == "auto" else _NEVER


# The changes of a job's workers, and the time that they have cost.


class ElasticView:
    """The changes of the workers during one `fit`.

    Args:
        elastic: The changes.
        clock: Measures this worker's steps.

    Attributes:
        writable: Whether this worker can write the figures, as far as it knows.
    """

    def __init__(self, elastic: ElasticHooks, clock: Any) -> None:
        self.writable = True
        self._elastic = elastic
        self._clock = clock
        self._began = time.monotonic()
        self._lost = clock.lost
        self._pauses = 0.0
        self._epoch = elastic.epoch
        self._seen = len(elastic.changes)

    @property
    def has_changed(self) -> bool:
        """Whether the workers have changed since `take`; alike on all of them."""
        return self._elastic.epoch != self._epoch

    def take(self) -> list[MembershipChange]:
        """Return the changes since the last call."""
        self._epoch = self._elastic.epoch
        new = list(self._elastic.changes[self._seen :])
        self._seen += len(new)
        self._pauses += sum(change.seconds for change in new)
        return new

    def state(self) -> list[float]:
        """Return the seconds so far, those of pauses, and those of repeated steps."""
        lost = self._clock.lost - self._lost
        return [time.monotonic() - self._began, self._pauses, lost]

    def adopt(self, state: list[float]) -> None:
        """Continue from another worker's state, before the first step here."""
        seconds, self._pauses, lost = state
        self._began, self._lost = time.monotonic() - seconds, self._clock.lost - lost

    def goodput_percent(self) -> float:
        """Return the useful part of the time so far.

        Pauses, and steps that were begun again, aren't useful.
        """
        seconds = max(time.monotonic() - self._began, 1e-9)
        lost = self._pauses + self._clock.lost - self._lost
        return 100 * max(0.0, 1.0 - lost / seconds)


# The events of a job while it is measured, in words.

_WHAT = {"lost": "was lost", "joined": "joined"}


class Events:
    """Events that haven't been written yet.

    Args:
        known: Events of the strategy that are older than this object.
    """

    def __init__(self, known: Sequence[Any] = ()) -> None:
        self._known = len(known)
        self._ranks: tuple[int, ...] | None = None
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Add an event."""
        self._texts.append(text)

    def note_workers(self, events: Sequence[Any], ranks: tuple[int, ...]) -> None:
        """Add an event for each worker that joined or was lost.

        Args:
            events: All events of the strategy.
            ranks: The ranks that train now.
        """
        for event in events[self._known :]:
            why = f": {event.reason}" if event.reason else ""
            self.add(
                f"rank {event.rank} ({event.address}) "
                f"{_WHAT.get(event.kind, event.kind)} at its step {event.clock}{why}"
            )
        self._known = len(events)
        if self._ranks not in (None, ranks):
            workers = "worker trains" if len(ranks) == 1 else "workers train"
            self.add(
                f"{len(ranks)} {workers} from here on: "
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            )
        self._ranks = ranks

    def take(self) -> str:
        """Return the events since the last call, as markdown; "" if there are none."""
        text = "\n".join(f"- {one}" for one in self._texts)
        self._texts = []
        return text


# Reads that are staler are counted as this.
_STALEST = 63


class WorkerTotals(NamedTuple):
    """The measurements of one worker in some steps.

    Attributes:
        times: The times of its steps.
        machine: What it uses of its machine.
        norms: Sums of the norms of its gradients.
        reads: Number of its reads of weights, by the steps that they lagged, where more
            than 63 count as 63.
        stages: See `StageClock.take`; empty without stages.
    """

    times: StepTimes
    machine: MachineUsage
    norms: GradientNorms
    reads: Counter[int]
    stages: list[float]

    @classmethod
    def from_json(cls, value: list[Any]) -> WorkerTotals:
        """Return the totals that JSON has made a list."""
        times, machine, norms, reads, stages = value
        return cls(
            StepTimes(*times),
            MachineUsage(*machine),
            GradientNorms(*norms),
            Counter({int(lag): count for lag, count in reads.items()}),
            stages,
        )

    def plus(self, other: WorkerTotals) -> WorkerTotals:
        """Return the sums of both."""
        return WorkerTotals(
            self.times.plus(other.times),
            self.machine.plus(other.machine),
            self.norms.plus(other.norms),
            self.reads + other.reads,
            [*map(operator.add, self.stages, other.stages)],
        )


class JobView:
    """One model's job, as this worker sees it.

    Args:
        model: Compiled.

    Attributes:
        model: The same.
        hooks: The hooks of its strategy; None if the job is one worker, whose strategy
            places layers, or isn't one of kerasdist's.
        clock: Measures this worker's steps, see `strategies.measure.step_clock`; None
            without a strategy of kerasdist.
        communicator: Between the workers; None likewise.
        stage_clock: Measures the stages of a placement; None without one.
        in_step: Whether all workers take each step together.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._strategy = model.distribute_strategy
        self.hooks = hooks_of(self._strategy)
        clock: Any = timer_of(self._strategy)
        self.clock = clock
        self.communicator: Communicator = clock and clock.communicator
        self.stage_clock: StageClock | None = stage_clock_of(self._strategy)
        self.in_step = self.hooks is None or not self.hooks.dynamic
        self._reads: Counter[int] = Counter()
        self._norms = GradientNorms()

    @property
    def is_chief(self) -> bool:
        """Whether this worker writes the files."""
        return self.clock is None or self.clock.rank == 0

    @property
    def steps_per_call(self) -> int:
        """The number of steps in one execution of a graph."""
        return int(getattr(self.model, "steps_per_execution", 1) or 1)

    def facts(self, norms: Sequence[GradientNorms]) -> dict[str, Any]:
        """Return the arguments of `summaries.combine` that describe the job.

        Args:
            norms: Those of all workers.
        """
        hooks, devices, moved = self.hooks, 1, 0.0
        if hooks is None:
            devices = len(self._strategy.devices)
        if devices > 1:
            steps = self._strategy.placement_report().steps
            moved = float((steps["train"].bytes_moved if "train" in steps else 0) or 0)
        steps_of_each = min((each.steps for each in norms), default=0.0)
        replicas = 1 if hooks is None else hooks.workers.replicas
        return {
            "in_step": self.in_step,
            "devices": devices,
            "between_devices": moved,
            "compression": {} if hooks is None else hooks.gradients.memories.figures(),
            "noise": None if steps_of_each < LEAST_STEPS else noise_of(norms, replicas),
        }

    def take(self) -> WorkerTotals:
        """Return what this worker has measured since the last call."""
        has_servers = isinstance(self._strategy, ParameterServerStrategy)
        reads: Counter[int] = Counter()
        for lag, count in (self._strategy.staleness if has_servers else {}).items():
            reads[min(lag, _STALEST)] += count
        before, self._reads = self._reads, reads
        return WorkerTotals(
            times=self.clock.take(),
            machine=self._machine.take(),
            norms=self.take_norms(),
            reads=reads - before,
            stages=[] if self.stage_clock is None else self.stage_clock.take(),
        )

    def take_norms(self) -> GradientNorms:
        """Return the norms of this worker's gradients since the last call."""
        meter = None if self.hooks is None else self.hooks.norms
        now = GradientNorms() if meter is None else meter.read()
        before, self._norms = self._norms, now
        return before.plus(self._norms, kept=-1.0)

    @functools.cached_property
    def _machine(self) -> MachineReader:
        return MachineReader()

    def happened(self) -> list[Any]:
        """Return the strategy's events: workers lost, and the like."""
        has_servers = isinstance(self._strategy, ParameterServerStrategy)
        return list(self._strategy.events) if has_servers else []

    def steps_taken(self) -> int:
        """Return the optimizer's steps, of all workers: the step of a figure."""
        optimizers = leaves_of(self.model)
        if self.in_step or not optimizers:
            return int(self.model.optimizer.iterations)
        return int(steps_of(optimizers[0]))

    def rate(self) -> float | None:
        """Return the learning rate; None if there's no single one."""
        try:
            rate = self.model.optimizer.learning_rate
            return float(keras.ops.convert_to_numpy(rate))
        except (AttributeError, TypeError, ValueError):
            return None


# The speed of a single worker, with which the scaling of several is compared.
#
# Its steps are real ones, optimizer included, on a whole global batch of zeros, which
# are available at once. Afterwards everything is as before. The others wait meanwhile,
# from one of its calls to the next:
#
#     chief    trace, warm up │ call │ call │ ... │ restore │ result
#     others   wait           │ wait │ wait │ ... │ wait    │ result
#
# so that no wait is longer than a call, however many calls there are.
#
# If one model is on several devices of a single worker, one device takes the steps with
# the whole model (`strategies.placed.placer`).

_WARM_UP = 2  # calls, the first of which traces
SECONDS = 1.0
_MOST = 100  # calls
# The chief's messages after each call; any other value is the seconds of a step.
_GOES_ON, _FAILED = -1.0, 0.0


def _is_plain(batch: Any) -> bool:
    parts = tf.nest.flatten(batch)
    return bool(parts) and all(
        part is None or isinstance(part, tf.TensorSpec) for part in parts
    )


def _measure(job: JobView, rows: int, after_call: Callable[[], Any]) -> float:
    """Return the seconds of a step of this worker alone."""
    model = job.model

    def zeros(spec: Any) -> Any:
        if spec is None:
            return None
        shape = [rows, *(1 if size is None else size for size in spec.shape[1:])]
        return tf.zeros(shape[: spec.shape.rank], spec.dtype)

    with tf.device(_tf.canonical_device("CPU:0")):
        data = tf.data.Dataset.from_tensors(
            tf.nest.map_structure(zeros, job.clock.batch)
        )
    without_peers = on_one_device if job.hooks is None else _one_worker
    with without_peers(model):
        batches = iter(_distributed(model.distribute_strategy, data.repeat()))
        function = new_train_function(model)
        calls, seconds = -_WARM_UP, 0.0
        while calls < _MOST and seconds < SECONDS:
            begin = time.perf_counter()
            for value in tf.nest.flatten(function(batches)):
                np.asarray(value)  # on a GPU it's over then, and not before
            calls += 1
            if calls > 0:
                seconds += time.perf_counter() - begin
            after_call()
    return seconds / (calls * job.steps_per_call)


@contextlib.contextmanager
def _one_worker(model: Any) -> Iterator[None]:
    """Run the block on this worker alone, and restore its state afterwards."""
    strategy = model.distribute_strategy
    kept = [
        (part, part.numpy())
        for variable in whole_state(model)
        for part in strategy.experimental_local_results(variable)
    ]
    try:
        with strategy.extended.workers.without_peers():
            yield
    finally:
        for part, value in kept:
            part.assign(value)


def _distributed(strategy: Any, data: Any) -> Any:
    """Distribute whole batches to the steps of a single worker."""
    extended = strategy.extended
    if not isinstance(extended, SharingExtended):
        return strategy.experimental_distribute_dataset(data)
    if not extended.workers.is_alone:
        data = slice_dataset(data, extended.workers.layout)
    return extended.distribute_parts(data)


class Baseline:
    """The baseline of one `fit`: given, or measured in it.

    Args:
        given: Examples per second, or None.
        calibrate: Whether to measure it.

    Attributes:
        missing: Whether it's still to be measured.
    """

    def __init__(self, given: float | None, calibrate: bool) -> None:
        self._given = given
        self._calibrate = calibrate
        # Samples of a step, those of a global batch, and its seconds, without reading
        # data and without the time between two steps.
        self._alone: tuple[int, float] | None = None
        self.missing = calibrate

    def agree(self, communicator: Communicator) -> None:
        """Take over from the chief whether it's missing: others may have joined later.

        All workers call it; all of them were given `calibrate`.
        """
        if self._calibrate:
            (missing,) = communicator.broadcast([np.int64(self.missing)])
            self.missing = bool(missing)

    def state(self) -> list[Any]:
        """Return, as JSON, whether it's missing, and what was measured."""
        return [self.missing, self._alone]

    def adopt(self, state: list[Any]) -> None:
        """Take over another worker's state."""
        self.missing, self._alone = state

    def measure(self, job: JobView) -> str:
        """Let the chief take steps by itself; all workers call it together.

        Args:
            job: That of a `fit` which has taken a measured step.

        Returns:
            The result, in words. Or why there is none: batches contain other values
            than plain tensors, or a step on zeros fails, for example because there is
            too little memory. The model is unchanged in any case.

        Raises:
            CollectiveError: See `kerasdist.errors`; the model is unchanged.
        """
        self.missing = False
        clock, communicator = job.clock, job.communicator
        every = gather_json(communicator, clock.rows_per_step)
        # Asynchronous workers have whole batches each.
        rows = round(sum(every) if job.hooks is not None and job.in_step else every[0])

        def send(value: float) -> float:
            """Send a value from the chief to all."""
            (seconds,) = communicator.broadcast([np.float64(value)])
            return float(seconds)

        seconds, reason = _GOES_ON, "see the chief"
        with clock.stopped():
            while clock.rank > 0 and seconds == _GOES_ON:
                seconds = send(_FAILED)
            if clock.rank == 0:
                seconds, reason = _FAILED, "batches aren't made of plain tensors"
                try:
                    if rows and _is_plain(clock.batch):
                        seconds = _measure(job, rows, lambda: send(_GOES_ON))
                except errors.KerasDistError:
                    raise
                except Exception as error:
                    # A measurement must not end the job that it measures.
                    reason = f"a step on zeros fails: {type(error).__name__}: {error}"
                # Frees the graph, and copies of variables, which refer to each other.
                gc.collect()
                send(seconds)
        if seconds <= 0:
            return (
                f"The speed of one worker can't be measured here ({reason}): give "
                "`baseline=`."
            )
        self._alone = rows, seconds
        unit = "device with the whole model" if job.hooks is None else "worker alone"
        return (
            f"One {unit} takes {in_seconds(seconds)} for a step on {rows:,} samples, "
            "all zeros."
        )

    def speed(self, times: Sequence[StepTimes]) -> float | None:
        """Return the examples per second of one worker; None if they aren't known.

        Args:
            times: The measurements of all workers. The time between two steps is added
                to the baseline: one worker would need it, too.
        """
        steps = sum(one.steps for one in times)
        if self._alone is None or not steps:
            return self._given
        outside = sum(one.outside for one in times) / steps
        rows, seconds = self._alone
        return rows / (seconds + outside)
