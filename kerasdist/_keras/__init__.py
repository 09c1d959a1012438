"""The Keras seam: the only place that touches Keras's internals.

Keras 3 was written for strategies that average equal parts, in an order of things
that isn't right for several workers. `install` puts hooks into the places below;
each does what Keras does, unless the strategy in use has `keras_hooks`:

    losses      scale_loss_for_distribution, reduce_values, apply_mask, CompileLoss
    optimizers  apply: reduce first, then clip, update; accumulate, then reduce
    updates     SGD.update_step: one operation, no memory for what's between
    rates       the learning rate times a factor
    layers      SeedGenerator, BatchNormalization(synchronized=True)
    dealt       TFEpochIterator, where each batch is one worker's
    arrays      TFEpochIterator: arrays in an order that all workers agree on
    items       each worker reads its share of a PyDataset's items
    trainer     steps, predictions, *_on_batch, fit
    callbacks   files are written by the chief; stops and rates are agreed
    placed      each layer, its variables among it, on the device that it belongs on:
                where a strategy has a `layer_placer`
    micro       a model's call as several calls, on parts of its batch: inside of
                `dividing`
    again       activations that are computed again: inside of `rematerializing`
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow import core as tf_core
from keras.src.backend.tensorflow import nn as tf_nn
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks import backup_and_restore, callback_list
from keras.src.layers import layer as layer_module
from keras.src.layers.normalization import batch_normalization
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics
from keras.src.models import model as keras_model
from keras.src.ops import function
from keras.src.optimizers import base_optimizer, loss_scale_optimizer, sgd
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as base_trainer

from kerasdist._keras import (
    arrays,
    backups,
    callbacks,
    layers,
    loops,
    losses,
    micro_batches,
    optimizers,
    placed_layers,
    placed_trainer,
    planned,
    rates,
    rematerialize,
    trainer,
    updates,
)
from kerasdist._keras.arrays import ArrayData, random_seed
from kerasdist._keras.hooks import KerasHooks, StepTimer
from kerasdist._keras.items import ItemData
from kerasdist._keras.micro_batches import dividing
from kerasdist._keras.placed_layers import (
    LayerFacts,
    LayerPlacer,
    called_layer,
    device_of_variable,
)
from kerasdist._keras.rematerialize import rematerializing
from kerasdist._keras.state import copied_to, whole_state
from kerasdist._keras.step import gradients_are_reduced, is_timed
from kerasdist._keras.taken import own_steps
from kerasdist._keras.trainer import new_train_function

__all__ = [
    "ArrayData",
    "ItemData",
    "KerasHooks",
    "LayerFacts",
    "LayerPlacer",
    "StepTimer",
    "called_layer",
    "copied_to",
    "device_of_variable",
    "dividing",
    "gradients_are_reduced",
    "install",
    "is_timed",
    "new_train_function",
    "own_steps",
    "random_seed",
    "rematerializing",
    "whole_state",
]

_ENTRIES = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
_installing = threading.Lock()
_installed = False


def install() -> None:
    """Put the hooks into Keras, once per process."""
    global _installed
    with _installing:
        if _installed:
            return
        model = tf_trainer.TensorFlowTrainer
        for owner, name, hook in (
            (loss_module, "scale_loss_for_distribution", losses.leave_loss),
            (loss_module, "unscale_loss_for_distribution", losses.leave_loss),
            (loss_module, "reduce_values", losses.reduce_values),
            (loss_module, "apply_mask", losses.mask_weights),
            (compile_utils.CompileLoss, "call", losses.compile_loss),
            (reduction_metrics.Mean, "update_state", losses.mean_metric),
            (base_optimizer.BaseOptimizer, "apply", optimizers.apply),
            (loss_scale_optimizer.LossScaleOptimizer, "apply", optimizers.apply),
            (
                base_optimizer.BaseOptimizer,
                "_clip_gradients",
                optimizers.clip_gradients,
            ),
            (
                base_optimizer.BaseOptimizer,
                "_backend_apply_gradients",
                optimizers.accumulate,
            ),
            (
                base_optimizer.BaseOptimizer,
                "_get_current_learning_rate",
                optimizers.learning_rate,
            ),
            (
                base_optimizer.BaseOptimizer,
                "finalize_variable_values",
                optimizers.finalize,
            ),
            (
                tf_optimizer.TFOptimizer,
                "_all_reduce_sum_gradients",
                optimizers.leave_reduced,
            ),
            (sgd.SGD, "update_step", updates.sgd_step),
            (tf_nn, "_compute_moments_sync", layers.synchronized_moments),
            (seed_generator.SeedGenerator, "next", layers.next_seed),
            (tf_trainer.TFEpochIterator, "__init__", arrays.init_epoch_iterator),
            (tf_trainer, "reduce_per_replica", trainer.reduce_per_replica),
            (model, "_make_function", trainer.make_function),
            (model, "_autoconvert_optionals", trainer.receive_batch),
            (model, "_maybe_symbolic_build", trainer.symbolic_build),
            (model, "_maybe_symbolic_build", planned.plan_placement),
            (model, "_get_metrics_result_or_logs", loops.finish_epoch),
            (model, "make_train_function", loops.begin_training),
            (model, "fit", loops.fit),
            (model, "evaluate", loops.on_chief_only),
            (model, "predict", loops.on_chief_only),
            (model, "predict_on_batch", trainer.predict_on_batch),
            (callback_list.CallbackList, "on_train_begin", callbacks.on_train_begin),
            (callback_list.CallbackList, "on_epoch_end", callbacks.on_epoch_end),
            (
                callback_list.CallbackList,
                "on_train_batch_end",
                callbacks.on_train_batch_end,
            ),
        ):
            _wrap(owner, name, hook)
        placed: list[tuple[Any, str, Callable[..., Any]]] = [
            (layer_module.Layer, "_initialize_tracker", placed_layers.init_layer),
            (layer_module.Layer, "__call__", placed_layers.call_layer),
            (keras_model.Model, "export", placed_layers.export_model),
            (tf_core.Variable, "__init__", placed_layers.init_variable),
            (tf_core.Variable, "_initialize", placed_layers.initialize_variable),
            # Where it's defined: Keras takes a `compile` that it finds elsewhere for a
            # user's own.
            (base_trainer.Trainer, "compile", placed_trainer.compile_model),
            (
                tf_optimizer.TFOptimizer,
                "_all_reduce_sum_gradients",
                placed_trainer.leave_gradients,
            ),
            (
                base_optimizer.BaseOptimizer,
                "_backend_reset_gradient_accumulators",
                placed_trainer.reset_accumulators,
            ),
            (
                tf_trainer.TFEpochIterator,
                "__init__",
                placed_trainer.init_epoch_iterator,
            ),
            (model, "make_train_function", placed_trainer.make_function),
            (model, "make_test_function", placed_trainer.make_function),
            (model, "make_predict_function", placed_trainer.make_function),
            *((model, name, placed_trainer.name_the_lost) for name in _ENTRIES),
        ]
        for owner, name, place in placed:
            _wrap(owner, name, place)
        # Last, so that they are around the others.
        divided: Any = (
            (layer_module.Layer, "__call__", rematerialize.call_layer),
            (function.Function, "_run_through_graph", rematerialize.run_through_graph),
            (seed_generator.SeedGenerator, "next", rematerialize.draw_seed),
            (tf_core.Variable, "assign", rematerialize.assign),
            (layer_module.Layer, "__call__", micro_batches.call_layer),
            (reduction_metrics.Mean, "update_state", micro_batches.mean_metric),
            (
                batch_normalization.BatchNormalization,
                "call",
                micro_batches.normalize,
            ),
        )
        for owner, name, hook in divided:
            _wrap(owner, name, hook)
        _wrap(backup_and_restore.BackupAndRestore, "_save_model", backups.write)
        for owner, name in callbacks.WRITERS:
            _wrap(owner, name, callbacks.on_chief_only)
        for owner, name in callbacks.SAVERS:
            _wrap(owner, name, callbacks.close_window)
        for owner, name in rates.SCHEDULERS:
            _wrap(owner, name, rates.on_base_rate)
        rate = base_optimizer.BaseOptimizer.learning_rate
        base_optimizer.BaseOptimizer.learning_rate = rate.setter(
            _around(rate.fset, rates.set_rate)
        )
        _installed = True


def _wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    setattr(owner, name, _around(getattr(owner, name), hook))


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    # Keras asks a layer's constructor for its arguments, and not what it wraps.
    wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return wrapper
