"""The report of where operations ran, from the runtime's graphs of a step.

TensorFlow's runtime reports which operation ran on which device, and what was sent
between devices. The layer of an operation is found by its name: layers' scopes are
recorded while a step is traced. So are shapes, from which the size of sent tensors is
computed, because the runtime reports only their names.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from kerasdist._tf.graph_clocks import CLOCK, RunNode
from kerasdist.placement.plan import human_bytes

# Operations that compute nothing.
_LIGHT = frozenset(
    {
        "_Arg",
        "_DeviceArg",
        "_DeviceRetval",
        "_HostRecv",
        "_HostSend",
        "_Recv",
        "_Retval",
        "_Send",
        "Const",
        "Enter",
        "Exit",
        "Identity",
        "LoopCond",
        "Merge",
        "NextIteration",
        "NoOp",
        "Switch",
    }
)
_BETWEEN = "(between layers)"
_TAPE = "gradient_tape/"
_CALL = "StatefulPartitionedCall/"


@dataclasses.dataclass
class Names:
    """Names that are recorded while steps are traced.

    Attributes:
        layers: From the scope in which a layer's operations were created to its path.
        shapes: From an operation's name to the shapes of its outputs; None stands for a
            dimension that depends on the batch.
        optimizers: Names of optimizers.
    """

    layers: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: dict[str, Sequence[tuple[int | None, ...] | None]] = dataclasses.field(
        default_factory=dict
    )
    optimizers: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlace:
    """The operations of one layer on one device.

    Attributes:
        layer: The layer's path; "(adam)" for the optimizer of this name, "(between
            layers)" for losses, metrics and the like.
        device: The full name of the device.
        forward: Number of operations of the forward pass that ran there.
        backward: Number of operations of the backward pass.
    """

    layer: str
    device: str
    forward: int
    backward: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """The tensors that are sent from one device to another in a step.

    Attributes:
        source: The sending device.
        target: The receiving device.
        tensors: Number of tensors.
        fixed: Bytes that don't depend on the batch.
        per_row: Bytes for each row of the batch.
        unknown: Number of tensors of unknown size, which aren't in the sums.
    """

    source: str
    target: str
    tensors: int = 0
    fixed: int = 0
    per_row: int = 0
    unknown: int = 0

    def bytes(self, rows: int) -> int:
        """Return the bytes in a step with a batch of this many rows."""
        return self.fixed + rows * self.per_row


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlaces:
    """The placement of one kind of step.

    Attributes:
        rows: Rows of a batch; None if they weren't known.
        layers: By layer, in the order of the step.
        moves: By pair of devices.
    """

    rows: int | None
    layers: tuple[LayerPlace, ...]
    moves: tuple[Move, ...]

    @property
    def bytes_moved(self) -> int | None:
        """The bytes sent between devices; None if `rows` isn't known."""
        if self.rows is None:
            return None
        return sum(move.bytes(self.rows) for move in self.moves)

    def devices_of(self, layer: str) -> list[str]:
        """Return the devices on which operations of a layer ran, given its path."""
        return sorted({place.device for place in self.layers if place.layer == layer})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """The devices on which operations ran; printed as a table.

    Attributes:
        steps: By kind of step: "train", "test" and "predict", those that have run.
    """

    steps: Mapping[str, StepPlaces]

    def __str__(self) -> str:
        if not self.steps:
            return "Nothing has run yet: call `fit`, `evaluate` or `predict` first."
        return "\n\n".join(_table(kind, step) for kind, step in self.steps.items())


def places_of(nodes: Iterable[RunNode], names: Names, rows: int | None) -> StepPlaces:
    """Summarize the operations of a step.

    Args:
        nodes: The operations that ran.
        names: The names that were recorded while it was traced.
        rows: Rows of a batch, if they are known.
    """
    nodes = list(nodes)
    counts: dict[tuple[str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    sent: dict[tuple[str, str], dict[str, int]]
    sent = collections.defaultdict(collections.Counter)
    for node in nodes:
        if any(CLOCK in name for name in (node.name, *node.inputs)):
            continue
        if node.op not in _LIGHT:
            layer, backward = _layer_of(node.name, names)
            counts[layer, node.device][backward] += 1
        elif node.target is not None and not node.name.startswith("GroupCrossDevice"):
            size = _size(node, names)
            found = sent[node.device, node.target]
            found["tensors"] += 1
            if size is None:
                found["unknown"] += 1
            else:
                found["fixed"] += size[0]
                found["per_row"] += size[1]
    order = {layer: i for i, layer in enumerate(names.layers.values())}
    return StepPlaces(
        rows=rows,
        layers=tuple(
            LayerPlace(layer=layer, device=device, forward=forward, backward=backward)
            for (layer, device), (forward, backward) in sorted(
                counts.items(), key=lambda item: (order.get(item[0][0], 1 << 30), item)
            )
        ),
        moves=tuple(
            Move(source=source, target=target, **figures)
            for (source, target), figures in sorted(sent.items())
        ),
    )


def _layer_of(name: str, names: Names) -> tuple[str, bool]:
    """Return the layer of an operation, and whether it's of the backward pass."""
    while name.startswith(_CALL):
        name = name.removeprefix(_CALL)
    backward = name.startswith(_TAPE)
    scope = name.removeprefix(_TAPE).rpartition("/")[0]
    while scope:
        if scope in names.layers:
            return names.layers[scope], backward
        scope = scope.rpartition("/")[0]
    outer = name.removeprefix(_TAPE).partition("/")[0]
    return f"({outer})" if outer in names.optimizers else _BETWEEN, backward


def _size(node: RunNode, names: Names) -> tuple[int, int] | None:
    """Return the bytes of a sent tensor: the fixed ones, and those for each row."""
    name = node.inputs[0] if node.inputs else ""
    while name.startswith(_CALL):
        name = name.removeprefix(_CALL)
    shapes = node.shapes or names.shapes.get(name)
    if shapes is None or node.output >= len(shapes):
        return None
    shape = shapes[node.output]
    if shape is None or shape.count(None) > 1:
        return None
    size = math.prod(d for d in shape if d is not None) * node.item_size
    return (0, size) if None in shape else (size, 0)


def _table(kind: str, step: StepPlaces) -> str:
    width = max([len(place.layer) for place in step.layers] + [5])
    lines = [
        f"{kind}: what ran where",
        f"  {'layer':{width}}  {'device':8} {'forward':>8} {'backward':>9}",
    ]
    lines += [
        f"  {place.layer:{width}}  {_short(place.device):8} "
        f"{place.forward:8} {place.backward:9}"
        for place in step.layers
    ]
    for move in step.moves:
        size = f"{human_bytes(move.fixed)} + {human_bytes(move.per_row)} for each row"
        if step.rows is not None:
            size = f"{human_bytes(move.bytes(step.rows))} for {step.rows} rows"
        unknown = f", {move.unknown} of them of unknown size" if move.unknown else ""
        lines.append(
            f"  {_short(move.source)} -> {_short(move.target)}: {size} per step, in "
            f"{move.tensors} tensors{unknown}"
        )
    if not step.moves:
        lines.append("  Nothing is sent between devices.")
    return "\n".join(lines)


def _short(device: str) -> str:
    return device.replace("/device:", "/").replace(
        "/job:localhost/replica:0/task:0/", ""
    )
