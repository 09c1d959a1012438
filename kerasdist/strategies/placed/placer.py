"""The devices of a placed model's layers, variables and operations."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psutil
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current, is_timed
from kerasdist._keras.placement.layers import LayerFacts
from kerasdist._keras.placement.micro_batches import dividing
from kerasdist._keras.placement.rematerialize import rematerializing
from kerasdist._keras.shared_state import copied_to, whole_state
from kerasdist._tf import gradient_placement, graph_clocks
from kerasdist._tf.graph_clocks import parts_of_operations, ran_graphs
from kerasdist._tf.variables import facets_of
from kerasdist.placement.patterns import Patterns
from kerasdist.placement.plan import Plan
from kerasdist.strategies.devices import resolve_devices
from kerasdist.strategies.measure.stages import StageClock
from kerasdist.strategies.options import check_positive
from kerasdist.strategies.placed.report import Names, StepPlaces, places_of
from kerasdist.strategies.reduce.sparse_parts import merge_micro_batches

# Micro-batches of a placed model: GPipe's schedule in TensorFlow's executor.


def check_micro_batches(micro_batches: Any) -> None:
    """Check the number of micro-batches.

    Raises:
        ValueError: It isn't a positive integer.
    """
    check_positive(
        "`micro_batches` must be a positive integer: into how many parts each batch is "
        "divided",
        "micro_batches",
        micro_batches,
        " Write 1 for none, or 4 times the number of devices to keep them busy.",
    )


@contextlib.contextmanager
def in_micro_batches(placer: Placer, clock: StageClock) -> Iterator[None]:
    """Call models on parts of the batch in a replica's step, in the block.

    The stages then overlap, because a part depends only on itself; and they process the
    parts in order.

    Args:
        placer: The placement of the replica.
        clock: Measures the stages, if the step is measured.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    first = 0 if graph is None else len(graph.get_operations())
    with (
        dividing(placer.micro_batches, _merge_slices) as marks,
        rematerializing(placer.rematerialize),
    ):
        yield
    if graph is None:
        return
    graph_clocks.order_parts(graph, marks.found)
    if is_timed():
        clock.mark(graph, first, marks.found)


def _merge_slices(gradient: Any, marks: Any) -> Any:
    """Add up the slices of a gradient that each micro-batch has for one lookup."""
    if (
        not isinstance(gradient, tf.IndexedSlices)
        or tf.executing_eagerly()
        or not marks.calls
    ):
        return gradient

    @functools.cache
    def parts() -> dict[Any, Any]:
        # Only if there are constants: it goes through the whole graph.
        return parts_of_operations(gradient.values.graph, marks.found)

    def micro_batch_of(tensor: Any) -> tuple[int, int] | None:
        part = parts().get(tensor.op)
        return None if part is None else (part.call, part.number)

    return merge_micro_batches(gradient, micro_batch_of)


# Stands for an unknown dimension of a shape: mostly a batch's rows.
_UNKNOWN_DIMENSION = 128


class Placer:
    """A placement in use: it determines the device of everything in a step.

    1. A layer with variables is on their device.
    2. A layer of a `stage` is on its device; else on the device of the innermost
       pattern that matches it or a layer around it; else on that of its calling layer.
    3. All other variables and layers without inner layers are on the first device. A
       layer with inner layers on several devices has none itself: only its own
       operations are left, see 4.
    4. An operation of no layer (a loss, a metric, an addition between layers) is on the
       device of its largest input, so that as little as possible is sent.
    5. Operations of the backward pass are on the devices of the operations whose
       gradients they compute, see `_tf.gradient_placement`.

    Args:
        patterns: From layer paths to devices.
        devices: Canonical names of all devices; the first one is for everything that
            no pattern matches.
        micro_batches: Into how many parts a replica's batch is divided.
        rematerialize: Whether activations are computed again instead of kept.

    Attributes:
        plan: The plan of the placement, if it is planned when it is used; else None.
        steps: The operations that ran on each device, by kind of step.
    """

    plan: Plan | None = None

    def __init__(
        self,
        patterns: Patterns,
        devices: Sequence[str],
        micro_batches: int = 1,
        rematerialize: bool = False,
    ) -> None:
        self.micro_batches, self.rematerialize = micro_batches, rematerialize
        self.patterns = patterns
        self.devices = tuple(devices)
        self._stages = _Stages()
        self._known: set[str] = set()
        self._warned: list[str] = []
        self._names = Names()
        self._traced: dict[int, Any] = {}
        self.steps: dict[str, StepPlaces] = {}

    @property
    def stage(self) -> str | None:
        """See `LayerPlacer`."""
        return self._stages.stack[-1] if self._stages.stack else None

    @property
    def needs_plan(self) -> bool:
        """See `LayerPlacer`."""
        return False

    def staging(self, device: str) -> contextlib.AbstractContextManager[None]:
        """See `LayerPlacer.staging`."""
        (name,) = resolve_devices([device], "device")
        if name not in self.devices:
            raise ValueError(
                "A stage must be on one of the strategy's devices. "
                f"Received: device={device!r}; they are {list(self.devices)}. Name "
                "it in the strategy's `devices=`."
            )
        return _tf.replaced(self._stages, stack=[*self._stages.stack, name])

    def wish(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        if layer.stage is not None:
            return layer.stage
        match = self.patterns.find(layer.paths)
        if match is not None and (match.above == 0 or layer.parent is None):
            return match.device
        return layer.parent

    def device_of(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        self._known.update(layer.paths)
        if layer.own:
            return layer.own[0]
        wish = self.wish(layer)
        if wish is not None:
            return wish
        if len(layer.inner) == 1:
            return next(iter(layer.inner))
        return self.devices[0] if layer.is_leaf else None

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """See `LayerPlacer`."""
        if self.stage is not None:
            return self.stage
        match = self.patterns.find([path]) if path else None
        if device is not None and (not path or path in called):
            return device
        around = [name for name in called if path.startswith(f"{name}/")]
        if device is not None and around:
            deeper = path.count("/") - max(name.count("/") for name in around)
            if match is None or match.above >= deeper:
                return device
        return self.devices[0] if match is None else match.device

    def new_variable(self) -> str:
        """Return the device of the variable that this thread is creating."""
        return current.variable_device or self.stage or self.devices[0]

    def check(self, layers: Iterable[LayerFacts]) -> None:
        """See `LayerPlacer`."""
        for layer in layers:
            self._known.update(layer.paths)
        unmatched = self.patterns.unmatched([sorted(self._known)])
        if not unmatched:
            return
        paths = sorted(self._known)
        text = (
            "Patterns of the placement match no layer. "
            f"Received: {', '.join(map(repr, unmatched))}; the layers are "
            f"{', '.join(map(repr, paths[:20]))}"
            f"{' and others' if len(paths) > 20 else ''}. A pattern must match the "
            "whole path of a layer, or its end behind a '/'; 'encoder/.*' matches "
            "all layers inside of 'encoder'. Name layers with `name=`"
        )
        if not self.patterns.has_catch_all:
            raise ValueError(
                f"{text}, and build all models of a strategy before the first is "
                "trained."
            )
        if unmatched != self._warned:
            # All layers have a device, and another model may have the missing ones.
            self._warned = unmatched
            warnings.warn(f"{text}, unless a later model has it.", stacklevel=2)

    @contextlib.contextmanager
    def recording(self, kind: str, rows: int | None, optimizer: str) -> Iterator[None]:
        """See `LayerPlacer`."""
        self._names.optimizers.add(optimizer)
        self._traced = {}
        with ran_graphs() as graphs:
            yield
        for op in (op for g in self._traced.values() for op in g.get_operations()):
            self._names.shapes[op.name] = tuple(
                None if output.shape.rank is None else tuple(output.shape)
                for output in op.outputs
            )
        self._traced = {}
        if graphs:
            # There are small graphs beside the step: of data and of single operations.
            step = max(graphs, key=len)
            self.steps[kind] = places_of(step, self._names, rows)

    def _note(self, op: Any) -> None:
        if current.calls:
            layer = current.calls[-1][0][-1]
            self._names.layers.setdefault(op.name.rpartition("/")[0], layer)
        # Some shapes are known only when the operation is complete.
        self._traced[id(op.graph)] = op.graph

    def choose(self, top: Any) -> Any:
        """Return a function that chooses the device of a step's operation.

        Args:
            top: The graph of the step: operations of other graphs are in a function,
                whose call has a device.
        """

        def device_of(op: Any) -> str:
            self._note(op)
            given = str(op.device)
            resource = any(t.dtype == tf.resource for t in op.inputs)
            if resource and not gradient_placement.calls_functions(op):
                return ""  # TensorFlow keeps it where its variable is
            if given or op.type == "Placeholder":
                return given
            return _largest(op.inputs) or (self.devices[0] if op.graph is top else "")

        return device_of


class _Stages(threading.local):
    def __init__(self) -> None:
        self.stack: list[str] = []


def _largest(inputs: Iterable[Any]) -> str:
    """Return the device of the largest input that is on one, or empty."""
    largest, found = -1, ""
    for tensor in inputs:
        device = gradient_placement.source_device(tensor)
        if not device:
            continue
        size = max(1, tensor.dtype.size)
        for dimension in tensor.shape if tensor.shape.rank is not None else ():
            size *= _UNKNOWN_DIMENSION if dimension is None else dimension
        if size > largest:
            largest, found = size, device
    return found


# A placed model run on one device, with which several devices are compared.
#
# All of its state is on the first device for a while:
#
#     as placed                      CPU:0  first layers      CPU:1  last layers
#     inside of `on_one_device`      CPU:0  all layers, whole batches
#
# Layers are called on whole batches, and activations are kept: one device needs no
# micro-batches, and recomputes nothing except to fit into little memory. The variables
# of other devices are copied, so those copies and the activations of a whole batch must
# fit into that one device beside its own layers.
#
# Variables that aren't Keras's stay on their devices, and operations that a layer
# itself puts on a device (`tf.device`) run there.


class _OneDevice(Placer):
    """A placer that puts everything on the first device.

    Args:
        placer: The placer that it replaces.
    """

    def __init__(self, placer: Placer) -> None:
        super().__init__(Patterns({}), placer.devices)

    def wish(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        del layer
        return self.devices[0]

    device_of = wish

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """See `LayerPlacer`."""
        del path, called, device
        return self.devices[0]


@contextlib.contextmanager
def on_one_device(model: Any) -> Iterator[None]:
    """Trace and run the block on the first device, on whole batches.

    Afterwards everything is where it was, with the values that it had; also if the
    first device's memory doesn't suffice, or a step fails.

    Args:
        model: A model that `ModelParallelStrategy` has placed, with its optimizer.

    Raises:
        MemoryError: The first device is a CPU of this host, which has too little memory
            left even for the copies.
    """
    facets = facets_of(model.distribute_strategy)
    first = facets.placer.devices[0]
    state = whole_state(model)
    _check_room(first, sum(_tf.bytes_of(v) for v in state if v.device != first))
    kept = [(v, v.numpy()) for v in state if v.device == first]
    whole = _tf.replaced(facets, placer=_OneDevice(facets.placer))
    try:
        with copied_to(model, first), whole:
            yield
    finally:
        for variable, value in kept:
            variable.assign(value)


def _check_room(device: str, needed: int) -> None:
    """Refuse copies that would make the host kill this process."""
    if _tf.host_of(device) != _tf.canonical_device("CPU:0") or ":CPU:" not in device:
        return  # there TensorFlow raises an error, or it is another host
    left = available_bytes()
    if needed > left:
        raise MemoryError(
            f"copies of other devices' variables take {needed:,} bytes, and "
            f"{left:,.0f} are left"
        )


def available_bytes() -> float:
    """Return the free memory of this host in bytes."""
    return float(psutil.virtual_memory().available)
