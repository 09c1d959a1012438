"""The event files of TensorBoard: figures, texts and the layout.

All values of a run at one step are one summary: TensorFlow's writer is called once for
it.
"""

from __future__ import annotations

import dataclasses
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

from kerasdist.strategies.measure.communication import StepTimes

# The figures of a window of steps of all workers: pure functions of numbers.

PHASES = ("input", "compute", "pack", "communicate", "wait", "update", "outside")


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

    @property
    def efficiency(self) -> float | None:
        """Examples per second divided by those of as many workers alone, or None.

        Or of as many devices, see `devices`.
        """
        if not self.baseline:
            return None
        return self.examples_per_second / (self.baseline * self.workers * self.devices)

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
    arrays: bool = False,
    link: float | None = None,
    baseline: float | None = None,
    devices: int = 1,
    between_devices: float = 0.0,
    staleness: Mapping[int, int] | None = None,
    idle: Sequence[float] = (),
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
        arrays: See `Figures`.
        link: See `Figures`.
        baseline: See `Figures`.
        devices: See `Figures`.
        between_devices: Bytes moved between the devices of one worker in a step.
        staleness: See `Figures`.
        idle: See `Figures`.
    """
    moved = [one for one in times if one.steps > 0 and one.seconds > 0]
    if not moved:
        return None
    least = min(one.exchange / one.steps for one in moved)
    parts: dict[int, dict[str, float]] = {}
    for one in moved:
        exchange = one.exchange / one.steps
        wait = min(exchange, max(exchange - least, one.late / one.steps))
        parts[one.rank] = {
            "input": one.input / one.steps,
            "compute": one.compute / one.steps,
            "pack": one.pack / one.steps,
            "communicate": exchange - wait,
            "wait": wait,
            "update": one.update / one.steps,
            "outside": one.outside / one.steps,
        }
    total = sum(one.steps for one in moved)
    phases = {
        phase: sum(parts[one.rank][phase] * one.steps for one in moved) / total
        for phase in PHASES
    }
    idle_parts = ("communicate", "wait")
    busy = {
        rank: sum(value for phase, value in part.items() if phase not in idle_parts)
        for rank, part in parts.items()
    }
    slowest, lag, slow_part = _slowest(parts, busy)
    rows = sum(one.rows for one in moved)
    steps = max(one.steps for one in moved) if in_step else total
    speeds = [
        one.sent / one.communicating
        for one in moved
        if one.communicating > 0 and one.sent > 0
    ]
    return Figures(
        workers=len(times),
        steps=steps,
        examples_per_second=rows / (seconds or max(one.seconds for one in moved)),
        by_rank={one.rank: one.rows / one.seconds for one in moved},
        step_seconds=sum(phases.values()),
        phases=phases,
        busy=busy,
        slowest=slowest,
        lag=lag,
        slow_part=slow_part,
        global_batch=rows / steps,
        bytes_per_step=sum(one.sent for one in moved) / total or between_devices,
        bandwidth=max(speeds, default=0.0),
        link=link,
        baseline=baseline,
        devices=devices,
        in_step=in_step,
        arrays=arrays,
        staleness=dict(staleness or {}),
        idle=tuple(idle),
    )


def _slowest(
    parts: Mapping[int, Mapping[str, float]], busy: Mapping[int, float]
) -> tuple[int | None, float, str]:
    """Return the slowest rank, its lag, and the phase in which it lags most."""
    if len(busy) < 2:
        return None, 0.0, ""
    slowest = max(busy, key=lambda rank: busy[rank])
    others = [rank for rank in busy if rank != slowest]
    lag = busy[slowest] - statistics.median(busy[rank] for rank in others)
    behind = {
        phase: parts[slowest][phase]
        - statistics.median(parts[rank][phase] for rank in others)
        for phase in PHASES
        if phase not in ("communicate", "wait")
    }
    return slowest, max(lag, 0.0), max(behind, key=lambda phase: behind[phase])


# The names of figures, and the layout of TensorBoard's page.
#
# Each figure is a scalar; the tab "Custom Scalars" shows those that belong together in
# one chart, in the order of a user's questions: how fast is it, where does the time go,
# which worker is slow, what is sent.
#
# TensorBoard gives each run a color, and all lines of a run have the same. So lines of
# one chart are runs of their own, below the callback's (`place`):
#
#     scaling                 single lines: of all workers, of the whole step; texts
#     scaling/max             the maximum of the figure beside it
#     scaling/part_compute    a part of a step, and so on
#     scaling/rank_0          a worker
#     scaling/stage_0         a stage
#
# It has seven colors, and takes them in the order of the runs' names: the parts of a
# step are as many, and follow each other.

EVENTS = "events"
STALENESS = "staleness/reads"
VERDICT = "verdict"

# Category, chart, and the regular expressions of the tags in it.
CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("1. How fast", "Examples per second", (r"examples_per_second",)),
    (
        "1. How fast",
        "Scaling efficiency: percent of as many single workers",
        (r"efficiency/.*",),
    ),
    ("2. Where a step's time goes", "Seconds of a step", (r"step_seconds/whole",)),
    ("2. Where a step's time goes", "Seconds of its parts", (r"step_seconds",)),
    ("2. Where a step's time goes", "Percent of a step", (r"step_percent",)),
    (
        "3. Who is slow",
        "Seconds of a step that a worker is busy",
        (r"busy_seconds",),
    ),
    ("3. Who is slow", "Slowest rank", (r"straggler/rank",)),
    ("3. Who is slow", "Its lag in seconds", (r"straggler/lag_seconds",)),
    ("3. Who is slow", "Staleness of the weights in steps", (r"staleness/(mean|max)",)),
    (
        "3. Who is slow",
        "Percent of the time that a stage is idle",
        (r"idle_percent",),
    ),
    ("4. What is sent", "Bytes that a worker sends in a step", (r"bytes/per_step",)),
    (
        "4. What is sent",
        "Bandwidth in bytes per second: achieved, and of the link",
        (r"bandwidth/.*",),
    ),
    ("5. The job", "Learning rate", (r"job/learning_rate",)),
    ("5. The job", "Global batch", (r"job/global_batch",)),
    ("5. The job", "Workers", (r"job/workers",)),
    ("5. The job", "Pauses in seconds", (r"job/pause_seconds",)),
    ("5. The job", "Goodput: percent of the time", (r"job/goodput_percent",)),
)


def layout() -> layout_pb2.Layout:
    """Return the layout of the tab "Custom Scalars"."""
    titles = dict.fromkeys(category for category, _, _ in CHARTS)
    return layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=title,
                chart=[
                    layout_pb2.Chart(
                        title=chart,
                        # The whole tag: the folder may have other files.
                        multiline=layout_pb2.MultilineChartContent(
                            tag=[f"^{tag}$" for tag in tags]
                        ),
                    )
                    for category, chart, tags in CHARTS
                    if category == title
                ],
            )
            for title in titles
        ]
    )


def scalars(figures: Figures, learning_rate: float | None = None) -> dict[str, float]:
    """Return the scalars of figures, by name."""
    found = {"examples_per_second/all": figures.examples_per_second}
    for rank, speed in figures.by_rank.items():
        found[f"examples_per_second/rank_{rank}"] = speed
    if figures.efficiency is not None:
        found["efficiency/percent"] = 100 * figures.efficiency
    found["step_seconds/whole"] = figures.step_seconds
    for phase, seconds in figures.phases.items():
        found[f"step_seconds/{phase}"] = seconds
        found[f"step_percent/{phase}"] = 100 * figures.share(phase)
    for rank, seconds in figures.busy.items():
        found[f"busy_seconds/rank_{rank}"] = seconds
    if figures.slowest is not None:
        found["straggler/rank"] = figures.slowest
        found["straggler/lag_seconds"] = figures.lag
    if figures.staleness:
        reads = sum(figures.staleness.values())
        steps = sum(lag * count for lag, count in figures.staleness.items())
        found["staleness/mean"] = steps / reads
        found["staleness/max"] = max(figures.staleness)
    for stage, idle in enumerate(figures.idle):
        found[f"idle_percent/stage_{stage}"] = 100 * idle
    if figures.workers > 1 or figures.bytes_per_step:
        found["bytes/per_step"] = figures.bytes_per_step
    if figures.workers > 1:
        found["bandwidth/achieved"] = figures.bandwidth
        if figures.link is not None:
            found["bandwidth/link"] = figures.link
    if learning_rate is not None:
        found["job/learning_rate"] = learning_rate
    found["job/global_batch"] = figures.global_batch
    found["job/workers"] = figures.workers
    return found


def place(name: str) -> tuple[str, str]:
    """Return the run and the tag of a figure that shares a chart with others.

    Args:
        name: As in `scalars`, `figure/line`.

    Returns:
        The run below the callback's, "" for the callback's own; and the tag.
    """
    figure, _, line = name.partition("/")
    if line == "all":
        return "", figure
    if line.startswith(("rank_", "stage_")):
        return line, figure
    if figure in ("step_seconds", "step_percent") and line != "whole":
        return f"part_{line}", figure
    if name in ("staleness/max", "bandwidth/link"):
        return "max", name
    return "", name


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
        self.flush()

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        texts: Mapping[str, str] | None = None,
        histograms: Mapping[str, Mapping[int, int]] | None = None,
    ) -> None:
        """Write the values of one step.

        Args:
            step: Its number.
            scalars: Numbers by name, see `charts.place`.
            texts: Markdown by tag.
            histograms: By tag the count of each number.
        """
        runs: dict[str, list[Any]] = {}
        for name, value in scalars.items():
            run, tag = place(name)
            runs.setdefault(run, []).append(scalar_pb(tag, value))
        more = [text_pb(tag, text) for tag, text in (texts or {}).items()]
        for tag, counts in (histograms or {}).items():
            more.append(histogram_pb(tag, _values(counts), _MOST_BUCKETS))
        if more:
            runs.setdefault("", []).extend(more)
        for run, parts in runs.items():
            whole = summary_pb2.Summary()
            for part in parts:
                whole.MergeFrom(part)
            self._write(run, whole, step)

    def flush(self) -> None:
        """Write everything to disk."""
        for writer in self._writers.values():
            writer.flush()

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


def _values(counts: Mapping[int, int]) -> Any:
    """Return each number as often as its count; in proportion, if that is too much."""
    total = sum(counts.values())
    scale = min(1.0, _MOST_READS / total) if total else 1.0
    return np.repeat(
        np.array(list(counts), np.float64),
        [max(1, round(count * scale)) for count in counts.values()],
    )
