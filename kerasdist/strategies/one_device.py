"""A placed model as if there were one device: what several are compared with.

All of its state is on the first device for a while, and nothing is elsewhere:

    as placed                      CPU:0  first layers      CPU:1  last layers
    inside of `on_one_device`      CPU:0  all layers, whole batches

Layers are called on whole batches, and activations are kept: one device needs neither
micro-batches, nor to compute anything again, but to fit what is large into little
memory. What belongs to other devices is copied, so those copies and what a whole batch
leaves for its backward pass must fit into that one device beside its own layers.

Variables that aren't Keras's stay where they are, and what a layer itself puts on a
device (`tf.device`) is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kerasdist import _keras
from kerasdist._keras import LayerFacts
from kerasdist.placement.patterns import Patterns
from kerasdist.strategies.placed_ops import Placer

__all__ = ["on_one_device"]


class _OneDevice(Placer):
    """All is on the first device, whatever was said.

    Args:
        placer: Where everything else would be.
    """

    def __init__(self, placer: Placer) -> None:
        super().__init__(Patterns({}), placer.devices)

    def wish(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        del layer
        return self.devices[0]

    def device_of(self, layer: LayerFacts) -> str | None:
        """See `LayerPlacer`."""
        del layer
        return self.devices[0]

    def variable_device(
        self, path: str, called: tuple[str, ...], device: str | None
    ) -> str:
        """See `LayerPlacer`."""
        del path, called, device
        return self.devices[0]


@contextlib.contextmanager
def on_one_device(model: Any) -> Iterator[None]:
    """What is traced and run inside is on the first device, on whole batches.

    Then everything is where it was, with the values that it had; also if the first
    device's memory isn't enough, or a step fails.

    Args:
        model: A model that `ModelParallelStrategy` has placed, with its optimizer.
    """
    extended = model.distribute_strategy.extended
    first = extended.layer_placer.devices[0]
    kept = [(v, v.numpy()) for v in _keras.whole_state(model) if v.device == first]
    before = extended.layer_placer, extended.micro_batches, extended.rematerialize
    try:
        with _keras.copied_to(model, first):
            extended.layer_placer = _OneDevice(extended.layer_placer)
            extended.micro_batches, extended.rematerialize = 1, False
            yield
    finally:
        extended.layer_placer, extended.micro_batches, extended.rematerialize = before
        for variable, value in kept:
            variable.assign(value)
