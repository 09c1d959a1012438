"""Micro-batches: a model's call on a batch as several calls on its parts.

    1. divide    the rows of all inputs of the model, in order
    2. call      the model on each part: its layers, losses and metrics as usual
    3. join      the outputs, in order

So the caller of the model (`train_step`, a loop) sees a whole batch: losses, metrics
and sample weights are computed from all of its outputs. Values that layers add
themselves while they are called are weighted by rows, to be those of the whole batch:

    add_loss of a scalar       a mean over rows: the mean of the parts', by rows
    add_loss of one per row    joined
    metrics of a layer         `Mean` of a scalar: by rows; of one per row: as they are
    BatchNormalization         a part's statistics; the moving ones forget as much as
                               with one batch
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import global_state, masking

from kerasdist import _tf
from kerasdist._keras.context import current, setting
from kerasdist._keras.global_batch.loss_kinds import LossKinds
from kerasdist._keras.global_batch.step_state import is_of_keras
from kerasdist._tf.patching import Original
from kerasdist.collectives.row_exchange import equal_part
from kerasdist.placement.micro_batch_order import MicroBatch


@dataclass
class Marks:
    """The operations of a graph at which parts begin, forward and backward.

    Attributes:
        found: The operations, each with its part.
        calls: How many models were called on parts.
    """

    found: list[tuple[Any, MicroBatch]] = field(default_factory=list)
    calls: int = 0

    def add(self, tensor: Any, part: MicroBatch) -> None:
        """Mark the operation that makes a tensor; does nothing without a graph."""
        if isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy"):
            self.found.append((tensor.op, part))


@dataclass(frozen=True)
class _Rows:
    """Rows of a batch, as numbers or as scalar integer tensors.

    Attributes:
        start: The first one.
        size: How many there are. If it's 0, the part has one row, which counts nothing.
        total: The rows of the batch.
        known: Whether they are numbers.
    """

    start: Any
    size: Any
    total: Any
    known: bool

    def of(self, value: Any) -> Any:
        """Return these rows of a tensor, at least one if it has any."""
        size = self.size if self.known else tf.maximum(self.size, 1)
        start = self.start if self.known else tf.minimum(self.start, self.total - 1)
        if not self.known:
            start = tf.maximum(start, 0)
        if isinstance(value, tf.SparseTensor):
            return _tf.sparse_rows(value, start, size)
        return value[start : start + size]

    def without_filling(self, value: Any) -> Any:
        """Return a part's output, without the row that fills an empty part."""
        return value if self.known else value[: self.size]

    @property
    def share(self) -> Any:
        """Return this part's share of the batch's rows, scalar float32."""
        if self.known:
            return self.size / self.total
        return tf.math.divide_no_nan(
            tf.cast(self.size, tf.float32), tf.cast(self.total, tf.float32)
        )


@contextlib.contextmanager
def dividing(parts: int, merge: Callable[..., Any] | None = None) -> Iterator[Marks]:
    """Divide the batches of models that are called inside of the block.

    Args:
        parts: The number of parts of a batch.
        merge: Makes one process's gradient of the one that a tape returns, given it and
            `marks`.
    """
    marks = Marks()
    merged = functools.partial(merge, marks=marks) if merge and parts > 1 else None
    with setting(parts=parts, marks=marks, merge=merged):
        yield marks


def call_layer(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Layer.__call__`: call an outermost model on parts."""
    if (
        current.parts == 1
        or current.part is not None
        or not isinstance(layer, keras.Model)
        or global_state.get_global_attribute("current_call_ctx") is not None
    ):
        return original(layer, *args, **kwargs)
    leaves = [leaf for leaf in tree.flatten((args, kwargs)) if _has_rows(leaf)]
    if not leaves:
        return original(layer, *args, **kwargs)
    _check(layer)
    parts = _divide(leaves[0], current.parts)
    if len(parts) == 1:
        return original(layer, *args, **kwargs)
    return _call(original, layer, args, kwargs, parts)


def _call(
    original: Original, layer: Any, args: Any, kwargs: Any, parts: list[_Rows]
) -> Any:
    marks = current.marks or Marks()
    call, marks.calls = marks.calls, marks.calls + 1
    total = parts[0].total

    def rows_of(number: int, leaf: Any) -> Any:
        if not _has_rows(leaf) or (
            parts[0].known and leaf.shape[0] not in (None, total)
        ):
            return leaf
        piece = parts[number].of(leaf)
        for tensor in tf.nest.flatten(piece, expand_composites=True):
            marks.add(tensor, MicroBatch(call, number, False))
        mask = masking.get_keras_mask(leaf)
        if mask is not None:
            masking.set_keras_mask(piece, parts[number].of(mask))
        return piece

    given = [
        tree.map_structure(lambda leaf, m=m: rows_of(m, leaf), (args, kwargs))
        for m in range(len(parts))
    ]
    outputs, losses = [], []
    with setting(written=functools.partial(_warn_of_state, layer)):
        for rows, (own_args, own_kwargs) in zip(parts, given, strict=True):
            with setting(part=rows):
                outputs.append(original(layer, *own_args, **own_kwargs))
            losses.append({id(one): list(one._losses) for one in _layers(layer)})
    for one in _layers(layer):
        one._losses[:] = _join_losses([part.get(id(one), []) for part in losses], parts)

    def join(*values: Any) -> Any:
        return _join(values, parts, marks, call)

    whole = tree.map_structure(join, *outputs)
    if current.kinds is not None:
        known = [current.kinds]
        if current.state is not None:
            known.append(current.state.kinds)
        for joined in (
            *tree.flatten(whole),
            *(x for one in _layers(layer) for x in one._losses),
        ):
            for kinds in known:
                _note(kinds, joined)
    return whole


def mean_metric(
    original: Original, metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Replace `Mean.update_state`: a part's value counts by its rows."""
    rows = current.part
    if rows is None or sample_weight is not None:
        return original(metric, values, sample_weight)
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:
        return original(metric, values, rows.share * current.share)
    if not rows.known:
        there = tf.cast(rows.size > 0, tf.float32)
        sample_weight = tf.ones(tf.shape(values)) * there
    return original(metric, values, sample_weight)


def normalize(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `BatchNormalization.call`: moving statistics as of one batch.

    Each part updates the moving statistics: with momentum to the power of its share,
    they decay in a step as much as with the whole batch.
    """
    rows = current.part
    if rows is None:
        return original(layer, *args, **kwargs)
    momentum = layer.momentum
    dtype = "float64" if layer.variable_dtype == "float64" else "float32"
    share = tf.cast(rows.share, dtype)
    # Without Keras's `__setattr__`, which tracks attributes.
    layer.__dict__["momentum"] = tf.pow(tf.constant(momentum, dtype), share)
    try:
        return original(layer, *args, **kwargs)
    finally:
        layer.__dict__["momentum"] = momentum


def _note(kinds: LossKinds, joined: Any) -> None:
    """Declare which joined tensors have rows, which a graph of parts doesn't show."""
    if isinstance(joined, tf.Tensor) and joined.shape.rank == 0:
        kinds.set_mean(joined)
    else:
        kinds.set_rows(joined)


def _has_rows(leaf: Any) -> bool:
    if not tf.is_tensor(leaf) and not hasattr(leaf, "__array__"):
        return False
    shape = getattr(leaf, "shape", None)
    return shape is not None and (
        getattr(shape, "rank", len(shape) if isinstance(shape, tuple) else None) != 0
    )


def _divide(leaf: Any, count: int) -> list[_Rows]:
    known = leaf.shape[0] if getattr(leaf.shape, "rank", 1) is not None else None
    if known is not None:
        parts = [equal_part(known, count, i) for i in range(min(count, known) or 1)]
        return [_Rows(p.start, p.stop - p.start, known, True) for p in parts]
    if isinstance(leaf, tf.RaggedTensor):
        total = tf.cast(leaf.nrows(), tf.int32)
    else:
        total = tf.shape(leaf)[0]
    # The same bounds as those of `equal_part`.
    size, more = total // count, total % count
    starts = [size * i + tf.minimum(i, more) for i in range(count)] + [total]
    return [
        _Rows(starts[i], starts[i + 1] - starts[i], total, False) for i in range(count)
    ]


def _layers(model: Any) -> list[Any]:
    found = {id(layer): layer for layer in model._flatten_layers()}
    return list(found.values())


def _check(model: Any) -> None:
    stateful = [one.name for one in _layers(model) if getattr(one, "stateful", False)]
    if stateful:
        raise ValueError(
            "Layers that keep a state for each row of a batch can't be called on parts "
            f"of it. Received: micro_batches={current.parts} with stateful=True in "
            f"{', '.join(map(repr, stateful[:5]))}. Use micro_batches=1 or "
            "stateful=False."
        )


def _warn_of_state(model: Any, variable: Any) -> None:
    """Warn if a layer of a script's own assigns a variable for each part."""
    for layer in _layers(model):
        if is_of_keras(layer) or not any(
            one is variable for one in layer._non_trainable_variables
        ):
            continue
        warnings.warn(
            f"Layer '{layer.name}' assigns its variable '{variable.name}' when it's "
            f"called. With micro_batches={current.parts} that's once for each "
            "micro-batch, with its rows: a counter of calls counts them all, and "
            "statistics are not those of one batch. Use micro_batches=1 for the "
            "numbers of one process.",
            stacklevel=2,
        )


def _join_losses(lists: list[list[Any]], parts: list[_Rows]) -> list[Any]:
    """Join the losses of one layer, for each part a list in the order of `add_loss`."""
    joined = []
    for i in range(max(map(len, lists))):
        found = [
            (losses[i], rows)
            for losses, rows in zip(lists, parts, strict=True)
            if i < len(losses)
        ]
        if found[0][0].shape.rank == 0:
            joined.append(_mean(found))
        else:
            joined.append(tf.concat([rows.without_filling(x) for x, rows in found], 0))
    return joined


def _mean(found: list[tuple[Any, _Rows]]) -> Any:
    """Return the mean of scalars, weighted by rows."""
    return tf.add_n([value * tf.cast(rows.share, value.dtype) for value, rows in found])


def _join(values: Any, parts: list[_Rows], marks: Marks, call: int) -> Any:
    """Join the parts of one output."""
    first = values[0]
    if not tf.is_tensor(first):
        return first
    pairs = list(zip(values, parts, strict=True))
    if isinstance(first, tf.SparseTensor):
        cut = [_tf.sparse_rows(x, 0, rows.size) for x, rows in pairs]
        return tf.sparse.concat(0, cut)
    if not isinstance(first, tf.RaggedTensor) and first.shape.rank == 0:
        return _mean(pairs) if first.dtype.is_floating else values[-1]
    cut = [rows.without_filling(x) for x, rows in pairs]
    if isinstance(first, tf.RaggedTensor):
        return tf.concat(cut, 0)
    joined = _concat(cut, marks, call)
    masks = [masking.get_keras_mask(x) for x in values]
    if all(mask is not None for mask in masks):
        mask = [rows.without_filling(m) for m, rows in zip(masks, parts, strict=True)]
        masking.set_keras_mask(joined, tf.concat(mask, 0))
    return joined


def _concat(parts: list[Any], marks: Marks, call: int) -> Any:
    """Concatenate parts, with marks where the gradients of the parts begin."""

    @tf.custom_gradient
    def concatenated(*tensors: Any) -> Any:
        with _same_device(tensors[-1]):
            whole = tf.concat(tensors, 0)

        def backward(gradient: Any) -> Any:
            sizes = [tf.shape(tensor)[0] for tensor in tensors]
            pieces = []
            for number, piece in enumerate(tf.split(gradient, sizes)):
                piece = tf.identity(piece)
                marks.add(piece, MicroBatch(call, number, True))
                pieces.append(piece)
            return pieces

        return whole, backward

    if not parts[0].dtype.is_floating and not parts[0].dtype.is_complex:
        return tf.concat(parts, 0)
    return concatenated(*parts)


def _same_device(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Use the device of a tensor of a graph, if it has one."""
    if hasattr(tensor, "numpy"):
        return contextlib.nullcontext()
    device = tensor.op.device
    return tf.device(device) if device else contextlib.nullcontext()
