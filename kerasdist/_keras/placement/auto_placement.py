"""Automatic placements, which are planned when a model is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src import backend, tree

from kerasdist._keras.models.step_build import can_be_called
from kerasdist._keras.placement.layers import placer_of, prepare

# Keras's own default, where the batch size isn't known.
_ROWS = 32


def plan_placement(
    original: Callable[..., Any],
    trainer: Any,
    iterator: Any = None,
    data_batch: Any = None,
) -> Any:
    """Replace `_maybe_symbolic_build`, which is called before a first step.

    It builds the optimizer, and the variables must be on their devices by then.
    """
    placer = placer_of(trainer.distribute_strategy)
    if placer is not None and placer.needs_plan:
        example = data_batch
        if iterator is not None:
            example = iterator.data_adapter.get_tf_dataset().element_spec
        ensure_planned(trainer, placer, example)
        with trainer.distribute_strategy.scope():
            prepare(trainer, placer)
    return original(trainer, iterator=iterator, data_batch=data_batch)


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
