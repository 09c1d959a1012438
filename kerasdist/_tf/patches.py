"""The table of the functions of TensorFlow that are wrapped, with their hooks.

`patching` defines the text. CONTRIBUTING.md has this table for readers, generated
by `PYTHONPATH=tests/support python tests/_keras/test_patches.py`.
"""

from __future__ import annotations

import tensorflow as tf

from kerasdist._tf import gradient_placement
from kerasdist._tf.patching import Patcher, parse_table
from kerasdist._version import range_in_words
from kerasdist.errors import IncompatibleTensorFlowError

TABLE = parse_table(
    """
core
    variables
        aggregate $PYTHON.distribute.values.apply_aggregation_replica_context(value, \
                aggregation, destinations)
        + to_float $PYTHON.distribute.values.DistributedVariable.__float__
        + to_int $PYTHON.distribute.values.DistributedVariable.__int__
        keep_graph $PYTHON.framework.ops._DefaultGraphStack.reset(self)
        keep_error $FUNCTION.InterpolateRuntimeError.__exit__(self, typ, exc, tb)
        call $PYTHON.saved_model.load._WrapperFunction._call_flat(self, args, \
                captured_inputs)
placement
    gradient_placement
        record_device $PYTHON.eager.execute.record_gradient(op_name, inputs, attrs, \
                outputs)
        call_on_device $PYTHON.eager.record.record_operation|\
                record_operation_backprop_only(op_type, output_tensors, input_tensors, \
                backward_function, ...)
        differentiate_on_device $PYTHON.eager.backprop._gradient_function(op_name, \
                attr_tuple, num_inputs, inputs, outputs, out_grads, \
                skip_input_indices, forward_pass_name_scope)
        add_on_device $PYTHON.eager.backprop._aggregate_grads(gradients)
remote
    remote
        add_function $PYTHON.eager.context.Context.add_c_function(self, c_func)
        remove_function $PYTHON.eager.context.Context.remove_function(self, name)
""",
    FUNCTION="tensorflow.python.eager.polymorphic_function.atomic_function",
    PYTHON="tensorflow.python",
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
