"""Where layers, variables and operations of a placed model are."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _keras
from kerasdist._keras import LayerFacts, called_layer
from kerasdist._tf import gradient_placement
from kerasdist._tf.graph.partition_graphs import ran_graphs
from kerasdist.placement.patterns import Patterns
from kerasdist.strategies.placed.report import Names, StepPlaces, places_of

__all__ = ["Placer"]

# For what TensorFlow doesn't know of a shape: a batch's rows, most of the time.
_UNKNOWN_DIMENSION = 128


class Placer:
    """A placement in use: what it says of everything in a step.

    1. A layer with variables is where they are.
    2. A layer of a `stage` is on its device; else where the innermost pattern says
       that matches it or a layer around it; else where the layer is that calls it.
    3. What nothing is said of is on the first device: variables and layers without
       layers inside. A layer that has layers inside isn't anywhere if they are on
       several devices: only its own operations are left, see 4.
    4. An operation of no layer (a loss, a metric, an addition between layers) is where
       its largest input is, so that the least has to be moved.
    5. Operations of the backward pass are where those of the forward pass are that
       they are the gradient of, see `_tf.gradient_placement`.

    Args:
        patterns: From layer paths to devices.
        devices: Canonical names of all devices; the first one is for what nothing is
            said of.

    Attributes:
        steps: What ran where, by kind of step.
    """

    def __init__(self, patterns: Patterns, devices: Sequence[str]) -> None:
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

    @contextlib.contextmanager
    def staging(self, device: str) -> Iterator[None]:
        """What is made inside belongs on a device."""
        self._stages.stack.append(device)
        try:
            yield
        finally:
            self._stages.stack.pop()

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
        """Where the variable goes that is being made in this thread."""
        return _keras.device_of_variable() or self.stage or self.devices[0]

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
            # All layers have a device, and another model may have what is missing.
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
            # Beside the step there are small ones, of data and of single operations.
            step = max(graphs, key=len)
            self.steps[kind] = places_of(step, self._names, rows)

    def _note(self, op: Any) -> None:
        layer = called_layer()
        if layer is not None:
            self._names.layers.setdefault(op.name.rpartition("/")[0], layer)
        # Some shapes are known only when the operation is finished.
        self._traced[id(op.graph)] = op.graph

    def choose(self, top: Any) -> Any:
        """A function that says where an operation of a step goes.

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
    """The device of the largest input that is on one, or empty."""
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
