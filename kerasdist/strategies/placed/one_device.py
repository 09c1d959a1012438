"""A placed model run on one device, with which several devices are compared.

All of its state is on the first device for a while:

    as placed                      CPU:0  first layers      CPU:1  last layers
    inside of `on_one_device`      CPU:0  all layers, whole batches

Layers are called on whole batches, and activations are kept: one device needs no
micro-batches, and recomputes nothing except to fit into little memory. The variables of
other devices are copied, so those copies and the activations of a whole batch must fit
into that one device beside its own layers.

Variables that aren't Keras's stay on their devices, and operations that a layer itself
puts on a device (`tf.device`) run there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil

from kerasdist import _tf
from kerasdist._keras.placement.layers import LayerFacts
from kerasdist._keras.training.state import copied_to, whole_state
from kerasdist._tf.variables import facets_of
from kerasdist.placement.patterns import Patterns
from kerasdist.strategies.placed.placer import Placer


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
    _check_room(first, sum(_bytes(v) for v in state if v.device != first))
    kept = [(v, v.numpy()) for v in state if v.device == first]
    before = facets.placer, facets.micro_batches, facets.rematerialize
    try:
        with copied_to(model, first):
            facets.placer = _OneDevice(facets.placer)
            facets.micro_batches, facets.rematerialize = 1, False
            yield
    finally:
        facets.placer, facets.micro_batches, facets.rematerialize = before
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


def _bytes(variable: Any) -> int:
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size)
