"""Costs of the layers of a model that a function builds, without its weights.

1. the function runs inside `without_weights`: all layers and variables exist, but
   weights have no memory
2. the model is called with placeholders in a graph of its own, and differentiated;
   every layer that is placed as a whole marks its operations by a name scope, which
   the operations of its backward pass inherit
3. `graph_costs` analyzes this graph
4. the optimizer is built for the same variables, and its slots are counted

So a layer's cost is that of what TensorFlow would run, for any kind of layer.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from kerasdist import _tf
from kerasdist._keras.placement.graph_costs import Traced, measure
from kerasdist._keras.placement.layers import own_variables
from kerasdist.placement.partition import LayerCost, ModelCost


def describe(
    model_fn: Callable[[], Any],
    rows: int,
    optimizer: Any = None,
    inputs: Any = None,
) -> ModelCost:
    """Return what the layers of a model cost.

    Args:
        model_fn: Returns the model, which may also be one that exists: it isn't
            changed. Takes no arguments.
        rows: The number of rows to trace with, at least 2; costs are given per row.
        optimizer: A Keras optimizer or its name; by default the one that the model was
            compiled with, if any.
        inputs: The model's inputs, if the model doesn't define them: shapes without the
            batch (tuples), or `keras.Input`s, in a structure.

    Raises:
        ValueError: The model can't be built like this; the message names the fault.
    """
    with without_weights():
        model = _built(model_fn)
        # A single row could be mistaken for a dimension to broadcast.
        return _describe(model, max(2, rows), optimizer, inputs)


def tables_of(model: Any) -> list[Any]:
    """Return the trained variables of embeddings: a step changes some rows of them."""
    return [
        variable
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
        for variable in layer.trainable_variables
    ]


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
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None)
    optimizer = _copy_of(optimizer)
    graph = tf.__internal__.FuncGraph("step")
    units = _Units(model)
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
        trained = list({id(v): v for v in model.trainable_variables}.values())
        seeds = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in results]
        gradients = tape.gradient(
            results, [variable.value for variable in trained], output_gradients=seeds
        )
    costs = units.costs(optimizer, trained, gradients)
    ends = tf.nest.flatten(gradients, expand_composites=True)
    tensors, first = measure(
        Traced(
            made=graph.get_operations(),
            forward=forward,
            data=[t for t in tf.nest.flatten(data) if t is not None],
            outputs=results,
            seeds=seeds,
            gradients=[tensor for tensor in ends if tensor is not None],
            unit_of=units.of,
            rows=rows,
        ),
        costs,
    )
    # In the order in which they run; those that don't are last.
    ordered = sorted(
        costs, key=lambda cost: (cost.path not in first, first.get(cost.path, 0))
    )
    layers = {
        cost.path: cost
        for cost in ordered
        if cost.path in first or cost.parameter_bytes
    }
    index = {path: i for i, path in enumerate(layers)}
    return ModelCost(
        layers=tuple(layers.values()),
        tensors=tuple(
            dataclasses.replace(
                tensor,
                source=index[costs[tensor.source].path] if tensor.source >= 0 else -1,
                consumers=tuple(index[costs[n].path] for n in tensor.consumers),
            )
            for tensor in tensors
        ),
    )


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
    for known in (model, getattr(model, "_functional", None)):
        if given is None:
            given = getattr(known, "_inputs_struct", None)
    if given is None:
        shapes = list((getattr(model, "_build_shapes_dict", None) or {}).values())
        if len(shapes) == 1 and _is_shape(shapes[0]):
            given = tuple(shapes[0][1:])
    if given is None:
        raise ValueError(
            "A plan needs the shapes of the model's inputs. Received: "
            f"model={type(model).__name__}({model.name!r}), which doesn't define them. "
            "Give them as `inputs=(28, 28, 1)` (shapes without the batch, or "
            "`keras.Input`s; several in a list or dict), begin the model with "
            "`keras.Input`, or call `model.build` in `model_fn`."
        )
    return _placeholder(given, rows)


def _is_shape(given: Any) -> bool:
    return isinstance(given, tuple | list) and all(
        size is None or isinstance(size, int) for size in given
    )


def _placeholder(given: Any, rows: int) -> Any:
    if isinstance(given, dict):
        return {name: _placeholder(value, rows) for name, value in given.items()}
    if _is_shape(given):
        shape, dtype = [rows, *given], keras.config.floatx()
    elif isinstance(given, tuple | list):
        return type(given)([_placeholder(value, rows) for value in given])
    else:
        shape, dtype = [given.shape[0] or rows, *given.shape[1:]], given.dtype
    if None in shape:
        raise ValueError(
            "A plan needs inputs of known sizes. Received: an input of shape "
            f"{tuple(shape)} (the first is the batch); give `inputs=` with a number in "
            "place of None, for instance the longest sequence."
        )
    return tf.compat.v1.placeholder(keras.backend.standardize_dtype(dtype), shape)


# The layers of a model that are placed on a device as a whole.
#
# Built-in layers are, with all layers in them (MultiHeadAttention, Bidirectional,
# RNNs). Models, and custom layers that consist of other layers, are divided; the
# weights that such a layer has itself are placed by its own path.

_MARK = re.compile(r"kerasdist_unit_(\d+)x")
_marking = threading.Lock()


def _goes_whole(layer: Any) -> bool:
    """Return whether a layer is placed as a whole."""
    built_in = type(layer).__module__.partition(".")[0] == "keras"
    return not isinstance(layer, keras.Model) and (built_in or not layer._layers)


class _Units:
    """The layers of a model that are placed as a whole, numbered.

    Args:
        model: The model.

    Attributes:
        layers: The layers by number.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}
        self.layers: list[Any] = []

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Let calls of layers mark the operations that they make, in this thread."""
        original = keras.Layer.__call__
        me = threading.get_ident()
        inside = False

        @functools.wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if threading.get_ident() != me or inside or not _goes_whole(layer):
                return original(layer, *args, **kwargs)
            inside = True
            try:
                with tf.name_scope(f"kerasdist_unit_{self._number(layer)}x"):
                    return original(layer, *args, **kwargs)
            finally:
                inside = False

        with _marking, _tf.replaced(keras.Layer, __call__=call):
            yield

    def of(self, name: str) -> int | None:
        """Return the number of the layer that made an operation of this name."""
        marks = _MARK.findall(name)
        return int(marks[-1]) if marks else None

    def costs(
        self, optimizer: Any, trained: Sequence[Any], gradients: Sequence[Any]
    ) -> list[LayerCost]:
        """Return the costs of each layer's variables, by number.

        Layers with the same path, which go to one device, are one layer here.

        Args:
            optimizer: A new one; or None.
            trained: The trained variables.
            gradients: Theirs, or None where there is none.
        """
        slots = _slot_bytes(optimizer, trained)
        about = {
            id(variable): (size, gradient)
            for variable, size, gradient in zip(trained, slots, gradients, strict=True)
        }
        owners = list(self._variables())
        paths = {number: path for number, path, _ in owners}
        costs: dict[str, LayerCost] = {}
        found = []
        for number, layer in enumerate(self.layers):
            path = paths.get(number) or layer.name
            new = LayerCost(path=path, kind=type(layer).__name__)
            found.append(costs.setdefault(path, new))
        for number, _, variables in owners:
            cost = found[number]
            for variable in variables:
                size = _bytes(variable)
                cost.parameter_bytes += size
                if id(variable) not in about:
                    continue
                slot, gradient = about[id(variable)]
                cost.trainable_bytes += size
                cost.slot_bytes += slot
                if gradient is not None and not _keeps_rows(optimizer, gradient):
                    cost.gradient_bytes += size
                    if optimizer is not None:
                        updating = _UPDATE_ARRAYS * size
                        cost.update_bytes = max(cost.update_bytes, updating)
        return found

    def _variables(self) -> Iterator[tuple[int, str, list[Any]]]:
        """Yield the number, path and variables of layers, each variable once.

        A layer that only contains others, and has no variables, isn't yielded.
        """
        seen: set[int] = set()
        top = self._model.path or self._model.name
        for layer, path in _walk(self._model, top, set()):
            variables = layer.variables if _goes_whole(layer) else own_variables(layer)
            own = [v for v in variables if id(v) not in seen]
            seen.update(map(id, own))
            if own or id(layer) in self._numbers:
                yield self._number(layer), path, own

    def _number(self, layer: Any) -> int:
        if id(layer) not in self._numbers:
            self._numbers[id(layer)] = len(self.layers)
            self.layers.append(layer)
        return self._numbers[id(layer)]


def _walk(layer: Any, path: str, seen: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield all layers that may have variables, each once, and their paths."""
    if id(layer) in seen or isinstance(layer, keras.layers.InputLayer):
        return
    seen.add(id(layer))
    yield layer, path
    if not _goes_whole(layer):
        above = _prefix(layer, path)
        for child in layer._layers:
            yield from _walk(child, child.path or f"{above}{child.name}", seen)


def _prefix(layer: Any, path: str) -> str:
    """Return the beginning of the paths of a layer's children.

    Only layers with a `build` of their own know their path; those of their siblings
    begin alike. A functional model's name isn't a part of them.
    """
    for child in layer._layers:
        if child.path and child.path.endswith(child.name):
            return str(child.path.removesuffix(child.name))
    return "" if hasattr(layer, "_inputs_struct") else f"{path}/"


# The optimizer slots of trained weights, found by building the optimizer.

# They don't touch rows without a gradient, and never make such a gradient dense.
_ROWS_ONLY = (keras.optimizers.SGD,)
# How many arrays of a weight's size an update has before it's done with one. One moment
# after the other needs two, but TensorFlow's threads compute them more or less at the
# same time: for a table of 77 MB with Adam two to four were measured.
_UPDATE_ARRAYS = 3


def _copy_of(optimizer: Any) -> Any:
    """Return a copy of an optimizer, or of that of a name, without slots; or None.

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


def _slot_bytes(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Build an optimizer; return the bytes of its slots for each variable.

    Slots are all of its variables that aren't scalars: moments, averages (EMA),
    accumulated gradients. To be called inside `without_weights`.
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

    with _tf.replaced(inner, add_variable_from_reference=add):
        optimizer.build(list(variables))
    # Adafactor's slots have other shapes than the weights.
    rest = [v for v in inner.variables if id(v) not in owned and len(v.shape)]
    total = sum(map(_bytes, rest))
    elements = sum(math.prod(v.shape) for v in variables) or 1
    return [
        counts[id(v)] + round(total * math.prod(v.shape) / elements) for v in variables
    ]


def _keeps_rows(optimizer: Any, gradient: Any) -> bool:
    """Return whether a weight's gradient is a few rows of it, also in the update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rows = isinstance(gradient, tf.IndexedSlices)
    return rows and type(inner) in _ROWS_ONLY and not inner.momentum


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
    kept: dict[str, Any] = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in vars(state).items()
    }
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


def _create(create: Callable[..., Any], **kwargs: Any) -> Any:
    shape, dtype = _spec(kwargs["initial_value"], kwargs.get("dtype"))
    if shape.num_elements() is not None and shape.num_elements() <= _FEW_ELEMENTS:
        return create(**kwargs)
    return _tf.VariableWithoutValue(
        shape=shape,
        dtype=dtype,
        trainable=bool(kwargs.get("trainable")),
        name=kwargs.get("name") or "variable",
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
