"""The event files of TensorBoard: figures, texts and the layout.

All values of a run at one step are one summary: TensorFlow's writer is called once for
it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb

from kerasdist.prediction.noise import GradientNoise
from kerasdist.prediction.simulation import Prediction
from kerasdist.strategies.measure.communication import StepTimes
from kerasdist.strategies.measure.machine import MachineUsage

# The figures of a window of steps of all workers: pure functions of numbers.

PHASES = ("input", "compute", "pack", "communicate", "wait", "update", "outside")
# Those in which a worker doesn't communicate.
_BUSY = ("input", "compute", "pack", "update", "outside")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of one window; times are means over its steps and workers.

    Attributes:
        workers: Number of workers.
        steps: Number of steps; where workers don't wait for each other, of all of them.
        examples_per_second: Samples per second of all workers.
        by_rank: Samples per second of each worker, by rank.
        step_seconds: Seconds of a step; the sum of `phases`.
        phases: Seconds of a step's parts, by the names in `PHASES`.
        busy: By rank the seconds of a step in which the worker doesn't communicate.
        slowest: The rank with the most busy seconds; None for one worker.
        lag: Its busy seconds minus the median of the others'.
        slow_part: The phase in which that rank lags most; "" for one worker.
        global_batch: Samples of a step.
        bytes_per_step: Bytes that a worker sends in a step, mean over the workers; of a
            worker alone those between its devices.
        bandwidth: Bytes per second that a worker sends while it communicates, of the
            worker that waits least; 0 if nothing is sent.
        link: The same for a single buffer, on an idle machine; None if it wasn't
            measured.
        baseline: Examples per second of one worker, or of one device of a worker; None
            if they aren't known.
        devices: How many devices the worker has, if the baseline is that of one device.
        in_step: Whether workers take each step together.
        arrays: Whether the batches are rows of arrays.
        staleness: Number of reads of weights, by their staleness in steps.
        idle: By stage the share of a step in which it has nothing to do, 0 to 1.
        compression: "bytes_before" and "bytes_after" of the gradients of a step, and
            "unsent_norm", of the chief; empty without a compressor.
        noise: The noise of the gradients; None if it isn't known.
        machines: What workers use of their machines, by rank; empty in the first second
            of a job.
        predicted: What `kerasdist predict` has said of as many workers, or None.
    """

    workers: int
    steps: float
    examples_per_second: float
    by_rank: Mapping[int, float]
    step_seconds: float
    phases: Mapping[str, float]
    busy: Mapping[int, float]
    slowest: int | None = None
    lag: float = 0.0
    slow_part: str = ""
    global_batch: float = 0.0
    bytes_per_step: float = 0.0
    bandwidth: float = 0.0
    link: float | None = None
    baseline: float | None = None
    devices: int = 1
    in_step: bool = True
    arrays: bool = False
    staleness: Mapping[int, int] = dataclasses.field(default_factory=dict)
    idle: Sequence[float] = ()
    compression: Mapping[str, float] = dataclasses.field(default_factory=dict)
    noise: GradientNoise | None = None
    machines: Mapping[int, MachineUsage] = dataclasses.field(default_factory=dict)
    predicted: Prediction | None = None

    @property
    def alone(self) -> int:
        """The number of workers, or of their devices, that the baseline is one of."""
        return self.workers * self.devices

    @property
    def efficiency(self) -> float | None:
        """Examples per second divided by those of as many workers alone, or None.

        Or of as many devices, see `devices`.
        """
        if not self.baseline:
            return None
        return self.examples_per_second / (self.baseline * self.workers * self.devices)

    @property
    def next_worker(self) -> float | None:
        """The part of the first worker's progress that one more adds, or None.

        See `GradientNoise.next_worker`.
        """
        if self.noise is None or not self.global_batch:
            return None
        return self.noise.next_worker(self.workers, self.global_batch)

    @property
    def goodput(self) -> float | None:
        """Useful samples per second, beside batches of one worker; None if unknown."""
        if self.noise is None or not self.global_batch:
            return None
        batch, base = self.global_batch, self.global_batch / self.workers
        return self.noise.goodput(self.examples_per_second, batch, base)

    @property
    def predicted_rows(self) -> float:
        """A worker's samples of a step for which `predicted` is; 0 without it."""
        found = self.predicted
        return found.examples_per_s * found.step_s / self.workers if found else 0.0

    @property
    def samples(self) -> float:
        """A worker's samples of a step."""
        return self.global_batch / (self.workers if self.in_step else 1)

    @property
    def cores(self) -> float:
        """The number of cores of a worker, mean over the workers; 0: not known."""
        used = self.machines.values()
        return sum(one.cores for one in used) / len(used) if used else 0.0

    @property
    def busy_cores(self) -> float | None:
        """The cores that a worker keeps busy, mean over the workers, or None."""
        used = self.machines.values()
        return sum(one.per_second("cpu") for one in used) / len(used) if used else None

    @property
    def mean_staleness(self) -> float | None:
        """The mean of `staleness`, in steps; None if weights weren't read."""
        steps = sum(lag * count for lag, count in self.staleness.items())
        return steps / sum(self.staleness.values()) if self.staleness else None

    def share(self, *phases: str) -> float:
        """Return the part of a step that these phases are, 0 to 1."""
        if not self.step_seconds:
            return 0.0
        return sum(self.phases[phase] for phase in phases) / self.step_seconds


def combine(
    times: Sequence[StepTimes],
    *,
    seconds: float | None = None,
    in_step: bool = True,
    between_devices: float = 0.0,
    **job: Any,
) -> Figures | None:
    """Return the figures of all workers' measurements; None if there was no step.

    A worker that communicates longer than another one waits for it: the difference is
    the least value of `wait`. It's more if a worker measured that the others were late,
    each now and then.

    Args:
        times: Of each worker, in rank order.
        seconds: The duration of all steps; by default that of the worker that took
            longest.
        in_step: Whether workers take each step together.
        between_devices: Bytes moved between the devices of one worker in a step.
        job: Further fields of `Figures`: `arrays`, `link`, `baseline`, `devices`,
            `staleness`, `idle`, `compression`, `noise`, `machines`,
            `predicted`.
    """
    moved = [one for one in times if one.steps > 0 and one.seconds > 0]
    if not moved:
        return None
    least = min(one.exchange / one.steps for one in moved)
    parts: dict[int, dict[str, float]] = {}
    for one in moved:
        exchange = one.exchange / one.steps
        wait = min(exchange, max(exchange - least, one.late / one.steps))
        parts[one.rank] = {phase: getattr(one, phase) / one.steps for phase in _BUSY}
        parts[one.rank].update(communicate=exchange - wait, wait=wait)
    total = sum(one.steps for one in moved)
    phases = {
        phase: sum(parts[one.rank][phase] * one.steps for one in moved) / total
        for phase in PHASES
    }
    rows = sum(one.rows for one in moved)
    steps = max(one.steps for one in moved) if in_step else total
    speeds = [one.sent / one.communicating for one in moved if one.communicating > 0]
    return Figures(
        workers=len(times),
        steps=steps,
        examples_per_second=rows / (seconds or max(one.seconds for one in moved)),
        by_rank={one.rank: one.rows / one.seconds for one in moved},
        step_seconds=sum(phases.values()),
        phases=phases,
        global_batch=rows / steps,
        bytes_per_step=sum(one.sent for one in moved) / total or between_devices,
        bandwidth=max(speeds, default=0.0),
        in_step=in_step,
        **_busy(parts),
        **job,
    )


def _busy(parts: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return the fields of figures on who is busy, from each rank's parts of a step."""
    busy = {rank: sum(part[phase] for phase in _BUSY) for rank, part in parts.items()}
    if len(busy) < 2:
        return {"busy": busy}
    slowest = max(busy, key=lambda rank: busy[rank])
    others = [rank for rank in busy if rank != slowest]
    lag = busy[slowest] - statistics.median(busy[rank] for rank in others)
    behind = {
        phase: parts[slowest][phase]
        - statistics.median(parts[rank][phase] for rank in others)
        for phase in _BUSY
    }
    slow_part = max(behind, key=lambda phase: behind[phase])
    return {
        "busy": busy,
        "slowest": slowest,
        "lag": max(lag, 0.0),
        "slow_part": slow_part,
    }


# The names of figures, and the layout of TensorBoard's page.
#
# Each figure is a scalar; the tab "Custom Scalars" shows those that belong together in
# one chart, in the order of a user's questions: how fast is it, where does the time go,
# which worker is slow, what is sent.
#
# TensorBoard gives each run a color, and all lines of a run have the same. So lines of
# one chart are runs of their own, below the callback's:
#
#     scaling                 single lines: of all workers, of the whole step; texts
#     scaling/max             the maximum of the figure beside it
#     scaling/predicted       what `kerasdist predict` has said of it
#     scaling/part_compute    a part of a step, and so on
#     scaling/rank_0          a worker
#     scaling/stage_0         a stage
#
# It has seven colors, and takes them in the order of the runs' names: the parts of a
# step are as many, and follow each other.

EVENTS = "events"
STALENESS = "staleness/reads"
VERDICT = "verdict"

# By category the charts, each with the regular expression of its figures' tags.
CHARTS = {
    "1. How fast": {
        "Examples per second": "examples_per_second",
        "Scaling efficiency: percent of as many single workers": "efficiency/.*",
    },
    "2. Where a step's time goes": {
        "Seconds of a step": "step_seconds/whole",
        "Seconds of its parts": "step_seconds",
        "Percent of a step": "step_percent",
    },
    "3. Who is slow": {
        "Seconds of a step that a worker is busy": "busy_seconds",
        "Slowest rank": "straggler/rank",
        "Its lag in seconds": "straggler/lag_seconds",
        "Staleness of the weights in steps": "staleness/(mean|max)",
        "Percent of the time that a stage is idle": "idle_percent",
    },
    "4. What is sent": {
        "Bytes that a worker sends in a step": "bytes/per_step",
        "Bandwidth in bytes per second: achieved, and of the link": "bandwidth/.*",
        "Bytes of a step's gradients: before compression, after it": (
            "compression/bytes_(before|after)"
        ),
        "Norm of the gradients that aren't sent yet": "compression/unsent_norm",
    },
    "5. What a larger batch is worth": {
        "Samples: of a batch that still pays, and of this job's": "batch/samples",
        "Percent of the first worker's progress that one more adds": (
            "batch/next_worker_percent"
        ),
        "Examples per second that count, beside batches of one worker": "batch/goodput",
    },
    "6. The machines": {
        "Cores that a worker keeps busy": "machine/busy_cores",
        "Bytes of memory of a worker": "machine/memory",
        "Percent of a host's memory in use": "machine/host_memory_percent",
        "Bytes per second to and from swap": "machine/swap",
        "Bytes per second over a host's network": "machine/network",
        "Bytes per second from and to disks": "machine/disk",
        "Percent of the time that a worker's GPUs are busy": "machine/gpu_percent",
        "Bytes of memory of a worker's GPUs": "machine/gpu_memory",
    },
    "7. The job": {
        "Learning rate": "job/learning_rate",
        "Global batch": "job/global_batch",
        "Workers": "job/workers",
        "Pauses in seconds": "job/pause_seconds",
        "Goodput: percent of the time": "job/goodput_percent",
    },
}
# By run, "" for the callback's own, the values by tag.
Scalars = dict[str, dict[str, float]]


def layout() -> layout_pb2.Layout:
    """Return the layout of the tab "Custom Scalars"."""
    found = layout_pb2.Layout()
    for category, charts in CHARTS.items():
        added = found.category.add(title=category)
        for title, tag in charts.items():
            # The whole tag: the folder may have other files.
            added.chart.add(title=title).multiline.tag.append(f"^{tag}$")
    return found


def scalars(figures: Figures, learning_rate: float | None = None) -> Scalars:
    """Return the scalars of figures."""
    f, several = figures, figures.workers > 1
    # None isn't written.
    runs: dict[str, dict[str, float | None]] = {
        "": {
            "examples_per_second": f.examples_per_second,
            "efficiency/percent": f.efficiency and 100 * f.efficiency,
            "step_seconds/whole": f.step_seconds,
            "straggler/rank": f.slowest,
            "straggler/lag_seconds": None if f.slowest is None else f.lag,
            "staleness/mean": f.mean_staleness,
            "bytes/per_step": f.bytes_per_step if several else f.bytes_per_step or None,
            "bandwidth/achieved": f.bandwidth if several else None,
            "compression/bytes_before": f.compression.get("bytes_before"),
            "compression/unsent_norm": f.compression.get("unsent_norm"),
            "batch/samples": None if f.noise is None else f.global_batch,
            "batch/next_worker_percent": f.next_worker and 100 * f.next_worker,
            "batch/goodput": f.goodput,
            "job/learning_rate": learning_rate,
            "job/global_batch": f.global_batch,
            "job/workers": f.workers,
        },
        "max": {
            "staleness/max": max(f.staleness, default=None),
            "bandwidth/link": f.link if several else None,
            "compression/bytes_after": f.compression.get("bytes_after"),
            # The noise scale, where it's a number of samples.
            "batch/samples": None
            if f.noise is None or math.isinf(f.noise.scale)
            else f.noise.scale,
        },
    }
    if f.predicted is not None:
        runs["predicted"] = {
            "examples_per_second": f.predicted.examples_per_s,
            "step_seconds/whole": f.predicted.step_s,
        }
    for phase, seconds in f.phases.items():
        percent = 100 * f.share(phase)
        runs[f"part_{phase}"] = {"step_seconds": seconds, "step_percent": percent}
    for rank, speed in f.by_rank.items():
        runs[f"rank_{rank}"] = {
            "examples_per_second": speed,
            "busy_seconds": f.busy[rank],
        }
    for rank, used in f.machines.items():
        runs.setdefault(f"rank_{rank}", {}).update(
            {
                "machine/busy_cores": used.per_second("cpu"),
                "machine/memory": used.memory,
                "machine/host_memory_percent": 100 * used.host_memory,
                "machine/swap": used.per_second("swapped"),
                "machine/network": used.per_second("network"),
                "machine/disk": used.per_second("disk"),
                "machine/gpu_percent": 100 * used.per_second("gpu") / used.gpus
                if used.gpus
                else None,
                "machine/gpu_memory": used.gpu_memory if used.gpus else None,
            }
        )
    for number, idle in enumerate(f.idle):
        runs[f"stage_{number}"] = {"idle_percent": 100 * idle}
    return {
        run: {tag: value for tag, value in values.items() if value is not None}
        for run, values in runs.items()
    }


# A histogram has a bucket per staleness, up to this many.
_MOST_BUCKETS = 30
_MOST_READS = 10_000


class Summaries:
    """A run's event file, with the layout of its page, and those of runs below it.

    Args:
        folder: The folder of the run's file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}
        self._write("", custom_scalar.pb(layout()), 0)

    def write(
        self,
        step: int,
        scalars: Scalars,
        texts: Mapping[str, str],
        reads: Mapping[int, int] | None = None,
    ) -> None:
        """Write the values of one step.

        Args:
            step: Its number.
            scalars: Numbers.
            texts: Markdown by tag; empty ones aren't written.
            reads: Number of reads of weights, by their staleness.
        """
        runs = {
            run: [scalar_pb(tag, value) for tag, value in values.items()]
            for run, values in {"": {}, **scalars}.items()
        }
        runs[""] += [text_pb(tag, text) for tag, text in texts.items() if text]
        if reads:
            runs[""].append(histogram_pb(STALENESS, _values(reads), _MOST_BUCKETS))
        for run, parts in runs.items():
            if parts:
                values = [value for part in parts for value in part.value]
                self._write(run, summary_pb2.Summary(value=values), step)

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, run: str, summary: Any, step: int) -> None:
        # On the host, and outside of whatever strategy is in scope.
        with tf.init_scope(), tf.device("/CPU:0"):
            writer = self._writers.get(run)
            if writer is None:
                folder = os.path.join(self._folder, run) if run else self._folder
                writer = self._writers[run] = tf.summary.create_file_writer(folder)
            with writer.as_default():
                tf.summary.experimental.write_raw_pb(
                    summary.SerializeToString(), step=step
                )
            writer.flush()


def _values(counts: Mapping[int, int]) -> Any:
    """Return each number as often as its count; in proportion, if that is too much."""
    total = sum(counts.values())
    scale = min(1.0, _MOST_READS / total) if total else 1.0
    return np.repeat(
        np.array(list(counts), np.float64),
        [max(1, round(count * scale)) for count in counts.values()],
    )
