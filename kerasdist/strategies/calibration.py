"""How fast one worker is alone: what the scaling of several is compared with.

The others wait meanwhile. Its steps are real ones, optimizer included, on a whole
global batch of zeros, which are there at once. Then everything is what it was.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import _keras
from kerasdist.collectives import Communicator

__all__ = ["speed_alone"]

_WARM_UP = 2  # calls
_SECONDS = 1.0
_FEWEST, _MOST = 3, 100  # calls


def speed_alone(model: Any) -> float | None:
    """Measure the examples per second of the chief alone; all workers call it together.

    Args:
        model: A model in `fit`, which has taken a step that was measured.

    Returns:
        The same on all workers. None if it can't be measured: a worker has several
        replicas, or batches are made of something else than plain tensors.
    """
    extended = model.distribute_strategy.extended
    clock = extended.timer
    communicator: Communicator = clock.communicator
    hooks = getattr(extended, "keras_hooks", None)
    mine = np.array([clock.rows_per_step], np.float64)
    every = [float(part[0]) for part in communicator.all_gather(mine)]
    # Where workers don't wait for each other, each has whole batches.
    rows = round(every[0] if hooks is None or hooks.deals else sum(every))
    speed = 0.0
    possible = rows and len(extended.worker_devices) == 1 and _is_plain(clock.batch)
    if clock.rank == 0 and hooks is not None and possible:
        with clock.stopped():
            speed = _measure(model, clock.batch, rows)
    with clock.stopped():
        # Who isn't the chief waits here.
        return float(communicator.all_reduce([np.float64(speed)], "max")[0]) or None


def _is_plain(batch: Any) -> bool:
    parts = tf.nest.flatten(batch)
    return bool(parts) and all(
        part is None or isinstance(part, tf.TensorSpec) for part in parts
    )


def _measure(model: Any, batch: Any, rows: int) -> float:
    strategy = model.distribute_strategy
    extended = strategy.extended

    def zeros(spec: Any) -> Any:
        if spec is None:
            return None
        shape = [rows, *(1 if size is None else size for size in spec.shape[1:])]
        return tf.zeros(shape[: spec.shape.rank], spec.dtype)

    variables = [*model.variables, *model.optimizer.variables]
    kept = [
        (part, part.numpy())
        for variable in variables
        for part in strategy.experimental_local_results(variable.value)
    ]
    with extended.alone(), tf.device(extended.worker_devices[0]):
        data = tf.data.Dataset.from_tensors(tf.nest.map_structure(zeros, batch))
        batches = iter(data.repeat())
        function = _keras.new_train_function(model)
        try:
            for _ in range(_WARM_UP):
                function(batches)
            begin, calls, seconds = time.perf_counter(), 0, 0.0
            while calls < _FEWEST or (calls < _MOST and seconds < _SECONDS):
                function(batches)
                calls += 1
                seconds = time.perf_counter() - begin
        finally:
            for part, value in kept:
                part.assign(value)
    return calls * int(model.steps_per_execution) * rows / seconds
