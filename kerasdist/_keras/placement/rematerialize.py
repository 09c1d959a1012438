"""Activations that are recomputed instead of kept.

The results of the forward pass that the backward pass needs are most of the memory of a
step. A segment is a run of layers on one device. Of a segment only the inputs are kept;
when its gradients are needed, it is recomputed from them:

    1. forward    the segment's layers run without being recorded
    2. backward   gradients of the outputs are there: the layers run again, with the
                  same random numbers and without side effects, and are recorded
    3. gradients  of the inputs and variables are computed from that record

In the second run dropout drops the same elements, variables have the same values
(nothing updates them between), and assignments, such as those of BatchNormalization's
statistics and of metrics, and `add_loss` have no effect. That doesn't hold for
variables that aren't Keras's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state, masking

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._tf.patching import Original


def rematerializing(active: bool = True) -> contextlib.AbstractContextManager[None]:
    """Recompute the activations of layers that are called inside of the block."""
    return setting(rematerializing=active)


def call_layer(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Layer.__call__`: run a layer on one device as a segment.

    The outermost such layer is, but not a whole model: one that Keras runs operation by
    operation is divided into segments by `run_through_graph`.
    """
    device = None
    if _is_due() and layer.built and not (_is_model(layer) and _context() is None):
        device = _device(layer)
    if device is None:
        return original(layer, *args, **kwargs)
    leaves = tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf)]
    if not places:
        return original(layer, *args, **kwargs)

    def run(tensors: list[Any]) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        own_args, own_kwargs = tree.pack_sequence_as((args, kwargs), filled)
        return original(layer, *own_args, **own_kwargs)

    return _segment(run, [leaves[place] for place in places], [layer], device)


def run_through_graph(
    original: Original,
    function: Any,
    inputs: Any,
    operation_fn: Callable[[Any], Any] = lambda op: op,
    call_fn: Any = None,
) -> Any:
    """Replace `Function._run_through_graph`: run segments instead of layers."""
    if not _is_due() or call_fn is not None or not isinstance(function, keras.Model):
        extra = () if call_fn is None else (call_fn,)
        return original(function, inputs, operation_fn, *extra)
    known = dict(zip(map(id, function.inputs), tree.flatten(inputs), strict=True))
    segments = _segments(function)
    needed = {id(tensor) for tensor in function.outputs}
    wanted: list[set[int]] = []  # by segments, the tensors that are read after each
    for _, nodes in reversed(segments):
        wanted.append(set(needed))
        needed.update(id(x) for node in nodes for x in node.input_tensors)
    for (device, nodes), later in zip(segments, reversed(wanted), strict=True):
        made = [x for node in nodes for x in node.outputs]
        inside = {id(x) for x in made}
        read = dict.fromkeys(id(x) for node in nodes for x in node.input_tensors)
        sources = [key for key in read if key not in inside]
        results = [id(x) for x in made if id(x) in later]

        def run(
            tensors: list[Any],
            nodes: list[Any] = nodes,
            sources: list[int] = sources,
            results: list[int] = results,
        ) -> list[Any]:
            values = dict(zip(sources, tensors, strict=True))
            for node in nodes:
                args, kwargs = node.arguments.fill_in(values)
                outputs = operation_fn(node.operation)(*args, **kwargs)
                flat = tree.flatten(outputs)
                values.update(zip(map(id, node.outputs), flat, strict=True))
            return [values[key] for key in results]

        tensors = [known[key] for key in sources]
        layers = [n.operation for n in nodes if isinstance(n.operation, keras.Layer)]
        if device is None or not all(map(_is_tensor, tensors)):
            found = run(tensors)
        else:
            found = _segment(run, tensors, layers, device)
        known.update(zip(results, found, strict=True))
    outputs = [known[id(tensor)] for tensor in function.outputs]
    return tree.pack_sequence_as(function._outputs_struct, outputs)


def draw_seed(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Replace `SeedGenerator.next`: return the first run's seeds in the second."""
    if current.seeds is None:
        return original(*args, **kwargs)
    if current.second_run:
        current.drawn += 1
        return current.seeds[current.drawn - 1]
    seed = original(*args, **kwargs)
    current.seeds.append(seed)
    return seed


def assign(original: Original, variable: Any, value: Any) -> Any:
    """Replace `Variable.assign`: do nothing in the second run."""
    return value if current.second_run else original(variable, value)


def _is_due() -> bool:
    return current.rematerializing and current.seeds is None and _tf.is_recording()


def _context() -> Any:
    """Return Keras's state of the current call: its first caller, and `training`."""
    return global_state.get_global_attribute("current_call_ctx")


def _is_model(layer: Any) -> bool:
    return isinstance(layer, keras.Model)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor)


def _device(layer: Any) -> str | None:
    """Return the device of all of a layer's variables, or None."""
    devices = {weight.value.device for weight in layer.weights}
    return devices.pop() if len(devices) == 1 else None


def _segments(function: Any) -> list[tuple[str | None, list[Any]]]:
    """Return nodes in an order in which they can run, cut where the device changes.

    An operation without variables is in the segment of the one before it.
    """
    segments: list[tuple[str | None, list[Any]]] = []
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            operation = node.operation
            if not operation or node.is_input:
                continue
            plain = not getattr(operation, "weights", None)
            device = None if plain else _device(operation)
            if segments and (segments[-1][0] == device or plain):
                segments[-1][1].append(node)
            elif segments and not any(
                getattr(one.operation, "weights", None) for one in segments[-1][1]
            ):
                # Only operations without variables so far: they join the next segment.
                segments[-1] = (device, [*segments[-1][1], node])
            else:
                segments.append((device, [node]))
    return segments


def _segment(
    run: Callable[[list[Any]], Any],
    tensors: list[Any],
    layers: list[Any],
    device: str,
) -> Any:
    """Run a segment on tensors, and once more for its gradients."""
    every = list(
        {id(x): x for layer in layers for x in layer._flatten_layers()}.values()
    )
    seeds: list[Any] = []
    masks = [masking.get_keras_mask(tensor) for tensor in tensors]
    known: dict[str, Any] = {}
    context, calls = _context(), current.calls

    def once(given: list[Any], second_run: bool) -> list[Any]:
        """Return the outputs that are tensors, then the layers' added losses."""
        for tensor, mask in zip(given, masks, strict=True):
            if mask is not None:
                masking.set_keras_mask(tensor, mask)
        counts = [len(layer._losses) for layer in every]
        running = setting(calls=calls, seeds=seeds, second_run=second_run, drawn=0)
        # So that there is one before, also in a thread that has called no layer.
        global_state.set_global_attribute("current_call_ctx", _context())
        state = global_state.GLOBAL_STATE_TRACKER
        in_context = _tf.replaced(state, current_call_ctx=context)
        with running, in_context:
            outputs = run(given)
        losses = [layer._losses[n:] for layer, n in zip(every, counts, strict=True)]
        for layer, count in zip(every, counts, strict=True):
            del layer._losses[count:]
        leaves = tree.flatten(outputs)
        if not second_run:
            known.update(outputs=outputs, leaves=leaves, losses=losses)
        return [x for x in leaves if _is_tensor(x)] + [
            x for some in losses for x in some
        ]

    @tf.custom_gradient
    def segment(*given: Any) -> Any:
        def backward(*gradients: Any, variables: Any = None) -> Any:
            gradients = tuple(map(_dense, gradients))
            # 2. Run the layers again, recorded, on copies of the inputs.
            # They depend on `gradients`, so that the second run begins after those; a
            # control dependency alone would be optimized away together with the copy.
            late = [_after(tensor, gradients) for tensor in given]
            trained = list(variables or ())
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([x for x in late if _can_be_learned(x)])
                tape.watch(trained)
                found = once(late, True)
            # 3. Compute the gradients from that record.
            pairs = [
                (x, gradient)
                for x, gradient in zip(found, gradients, strict=True)
                if _can_be_learned(x) and gradient is not None
            ]
            results = tape.gradient(
                [x for x, _ in pairs],
                [*late, *trained],
                output_gradients=[gradient for _, gradient in pairs],
            )
            of_inputs = results[: len(late)]
            return (of_inputs, results[len(late) :]) if variables else of_inputs

        # 1. Run the layers unrecorded: only the inputs are kept.
        with _tf.stop_recording():
            return once(list(given), False), backward

    with tf.device(device):
        flat = segment(*[tf.identity(tensor) for tensor in tensors])
    # Restore the structure of the outputs, their masks, and the layers' losses.
    flat = list(flat)
    leaves = []
    for leaf in known["leaves"]:
        if not _is_tensor(leaf):
            leaves.append(leaf)
            continue
        made = flat.pop(0)
        mask = masking.get_keras_mask(leaf)
        if mask is not None:
            masking.set_keras_mask(made, mask)
        leaves.append(made)
    for layer, losses in zip(every, known["losses"], strict=True):
        layer._losses.extend(flat.pop(0) for _ in losses)
    return tree.pack_sequence_as(known["outputs"], leaves)


def _after(tensor: Any, gradients: Any) -> Any:
    """Return a copy of a tensor that is made after the gradients."""
    first = next(x for x in gradients if x is not None and _can_be_learned(x))
    if not _can_be_learned(tensor):
        with tf.control_dependencies([first]):
            return tf.identity(tensor)
    number = tf.cast(tf.reduce_max(tf.reshape(first, [-1])[:1]), tf.float32)
    # 0, also for NaN, in a form that no optimizer recognizes.
    zero = tf.where(tf.math.is_nan(number), 0.0, tf.minimum(tf.abs(number), 0.0))
    return tensor + tf.cast(zero, tensor.dtype)


def _dense(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient)


def _can_be_learned(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating)
