"""Lifetimes of the tensors of a training step: saved and transient memory.

TensorFlow runs each operation as soon as its inputs are available. So a step's graph is
processed in two parts, each in the order of creation: *early*, the operations that
don't need the gradient of the loss (the forward pass, and operations created for the
backward pass that don't depend on it, such as `x - mean` of a normalization), and
*late*, the rest. A tensor is alive from the operation that produces it to the last one
that reads it. A tensor produced early and read late is *saved*; all others are
*transient*. Tensors that share memory count once. Weights and their gradients don't
count at all: they are counted as such elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kerasdist._keras.costs import op_costs

# They read a shape, not the elements: TensorFlow replaces them by constants.
_SHAPES_ONLY = {"BroadcastGradientArgs", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"}
# They may write into the memory of an input that no other operation needs.
_IN_PLACE = frozenset(
    [
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "Cast",
        "Elu",
        "EluGrad",
        "Erf",
        "Exp",
        "GeluGrad",
        "Gelu",
        "LeakyRelu",
        "LeakyReluGrad",
        "Log",
        "Maximum",
        "Minimum",
        "Mul",
        "Neg",
        "Pow",
        "RealDiv",
        "Relu",
        "Relu6",
        "Relu6Grad",
        "ReluGrad",
        "Rsqrt",
        "RsqrtGrad",
        "SelectV2",
        "Selu",
        "SeluGrad",
        "Sigmoid",
        "SigmoidGrad",
        "Softmax",
        "Softplus",
        "SoftplusGrad",
        "Sqrt",
        "SqrtGrad",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tanh",
        "TanhGrad",
    ]
)
_RANDOM = ("Random", "StatelessRandom", "StatelessTruncated", "Stateless")


@dataclasses.dataclass
class UnitUse:
    """The memory and work of one layer in a step with a fixed number of rows.

    Attributes:
        saved: Bytes that depend on the batch.
        fixed: Bytes of weights in another form.
        transient: Peak of transient bytes.
        output: Bytes of the outputs that other layers read.
        flops: Operations of its forward pass.
        first: The index of its first operation.
    """

    saved: int = 0
    fixed: int = 0
    transient: int = 0
    output: int = 0
    flops: float = 0.0
    first: int | None = None


@dataclasses.dataclass(frozen=True)
class Use:
    """The memory and work of all layers, and the tensors between them.

    Attributes:
        units: One for each.
        tensors: For each tensor between layers the layer that produces it (-1: the
            data), the layers that read it, and its bytes.
    """

    units: list[UnitUse]
    tensors: list[tuple[int, tuple[int, ...], int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traced:
    """A step's graph.

    Attributes:
        made: Its operations in the order of creation.
        forward: How many of them belong to the forward pass.
        data: The tensors of a batch.
        outputs: The results of the forward pass.
        seeds: Their gradients, from which the backward pass begins.
        gradients: The results of the backward pass.
        unit_of: From an operation's name to the number of its layer.
        units: Number of layers.
    """

    made: Sequence[Any]
    forward: int
    data: Sequence[Any]
    outputs: Sequence[Any]
    seeds: Sequence[Any]
    gradients: Sequence[Any]
    unit_of: Callable[[str], int | None]
    units: int


def measure(step: Traced) -> Use:
    """Analyze a step's graph."""
    return _Step(step).use()


class _Step:
    def __init__(self, step: Traced) -> None:
        self._forward = step.forward
        self._unit_count = step.units
        self._made = made = step.made
        needed = _needed([t.op for t in (*step.outputs, *step.gradients)])
        order = [i for i, o in enumerate(made) if o.name in needed]
        self._inputs = {i: list(made[i].inputs) for i in order}
        self._outputs = {i: list(made[i].outputs) for i in order}
        late = self._after([tensor.name for tensor in step.seeds], order)
        self._order = [i for i in order if i not in late]
        # The position at which the late part begins.
        self._border = len(self._order)
        self._order += [i for i in order if i in late]
        self._place = {i: place for place, i in enumerate(self._order)}
        self._data = {tensor.name for tensor in step.data}
        self._seeds = {tensor.name for tensor in step.seeds}
        self._root: dict[str, str] = {}
        self._size: dict[str, int] = {}
        self._maker: dict[str, int] = {}
        for i in self._order:
            self._name_memory(i)
        self._gradients = self._weight_gradients(step.gradients)
        self._depends = self._data_dependent()
        self._unit = self._assign(step.unit_of)
        self._last = self._last_reads([self._root[t.name] for t in step.outputs])
        self._saved = [
            root
            for root, size in self._size.items()
            if size
            and root not in self._data
            and self._place[self._maker[root]] < self._border
            and self._last.get(root, -1) >= self._border
        ]

    def use(self) -> Use:
        units = [UnitUse() for _ in range(self._unit_count)]
        for i in self._order:
            unit = units[self._unit[i]]
            if unit.first is None:
                unit.first = i
            if i < self._forward:
                unit.flops += op_costs.flops(self._made[i])
        for root in self._saved:
            unit = units[self._unit[self._maker[root]]]
            if root in self._depends:
                unit.saved += self._size[root]
            else:
                unit.fixed += self._size[root]
        self._passing(units)
        tensors = self._between()
        for source, _, size in tensors:
            if source >= 0:
                units[source].output += size
        return Use(units, tensors)

    def _name_memory(self, i: int) -> None:
        """Determine which memory each output uses, and its size."""
        operation = self._made[i]
        lists = {}
        if op_costs.is_loop(operation):
            lists = op_costs.loop_lists(operation)
        for index, output in enumerate(self._outputs[i]):
            root, size = output.name, op_costs.tensor_bytes(output)
            if operation.type in op_costs.ALIASES:
                root = self._root[self._inputs[i][0].name]
            elif index in lists:
                inner, size = lists[index]
                root = f"{operation.name}/{inner}"
            elif operation.type == "TensorListFromTensor":
                size = op_costs.tensor_bytes(self._inputs[i][0])
            elif operation.type in ("ReadVariableOp", "Placeholder", "Const"):
                given = output.name in self._data or output.name in self._seeds
                size = size if given else 0
            self._root[output.name] = root
            if root not in self._size:
                self._size[root], self._maker[root] = size, i

    def _weight_gradients(self, gradients: Sequence[Any]) -> set[str]:
        """Return the memory of gradients of weights, including the parts of a sum."""
        found: set[str] = set()
        left = [tensor.name for tensor in gradients]
        while left:
            root = self._root[left.pop()]
            maker = self._maker[root]
            if root in found or self._place[maker] < self._border:
                continue
            found.add(root)
            if self._made[maker].type in ("AddN", "AddV2"):
                left += [tensor.name for tensor in self._inputs[maker]]
        return found

    def _data_dependent(self) -> set[str]:
        """Return the memory whose size depends on the number of rows."""
        found = {self._root[name] for name in self._data if name in self._root}
        for i in self._order:
            if self._made[i].type.startswith(_RANDOM) or any(
                self._root[tensor.name] in found for tensor in self._inputs[i]
            ):
                found.update(self._root[tensor.name] for tensor in self._outputs[i])
        return found

    def _assign(self, unit_of: Callable[[str], int | None]) -> dict[int, int]:
        """Return each operation's layer; between layers, that of its input."""
        found: dict[int, int] = {}
        last = 0
        for i in self._order:
            unit = unit_of(self._made[i].name)
            if unit is None:
                makers = [
                    (self._size[root], found[self._maker[root]])
                    for root in (self._root[t.name] for t in self._inputs[i])
                    if root in self._depends and root not in self._data
                ]
                unit = max(makers)[1] if makers else last
            found[i] = last = unit
        return found

    def _last_reads(self, outputs: Sequence[str]) -> dict[str, int]:
        """Return the position of the last operation that reads each memory."""
        last: dict[str, int] = {}
        for place, i in enumerate(self._order):
            if self._made[i].type in _SHAPES_ONLY:
                continue
            for tensor in self._inputs[i]:
                last[self._root[tensor.name]] = place
        for root in outputs:
            # The loss reads them.
            last[root] = max(last.get(root, 0), self._border)
        return last

    def _passing(self, units: list[UnitUse]) -> None:
        """Compute the peak of transient bytes of each layer."""
        excluded = {*self._saved, *self._gradients, *self._data}
        ends: dict[int, list[str]] = {}
        for root, place in self._last.items():
            if root not in excluded:
                ends.setdefault(place, []).append(root)
        live = 0
        for place, i in enumerate(self._order):
            ending = sum(self._size[root] for root in ends.get(place, ()))
            mine = {self._root[tensor.name] for tensor in self._outputs[i]} - excluded
            mine = {root for root in mine if self._maker[root] == i}
            new = sum(self._size[root] for root in mine)
            unread = sum(self._size[root] for root in mine if root not in self._last)
            taken = min(new, ending) if self._made[i].type in _IN_PLACE else 0
            unit = units[self._unit[i]]
            unit.transient = max(unit.transient, live + new - taken)
            live += new - ending - unread

    def _between(self) -> list[tuple[int, tuple[int, ...], int]]:
        """Return the tensors of the forward pass that pass from one layer to others."""
        readers: dict[str, set[int]] = {}
        for i in self._order:
            if i >= self._forward:
                continue
            for tensor in self._inputs[i]:
                root = self._root[tensor.name]
                if root in self._depends and self._size[root]:
                    readers.setdefault(root, set()).add(self._unit[i])
        found = []
        for root, units in readers.items():
            source = -1 if root in self._data else self._unit[self._maker[root]]
            others = tuple(sorted(units - {source}))
            if others:
                found.append((source, others, self._size[root]))
        return found

    def _after(self, names: Sequence[str], order: Sequence[int]) -> set[int]:
        """Return the operations that depend on one of these tensors."""
        found, reached = set(), set(names)
        for i in order:
            outputs = [tensor.name for tensor in self._outputs[i]]
            if any(name in reached for name in outputs) or any(
                tensor.name in reached for tensor in self._inputs[i]
            ):
                found.add(i)
                reached.update(outputs)
        return found


def _needed(ends: Sequence[Any]) -> set[str]:
    """Return the names of all operations that these depend on."""
    found: set[str] = set()
    left = list(ends)
    while left:
        operation = left.pop()
        if operation.name not in found:
            found.add(operation.name)
            left += [tensor.op for tensor in operation.inputs]
    return found
