"""Models without a strategy, in a job of several workers.

A model that was created, cloned or loaded outside of the scope is trained by each
worker for itself. That is rarely intended, and nothing else shows it: the chief warns.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.learning_rate import optimizers_of
from kerasdist._keras.protocols import KerasHooks, current_hooks, hooks_of
from kerasdist._tf.variables import (
    COMPILED,
    TRAINED_LOCALLY,
    is_distributed,
    of_tensorflow,
)

# Loops for one process, which differentiate and update outside of `strategy.run`.
#
#     for x, y in dataset:
#         with tf.GradientTape() as tape:
#             loss = ...
#         optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
#
# Without intervention each worker would change its own copy of the weights. So the
# workers' gradients are averaged there: if all read the same batches the numbers are
# those of one process, and different batches count as one large batch.

_REMEDY = (
    "To divide the batches among the workers, iterate over "
    "`strategy.experimental_distribute_dataset(dataset)`, and call the step by "
    "`strategy.run(step, args=(x, y))`, in which the loss is divided by the rows of "
    "the global batch; or train by `fit`."
)


def strategy_outside(variables: Sequence[Any]) -> Any | None:
    """Return the kerasdist strategy of variables; None in one of its replicas."""
    for variable in variables:
        value = getattr(variable, "_value", variable)
        strategy = getattr(value, "distribute_strategy", None)
        if is_distributed(value) and hooks_of(strategy) is not None:
            inside = tf.distribute.get_strategy() is strategy
            replica = inside and not tf.distribute.in_cross_replica_context()
            return None if replica else strategy
    return None


def copies_of(sources: Any) -> Any:
    """Return the tensors that a tape records for variables outside of replicas."""

    def copy(source: Any) -> Any:
        value = getattr(source, "_value", source)
        if not is_distributed(value):
            return source
        copies = value.distribute_strategy.experimental_local_results(value)
        return copies[0] if len(copies) == 1 else source

    return tf.nest.map_structure(copy, sources)


def apply_on_all(
    strategy: Any, optimizer: Any, gradients: Sequence[Any], variables: Any
) -> None:
    """Update with the mean of all workers' gradients; all workers call it alike.

    Raises:
        RuntimeError: The workers are asynchronous (`mode="async"`), or this worker has
            several replicas, of which a tape sees one.
    """
    hooks = hooks_of(strategy)
    if hooks is None:
        return
    if hooks.dynamic:
        raise RuntimeError(
            "With mode='async' each step takes a batch that no other worker has, and "
            "an optimizer updates inside of `strategy.run`. Received: "
            f"{type(optimizer).__name__}.apply outside of it. {_REMEDY}"
        )
    if hooks.workers.local_replicas > 1:
        raise RuntimeError(
            "With several replicas in a worker an optimizer updates inside of "
            f"`strategy.run`. Received: {type(optimizer).__name__}.apply outside of "
            f"it, with {hooks.workers.local_replicas} replicas in this worker. "
            f"{_REMEDY}"
        )
    if hooks.workers.communicator.size > 1:
        _inform(hooks)
    parts = [_part(gradient, hooks.workers.replicas) for gradient in gradients]

    def update(*parts: Any) -> None:
        optimizer.apply(list(parts), variables)

    with strategy.scope():
        strategy.run(update, args=tuple(parts))


def _inform(hooks: KerasHooks) -> None:
    hooks.log_once(
        "plain loop",
        "kerasdist: an optimizer updates outside of `strategy.run`. Each worker "
        "computes whole batches, and the workers' gradients are averaged: the same "
        "batches give the numbers of one process, and no speedup; different batches "
        "count as one large batch. " + _REMEDY,
    )


def _part(gradient: Any, replicas: int) -> Any:
    """Return a replica's part: gradients of replicas are summed in custom loops."""
    if gradient is None or replicas == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / replicas
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / replicas


# Models that only their own training steps can build.
#
# A GAN has no `call`, a variational autoencoder calls its halves one after the other,
# and their data may have any form. A single process builds them while it traces the
# first step. Under a strategy all variables must exist before that, so that all workers
# hold the same ones, with the chief's values, and know it before they train.
#
#     1. the step is traced once, into a graph that never runs; layers create their
#        variables meanwhile, outside of that graph
#     2. optimizers are built for the variables of their updates, and update nothing


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


# Steps of models that were compiled with `jit_compile=True`.
#
# Keras lets XLA compile all of a step. Here the strategy does, around the exchange: see
# `kerasdist._tf.compiled_step`.


def make_compiled(
    trainer: Any,
    hooks: KerasHooks,
    step: Callable[[Any], Any],
    original: Callable[..., Callable[[Any], Any]],
) -> Callable[[Any], Any]:
    """Return a function that takes steps, compiled by XLA if the model is to be.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        step: A step of one replica.
        original: Keras's function that makes it.
    """
    if trainer.jit_compile is not True or is_alone(hooks):
        return original(trainer, step)
    COMPILED.set(step, True)
    # Keras would compile the communication.
    with _tf.replaced(trainer, jit_compile=False), setting(compiled=True):
        return original(trainer, step)


def is_alone(hooks: KerasHooks) -> bool:
    """Return whether a step never communicates, so that XLA compiles all of it."""
    return (
        hooks.workers.replicas == 1 and hooks.elastic is None and hooks.dynamic is None
    )


# The hooks of strategies that can run collectives: neither closed nor garbage.
in_use: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def local_training() -> Iterator[None]:
    """Declare that each worker is meant to train models of its own.

        with kerasdist.local_training():
            model.fit(x, y)

    Such a model was created outside of the strategy's scope. Each worker then trains a
    model of its own on all the data that it gets, and saves it where the script does:
    give each rank a file of its own. With a single worker nothing is different.
    """
    with setting(local=True):
        yield


def warn_if_outside(trainer: Any) -> None:
    """Warn, when training begins, if each worker trains a model of its own.

    Warns once per model, on the chief. Models of another `tf.distribute` strategy and
    strategies of one worker aren't concerned.

    Raises:
        ValueError: The training is declared as local, and the model has a strategy.
    """
    strategy = trainer.distribute_strategy
    if hooks_of(strategy) is not None and current.local:
        raise ValueError(
            "A model that was created inside of the strategy's scope is trained by all "
            f"workers together. Received: model {trainer.name!r} of "
            f"{type(strategy).__name__} inside of `with kerasdist.local_training():`. "
            "Create the model outside of the scope, or leave out `local_training`."
        )
    hooks = _hooks_in_use(trainer)
    if hooks is None:
        return
    known = TRAINED_LOCALLY.get(trainer)
    if current.local or known is None:
        TRAINED_LOCALLY.set(trainer, current.local)
    if current.local or known is not None:
        return
    if hooks.workers.rank == 0:
        warnings.warn(
            f"Model {trainer.name!r} was created, cloned or loaded outside of "
            "`with strategy.scope():`. So each worker trains a model of its own, on "
            "all the data that it is given, and only the chief's is saved. Received: "
            "training of a model without a strategy, beside a strategy of "
            f"{hooks.workers.communicator.size} workers. To train one model on all "
            "workers, create, clone or load it inside `with strategy.scope():`. "
            "If this is meant, put `with kerasdist.local_training():` around the "
            "training.",
            stacklevel=2,
        )


def check_not_local(trainer: Any) -> None:
    """Check that a strategy may adopt a model.

    Raises:
        ValueError: Each worker has trained it for itself.
    """
    if TRAINED_LOCALLY.get(trainer) is not None:
        raise ValueError(
            "Each worker has trained this model for itself: the workers' weights "
            f"differ. Received: model {trainer.name!r}, used inside of the scope of "
            f"{type(trainer.distribute_strategy).__name__}. Use it outside of the "
            "scope, or clone it inside and set the weights of one worker."
        )


def writer_hooks(saved: Any) -> KerasHooks | None:
    """Return the hooks of the strategy whose chief writes files; None: all write.

    Without a strategy all ranks would write the same file. They may if their trainings
    are declared as local.

    Args:
        saved: A model, a layer or an archive: it has a strategy of its own, or that of
            its variables, or none.
    """
    hooks = hooks_of(getattr(saved, "distribute_strategy", None))
    if hooks is not None or TRAINED_LOCALLY.get(saved):
        return hooks
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
        variable = of_tensorflow(saved.variables[0])
        hooks = hooks_of(getattr(variable, "distribute_strategy", None))
    return hooks or current_hooks() or _hooks_in_use(saved)


def _hooks_in_use(trainer: Any) -> KerasHooks | None:
    """Return the hooks of a strategy of several workers in use; else None."""
    own = getattr(trainer, "_distribute_strategy", None)
    if own is not None or tf.distribute.has_strategy():
        return None
    found: Any = (hooks for hooks in in_use if hooks.workers.communicator.size > 1)
    return next(found, None)
