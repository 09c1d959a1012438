"""What `BackupAndRestore` keeps, and how far training had come by that.

Keras writes the epoch and the batch beside the weights, in JSON. Where workers don't
wait for each other that says little: the weights hold steps of all workers, and the
optimizer counts the chief's. So how many there are is written with it:

    {"epoch": 1, "batch": 2, "kerasdist": {"steps": 9, "steps_of_epoch": 3}}

Whoever goes on from such a backup, in whatever strategy, writes that, too: see `taken`.
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

from kerasdist._keras.optimizer.global_step import steps_with_others
from kerasdist._keras.protocols import dealing_hooks

__all__ = ["Backup", "read", "write"]

_KEY = "kerasdist"


@dataclass(frozen=True, kw_only=True)
class Backup:
    """How far training had come where it's taken up again.

    Attributes:
        restored: Whether it's taken up again at all.
        steps: How many steps of all workers are in the weights; None: as many as the
            optimizer has counted.
        batches: How many batches are in them of the epoch that was interrupted. Keras
            begins it again.
    """

    restored: bool = False
    steps: int | None = None
    batches: int = 0


def write(original: Callable[..., Any], self: Any) -> None:
    """In place of `BackupAndRestore._save_model`, on the chief."""
    original(self)
    progress = _progress(self)
    if progress is None:
        return
    path = str(self._training_metadata_path)
    with file_utils.File(path, "r") as file:
        facts = json.loads(file.read())
    facts[_KEY] = {"steps": progress[0], "steps_of_epoch": progress[1]}
    # At once: who is killed meanwhile finds what Keras has written.
    with file_utils.File(f"{path}.new", "w") as file:
        file.write(json.dumps(facts))
    tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


def read(callbacks: Sequence[Any]) -> Backup:
    """What the callbacks of a `fit` have restored, if there was something."""
    for callback in callbacks:
        path = getattr(callback, "_training_metadata_path", None)
        if not isinstance(callback, backup_and_restore.BackupAndRestore) or not path:
            continue
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            file_utils.File(path, "r") as file,
        ):
            facts = json.loads(file.read())
            # Where an epoch has ended Keras writes 0, as after the first batch.
            inside = callback.save_freq != "epoch"
            if _KEY not in facts:
                batches = int(facts["batch"]) + 1 if inside else 0
                return Backup(restored=True, batches=batches)
            mine = facts[_KEY]
            of_epoch = int(mine["steps_of_epoch"]) if inside else 0
            return Backup(restored=True, steps=int(mine["steps"]), batches=of_epoch)
    return Backup()


def _progress(callback: Any) -> tuple[int, int] | None:
    """Number of steps in all, and in this epoch, that are in a model's weights.

    None: the optimizer has counted all of them itself.
    """
    hooks = dealing_hooks(callback.model.distribute_strategy)
    if hooks is not None:
        return hooks.progress()
    steps = steps_with_others(callback.model)
    if steps is None:
        return None
    inside = callback.save_freq != "epoch"
    return steps, int(callback._last_batch_seen) + 1 if inside else 0
