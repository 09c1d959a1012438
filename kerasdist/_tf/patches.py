"""The table of the functions of TensorFlow that are wrapped, with hook and purpose.

`patching` defines the rows. CONTRIBUTING.md has this table for readers, generated
by `PYTHONPATH=tests/support python tests/_keras/test_patches.py`.
"""

from __future__ import annotations

import tensorflow as tf

from kerasdist._tested import range_in_words
from kerasdist._tf import gradient_placement
from kerasdist._tf.patching import Patch, Patcher
from kerasdist.errors import IncompatibleTensorFlowError

_VALUES = "tensorflow.python.distribute.values"
_EAGER = "tensorflow.python.eager"

TABLE = (
    Patch(
        hook="variables.aggregate",
        feature="core",
        does="replicas that hold the same value write it without a merge call",
        targets=(
            f"{_VALUES}.apply_aggregation_replica_context"
            "(value, aggregation, destinations)",
        ),
    ),
    Patch(
        hook="variables.to_float",
        feature="core",
        does="`float(model.optimizer.learning_rate)`, as of a plain variable",
        targets=(f"{_VALUES}.DistributedVariable.__float__",),
        adds=True,
    ),
    Patch(
        hook="variables.to_int",
        feature="core",
        does="`int(variable)`, as of a plain variable",
        targets=(f"{_VALUES}.DistributedVariable.__int__",),
        adds=True,
    ),
    Patch(
        hook="variables.keep_graph",
        feature="core",
        does="`keras.backend.clear_session()` doesn't end the scope around it",
        targets=("tensorflow.python.framework.ops._DefaultGraphStack.reset(self)",),
    ),
    Patch(
        hook="variables.call",
        feature="core",
        does="functions of a SavedModel loaded in the scope can be called there",
        targets=(
            "tensorflow.python.saved_model.load._WrapperFunction._call_flat"
            "(self, args, captured_inputs)",
        ),
    ),
    Patch(
        hook="gradient_placement.record_device",
        feature="placement",
        does="the device of an operation is recorded for its gradient",
        targets=(f"{_EAGER}.execute.record_gradient(op_name, inputs, attrs, outputs)",),
    ),
    Patch(
        hook="gradient_placement.call_on_device",
        feature="placement",
        does="a function's gradient is computed where the function was",
        targets=(
            f"{_EAGER}.record.record_operation"
            "(op_type, output_tensors, input_tensors, backward_function, ...)",
            f"{_EAGER}.record.record_operation_backprop_only"
            "(op_type, output_tensors, input_tensors, backward_function, ...)",
        ),
    ),
    Patch(
        hook="gradient_placement.differentiate_on_device",
        feature="placement",
        does="an operation's gradient is computed where the operation was",
        targets=(
            f"{_EAGER}.backprop._gradient_function(op_name, attr_tuple, num_inputs, "
            "inputs, outputs, out_grads, skip_input_indices, forward_pass_name_scope)",
        ),
    ),
    Patch(
        hook="gradient_placement.add_on_device",
        feature="placement",
        does="gradients of one tensor are added where the first of them is",
        targets=(f"{_EAGER}.backprop._aggregate_grads(gradients)",),
    ),
    Patch(
        hook="remote.add_function",
        feature="remote",
        does="other threads run while other tasks are called to add a function",
        targets=(f"{_EAGER}.context.Context.add_c_function(self, c_func)",),
    ),
    Patch(
        hook="remote.remove_function",
        feature="remote",
        does="the same for removing one; after a loss none is removed",
        targets=(f"{_EAGER}.context.Context.remove_function(self, name)",),
    ),
)

_PATCHER = Patcher(
    "kerasdist._tf",
    TABLE,
    lambda faults: IncompatibleTensorFlowError(
        tf.__version__, faults, range_in_words("tensorflow")
    ),
)


def check() -> None:
    """Check that TensorFlow has every function that is wrapped. Changes nothing.

    Raises:
        IncompatibleTensorFlowError: Lists all that is missing or different.
    """
    _PATCHER.check()


def install(feature: str) -> None:
    """Put the hooks of a feature into TensorFlow, once per process.

    Raises:
        IncompatibleTensorFlowError: See `check`. Nothing has changed.
    """
    _PATCHER.install(feature)
    if feature == "placement":
        gradient_placement.register()


def uninstall() -> None:
    """Take all hooks out again, for tests."""
    _PATCHER.uninstall()
    gradient_placement.register()
