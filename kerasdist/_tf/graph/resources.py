"""The uses of variables by the operations of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.python.framework import auto_control_deps_utils


def reads_or_writes(
    graph: Any, operations: Sequence[Any], variables: Sequence[Any]
) -> tuple[bool, bool]:
    """Return whether operations read, or write, any of the variables.

    An operation that TensorFlow knows nothing about counts as writing.

    Args:
        graph: The graph of a function that is being traced.
        operations: Operations of it; those that call functions count for them.
        variables: TensorFlow's variables from outside of the function.
    """
    handles = {id(variable.handle) for variable in variables}
    inside = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
    read = written = False
    for operation in operations:
        if not any(id(tensor) in inside for tensor in operation.inputs):
            continue
        found = auto_control_deps_utils.get_read_write_resource_inputs(operation)
        read |= any(id(tensor) in inside for tensor in found[0])
        written |= any(id(tensor) in inside for tensor in found[1])
    return read, written
