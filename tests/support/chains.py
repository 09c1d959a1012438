"""Models in which each layer reads the output of the one before."""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist.placement.partition import LayerCost, ModelCost, TensorCost


def chain(layers: Sequence[LayerCost]) -> ModelCost:
    """Return the costs of such a model."""
    between = [
        TensorCost(source=i, consumers=(i + 1,), row_bytes=layer.output_row_bytes)
        for i, layer in enumerate(layers[:-1])
    ]
    return ModelCost(layers=tuple(layers), tensors=tuple(between))
