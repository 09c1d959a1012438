"""Models whose placement is planned when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src import backend, tree

from kerasdist._keras.placed_layers import placer_of, prepare

__all__ = ["ensure_planned", "plan_placement"]

# Keras's own, where nothing says how large a batch is.
_ROWS = 32


def plan_placement(
    original: Callable[..., Any],
    trainer: Any,
    iterator: Any = None,
    data_batch: Any = None,
) -> Any:
    """In place of `_maybe_symbolic_build`, which is called before a first step.

    It builds the optimizer: the variables must be where they belong by then.
    """
    placer = placer_of(trainer.distribute_strategy)
    if placer is not None and _is_unplanned(placer):
        example = data_batch
        if iterator is not None:
            example = iterator.data_adapter.get_tf_dataset().element_spec
        ensure_planned(trainer, placer, example)
        with trainer.distribute_strategy.scope():
            prepare(trainer, placer)
    return original(trainer, iterator=iterator, data_batch=data_batch)


def ensure_planned(trainer: Any, placer: Any, example: Any = None) -> None:
    """Have the plan of an automatic placement made, if it isn't yet.

    Args:
        trainer: The model.
        placer: Of its strategy.
        example: A batch, or what Keras knows of one: inputs, targets, weights; or None.

    Raises:
        ValueError: The model isn't built, and nothing says what it's called with.
        PlanError: It doesn't fit.
    """
    if not _is_unplanned(placer):
        return
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
    # Functional models know their inputs, and in which order they take them.
    known = hasattr(trainer, "_inputs_struct") or getattr(trainer, "_functional", None)
    placer.make_plan(trainer, int(rows or _ROWS), None if known else specs)


def _is_unplanned(placer: Any) -> bool:
    return hasattr(placer, "make_plan") and placer.plan is None


def _spec(value: Any) -> Any:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.KerasTensor(tuple(value.shape), dtype)
