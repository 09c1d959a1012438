"""The costs of a model's layers, and the cut of the model into stages."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# The costs of a model's layers: bytes and floating-point operations.
#
# A stage (layers on one device) holds, at its worst moment in a training step:
#
#     weights and slots   always
#     activations         saved by the forward pass for the backward pass, which runs
#                         from the last layer to the first, and frees those of a layer
#     gradients           of the layers that the backward pass has finished
#     transients          the temporary memory of one layer while it computes
#
# So the worst moment is that of some layer i of the stage (or the update at the end):
#
#     peak = weights + slots + inputs
#            + max over i (activations of layers <= i + gradients of layers >= i
#                          + transients of i)
#
# With micro-batches (Huang et al., "GPipe", 2019) all parts' activations are held until
# the backward pass, and transients are those of one part. With rematerialization only a
# stage's inputs are held for all parts, and the activations of one part.

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


# With a hash, so that a plan has one.
@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class LayerCost:
    """The costs of one layer that is placed on a device as a whole.

    Sizes are in bytes; those that depend on the batch are per row. They are added up
    while a step is measured, and don't change afterwards.

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
        ValueError: There's no layer.
    """

    layers: tuple[LayerCost, ...]
    tensors: tuple[TensorCost, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("The model has no layers. Expected at least one.")


# The cut of a model into stages: the slowest stage as fast as possible.
#
# Layers are in the order in which they run; a stage is a run of neighbours, and stage s
# is placed on the s-th device. The time of a stage is the sum of
#
#     work        the operations of its layers
#     transfers   for each byte that crosses one of its borders, the operations that its
#                 device could run meanwhile (`flops_per_byte`)
#
# A tensor that skips layers crosses once for each stage that reads it, and costs
# nothing in the stages between, which it doesn't pass through. Both terms and the
# memory depend on a stage's first and last layer alone. So dynamic programming finds
# the best of all cuts of this order, for chains and for any other graph of layers:
#
#     best(s, j) = min over i <= j of max(best(s - 1, i), time(i, j))
#                  where layers i to j - 1 fit into device s
#
# A stage may be empty: its device isn't needed. Among cuts with an equally fast slowest
# stage the one with the least total is taken: that with the fewest transfers.

# A device that runs 1e12 operations a second, behind a bus of 1e10 bytes a second.
_FLOPS_PER_BYTE = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """A model's layers in stages.

    Attributes:
        borders: Stage s has the layers `borders[s]` to `borders[s + 1] - 1`.
        times: The time of each stage, in operations of a training step.
        memory: Bytes of each stage at its worst moment.
        entering: Bytes of a batch that each stage gets: from other stages, and of the
            data.
    """

    borders: tuple[int, ...]
    times: tuple[float, ...]
    memory: tuple[int, ...]
    entering: tuple[int, ...]

    @property
    def slowest(self) -> float:
        """The time of the slowest stage."""
        return max(self.times)


class StageCosts:
    """The costs of every possible stage of a model.

    The stage of the layers i to j - 1 is at `[i, j]`, for i <= j; an empty one costs
    nothing.

    Args:
        model: The model.
        run: How it's trained.
        flops_per_byte: The operations that count as much as the transfer of a byte.

    Attributes:
        time: Array of shape `(n + 1, n + 1)`, operations.
        memory: The same, bytes at the worst moment.
        entering: The same, bytes received from other stages or as the model's data.
    """

    def __init__(
        self, model: ModelCost, run: Run, flops_per_byte: float = _FLOPS_PER_BYTE
    ) -> None:
        size = len(model.layers)
        shape = (size + 1, size + 1)
        self.entering, leaving = np.zeros(shape), np.zeros(shape)
        for tensor in model.tensors:
            _count(tensor, self.entering, leaving)
        np.cumsum(self.entering, axis=1, out=self.entering)
        np.cumsum(leaving, axis=1, out=leaving)
        # Sums of bytes per row, which may be fractions.
        self.entering = np.round(self.entering * run.batch_size)
        leaving = np.round(leaving * run.batch_size)
        work = _sums([layer.flops(run) for layer in model.layers])
        # Their gradients take the same way back.
        transfers = 2 * flops_per_byte * (self.entering + leaving)
        # An empty stage costs nothing.
        has_layers = np.triu(np.ones(shape, bool), 1)
        self.time = np.where(has_layers, work[None] - work[:, None] + transfers, 0.0)
        self.memory = np.where(has_layers, self._memory(model, run), 0.0)

    def _memory(self, model: ModelCost, run: Run) -> Any:
        layers = model.layers
        size = len(layers)
        fixed = _sums([layer.parameter_bytes + layer.slot_bytes for layer in layers])
        saved = _sums([layer.activation_bytes(run) for layer in layers])
        gradients = _sums([layer.gradient_bytes for layer in layers])
        transient = np.array([layer.transient_bytes(run) for layer in layers])
        update = np.array([layer.update_bytes for layer in layers], float)
        # At layer k of the stage from i to j - 1, without what depends on i or j alone.
        moment = saved[1:] - gradients[:-1] + transient
        memory = np.zeros((size + 1, size + 1))
        for i in range(size):
            worst = np.maximum.accumulate(moment[i:]) - saved[i] + gradients[i + 1 :]
            updating = np.maximum.accumulate(update[i:])
            end = gradients[i + 1 :] - gradients[i] + updating
            memory[i, i + 1 :] = fixed[i + 1 :] - fixed[i] + np.maximum(worst, end)
        return np.ceil(memory + self.entering - 1e-3)

    def cut(self, borders: Sequence[int]) -> Cut:
        """Return a cut with its costs."""
        pairs = list(itertools.pairwise(borders))
        return Cut(
            borders=tuple(borders),
            times=tuple(float(self.time[i, j]) for i, j in pairs),
            memory=tuple(int(self.memory[i, j]) for i, j in pairs),
            entering=tuple(int(self.entering[i, j]) for i, j in pairs),
        )

    def best(self, limits: Sequence[float]) -> Cut | None:
        """Return the best cut for devices with this much memory, in bytes.

        Returns:
            A cut with one stage, perhaps empty, for each limit; None if nothing fits.
        """
        fits = [self._within(limit) for limit in limits]
        slowest = self._search(fits, np.maximum)
        if slowest is None:
            return None
        bound = max(self.cut(slowest).times)
        borders = self._search([ok & (self.time <= bound) for ok in fits], np.add)
        return self.cut(slowest if borders is None else borders)

    def smallest(self, limits: Sequence[float]) -> Cut:
        """Return the cut whose largest excess over the devices' memory is least."""
        low, high = 0.0, float(np.max(self.memory))
        for _ in range(40):
            middle = (low + high) / 2
            fits = [self._within(limit + middle) for limit in limits]
            if self._search(fits, np.maximum) is None:
                low = middle
            else:
                high = middle
        found = self.best([limit + high for limit in limits])
        # With the memory of the largest stage as excess all stages fit.
        size = len(self.time) - 1
        return self.cut([0, *[size] * len(limits)]) if found is None else found

    def _within(self, limit: float) -> Any:
        """Return a mask of the stages, from i to j >= i, that a device can hold."""
        return np.triu(self.memory <= limit)

    def _search(self, allowed: Sequence[Any], join: Any) -> list[int] | None:
        """Return the borders with the least `join` over the stages' times."""
        size = len(self.time) - 1
        best = np.full(size + 1, np.inf)
        best[0] = 0.0
        choices = []
        for ok in allowed:
            totals = np.where(ok, join(best[:, None], self.time), np.inf)
            # The last of equally good ones: rather the first devices than the last.
            choice = size - np.argmin(totals[::-1], axis=0)
            best = np.take_along_axis(totals, choice[None], axis=0)[0]
            choices.append(choice)
        if not np.isfinite(best[size]):
            return None
        borders = [size]
        for choice in reversed(choices):
            borders.append(int(choice[borders[-1]]))
        return borders[::-1]


def _count(tensor: TensorCost, entering: Any, leaving: Any) -> None:
    """Add a tensor to the differences of `entering` and `leaving` along a row."""
    source, amount = tensor.source, tensor.row_bytes
    readers = sorted(set(tensor.consumers) - {source})
    if not readers:
        return
    # The first reader at or after i is the moment from which a stage reads it.
    for i in range(readers[-1] + 1):
        first = next(index for index in readers if index >= i)
        if source < i or source > first:
            entering[i, first + 1] += amount
            if source > first:
                # A stage that reaches as far as the source makes it itself.
                entering[i, source + 1] -= amount
    for i in range(source + 1):
        leaving[i, source + 1] += amount
        # All readers are inside from here on, unless one is before i.
        if readers[0] >= i:
            leaving[i, max(readers[-1], source) + 1] -= amount


def _sums(values: Sequence[float]) -> Any:
    """Return the sums of the first 0, 1, ... values."""
    return np.concatenate([[0.0], np.cumsum(np.array(values, float))])
