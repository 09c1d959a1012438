"""Devices of gradients' operations, and of operations without a device.

TensorFlow puts the operations of a gradient on the device where
`tf.GradientTape.gradient` is called, not on that of the operations that are
differentiated. A tape's record doesn't contain the device, but it contains the name
scope, which TensorFlow passes on unchanged as text. So hooks append the device to it:

    1. forward    an operation is made on a device; the recorded scope is
                  "scope <separator> device"
    2. backward   the two are split; the gradient's operations are made on that
                  device, in the scope that they would have had
    3. functions  of `tf.function` and `tf.custom_gradient` have a Python function
                  that computes the gradient: it is called on that device
    4. sums       of gradients of one tensor are made where the first of them is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute.one_device_strategy import (
    OneDeviceExtended as OneDeviceExtended,
)
from tensorflow.python.distribute.one_device_strategy import (
    _OneDeviceReplicaContext,
)
from tensorflow.python.eager import backprop, context
from tensorflow.python.framework import ops

from kerasdist._tf.patching import Original
from kerasdist._tf.tensor_origins import CALLS, CASES, IFS, WHILES, captured
from kerasdist._tf.variables import current_facets

_SEPARATOR = "\0"

# Operations that call functions, whose own operations are placed one by one, or take
# the device of the call: variables among its arguments don't determine its device.
_CALLS = frozenset({"For", *CALLS, *CASES, *IFS, *WHILES})


def on_device(device: str | None) -> AbstractContextManager[Any]:
    """Make operations on a device; None leaves that to TensorFlow."""
    return ops.device(device) if device else ExitStack()


def move_to_device_of(value: Any, other: Any) -> Any:
    """Return a value, or None, on the device of another one."""
    if value is None:
        return None
    with on_device(device_of(other)):
        return tf.identity(value)


def update_on(device: str) -> AbstractContextManager[Any]:
    """Update a variable that is on a device."""
    stack = ExitStack()
    stack.enter_context(ops.device(device))
    stack.enter_context(distribute_lib.UpdateContext(device))
    return stack


def replica_of(strategy: Any) -> AbstractContextManager[Any]:
    """Enter the only replica of a strategy with a `OneDeviceExtended`."""
    return _OneDeviceReplicaContext(strategy)


def source_device(tensor: Any) -> str:
    """Return the device of a tensor of a graph; empty if it isn't known.

    A tensor that is read from a variable is where the variable is.
    """
    op = tensor.op
    if op.device:
        return str(op.device)
    if op.type == "Placeholder":
        outer = captured(tensor)
        if outer is None:
            return ""
        if isinstance(outer, ops.EagerTensor):
            return str(outer.device)
        return source_device(outer)
    if calls_functions(op):
        return ""
    resources = [source for source in op.inputs if source.dtype == tf.resource]
    return source_device(resources[0]) if resources else ""


def calls_functions(op: Any) -> bool:
    """Return whether an operation of a graph calls functions."""
    return op.type in _CALLS


@contextmanager
def default_placement(choose: Callable[[Any], str]) -> Iterator[None]:
    """Let `choose` decide the device of each operation that is put into this graph.

    It is called after all `tf.device` scopes, also for operations of functions that
    are traced inside: the operation's device is the one of those scopes, or empty.
    """
    with ops.get_default_graph().device(choose):
        yield


def _is_placing() -> bool:
    return current_facets().places_gradients


def _adds_in_turn() -> bool:
    placer = current_facets().placer
    return placer is not None and placer.micro_batches > 1


def device_of(tensors: Any) -> str:
    """Return the device of the first tensor of a nest, or empty."""
    for tensor in tf.nest.flatten(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            tensor = tensor.values
        if isinstance(tensor, ops.EagerTensor):
            return str(tensor.device)
        if isinstance(tensor, tf.Tensor):
            return str(tensor.op.device)
    return ""


def record_device(
    original: Original, op_name: str, inputs: Any, attrs: Any, outputs: Any
) -> None:
    """Replace `record_gradient`: record an operation's device for its gradient.

    See 1. above.
    """
    device = ""
    if not context.executing_eagerly() and _is_placing():
        device = device_of(outputs)
    if not device:
        original(op_name, inputs, attrs, outputs)
        return
    scope = f"{ops.get_name_scope()}{_SEPARATOR}{device}"
    pywrap_tfe.TFE_Py_RecordGradient(op_name, inputs, attrs, outputs, scope)


def differentiate_on_device(
    original: Original,
    op_name: str,
    attributes: Any,
    count: int,
    inputs: Any,
    outputs: Any,
    gradients: Any,
    skipped: Any,
    scope: str | None,
) -> Any:
    """Replace `_gradient_function`: compute on the operation's device.

    See 2. above.
    """
    device = ""
    if scope and _SEPARATOR in scope:
        scope, _, device = scope.partition(_SEPARATOR)
    elif context.executing_eagerly() and _is_placing():
        # Tensors that the gradient doesn't need aren't kept by TensorFlow.
        device = device_of(outputs)
    with on_device(device):
        return original(
            op_name, attributes, count, inputs, outputs, gradients, skipped, scope
        )


def call_on_device(
    original: Original,
    op_type: str,
    output_tensors: Any,
    input_tensors: Any,
    backward_function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replace `record_operation` and the like: a function's gradient is on its device.

    See 3. above.
    """
    device = device_of(output_tensors) if _is_placing() else ""
    function = backward_function
    if device:

        def on_its_device(*gradients: Any, **keywords: Any) -> Any:
            with on_device(device):
                return backward_function(*gradients, **keywords)

        function = on_its_device
    return original(op_type, output_tensors, input_tensors, function, *args, **kwargs)


def add_on_device(original: Original, gradients: Any) -> Any:
    """Replace `_aggregate_grads`: add gradients where the first of them is.

    See 4. above.
    """
    if len(gradients) < 2 or not _is_placing():
        return original(gradients)
    with on_device(device_of(gradients)):
        if _adds_in_turn() and all(isinstance(g, tf.Tensor) for g in gradients):
            # One at a time as they arrive, the last micro-batch's first: one sum of all
            # would keep them all until the end of the step, and would be computed when
            # the device has nothing else left to do.
            total = gradients[-1]
            for gradient in gradients[-2::-1]:
                total = total + gradient
            return total
        return original(gradients)


def register() -> None:
    """Register hooked functions of which TensorFlow's runtime holds references."""
    pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)
    pywrap_tfe.TFE_Py_RegisterVSpace(
        backprop._default_vspace._replace(aggregate_fn=backprop._aggregate_grads)
    )
