"""The speed of a single worker, with which the scaling of several is compared.

Its steps are real ones, optimizer included, on a whole global batch of zeros, which are
available at once. Afterwards everything is as before. The others wait meanwhile, from
one of its calls to the next:

    chief    trace, warm up │ call │ call │ ... │ restore │ result
    others   wait           │ wait │ wait │ ... │ wait    │ result

so that no wait is longer than a call, however many calls there are.

If one model is on several devices of a single worker, one device takes the steps with
the whole model (`strategies.placed.one_device`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _keras, _tf, errors
from kerasdist._tf.variables import facets_of
from kerasdist.collectives import Communicator
from kerasdist.strategies.data.batch_split import slice_dataset
from kerasdist.strategies.placed.one_device import on_one_device
from kerasdist.strategies.sync.data import SharingExtended

_WARM_UP = 2  # calls, the first of which traces
SECONDS = 1.0
_MOST = 100  # calls
# The chief's messages after each call; any other value is the seconds of a step.
_GOES_ON, _FAILED = -1.0, 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
    """The speed of a single worker.

    Attributes:
        rows: Samples of a step: those of a global batch.
        seconds: Seconds of a step, without reading data and without the time between
            two steps.
        worker: Whether it's one worker, with all of its devices; else it's one device
            of a single worker that has several.
    """

    rows: int
    seconds: float
    worker: bool


def measure_alone(model: Any) -> Alone | str:
    """Let the chief take steps by itself; all workers call it together.

    Args:
        model: A model in `fit`, which has taken a measured step.

    Returns:
        The result, the same on all workers. Or a text that explains why there is none:
        batches contain other values than plain tensors, or a step on zeros fails, for
        example because there is too little memory. The model is unchanged in any case.

    Raises:
        CollectiveError: See `kerasdist.errors`; the model is unchanged.
    """
    facets = facets_of(model.distribute_strategy)
    clock = facets.timer
    communicator: Communicator = clock.communicator
    hooks = facets.hooks
    mine = np.array([clock.rows_per_step], np.float64)
    every = [float(part[0]) for part in communicator.all_gather(mine)]
    # Asynchronous workers have whole batches each.
    rows = round(every[0] if hooks is None or hooks.dynamic else sum(every))

    def send(value: float) -> float:
        """Send a value from the chief to all."""
        (seconds,) = communicator.broadcast([np.float64(value)])
        return float(seconds)

    with clock.stopped():
        if clock.rank > 0:
            while (seconds := send(_FAILED)) == _GOES_ON:
                pass
            reason = "see the chief"
        else:
            found, reason = 0.0, ""
            try:
                if not rows or not _is_plain(clock.batch):
                    reason = "batches aren't made of plain tensors"
                else:
                    found = _measure(model, clock.batch, rows, lambda: send(_GOES_ON))
            except errors.KerasDistError:
                raise
            except Exception as error:
                # A measurement must not end the job that it measures.
                reason = f"a step on zeros fails: {type(error).__name__}: {error}"
            # Frees the graph, and copies of variables, which refer to each other.
            gc.collect()
            seconds = send(found)
    if seconds <= 0:
        return reason
    return Alone(rows=rows, seconds=seconds, worker=_has_workers(model))


def _is_plain(batch: Any) -> bool:
    parts = tf.nest.flatten(batch)
    return bool(parts) and all(
        part is None or isinstance(part, tf.TensorSpec) for part in parts
    )


def _measure(model: Any, batch: Any, rows: int, after_call: Callable[[], Any]) -> float:
    """Return the seconds of a step of this worker alone."""

    def zeros(spec: Any) -> Any:
        if spec is None:
            return None
        shape = [rows, *(1 if size is None else size for size in spec.shape[1:])]
        return tf.zeros(shape[: spec.shape.rank], spec.dtype)

    with tf.device(_tf.canonical_device("CPU:0")):
        data = tf.data.Dataset.from_tensors(tf.nest.map_structure(zeros, batch))
    without_peers = _one_worker if _has_workers(model) else on_one_device
    with without_peers(model):
        batches = iter(_distributed(model.distribute_strategy, data.repeat()))
        function = _keras.new_train_function(model)
        calls, seconds = -_WARM_UP, 0.0
        while calls < _MOST and seconds < SECONDS:
            begin = time.perf_counter()
            for value in tf.nest.flatten(function(batches)):
                np.asarray(value)  # on a GPU it's over then, and not before
            calls += 1
            if calls > 0:
                seconds += time.perf_counter() - begin
            after_call()
    return seconds / (calls * int(model.steps_per_execution))


def _has_workers(model: Any) -> bool:
    """Return whether the job may have several workers, or else several devices."""
    return isinstance(model.distribute_strategy.extended, SharingExtended)


@contextlib.contextmanager
def _one_worker(model: Any) -> Iterator[None]:
    """Run the block on this worker alone, and restore its state afterwards."""
    strategy = model.distribute_strategy
    kept = [
        (part, part.numpy())
        for variable in _keras.whole_state(model)
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
        data = slice_dataset(data, *extended.workers.layout)
    return extended.distribute_parts(data)
