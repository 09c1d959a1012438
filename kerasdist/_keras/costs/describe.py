"""Costs of the layers of a model that a function builds, without its weights.

1. the function runs inside `without_weights`: all layers and variables exist, but
   weights have no memory
2. the model is called with placeholders in a graph of its own, and differentiated;
   every layer that is placed as a whole marks its operations by a name scope, which
   the operations of its backward pass inherit
3. `liveness` analyzes this graph
4. the optimizer is built for the same variables, and its slots are counted

So a layer's cost is that of what TensorFlow would run, for any kind of layer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from kerasdist import _tf
from kerasdist._keras.costs.liveness import Traced, Use, measure
from kerasdist._keras.costs.placement_units import Units
from kerasdist.placement.partition import LayerCost, ModelCost, TensorCost

# The optimizer slots of trained weights, found by building the optimizer.

# They don't touch rows without a gradient, and never make such a gradient dense.
_ROWS_ONLY = (keras.optimizers.SGD,)
# How many arrays of a weight's size an update has before it's done with one. One moment
# after the other needs two, but TensorFlow's threads compute them more or less at the
# same time: for a table of 77 MB with Adam two to four were measured.
_UPDATE_ARRAYS = 3


def copy_of(optimizer: Any) -> Any:
    """Return a copy of an optimizer that has no slots of weights yet.

    Args:
        optimizer: An optimizer, its name, or None.

    Returns:
        A new optimizer; None for None.

    Raises:
        ValueError: The optimizer can't be copied.
    """
    if optimizer is None:
        return None
    try:
        if isinstance(optimizer, str):
            return keras.optimizers.get(optimizer)
        return type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        raise ValueError(
            "A plan needs an optimizer that can be recreated from its configuration, "
            f"to count its slots. Received: optimizer={optimizer!r}; expected a "
            "`keras.optimizers.Optimizer` whose `get_config` returns the arguments of "
            "its constructor, or a name like 'adam'."
        ) from error


def slot_bytes(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Build an optimizer; return the bytes of its slots for each variable.

    Slots are all of its variables that aren't scalars: moments, averages (EMA),
    accumulated gradients. To be called inside `without_weights`.

    Args:
        optimizer: From `copy_of`; None has no slots.
        variables: Keras variables.
    """
    if optimizer is None:
        return [0] * len(variables)
    # One of several equal variables is enough, which halves the time.
    keys = [_key(optimizer, variable) for variable in variables]
    chosen = dict(zip(keys, variables, strict=True))
    built = dict(zip(chosen, _build(optimizer, [*chosen.values()]), strict=True))
    return [built[key] for key in keys]


def _key(optimizer: Any, variable: Any) -> Any:
    """Return a key; variables with the same key get slots of the same size."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(inner)
    # Muon depends on paths, and optimizers from outside of Keras may do so.
    if kind.__module__.partition(".")[0] != "keras" or kind.__name__ == "Muon":
        return id(variable)
    replaced = bool(getattr(variable, "overwrite_with_gradient", False))
    return tuple(variable.shape), variable.dtype, replaced


def _build(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    if not variables:
        return []
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    counts = {id(variable): 0 for variable in variables}
    owned: set[int] = set()
    original = inner.add_variable_from_reference

    def add(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(reference_variable, *args, **kwargs)
        if id(reference_variable) in counts:
            counts[id(reference_variable)] += _bytes(made)
            owned.add(id(made))
        return made

    inner.add_variable_from_reference = add
    try:
        optimizer.build(list(variables))
    finally:
        del inner.add_variable_from_reference
    # Adafactor's slots have other shapes than the weights.
    rest = [v for v in inner.variables if id(v) not in owned and len(v.shape)]
    total = sum(map(_bytes, rest))
    elements = sum(math.prod(v.shape) for v in variables) or 1
    return [
        counts[id(v)] + round(total * math.prod(v.shape) / elements) for v in variables
    ]


def gradient_is_dense(optimizer: Any, gradient: Any) -> bool:
    """Return whether a weight's gradient takes as much memory as the weight."""
    if not isinstance(gradient, tf.IndexedSlices):
        return True
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return not (type(inner) in _ROWS_ONLY and not inner.momentum)


def updates_at_once(optimizer: Any) -> int:
    """Return how many arrays of a weight's size exist while that weight is updated."""
    return 0 if optimizer is None else _UPDATE_ARRAYS


def _bytes(variable: Any) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


# Models without weights: variables that have a shape, but no memory.
#
# Inside `without_weights` a model is built as usual, by any of Keras's ways. Only its
# variables differ: they have a TensorFlow handle, which takes memory when it first gets
# a value, and it never gets one. Afterwards everything is as before: the next layers
# get the names, and the next weights the values, that they would have got without it.

# Variables this small are initialized: step counters, seeds, learning rates are read.
_FEW_ELEMENTS = 16


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Build models without weights in a `with` block, and leave no trace of them.

    Afterwards Keras's names and seeds, and Python's and NumPy's random numbers, are
    what they were before.
    """
    state = global_state.GLOBAL_STATE_TRACKER
    # Until 3.15 settings were stored separately.
    settings = getattr(global_state, "GLOBAL_SETTINGS_TRACKER", None)
    kept = {name: _copy(value) for name, value in vars(state).items()}
    python, numpy = random.getstate(), np.random.get_state()
    # A generator created inside would have no value.
    generator = kept.get("global_seed_generator")
    seeds = None if generator is None else tf.identity(generator.state.value)
    # Garbage (a model's layers, a graph's operations) is collected once, at the end.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with shapes_only():
            yield
    finally:
        if collecting:
            gc.enable()
        # `keras.backend.clear_session` replaces both.
        global_state.GLOBAL_STATE_TRACKER = state
        if settings is not None:
            global_state.GLOBAL_SETTINGS_TRACKER = settings
        vars(state).clear()
        vars(state).update(kept)
        if generator is not None:
            generator.state.assign(seeds)
        random.setstate(python)
        np.random.set_state(numpy)


def shapes_only() -> Any:
    """Create variables without memory, in the default graph; a context manager."""
    return tf.variable_creator_scope(_create)


def _copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _create(create: Callable[..., Any], **kwargs: Any) -> Any:
    shape, dtype = _spec(kwargs["initial_value"], kwargs.get("dtype"))
    if shape.num_elements() is not None and shape.num_elements() <= _FEW_ELEMENTS:
        return create(**kwargs)
    return _tf.variable_without_value(
        shape, dtype, bool(kwargs.get("trainable")), kwargs.get("name") or "variable"
    )


def _spec(initial: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the shape and dtype of a variable with this initial value."""
    if callable(initial):
        # Keras's variables have them as attributes; the initializer isn't called.
        for cell in getattr(initial, "__closure__", None) or ():
            variable = cell.cell_contents
            if isinstance(variable, keras.Variable):
                return tf.TensorShape(variable.shape), tf.as_dtype(dtype)
        with tf.__internal__.FuncGraph("initial_value").as_default():
            initial = tf.convert_to_tensor(initial(), dtype)
            return initial.shape, initial.dtype
    if not hasattr(initial, "shape") or not hasattr(initial, "dtype"):
        initial = np.asarray(initial)
    return tf.TensorShape(initial.shape), tf.as_dtype(dtype or initial.dtype)


def describe(
    model_fn: Callable[[], Any],
    rows: int,
    optimizer: Any = None,
    inputs: Any = None,
) -> ModelCost:
    """Return what the layers of a model cost.

    Args:
        model_fn: Returns the model. Takes no arguments.
        rows: The number of rows to trace with; costs are given per row.
        optimizer: A Keras optimizer or its name; by default the one that the model was
            compiled with, if any.
        inputs: The model's inputs, if the model doesn't define them: shapes without the
            batch (tuples), or `keras.Input`s, in a structure.

    Raises:
        ValueError: The model can't be built like this; the message names the fault.
    """
    with without_weights():
        model = _built(model_fn)
        return _describe(model, rows, optimizer, inputs)


def describe_built(model: Any, rows: int, inputs: Any = None) -> ModelCost:
    """Return the costs of the layers of an existing model, with its own optimizer.

    Args:
        model: A model, all of whose layers are built. It isn't changed.
        rows: See `describe`.
        inputs: See `describe`.
    """
    with without_weights():
        return _describe(model, rows, None, inputs)


def _built(model_fn: Callable[[], Any]) -> Any:
    try:
        model = model_fn()
    except tf.errors.FailedPreconditionError:
        # The function reads weights, as in a call with zeros that builds a model:
        # put its computation into a graph instead.
        with tf.__internal__.FuncGraph("model").as_default(), shapes_only():
            model = model_fn()
    if not isinstance(model, keras.Model):
        raise ValueError(
            "A plan needs a function that returns a model. Received: "
            f"model_fn={model_fn!r}, which returned {model!r}; expected a "
            "`keras.Model`."
        )
    return model


def _describe(model: Any, rows: int, optimizer: Any, inputs: Any) -> ModelCost:
    if optimizer is None and getattr(model, "optimizer", None) is not None:
        optimizer = model.optimizer
    optimizer = copy_of(optimizer)
    graph = tf.__internal__.FuncGraph("step")
    units = Units(model)
    with graph.as_default(), shapes_only():
        data = _placeholders(model, rows, inputs)
        with units.marking(), tf.GradientTape() as tape:
            outputs = _call(model, data)
        results = [
            tensor
            for tensor in tf.nest.flatten(outputs)
            if tf.is_tensor(tensor) and tensor.dtype.is_floating
        ]
        forward = len(graph.get_operations())
        trained = _unique(model.trainable_variables)
        seeds = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in results]
        gradients = tape.gradient(
            results, [variable.value for variable in trained], output_gradients=seeds
        )
    ends = [
        tensor
        for gradient in gradients
        if gradient is not None
        for tensor in tf.nest.flatten(gradient, expand_composites=True)
    ]
    weights = _weights(units, trained, gradients, optimizer)
    use = measure(
        Traced(
            made=graph.get_operations(),
            forward=forward,
            data=[t for t in tf.nest.flatten(data) if t is not None],
            outputs=results,
            seeds=seeds,
            gradients=ends,
            unit_of=units.of,
            units=len(units.layers),
        )
    )
    return _costs(units, use, weights, rows)


@dataclasses.dataclass
class _Weights:
    """The variables of one layer, in bytes; see `LayerCost`."""

    parameters: int = 0
    trainable: int = 0
    slots: int = 0
    gradients: int = 0
    update: int = 0


def _call(model: Any, data: Any) -> Any:
    try:
        return model(data, training=True)
    except Exception as error:
        raise ValueError(
            "A plan calls the model with placeholders in a graph, and this failed: "
            f"{type(error).__name__}: {error}\nReceived: inputs="
            f"{tf.nest.map_structure(lambda t: (t.shape, t.dtype.name), data)!r}; "
            "expected the inputs of `model.call` in `fit`. Give `inputs=` another "
            "shape, or several in a list or dict."
        ) from error


def _placeholders(model: Any, rows: int, inputs: Any) -> Any:
    """Return placeholders for a batch, in the structure of the model's inputs."""
    given = inputs
    if given is None:
        given = getattr(model, "_inputs_struct", None)
        functional = getattr(model, "_functional", None)
        if given is None and functional is not None:
            given = functional._inputs_struct
    if given is None:
        shapes = list((getattr(model, "_build_shapes_dict", None) or {}).values())
        if len(shapes) == 1:
            shape = shapes[0]
            given = tuple(shape[1:]) if _is_shape(shape) else None
    if given is None:
        raise ValueError(
            "A plan needs the shapes of the model's inputs. Received: "
            f"model={type(model).__name__}({model.name!r}), which doesn't define them. "
            "Give them as `inputs=(28, 28, 1)` (shapes without the batch, or "
            "`keras.Input`s; several in a list or dict), begin the model with "
            "`keras.Input`, or call `model.build` in `model_fn`."
        )
    return _placed(given, rows)


def _is_shape(given: Any) -> bool:
    return isinstance(given, tuple | list) and all(
        size is None or isinstance(size, int) for size in given
    )


def _placed(given: Any, rows: int) -> Any:
    if isinstance(given, dict):
        return {name: _placed(value, rows) for name, value in given.items()}
    if _is_shape(given):
        shape, dtype = [rows, *given], keras.config.floatx()
    elif isinstance(given, tuple | list):
        return type(given)([_placed(value, rows) for value in given])
    else:
        shape = [given.shape[0] or rows, *given.shape[1:]]
        dtype = given.dtype
    if None in shape:
        raise ValueError(
            "A plan needs inputs of known sizes. Received: an input of shape "
            f"{tuple(shape)} (the first is the batch); give `inputs=` with a number in "
            "place of None, for instance the longest sequence."
        )
    return tf.compat.v1.placeholder(keras.backend.standardize_dtype(dtype), shape)


def _unique(variables: Any) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _weights(
    units: Units, trained: list[Any], gradients: list[Any], optimizer: Any
) -> list[_Weights]:
    """Return the bytes of each layer's variables, in the order of layer numbers."""
    kept = slot_bytes(optimizer, trained)
    about = {
        id(variable): (size, gradient)
        for variable, size, gradient in zip(trained, kept, gradients, strict=True)
    }
    at_once = updates_at_once(optimizer)
    found: dict[int, _Weights] = {}
    for number, variables in units.variables():
        total = found.setdefault(number, _Weights())
        for variable in variables:
            size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
            total.parameters += size
            if id(variable) not in about:
                continue
            slot, gradient = about[id(variable)]
            total.trainable += size
            total.slots += slot
            if gradient is not None and gradient_is_dense(optimizer, gradient):
                total.gradients += size
                total.update = max(total.update, at_once * size)
    return [found.get(number, _Weights()) for number in range(len(units.layers))]


def _costs(units: Units, use: Use, weights: list[_Weights], rows: int) -> ModelCost:
    """Combine the results, in the order in which the layers run.

    Layers with the same path go to one device, and become one layer here.
    """
    last = len(units.layers), 0
    begins = [last if u.first is None else (0, u.first) for u in use.units]
    places: dict[int, int] = {}
    layers: list[LayerCost] = []
    index: dict[str, int] = {}
    paths = units.paths()
    for number in sorted(range(len(units.layers)), key=lambda n: (begins[n], n)):
        made, held, layer = use.units[number], weights[number], units.layers[number]
        if made.first is None and not held.parameters:
            continue
        cost = LayerCost(
            path=paths[number],
            kind=type(layer).__name__,
            parameter_bytes=held.parameters,
            trainable_bytes=held.trainable,
            slot_bytes=held.slots,
            gradient_bytes=held.gradients,
            update_bytes=held.update,
            saved_row_bytes=made.saved / rows,
            saved_bytes=made.fixed,
            transient_row_bytes=made.transient / rows,
            output_row_bytes=made.output / rows,
            row_flops=made.flops / rows,
        )
        if cost.path in index:
            places[number] = index[cost.path]
            layers[places[number]] = _joined(layers[places[number]], cost)
        else:
            places[number] = index[cost.path] = len(layers)
            layers.append(cost)
    tensors = [
        TensorCost(
            source=places.get(source, -1),
            consumers=tuple(places[reader] for reader in readers),
            row_bytes=size / rows,
        )
        for source, readers, size in use.tensors
    ]
    return ModelCost(layers=tuple(layers), tensors=tuple(tensors))


def _joined(a: LayerCost, b: LayerCost) -> LayerCost:
    """Merge two layers with the same path."""
    most = ("update_bytes", "transient_row_bytes")
    values = {}
    for field in dataclasses.fields(LayerCost):
        if field.name not in ("path", "kind"):
            pair = getattr(a, field.name), getattr(b, field.name)
            values[field.name] = max(pair) if field.name in most else sum(pair)
    return dataclasses.replace(a, **values)
