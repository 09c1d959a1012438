"""Models on devices: checks and records before and around their use."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend, tree

from kerasdist._keras.context import current
from kerasdist._keras.placement.layers import LayerPlacer, placer_of, prepare
from kerasdist._keras.protocols import translating
from kerasdist._keras.unscoped_models import can_be_called
from kerasdist._tf.patching import Original
from kerasdist._tf.variables import facets_of

# Automatic placements, which are planned when a model is first used.

# Keras's own default, where the batch size isn't known.
_ROWS = 32


def plan_for_data(trainer: Any, placer: Any, iterator: Any, data_batch: Any) -> None:
    """Plan `placement='auto'` before a model and its optimizer are built for data.

    The variables must be on their devices by then.
    """
    if not placer.needs_plan:
        return
    example = data_batch
    if iterator is not None:
        example = iterator.data_adapter.get_tf_dataset().element_spec
    ensure_planned(trainer, placer, example)
    with trainer.distribute_strategy.scope():
        prepare(trainer, placer)


def ensure_planned(trainer: Any, placer: Any, example: Any = None) -> None:
    """Make the plan of an automatic placement, if there is none yet.

    Args:
        trainer: The model.
        placer: The placer of its strategy.
        example: A batch, or its specification: inputs, targets, weights; or None.

    Raises:
        ValueError: The model isn't built, and its inputs aren't known.
        PlanError: The model doesn't fit.
    """
    if not placer.needs_plan:
        return
    if not can_be_called(trainer):
        raise ValueError(
            'placement="auto" calls a model to find out what its layers cost. '
            f"Received: model={trainer.name!r}, which has no `call`. Give it one, or "
            "say where its layers are: placement={'encoder/.*': 'GPU:0', ...}."
        )
    inputs = example[0] if isinstance(example, tuple | list) else example
    specs = None if inputs is None else tree.map_structure(_spec, inputs)
    if not all(layer.built for layer in trainer._flatten_layers()):
        if specs is None:
            raise ValueError(
                'With placement="auto" a model must be built before it is used. '
                f"Received: model={trainer.name!r}, which isn't. Call `fit` or "
                "`evaluate` first, begin it with `keras.Input`, or call `model.build`."
            )
        with trainer.distribute_strategy.scope():
            backend.compute_output_spec(trainer, specs, training=False)
    rows = next((x.shape[0] for x in tree.flatten(specs) if x is not None), None)
    inputs = _sized(_inputs_of(trainer), specs)
    _check_sizes(trainer, inputs)
    placer.make_plan(trainer, int(rows or _ROWS), inputs)


def _inputs_of(trainer: Any) -> Any:
    """Return the inputs of a functional model, in its order; None for any other."""
    functional = getattr(trainer, "_functional", None) or trainer
    return getattr(functional, "_inputs_struct", None)


def _sized(inputs: Any, specs: Any) -> Any:
    """Return inputs with the data's sizes where the model leaves them open."""
    if inputs is None:
        return specs
    flat, given = tree.flatten(inputs), tree.flatten(specs)
    if len(flat) != len(given):
        return inputs
    shapes = []
    for one, other in zip(flat, given, strict=True):
        shape = tuple(one.shape)
        if other is not None and len(other.shape) == len(shape):
            pairs = zip(shape[1:], other.shape[1:], strict=True)
            shape = (shape[0], *(a if a is not None else b for a, b in pairs))
        shapes.append(keras.KerasTensor(shape, one.dtype))
    return tree.pack_sequence_as(inputs, shapes)


def _check_sizes(trainer: Any, inputs: Any) -> None:
    shapes = [tuple(x.shape) for x in tree.flatten(inputs) if x is not None]
    if any(None in shape[1:] for shape in shapes):
        raise ValueError(
            'With placement="auto" the sizes of inputs must be known when a model is '
            f"first used. Received: model={trainer.name!r}, with inputs of shapes "
            f"{shapes} (the first is the batch), and data of unknown sizes. Give "
            "`keras.Input` a length, pad all batches of the data to one "
            "(`padded_batch(padded_shapes=...)`), or give the layers' devices: "
            "placement={'encoder/.*': 'GPU:0', ...}."
        )


def _spec(value: Any) -> Any:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.KerasTensor(tuple(value.shape), dtype)


def compile_model(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `compile`: move a built model to its devices.

    That must happen before an optimizer knows the variables.
    """
    result = original(trainer, *args, **kwargs)
    placer = placer_of(trainer.distribute_strategy)
    if placer is not None:
        _check(trainer)
        with trainer.distribute_strategy.scope():
            prepare(trainer, placer)
    return result


def make_function(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `make_train_function` and the like: check patterns; record a step."""
    placer = placer_of(trainer.distribute_strategy)
    if placer is None:
        return original(trainer, *args, **kwargs)
    _check(trainer)
    ensure_planned(trainer, placer, current.next_batch)
    with trainer.distribute_strategy.scope():
        prepare(trainer, placer)
    name = original.__name__.removeprefix("make_")
    before = getattr(trainer, name)
    original(trainer, *args, **kwargs)
    function = getattr(trainer, name)
    if function is not before:
        if name == "train_function":
            function = _count(trainer, function)
        kind = name.removesuffix("_function")
        setattr(trainer, name, _recorded(placer, trainer, kind, function))
    return getattr(trainer, name)


def init_epoch_iterator(
    original: Original, iterator: Any, *args: Any, **kwargs: Any
) -> None:
    """Replace `TFEpochIterator.__init__`: note how many rows the next steps have."""
    original(iterator, *args, **kwargs)
    placer = placer_of(iterator._distribute_strategy)
    if placer is not None:
        current.next_rows = iterator.data_adapter.batch_size
        current.next_batch = None
        if placer.needs_plan:
            current.next_batch = iterator.data_adapter.get_tf_dataset().element_spec


def _recorded(
    placer: LayerPlacer, trainer: Any, kind: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a train, test or predict function whose first call is recorded."""
    optimizer = getattr(getattr(trainer, "optimizer", None), "name", "")
    first = not trainer.run_eagerly

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not first:
            return function(*args, **kwargs)
        first = False
        with placer.recording(kind, current.next_rows, optimizer):
            return function(*args, **kwargs)

    return call


def _count(trainer: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same training function, whose steps are counted as in plain Keras.

    For error messages: in a call that takes several steps the first one counts until
    the call ends. And in `iterations` at ends of data: there a step of plain Keras on
    data of unknown length finds no batch, and has counted itself.
    """
    counter = facets_of(trainer.distribute_strategy).step_counter
    counter = counter or types.SimpleNamespace(step=0)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = counter.step
        counter.step = before + 1
        try:
            result = function(*args, **kwargs)
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            counter.step = before  # the data had ended
            optimizer = trainer.optimizer
            scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            counts = optimizer is not None and not scales and not trainer.run_eagerly
            if counts and not isinstance(error, StopIteration):
                optimizer.iterations.assign_add(1)
            raise
        counter.step = before + int(trainer.steps_per_execution)
        return result

    return call


def begun_with_batch(step_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that begins when its batch is there.

    Otherwise operations that need no batch, as `iterations.assign_add(1)`, are run or
    not at the end of data: on other devices they don't know yet that there is none.
    """

    @functools.wraps(step_function)
    def step(data: Any) -> Any:
        leaves = tf.nest.flatten(data, expand_composites=True)
        with tf.control_dependencies([leaf for leaf in leaves if tf.is_tensor(leaf)]):
            return step_function(data)

    return step


def name_the_lost(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace methods that train or use a model: raise the lost worker's error."""
    with translating(facets_of(trainer.distribute_strategy).failure):
        return original(trainer, *args, **kwargs)


def failure_behind(trainer: Any, error: Exception) -> Exception | None:
    """Return the lost worker's error behind TensorFlow's error; or None."""
    if not isinstance(error, tf.errors.OpError):
        return None
    return facets_of(trainer.distribute_strategy).failure(error)


def reset_accumulators(original: Original, optimizer: Any) -> None:
    """Replace `_backend_reset_gradient_accumulators`: make the zeros in place."""
    if placer_of(tf.distribute.get_strategy()) is None:
        original(optimizer)
        return
    for accumulator in optimizer._accumulated_gradients:
        if accumulator is not None:
            with tf.device(accumulator.value.device):
                accumulator.assign(tf.zeros(accumulator.shape, accumulator.value.dtype))


def _check(trainer: Any) -> None:
    if trainer.jit_compile is True:
        raise ValueError(
            "XLA compiles a step for one device, and would undo the placement. "
            "Received: jit_compile=True under "
            f"{type(trainer.distribute_strategy).__name__} with a placement. Compile "
            "the model with jit_compile=False (or 'auto')."
        )
    if trainer.run_eagerly or tf.config.functions_run_eagerly():
        warnings.warn(
            "With run_eagerly=True the numbers are right, but a part of the backward "
            "pass runs on the device of the next layers, devices wait for each other, "
            "and `placement_report()` has nothing to report. Use it for debugging, and "
            "compile with run_eagerly=False for training.",
            stacklevel=5,
        )
