"""The trace of a step, and its parts as functions of which XLA compiles each.

XLA compiles whole functions, and can't call the communicator. So the step is traced as
one graph, whose operations are divided into parts. Each becomes a function
that XLA compiles, and the exchange runs between them as in any other graph:

    part 1                exchange         part 2
    forward, backward ──▶ of gradients ──▶ update
"""

from __future__ import annotations

import contextlib
import dataclasses
import graphlib
import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager.polymorphic_function import (
    atomic_function,
    attributes,
)
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import (
    control_flow_ops,
    control_flow_util_v2,
    handle_data_util,
)

from kerasdist._tf.tensor_origins import functions_of, outermost

# Slices of few different lengths, for each of which XLA compiles a part: the eight
# between two powers of two, so that at most an eighth is added to many slices. Those of
# small batches have one of eight lengths, too.
_LEAST_STEP = 64


def length_step(count: Any) -> Any:
    """Return the distance of the eight lengths between two powers of two; int32.

    Args:
        count: An integer tensor, a scalar, between these powers; 0 if it's below 8.
    """
    octave = tf.math.log(tf.cast(tf.maximum(count, 1), tf.float64)) / math.log(2)
    return tf.cast(2.0 ** (tf.math.floor(octave) - 3), tf.int32)


def padded(slices: Any) -> Any:
    """Append zeros to slices that are added to a variable, up to one of few lengths.

    Args:
        slices: IndexedSlices, of which zeros at index 0 change nothing.
    """
    count = tf.shape(slices.indices)[0]
    step = tf.maximum(length_step(count), _LEAST_STEP)
    more = (tf.maximum(count, 1) + step - 1) // step * step - count
    rank = slices.values.shape.rank
    return tf.IndexedSlices(
        tf.pad(slices.values, [[0, more], *[[0, 0]] * (rank - 1)]),
        tf.pad(slices.indices, [[0, more]]),
        slices.dense_shape,
    )


# The division of a graph into parts to compile, and what runs between them.
#
#     part 1 ──▶ collective 1 ──▶ ... ──▶ part n ──▶ collective n ──▶ part n + 1
#
# An operation belongs to the part before the first collective that waits for it: as
# late as possible. So bucket 1 leaves when the backward pass has computed its
# gradients, and part 2 computes the next bucket's meanwhile. What no collective waits
# for, above all the update, is in the last part.
#
# Some operations beside the collectives aren't compiled either, and devices differ.
# Where an operation of a part waits for such a one that waits for the same part, the
# part is divided: later pieces have larger numbers of `hop`. What no such operation
# needs is in the last piece that it can be in.
#
# The lists of a loop, which its gradient reads, can't leave what XLA compiles: the
# gradient is in the part of the loop, also if its results aren't needed yet.


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOperation:
    """One operation.

    Attributes:
        before: Numbers of the nodes that it waits for, all smaller than its own.
        device: Where it's compiled for; None: it isn't compiled.
        collective: Whether it is, or contains, communication; not compiled.
        lists: Those of `before` whose lists it takes.
    """

    before: tuple[int, ...]
    device: str | None
    collective: bool = False
    lists: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPart:
    """Operations that run together.

    Attributes:
        nodes: Their numbers, in order.
        device: Where they're compiled for; None: one operation, which isn't.
    """

    nodes: tuple[int, ...]
    device: str | None


def divide(nodes: Sequence[StepOperation]) -> list[StepPart]:
    """Divide the operations of a graph into parts, in an order in which they can run.

    Args:
        nodes: All operations, each after those that it waits for.
    """
    needed = _needed(nodes)
    hops: list[int] = []
    for index, node in enumerate(nodes):
        hop = 0
        for before in node.before:
            if needed[before] == needed[index]:
                hop = max(hop, hops[before] + _crosses(nodes[before], node))
        hops.append(hop)
    last: dict[int, int] = {}
    for number, hop in zip(needed, hops, strict=True):
        last[number] = max(last.get(number, 0), hop)
    latest = [last[number] for number in needed]
    for index in reversed(range(len(nodes))):
        node = nodes[index]
        if node.device is not None:
            hops[index] = latest[index]
        for before in node.before:
            if needed[before] == needed[index]:
                hop = hops[index] - _crosses(nodes[before], node)
                latest[before] = min(latest[before], hop)
    groups: dict[tuple[int, int, int, str], list[int]] = {}
    for index, node in enumerate(nodes):
        own = index + 1 if node.device is None else 0
        key = needed[index], hops[index], own, node.device or ""
        groups.setdefault(key, []).append(index)
    # Of one hop the compiled ones first: the others may wait for them.
    return [
        StepPart(nodes=tuple(group), device=nodes[group[0]].device)
        for _, group in sorted(groups.items())
    ]


def _crosses(before: StepOperation, node: StepOperation) -> bool:
    """Return whether an operation can't be compiled with one that it waits for."""
    return node.device is not None and before.device != node.device


def _needed(nodes: Sequence[StepOperation]) -> list[int]:
    """Return the number of the first collective that waits for each node.

    It's that of a collective itself; of what no one waits for it's the last one's plus
    one. Lists stay with those who take them, if these don't wait for a collective.
    """
    count = sum(node.collective for node in nodes)
    needed = [count + 1] * len(nodes)
    earliest = [1] * len(nodes)  # the first part in which a node can be

    def pass_on() -> None:
        number = count
        for index in reversed(range(len(nodes))):
            if nodes[index].collective:
                # Not the number in the order of the graph, if another one waits for it.
                needed[index] = min(needed[index], number)
                number -= 1
            for before in nodes[index].before:
                needed[before] = min(needed[before], needed[index])

    pass_on()
    for index, node in enumerate(nodes):
        for before in node.before:
            after = needed[before] + 1 if nodes[before].collective else 0
            earliest[index] = max(earliest[index], earliest[before], after)
    found = True
    while found:
        found = False
        for index, node in enumerate(nodes):
            first = min((needed[each] for each in node.lists), default=needed[index])
            if earliest[index] <= first < needed[index]:
                needed[index], found = first, True
        if found:
            pass_on()
    return needed


# The name scope of operations that aren't compiled.
_OUTSIDE = "kerasdist_outside_of_xla"
_IS_OUTSIDE = re.compile(rf"(^|/){_OUTSIDE}(_\d+)?/")
# Operations that call Python, or communicate: XLA can't compile them.
_COLLECTIVES = re.compile(r"(Eager)?PyFunc(Stateless)?|Collective\w+|Nccl\w+")
# A part of nothing else isn't worth a call.
_TRIVIAL = frozenset({"Const", "Identity", "NoOp"})
_BRANCHES = frozenset({"If", "StatelessIf", "While", "StatelessWhile"})
_MUST_COMPILE = attributes.XLA_COMPILE


class _Context(control_flow_ops.XLAControlFlowContext):
    """Loops are traced as XLA needs them; communication is allowed."""


def in_xla() -> bool:
    """Return whether operations are put into a function that XLA compiles as a whole.

    Not in a step that is divided around the communication.
    """
    context = control_flow_ops.get_enclosing_xla_context()
    return context is not None and not isinstance(context, _Context)


def in_parts() -> bool:
    """Return whether a step is traced that is compiled in parts."""
    return isinstance(control_flow_ops.get_enclosing_xla_context(), _Context)


def outside_of_xla() -> Any:
    """Return a scope for operations that `compiled_in_parts` leaves uncompiled."""
    return tf.name_scope(_OUTSIDE)


def compiled_in_parts(function: Callable[[], Any], devices: Sequence[str]) -> Any:
    """Call a function while a graph is traced; let XLA compile what it adds.

    Communication, and what is in `outside_of_xla`, runs between the compiled parts.

    Args:
        function: Adds operations to the graph; uses tensors of the graph around it.
        devices: The devices to compile for; operations on others aren't compiled.

    Returns:
        The function's result, of tensors of the graph around it.

    Raises:
        ValueError: A function of which XLA compiles all communicates.
    """
    outer = tf.compat.v1.get_default_graph()

    def in_context() -> Any:
        with _entered():
            return function()

    whole = func_graph.func_graph_from_py_func("kerasdist_step", in_context, (), {})
    emitter = _Emitter(whole, outer)
    operations = _in_order(whole)
    nodes = _nodes(whole, operations, devices)
    needed = _users(operations, whole)
    for number, part in enumerate(divide(nodes)):
        chosen = [operations[index] for index in part.nodes]
        if part.device is None or all(each.type in _TRIVIAL for each in chosen):
            for operation in chosen:
                emitter.copy(operation)
        else:
            emitter.call(chosen, part, number, needed)
    return tf.nest.map_structure(
        lambda tensor: (
            None if tensor is None else emitter.tensor(whole.capture(tensor))
        ),
        whole.structured_outputs,
        expand_composites=True,
    )


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    context = _Context()
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


def _in_order(whole: Any) -> list[Any]:
    """Return the operations that results or effects depend on, in order."""
    wanted = {tensor.op for tensor in whole.outputs} | set(whole.control_outputs)
    found: set[Any] = set()
    while wanted:
        operation = wanted.pop()
        found.add(operation)
        for before in _before(operation):
            if before not in found:
                wanted.add(before)
    found -= {inner.op for _, inner in whole.captures}
    # Not the order in which they were added: edges of effects may lead back.
    operations = whole.get_operations()
    index = {each: number for number, each in enumerate(operations)}
    sorter = graphlib.TopologicalSorter(
        {
            index[each]: {index[one] for one in {*_before(each)} & found}
            for each in found
        }
    )
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heapq.heappush(ready, number)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return [operations[number] for number in order]


def _before(operation: Any) -> list[Any]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _nodes(
    whole: Any, operations: Sequence[Any], devices: Sequence[str]
) -> list[StepOperation]:
    index = {operation: number for number, operation in enumerate(operations)}
    places = _places(whole)
    nodes: list[StepOperation] = []
    for operation in operations:
        before = tuple(index[each] for each in _before(operation) if each in index)
        collective = _communicates(whole, operation)
        device: str | None = operation.device or None
        # A function can be compiled only for the device of all its variables.
        of_variables = {places.get(id(each)) for each in operation.inputs} - {None}
        if of_variables:
            device = of_variables.pop()
        elif device is None:
            near = [nodes[each].device for each in before] if len(devices) > 1 else []
            device = next((each for each in near if each is not None), devices[0])
        outside = collective or _IS_OUTSIDE.search(operation.name)
        if outside or of_variables or device not in devices:
            device = None
        lists = [each.op for each in operation.inputs if each.dtype == tf.variant]
        node = StepOperation(
            before=before,
            device=device,
            collective=collective,
            lists=tuple(index[each] for each in lists if each in index),
        )
        nodes.append(node)
    return nodes


def _places(whole: Any) -> dict[int, str]:
    """Return the devices of the variables that a graph has captured."""
    places = {}
    for given, inner in whole.captures:
        # The graph around it may have captured it as well.
        found = outermost(given)
        if given.dtype == tf.resource and hasattr(found, "numpy"):
            places[id(inner)] = str(found.device)
    return places


def _communicates(whole: Any, operation: Any) -> bool:
    if _COLLECTIVES.fullmatch(operation.type):
        return True
    found = any(_calls_python(whole, name) for name in functions_of(operation))
    compiled = _MUST_COMPILE in operation.node_def.attr
    if found and compiled and operation.get_attr(_MUST_COMPILE):
        raise ValueError(
            "XLA can't compile communication with other workers. Received: "
            "`strategy.run`, or a reduction, inside of "
            "`tf.function(jit_compile=True)`. Remove jit_compile=True there; a "
            "function inside of the step that doesn't communicate may have it."
        )
    return found


def _calls_python(whole: Any, name: str) -> bool:
    """Return whether a function calls Python, or communicates, itself or by others."""
    function = whole._get_function(name)
    if function is None:
        return False
    known = [function.cached_definition]
    known += [each.cached_definition for each in function.children]
    return any(
        _COLLECTIVES.fullmatch(node.op) for each in known for node in each.node_def
    )


def _users(operations: Sequence[Any], whole: Any) -> dict[int, set[Any]]:
    """Return the operations that use each tensor; `None` is the step's result."""
    users: dict[int, set[Any]] = {}
    for operation in operations:
        for tensor in operation.inputs:
            users.setdefault(id(tensor), set()).add(operation)
    for tensor in whole.outputs:
        users.setdefault(id(tensor), set()).add(None)
    return users


class _Emitter:
    """Adds the operations of a step to the graph around it.

    Args:
        whole: The graph of the step.
        outer: The graph around it.
    """

    def __init__(self, whole: Any, outer: Any) -> None:
        self._whole = whole
        self._outer = outer
        self._tensors = {id(inner): given for given, inner in whole.captures}
        # In the graph around it; those of a part are one operation.
        self._operations: dict[Any, Any] = {}

    def tensor(self, tensor: Any) -> Any:
        """Return the tensor in the graph around the step."""
        return self._tensors[id(tensor)]

    def copy(self, operation: Any) -> None:
        """Add one operation as it is."""
        inputs = [self.tensor(each) for each in operation.inputs]
        waits = self._waits([operation])
        with tf.control_dependencies(waits), tf.device(None):
            made = self._make(self._outer, operation, inputs)
        if operation.type in _BRANCHES:
            # As outside of a context of XLA; else its variables must be of one device.
            control_flow_util_v2.maybe_set_lowering_attr(made)
        self._operations[operation] = made
        for old, new in zip(operation.outputs, made.outputs, strict=True):
            self._tensors[id(old)] = new

    def call(
        self,
        operations: Sequence[Any],
        part: StepPart,
        number: int,
        users: dict[int, set[Any]],
    ) -> None:
        """Add a call of a function of these operations, which XLA compiles."""
        inside = set(operations)
        waits = self._waits([each for each in operations])
        graph = func_graph.FuncGraph(f"kerasdist_part_{number}")
        made: dict[Any, Any] = {}
        tensors: dict[int, Any] = {}
        with graph.as_default(), tf.device(None), graph.control_dependencies(None):
            for operation in operations:
                inputs = [
                    tensors[id(each)] if id(each) in tensors else self.tensor(each)
                    for each in operation.inputs
                ]
                before = [
                    made[each] for each in operation.control_inputs if each in made
                ]
                with graph.control_dependencies(before):
                    new = self._make(graph, operation, inputs, device="")
                made[operation] = new
                for old, output in zip(operation.outputs, new.outputs, strict=True):
                    tensors[id(old)] = output
        results = [
            each
            for operation in operations
            for each in operation.outputs
            if users.get(id(each), inside) - inside
        ]
        graph.inputs = list(graph.internal_captures)
        graph.structured_input_signature = ((), {})
        graph.outputs = [tensors[id(each)] for each in results]
        graph.structured_outputs = list(graph.outputs)
        must = set(self._whole.control_outputs)
        graph.control_outputs = [made[each] for each in operations if each in must]
        function = atomic_function.from_func_graph(
            f"__inference_{graph.name}_{ops.uid()}",
            graph,
            {
                _MUST_COMPILE: attr_value_pb2.AttrValue(b=True),
                attributes.NO_INLINE: attr_value_pb2.AttrValue(b=True),
            },
        )
        with tf.control_dependencies(waits), tf.device(None), tf.device(part.device):
            begun = len(self._outer.get_operations())
            outputs = function.call_flat(*graph.external_captures)
            call = self._outer.get_operations()[begun:][-1]
        for operation in operations:
            self._operations[operation] = call
        for old, new in zip(results, outputs, strict=True):
            self._tensors[id(old)] = new

    def _waits(self, operations: Sequence[Any]) -> list[Any]:
        found = {
            self._operations[before]
            for operation in operations
            for before in operation.control_inputs
            if before in self._operations
        }
        return sorted(found, key=lambda each: each.name)

    def _make(
        self, graph: Any, operation: Any, inputs: list[Any], device: str | None = None
    ) -> Any:
        for name in functions_of(operation):
            function = self._whole._get_function(name)
            if function is not None:
                graph._add_function_recursive(function)
        given = {
            name: value
            for name, value in operation.node_def.attr.items()
            if name != "_class"
        }
        made = graph._create_op_internal(
            operation.type,
            inputs,
            [each.dtype for each in operation.outputs],
            name=operation.name,
            attrs=given,
            compute_device=False,
        )
        if device is None and operation.device:
            made._set_device(operation.device)
        for old, new in zip(operation.outputs, made.outputs, strict=True):
            new.set_shape(old.shape)
            handle_data_util.copy_handle_data(old, new)
        return made
