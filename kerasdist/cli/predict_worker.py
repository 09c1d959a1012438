"""A worker of `kerasdist predict`: the user's script, with its first `fit` measured.

    python -m kerasdist.cli.predict_worker STEPS COMPRESSION (script.py | -m module) ...

The chief writes one line of JSON to standard output, a `prediction.profile.Profile`.
What the script prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist._keras.training.state import JobCallback
from kerasdist.callbacks.job_view import JobView
from kerasdist.cli.bench_worker import run_first_fit
from kerasdist.collectives.fused_buffer import in_buckets
from kerasdist.compression import Compressor, compressor_of
from kerasdist.prediction.profile import (
    GradientMessage,
    Profile,
    all_reduces_of,
    measure_link,
    messages_of,
)
from kerasdist.strategies.measure.communication import SpanList

# Calls before the first one that counts: they trace, and fill caches.
_WARM_UP = 5
_MOST_SPANS = 100_000  # of one call


class _Profiler(JobCallback):
    """Measures the steps of a `fit`, and ends the process.

    Args:
        steps: Number of steps.
        compression: The name of a compressor, or "" for the strategy's own.
        output: The file descriptor that the chief writes to.
    """

    def __init__(self, steps: int, compression: str, output: int) -> None:
        super().__init__()
        self._compression, self._output = compression, output
        self._left = steps
        self._calls = -_WARM_UP
        self._own = 0.0
        self._taken: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_begin`."""
        del logs
        job = JobView(self.model)
        if job.clock is None or job.hooks is None or not job.in_step:
            raise SystemExit(
                "kerasdist predict measures a step of `RingStrategy`, or of one worker "
                "of it. Received: the model's strategy is "
                f"{type(self.model.distribute_strategy).__name__}. Measure with "
                "`RingStrategy()`; other strategies are options of `predict`."
            )
        self._job = job
        self._spans = SpanList(job.communicator, _MOST_SPANS)
        job.clock.always = True
        job.clock.start()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_begin`."""
        del batch, logs
        if self._left <= 0:
            self._end()
        # The last call's messages are those of each.
        self._spans.spans.clear()
        self._spans.listen(True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback.on_train_batch_end`."""
        del batch, logs
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
        del logs
        self._end()

    def _end(self) -> None:
        if not self._taken:
            raise SystemExit(
                f"kerasdist predict needs more steps: the first {_WARM_UP} are slower, "
                f"and don't count. Received: {self._calls + _WARM_UP} calls. Give "
                "`fit` more rows or epochs."
            )
        job = self._job
        messages = _messages_in(
            self._spans.spans, job.communicator.size, job.steps_per_call
        )
        link = measure_link(job.communicator)
        compressing = 0.0
        if job.communicator.size == 1:
            messages, compressing = _messages_alone(self.model, self._compression)
        if not job.is_chief:
            raise SystemExit(0)

        def mean(name: str) -> float:
            return float(np.mean([getattr(t, name) / t.steps for t, _ in self._taken]))

        own = float(np.mean([own / t.steps for t, own in self._taken]))
        variables = self.model.trainable_variables
        profile = Profile(
            rows=job.clock.rows_per_step,
            compute=tuple(t.compute / t.steps + compressing for t, _ in self._taken),
            input=mean("input"),
            update=mean("update"),
            outside=max(mean("outside") - own, 0.0),
            messages=messages,
            weights=sum(map(_bytes_of, variables)),
            steps=int(self.params.get("steps") or 0),
            link=link,
        )
        os.write(self._output, json.dumps(profile.to_json()).encode() + b"\n")
        raise SystemExit(0)


def _bytes_of(variable: Any) -> int:
    return int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size


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
    compressor = compressor_of(name) if name else workers.compression
    variables = model.trainable_variables
    sizes = [_bytes_of(variable) for variable in variables]
    buckets = in_buckets(sizes, workers.bucket_size)
    if compressor is None:
        return all_reduces_of([sum(sizes[i] for i in b) for b in buckets]), 0.0
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
    messages = messages_of(
        [
            (sum(sizes[i] for i in bucket), found)
            for bucket, (found, _) in zip(buckets, sent, strict=True)
        ]
    )
    return messages, sum(taken for _, taken in sent)


def _compressed(
    compressor: Compressor, shapes: list[Any]
) -> tuple[list[tuple[str, int]], float]:
    """Return kinds and bytes of what a compressor sends, and its seconds."""
    sent: list[tuple[str, int]] = []

    def all_reduce(tensors: Any) -> list[Any]:
        sent.append(("all_reduce", sum(_bytes_of(tensor) for tensor in tensors)))
        return list(tensors)

    def all_gather(tensor: Any) -> Any:
        sent.append(("all_gather", _bytes_of(tensor)))
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


def main() -> None:
    """Run the script.

    Raises:
        SystemExit: The first `fit` has been measured; or, with a text, it can't be.
    """
    steps, compression, *command = sys.argv[1:]
    # Standard output before the script's goes elsewhere.
    output = os.dup(1)
    run_first_fit("predict", command, [_Profiler(int(steps), compression, output)])


if __name__ == "__main__":
    main()
