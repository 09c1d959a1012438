"""Models that only their own training steps can build.

A GAN has no `call`, a variational autoencoder calls its halves one after the other, and
their data may have any form. A single process builds them while it traces the first
step. Under a strategy all variables must exist before that, so that all workers hold
the same ones, with the chief's values, and know it before they train.

    1. the step is traced once, into a graph that never runs; layers create their
       variables meanwhile, outside of that graph
    2. optimizers are built for the variables of their updates, and update nothing
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.optimizer.learning_rate import optimizers_of
from kerasdist._keras.protocols import hooks_of


def can_be_called(trainer: Any) -> bool:
    """Return whether a model has a `call`."""
    return getattr(type(trainer).call, "__func__", type(trainer).call) is not (
        keras.Model.call
    )


def has_own_step(trainer: Any) -> bool:
    """Return whether the step that is about to run is the model's own."""
    name = "test_step" if current.evaluating else "train_step"
    theirs = getattr(keras.Model, name)
    own = getattr(trainer, name)  # not a method if it's a `tf.function`
    return getattr(own, "__func__", own) is not theirs


def is_unbuilt(trainer: Any) -> bool:
    """Return whether a step of the model's own may create variables."""
    layers = trainer._flatten_layers(include_self=False)
    optimizers = [] if current.evaluating else optimizers_of(trainer)
    return not all(part.built for part in (*layers, *optimizers))


def build_by_step(trainer: Any, batch: Any) -> None:
    """Create the variables that the first run of the model's next step creates.

    Args:
        trainer: The model.
        batch: A step's data: tensors, arrays, or their specifications.

    Raises:
        Exception: The step's error.
    """
    strategy = trainer.distribute_strategy
    hooks = hooks_of(strategy)
    step = trainer.test_step if current.evaluating else trainer.train_step
    graph = tf.__internal__.FuncGraph("kerasdist_build")
    with strategy.scope(), graph.as_default():
        data = tf.nest.map_structure(_placeholder, batch)
        first, facts = 0, contextlib.nullcontext()
        if hooks is not None:
            # Not `current_replica`, which gives asynchronous workers their own seeds.
            first = strategy.extended.workers.layout.first
            rows = hooks.data.split(data)[1]
            facts = current.of(hooks, rows, rows)
        # All replicas write alike: none must wait for others that aren't traced.
        with facts, setting(reduced=True, building=True):
            run = tf.autograph.experimental.do_not_convert(step)
            try:
                _tf.call_replica(strategy, first, run, (data,), {}, None)
            except Exception as error:
                if hooks is not None and hooks.workers.replicas > 1:
                    error.add_note(_takes_rows(hooks.workers.replicas))
                raise


def _takes_rows(replicas: int) -> str:
    return (
        f"A step gets one replica's rows of a global batch, of {replicas} replicas: it "
        "must take their number from the batch, not from a constant in the script, and "
        "a batch's rows must be its first dimension."
    )


def _placeholder(value: Any) -> Any:
    """Return a placeholder with a batch's shape and dtype, for at least one row."""
    if value is None or isinstance(value, tf.OptionalSpec):
        return None
    spec = value
    if not isinstance(value, tf.TypeSpec):
        spec = tf.type_spec_from_value(tf.convert_to_tensor(value))
    if isinstance(spec, tf.TensorSpec):
        shape = spec.shape
        if shape.rank and shape[0] == 0:
            shape = tf.TensorShape([1, *shape[1:]])
        return tf.compat.v1.placeholder(spec.dtype, shape)
    parts = tf.nest.map_structure(_placeholder, spec._component_specs)
    return spec._from_components(parts)


def build_only(optimizer: Any, variables: Any) -> None:
    """Replace an update of variables: build the optimizer for them."""
    if not optimizer.built and variables is not None:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))
        optimizer.built = True
