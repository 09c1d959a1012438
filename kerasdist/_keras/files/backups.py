"""The progress of training that is stored with a `BackupAndRestore` backup.

Keras writes the epoch and the batch beside the weights, in JSON. For asynchronous
workers that isn't enough: the weights contain steps of all workers, and the optimizer
counts only the chief's. So the number of all steps is written with it:

    {"epoch": 1, "batch": 2, "kerasdist": {"steps": 9, "steps_of_epoch": 3}}

A job that resumes from such a backup, in any strategy, writes it, too: `global_step`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from keras.src.callbacks import backup_and_restore
from keras.src.utils import file_utils

from kerasdist._keras.optimizer.learning_rate import steps_with_others
from kerasdist._keras.protocols import dynamic_hooks

_KEY = "kerasdist"


@dataclass(frozen=True, kw_only=True)
class Backup:
    """The progress of training at the point from which it is resumed.

    Attributes:
        restored: Whether training is resumed at all.
        steps: How many steps of all workers are in the weights; None: as many as the
            optimizer has counted.
        batches: How many batches of the interrupted epoch are in the weights. Keras
            starts that epoch again.
    """

    restored: bool = False
    steps: int | None = None
    batches: int = 0


def write(original: Callable[..., Any], self: Any) -> None:
    """Replace `BackupAndRestore._save_model`, on the chief: add the progress."""
    original(self)
    progress = _progress(self)
    if progress is None:
        return
    path = str(self._training_metadata_path)
    with file_utils.File(path, "r") as file:
        facts = json.loads(file.read())
    facts[_KEY] = {"steps": progress[0], "steps_of_epoch": progress[1]}
    # Written atomically: after a kill Keras's own file is still there.
    with file_utils.File(f"{path}.new", "w") as file:
        file.write(json.dumps(facts))
    tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


def read(callbacks: Sequence[Any]) -> Backup:
    """Return the progress that the callbacks of a `fit` have restored, if any."""
    for callback in callbacks:
        path = getattr(callback, "_training_metadata_path", None)
        if not isinstance(callback, backup_and_restore.BackupAndRestore) or not path:
            continue
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            file_utils.File(path, "r") as file,
        ):
            facts = json.loads(file.read())
            # At the end of an epoch Keras writes 0, as after the first batch.
            inside = callback.save_freq != "epoch"
            if _KEY not in facts:
                batches = int(facts["batch"]) + 1 if inside else 0
                return Backup(restored=True, batches=batches)
            mine = facts[_KEY]
            of_epoch = int(mine["steps_of_epoch"]) if inside else 0
            return Backup(restored=True, steps=int(mine["steps"]), batches=of_epoch)
    return Backup()


def _progress(callback: Any) -> tuple[int, int] | None:
    """Return the numbers of steps, in all and in this epoch, in a model's weights.

    None if the optimizer has counted all of them itself.
    """
    dynamic = dynamic_hooks(callback.model.distribute_strategy)
    if dynamic is not None:
        return dynamic.weights.progress()
    steps = steps_with_others(callback.model)
    if steps is None:
        return None
    inside = callback.save_freq != "epoch"
    return steps, int(callback._last_batch_seen) + 1 if inside else 0
