"""Keras's own callbacks on several workers: unchanged, except which worker writes.

Every rank runs every callback on the same logs, so that their decisions (the best
epoch, a lower rate, to stop) are the same everywhere. Only the chief writes files. The
ranks agree on what one of them decides by itself before it can make them diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from kerasdist._keras import file_writers as writers
from kerasdist._keras import learning_rate
from kerasdist._keras.chief_failover import take_over
from kerasdist._keras.context import current, setting
from kerasdist._keras.protocols import AsyncHooks, KerasHooks, hooks_of
from kerasdist._keras.shared_state import JobCallback, statistics_of
from kerasdist._keras.training import fit_loop
from kerasdist._tf.patching import Original

# They have batch methods, but never stop the training in them.
_NEVER_STOP = (
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.TensorBoard,
)


def flush_accumulators(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace what saves: keep what all workers have accumulated, and not sent."""
    hooks = hooks_of(self.model.distribute_strategy)
    if hooks is not None:
        fit_loop.flush_accumulators(hooks, self.model)
        path = _kept_path(self)
        if hooks.gradients.save is not None and path is not None:
            hooks.gradients.save(self.model.trainable_variables, path)
    return original(self, *args, **kwargs)


def _kept_path(callback: Any) -> Path | None:
    """Return the file of what compressors keep, in the folder of a local backup."""
    if not isinstance(callback, keras.callbacks.BackupAndRestore):
        return None
    folder = str(callback.backup_dir)
    return None if "://" in folder else Path(folder) / "kerasdist_kept.npz"


def on_epoch_end(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `CallbackList.on_epoch_end`: agree on the stop and on the rate.

    If one rank wants to stop, all stop. If the ranks' learning rates differ, all
    take the chief's.
    """
    hooks, dynamic = _hooks_of_model(self.model)
    if dynamic is not None:
        _count_all(self.callbacks, dynamic.steps_of_all)
    result = original(self, *args, **kwargs)
    if current.fitting:
        current.epoch += 1
    model = self.model
    if hooks is not None and hooks.workers.replicas > 1:
        model.stop_training = hooks.consensus.any_of(bool(model.stop_training))
        for optimizer in learning_rate.settable(model):
            rate = learning_rate.base_rate(optimizer)
            chief = hooks.consensus.of_chief(rate)
            if chief != rate:
                learning_rate.set_base_rate(optimizer, chief)
    take_over()
    if current.fitting and model is not None:
        fit_loop.after_epoch(model)
    if dynamic is not None and not model.stop_training:
        epoch = (args or [kwargs.get("epoch")])[0]
        # Missing in custom loops.
        epochs = (self.params or {}).get("epochs")
        if epoch is not None and epochs is not None and epoch + 1 < epochs:
            evaluated = getattr(model, "_eval_epoch_iterator", None) is not None
            known = {**learning_rate.rates_of(model), "evaluated": evaluated}
            dynamic.admit(epoch + 1, known, statistics_of(model))
    return result


def on_train_begin(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `CallbackList.on_train_begin`: all workers begin from one state.

    At this point everything is built and callbacks have restored their state; `fit` has
    not read yet at which epoch it begins. A late worker joins here.

    Raises:
        ValueError: A callback that must be on all ranks is missing on some.
    """
    model = self.model
    if model is not None and current.fitting:
        _check_callbacks(model, self.callbacks)
    if current.resumption is not None:
        current.resumption.begin(self.callbacks)
    result = original(self, *args, **kwargs)
    # Only now is the state restored, wherever in the list the callback is that does it.
    backup = writers.read_backup(self.callbacks)
    hooks, dynamic = _hooks_of_model(model)
    if hooks is not None and hooks.gradients.load is not None and current.fitting:
        for path in filter(None, map(_kept_path, self.callbacks)):
            hooks.gradients.load(model.trainable_variables, path)
    for callback in self.callbacks:
        if isinstance(callback, JobCallback):
            callback.resumed_after(backup.batches)
    # In a custom loop, callbacks may be used on one rank alone.
    if model is not None and (current.fitting or hooks is None):
        if dynamic is not None:
            dynamic.weights.resume_at(backup.steps)
        else:
            learning_rate.resume(model, backup.restored, backup.steps)
        finished = fit_loop.before_first_step(model, self.callbacks)
        if finished is not None:
            end = self.on_train_end
            self.on_train_end = lambda logs=None: end(finished)
    take_over()
    if dynamic is None or not dynamic.joining:
        return result
    model._initial_epoch, known = dynamic.join(statistics_of(model))
    current.joined = True
    learning_rate.set_rates(model, known)
    if known["evaluated"]:
        # The others use one iterator, made by `fit`, for all their evaluations. From
        # now on every worker makes a new one each time.
        model._eval_epoch_iterator = iter(())
    return result


def on_train_batch_end(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `CallbackList.on_train_batch_end`: agree on a stop within an epoch.

    It costs a collective per batch, and so is done only if there is a callback that
    could stop there. With dynamic batches a worker that stops ends the epoch for all.
    """
    with setting(after_batch=True):
        result = original(self, *args, **kwargs)
    model = self.model
    hooks, dynamic = _hooks_of_model(model)
    if dynamic is not None:
        if model.stop_training:
            dynamic.data.end_batches()
        return result
    if hooks is None or hooks.workers.replicas == 1:
        return result
    if any(may_stop(callback) for callback in self.callbacks):
        if self._async_train:
            self._flush_futures()
        model.stop_training = hooks.consensus.any_of(bool(model.stop_training))
    return result


def _check_callbacks(model: Any, callbacks: Sequence[Any]) -> None:
    """Check that callbacks that call collectives are the same, in order, on all ranks.

    Else some would wait in one collective, and the others in the next.

    Raises:
        ValueError: They aren't. Raised on all ranks.
    """
    hooks = hooks_of(model.distribute_strategy)
    if hooks is None:
        return
    names = [
        type(callback).__name__
        for callback in callbacks
        if isinstance(callback, JobCallback)
    ]
    stops = not hooks.dynamic and hooks.workers.replicas > 1
    if stops and any(may_stop(callback) for callback in callbacks):
        # Which callback it is doesn't matter: after each batch all ranks are asked.
        names.append("one with `on_train_batch_end`")
    names_by_rank = hooks.consensus.facts(", ".join(names))
    if len(set(names_by_rank.values())) > 1:
        which = "; ".join(
            f"on rank {rank} [{names}]" for rank, names in names_by_rank.items()
        )
        raise ValueError(
            "Callbacks in which the workers communicate must be given to `fit` on all "
            "ranks, in the same order: those of `kerasdist.callbacks`, and any whose "
            "`on_train_batch_end` may stop the training. "
            f"Received: callbacks={which}. Remove the condition on the rank: the files "
            "of these callbacks are written by the chief alone in any case. In a "
            "callback of your own test the rank inside, `if strategy.rank == 0:`."
        )


def _hooks_of_model(model: Any) -> tuple[KerasHooks | None, AsyncHooks | None]:
    hooks = hooks_of(getattr(model, "distribute_strategy", None))
    return hooks, None if hooks is None else hooks.dynamic


def _count_all(callbacks: Any, steps: int) -> None:
    """Set the length of an epoch of unknown length in the progress bar."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ProgbarLogger) and (
            callback.target is None
        ):
            callback.seen = max(callback.seen, steps, 1)


def may_stop(callback: Any) -> bool:
    """Return whether a callback may stop the training after a batch."""
    if isinstance(callback, _NEVER_STOP):
        return False
    if isinstance(callback, JobCallback) and callback.never_stops:
        return False
    # In a `LambdaCallback` they are attributes of the instance.
    plain = keras.callbacks.Callback
    return any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(plain, name)
        for name in ("on_train_batch_end", "on_batch_end")
    )
