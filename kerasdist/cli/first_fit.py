"""The workers of `kerasdist bench`, `predict` and `advise`: a script's first `fit`.

    python -m kerasdist.cli.first_fit bench STEPS (script.py | -m module) [args ...]
    python -m kerasdist.cli.first_fit profile ORDER (script.py | -m module) [args ...]

STEPS is a number, ORDER a `ProfilerOrder` as JSON. `fit` is measured, and ends the
process: every worker ends as a script does, by `SystemExit`.

Standard output is for the result, which the chief writes. What the script prints, the
progress bar of Keras too, goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import setting
from kerasdist._keras.placement.describe import describe, tables_of
from kerasdist._keras.shared_state import JobCallback
from kerasdist.callbacks import ScalingTensorBoard, bottleneck
from kerasdist.callbacks.job_view import JobView
from kerasdist.cli.console import output_to_errors
from kerasdist.collectives import gather_json
from kerasdist.collectives.fused_buffer import in_buckets
from kerasdist.compression import Compressor, compressor_of
from kerasdist.placement.partition import Run, StageCosts
from kerasdist.prediction.profile import (
    GradientMessage,
    Profile,
    Stages,
    all_reduces_of,
    measure_link,
    messages_of,
)
from kerasdist.strategies.measure.communication import SpanList
from kerasdist.transport.framing import from_plain, to_object


def main() -> None:
    """Measure what the first argument names, on the script of the others.

    Raises:
        SystemExit: The first `fit` has been measured; or, with a text, it can't be.
    """
    kind, what, *command = sys.argv[1:]
    if kind == "bench":
        _bench(int(what), command)
    else:
        order = from_plain(json.loads(what), ProfilerOrder)
        # Standard output before the script's goes elsewhere.
        profiler = _Profiler(order, os.dup(1))
        _run_first_fit(order.command, command, [profiler])


def _run_first_fit(name: str, command: list[str], callbacks: list[Any]) -> NoReturn:
    """Run a script whose first `fit` has more callbacks, which end the process.

    What the script prints goes to standard error.

    Args:
        name: The command's name, for the error.
        command: The script or module, and its arguments.
        callbacks: They replace a `ScalingTensorBoard` of the script.

    Raises:
        SystemExit: By a callback; or, with a text, there was no `fit`.
    """

    def added(trainer: Any, given: list[Any]) -> list[Any]:
        del trainer
        own = [one for one in given if not isinstance(one, ScalingTensorBoard)]
        return [*own, *callbacks]

    with output_to_errors(), setting(replace_callbacks=added):
        _run(command)
    raise SystemExit(
        f"kerasdist {name} found nothing to measure. The script ended without a call "
        "of `model.fit` under a strategy of kerasdist. Build and compile the model in "
        "`with kerasdist.RingStrategy().scope():`, and train it by `fit`."
    )


def _run(command: list[str]) -> None:
    """Run a script or module as Python itself does."""
    if command[0] == "-m":
        # The current folder stands in sys.path already.
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    path = command[0]
    sys.argv = command
    if not os.path.isdir(path):  # runpy itself adds a folder
        sys.path[0] = os.path.dirname(os.path.abspath(path))
    runpy.run_path(path, run_name="__main__")


# `kerasdist bench`: the figures are those of `ScalingTensorBoard`, which replaces the
# script's own one, if any.


def _bench(steps: int, command: list[str]) -> NoReturn:
    with tempfile.TemporaryDirectory(prefix="kerasdist-bench-") as folder:
        board = _Bench(folder, steps)
        try:
            _run_first_fit("bench", command, [board])
        finally:
            # Also after an error, which ends `fit`: for the steps before it.
            _print_result(board)


class _Bench(ScalingTensorBoard):
    """Ends the process after some steps of a `fit`, when the figures have been logged.

    Args:
        folder: Of its files.
        steps: Number of steps.
    """

    def __init__(self, folder: str, steps: int) -> None:
        super().__init__(folder, calibrate=True, verbose=0)
        self._most = steps
        self._left = self._epochs = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_begin`."""
        super().on_train_begin(logs)
        self._left = -(-self._most // self._job.steps_per_call)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_epoch_begin`."""
        self._epochs += 1
        # Asynchronous workers exchange their figures at the end of an epoch.
        if self._epochs > 1 and not self._job.in_step:
            self.on_train_end()
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_begin`."""
        if self._left == 0 and self._job.in_step:
            self.on_train_end()  # without the step that isn't run
        self._left -= 1
        super().on_train_batch_begin(batch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_end`."""
        super().on_train_end(logs)
        raise SystemExit(0)


def _print_result(board: ScalingTensorBoard) -> None:
    """Write the report to standard output, on the chief."""
    if board.figures is None or board.verdict is None:
        return
    print(file=sys.stderr)  # a progress bar's line hasn't ended
    try:
        print(bottleneck.to_text(board.figures, board.verdict), flush=True)
    except BrokenPipeError:
        # Its reader has enough. At its end Python writes the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


# `kerasdist predict` and `advise`: the chief writes one line of JSON, for each
# compressor of the order a `prediction.profile.Profile`.

# Calls before the first one that counts: they trace, and fill caches.
_WARM_UP = 5
_MOST_SPANS = 100_000  # of one call
# Numbers of micro-batches of which placements are computed.
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfilerOrder:
    """The order of a measurement.

    Attributes:
        command: Of kerasdist, for messages.
        steps: Number of steps.
        compressions: Names of compressors; "": the strategy's own, or none.
        devices: Number of devices for which divisions of the model are computed; 0:
            none are.
    """

    command: str
    steps: int
    compressions: tuple[str, ...] = ("",)
    devices: int = 0


class _Profiler(JobCallback):
    """Measures the steps of a `fit`, and ends the process.

    Args:
        order: What to measure.
        output: The file descriptor that the chief writes to.
    """

    def __init__(self, order: ProfilerOrder, output: int) -> None:
        super().__init__()
        self._order, self._output = order, output
        self._left = order.steps
        self._calls = -_WARM_UP
        self._own = 0.0
        self._taken: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_begin`."""
        job = JobView(self.model)
        if job.clock is None or job.hooks is None or not job.in_step:
            raise SystemExit(
                f"kerasdist {self._order.command} measures a step of `RingStrategy`, "
                "or of one worker of it. Received: the model's strategy is "
                f"{type(self.model.distribute_strategy).__name__}. Measure with "
                "`RingStrategy()`; the command simulates other strategies."
            )
        compressor = job.hooks.workers.memories.compressor
        if self._order.command == "advise" and compressor is not None:
            raise SystemExit(
                "kerasdist advise compares compressors with gradients as they are. "
                f"Received: compression={compressor!r} in the script's strategy. Leave "
                "it out: it's proposed where it pays."
            )
        self._job = job
        self._spans = SpanList(job.communicator, _MOST_SPANS)
        job.clock.always = True
        job.clock.start()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_begin`."""
        if self._left <= 0:
            self._end()
        # The last call's messages are those of each.
        self._spans.spans.clear()
        self._spans.listen(True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_end`."""
        begin = time.perf_counter()
        self._spans.listen(False)
        times = self._job.clock.take()
        self._calls += 1
        if self._calls > 0 and times.steps:
            self._left -= self._job.steps_per_call
            # The time before this step has the work of this method after the last one.
            self._taken.append((times, self._own))
        self._own = time.perf_counter() - begin

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_end`."""
        self._end()

    def _end(self) -> None:
        if not self._taken:
            raise SystemExit(
                f"kerasdist {self._order.command} needs more steps: the first "
                f"{_WARM_UP} are slower, and don't count. Received: "
                f"{self._calls + _WARM_UP} calls. Give `fit` more rows or epochs."
            )
        job = self._job
        messages = _messages_in(
            self._spans.spans, job.communicator.size, job.steps_per_call
        )
        link = measure_link(job.communicator)

        # The last batch of an epoch is smaller: it stands for no other.
        most = max(t.rows / t.steps for t, _ in self._taken)
        taken = [each for each in self._taken if each[0].rows / each[0].steps == most]
        if 2 * len(taken) < len(self._taken):
            taken, most = self._taken, job.clock.rows_per_step

        def mean(name: str) -> float:
            return float(np.mean([getattr(t, name) / t.steps for t, _ in taken]))

        mine = mean("compute") / max(most, 1.0)
        every = gather_json(job.communicator, mine)
        if not job.is_chief:
            raise SystemExit(0)
        own = float(np.mean([own / t.steps for t, own in taken]))
        profile = Profile(
            rows=most,
            compute=tuple(t.compute / t.steps for t, _ in taken),
            input=mean("input"),
            update=mean("update"),
            outside=max(mean("outside") - own, 0.0),
            messages=messages,
            weights=sum(_bytes_of(self.model.trainable_variables)),
            steps=int(self.params.get("steps") or 0),
            link=link,
            speeds=tuple(every[0] / one for one in every),
            tables=sum(_bytes_of(tables_of(self.model))),
            stages=_stages(self.model, most, self._order.devices),
        )
        found = {"": profile}
        if job.communicator.size == 1:
            found = self._with_compressors(profile)
        document = {name: to_object(each) for name, each in found.items()}
        os.write(self._output, json.dumps(document).encode() + b"\n")
        raise SystemExit(0)

    def _with_compressors(self, profile: Profile) -> dict[str, Profile]:
        """Return the profile of one worker with what each compressor would send."""
        found = {}
        for name in self._order.compressions:
            messages, taken = _messages_alone(self.model, name)
            compute = tuple(each + taken for each in profile.compute)
            found[name] = dataclasses.replace(
                profile, compute=compute, messages=messages
            )
        return found


def _stages(model: Any, rows: float, devices: int) -> tuple[Stages, ...]:
    """Return divisions of a model into stages; none if its costs can't be computed."""
    found: list[Stages] = []
    cuts = [(1, 1)] + [(devices, parts) for parts in _MICRO_BATCHES]
    for count, parts in cuts[: 1 if devices == 1 else None] if devices else []:
        if parts > rows:
            break
        run = Run(batch_size=int(rows), micro_batches=parts)
        try:
            costs = describe(lambda: model, run.part_rows)
        except ValueError:
            return ()
        stages = StageCosts(costs, run)
        # The fastest, whatever it needs, and the one that needs least.
        fast, small = stages.best([math.inf] * count), stages.smallest([0.0] * count)
        for cut in (fast or small,) if fast in (None, small) else (fast, small):
            found.append(
                Stages(
                    devices=count,
                    micro_batches=parts,
                    memory=float(max(cut.memory)),
                    share=cut.slowest / (sum(cut.times) or 1.0),
                    moved=float(sum(cut.entering[1:])),
                )
            )
    return tuple(found)


def _bytes_of(variables: Iterable[Any]) -> list[int]:
    return [_tf.bytes_of(variable.value) for variable in variables]


def _messages_in(
    spans: list[Any], ranks: int, steps: int
) -> tuple[GradientMessage, ...]:
    """Return the collectives of a step, recorded in a call of some steps."""
    found = [s for s in spans if s.name in ("all_reduce", "all_gather")]
    # Of a gather the size is that of all ranks.
    parts = {"all_reduce": 1, "all_gather": ranks}
    return messages_of(
        [
            (span.size, [(span.name, -(-span.size // parts[span.name]))])
            for span in found[: len(found) // steps]
        ]
    )


def _messages_alone(model: Any, name: str) -> tuple[tuple[GradientMessage, ...], float]:
    """Return what a worker would send in a step, and the seconds of compressing it.

    Gradients are those of the variables; a table's count whole.
    """
    workers = model.distribute_strategy.extended.workers
    compressor = compressor_of(name) if name else workers.memories.compressor
    variables = model.trainable_variables
    sizes = _bytes_of(variables)
    buckets = in_buckets(sizes, workers.bucket_size)
    totals = [sum(sizes[i] for i in bucket) for bucket in buckets]
    if compressor is None:
        return all_reduces_of(totals), 0.0
    if compressor.needs_factors:
        raise SystemExit(
            "kerasdist predict can't compute what factors are sent: that depends on "
            f"the rows of each layer. Received: compression={compressor!r} with one "
            "worker. Measure with two (`-n 2`)."
        )
    sent = [
        _compressed(compressor, [variables[i].shape for i in bucket])
        for bucket in buckets
    ]
    pairs = [(total, found) for total, (found, _) in zip(totals, sent, strict=True)]
    return messages_of(pairs), sum(taken for _, taken in sent)


def _compressed(
    compressor: Compressor, shapes: list[Any]
) -> tuple[list[tuple[str, int]], float]:
    """Return kinds and bytes of what a compressor sends, and its seconds."""
    sent: list[tuple[str, int]] = []

    def all_reduce(tensors: Any) -> list[Any]:
        sent.append(("all_reduce", sum(map(_tf.bytes_of, tensors))))
        return list(tensors)

    def all_gather(tensor: Any) -> Any:
        sent.append(("all_gather", _tf.bytes_of(tensor)))
        return tensor

    memory = compressor.init(shapes)
    gradients = [tf.random.normal(shape) for shape in shapes]
    taken = 0.0
    for _ in range(2):  # the first call is slower
        sent.clear()
        begin = time.perf_counter()
        _, memory, _ = compressor.reduce(gradients, memory, all_reduce, all_gather)
        taken = time.perf_counter() - begin
    return sent, taken


if __name__ == "__main__":
    main()
