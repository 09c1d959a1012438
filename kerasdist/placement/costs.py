"""The costs of a model's layers: bytes and floating-point operations.

A stage (layers on one device) holds, at its worst moment in a training step:

    weights and slots   always
    activations         saved by the forward pass for the backward pass, which runs from
                        the last layer to the first, and frees those of a layer
    gradients           of the layers that the backward pass has finished
    transients          the temporary memory of one layer while it computes

So the worst moment is that of some layer i of the stage (or the update at the end):

    peak = weights + slots + inputs
           + max over i (activations of layers <= i + gradients of layers >= i
                         + transients of i)

With micro-batches (Huang et al., "GPipe", 2019) all parts' activations are held until
the backward pass, and transients are those of one part. With rematerialization only a
stage's inputs are held for all parts, and the activations of one part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# The backward pass computes two products for each of the forward pass.
_PASSES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of training that memory depends on.

    Attributes:
        batch_size: Rows of a batch, >= 1.
        micro_batches: Parts into which a batch is cut, >= 1; 1: it isn't.
        rematerialize: Whether the forward pass is repeated in the backward pass, so
            that only a stage's inputs have to be held.

    Raises:
        ValueError: A number is wrong.
    """

    batch_size: int
    micro_batches: int = 1
    rematerialize: bool = False

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value!r}"
            for name, value in (
                ("batch_size", self.batch_size),
                ("micro_batches", self.micro_batches),
            )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if faults:
            raise ValueError(
                "A plan needs numbers of rows and parts. Received: "
                f"{', '.join(faults)}; expected integers >= 1."
            )

    @property
    def part_rows(self) -> int:
        """Rows of the largest micro-batch."""
        return math.ceil(self.batch_size / self.micro_batches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The costs of one layer that is placed on a device as a whole.

    Sizes are in bytes; those that depend on the batch are per row.

    Attributes:
        path: Its path in the model.
        kind: The name of its class.
        parameter_bytes: All its variables.
        trainable_bytes: Those of them that are trained.
        slot_bytes: The optimizer's slots for these.
        gradient_bytes: Their gradients.
        update_bytes: Held at most while the optimizer updates one of them.
        saved_row_bytes: Saved by the forward pass for the backward pass.
        saved_bytes: The same, independent of the batch: weights in another dtype.
        transient_row_bytes: Held at most while it computes, beside the saved bytes.
        output_row_bytes: Its outputs.
        row_flops: Floating-point operations of the forward pass; a multiplication and
            an addition are two.
    """

    path: str
    kind: str = ""
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    slot_bytes: int = 0
    gradient_bytes: int = 0
    update_bytes: int = 0
    saved_row_bytes: float = 0.0
    saved_bytes: int = 0
    transient_row_bytes: float = 0.0
    output_row_bytes: float = 0.0
    row_flops: float = 0.0

    def activation_bytes(self, run: Run) -> float:
        """Return the bytes saved at the worst moment, beside the stage's inputs."""
        rows = run.part_rows if run.rematerialize else run.batch_size
        return self.saved_row_bytes * rows + self.saved_bytes

    def transient_bytes(self, run: Run) -> float:
        """Return the temporary bytes while it computes one part."""
        return self.transient_row_bytes * run.part_rows

    def flops(self, run: Run) -> float:
        """Return the operations of a training step: forward and backward pass."""
        passes = _PASSES + 1 if run.rematerialize else _PASSES
        return passes * self.row_flops * run.batch_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorCost:
    """A tensor that one layer outputs and others read: an edge of the layer graph.

    Attributes:
        source: Index of the layer that outputs it; -1: a part of the batch.
        consumers: Indices of the layers that read it.
        row_bytes: Its bytes per row of the batch.
    """

    source: int
    consumers: tuple[int, ...]
    row_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The layers of a model in the order in which they run, and their tensors.

    Attributes:
        layers: The layers; each but for shared ones runs after those before it.
        tensors: The tensors between them.

    Raises:
        ValueError: There's no layer, two have one path, or an index is wrong.
    """

    layers: tuple[LayerCost, ...]
    tensors: tuple[TensorCost, ...] = ()

    def __post_init__(self) -> None:
        size = len(self.layers)
        if not size:
            raise ValueError("The model has no layers. Expected at least one.")
        paths = [layer.path for layer in self.layers]
        if len(set(paths)) < size:
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise ValueError(
                f"Layers must have different paths. Received twice: {twice}; give "
                "them different names."
            )
        for tensor in self.tensors:
            if not (
                -1 <= tensor.source < size
                and all(0 <= index < size for index in tensor.consumers)
            ):
                raise ValueError(
                    f"A tensor must lead from layer to layer. Received: {tensor}; "
                    f"expected indices below {size}."
                )

    @classmethod
    def chain(cls, layers: Sequence[LayerCost]) -> ModelCost:
        """Return a model in which each layer reads the output of the one before."""
        return cls(
            layers=tuple(layers),
            tensors=tuple(
                TensorCost(
                    source=i, consumers=(i + 1,), row_bytes=layer.output_row_bytes
                )
                for i, layer in enumerate(layers[:-1])
            ),
        )
