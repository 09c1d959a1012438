"""State that layers and metrics of a script keep, by what its update does.

A layer that counts rows, or keeps a codebook's moving sums, has on each replica what
this replica's rows made of it. The update is read from the graph, where it's assigned:

    layers
        the same on all replicas      left as it is
        a mean over rows, perhaps     left as it is, and averaged at the end of an
        added to the old value        epoch, as BatchNormalization's statistics are
        a function of sums, means,    computed from those of all replicas: one small
        largest and smallest rows     collective
        anything else                 the chief's at the end of an epoch, with a line
    metrics, whose values are summed over the replicas when they are read
        something is added            left as it is
        a function, as above          of all replicas; the first one writes it, others 0
        anything else                 left as it is, with a line

Keras's own layers and metrics aren't looked at. A `tf.Variable` that a layer holds as
an attribute is the layer's like one of `add_weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from kerasdist import _tf
from kerasdist._keras.context import current
from kerasdist._keras.global_batch.loss_kinds import CONSTANT, Extreme, Kind, LossKinds
from kerasdist._keras.global_batch.losses import part_of
from kerasdist._keras.protocols import KerasHooks
from kerasdist._tf.patching import Original
from kerasdist._tf.tensor_origins import outermost, reached, sources_of
from kerasdist._tf.variables import CHIEFS_STATE, is_distributed


def assign(original: Original, variable: Any, value: Any) -> Any:
    """Replace `Variable._direct_assign`: write what one process would write."""
    if current.written is not None:
        current.written(variable)
    state = current.state
    outside = tf.distribute.in_cross_replica_context()
    held = variable._value
    if (outside or not tf.distribute.has_strategy()) and (
        is_distributed(held)
        and held.synchronization == tf.VariableSynchronization.ON_READ
    ):
        # Otherwise TensorFlow reads it again, which is a sum over all workers.
        return held.assign(tf.cast(value, held.dtype), read_value=False)
    if state is None or current.reduced or outside:
        return original(variable, value)
    return original(variable, state.written(variable, held, value))


def update_plain(
    original: Original, variable: Any, update: Any, value: Any, **more: Any
) -> Any:
    """Replace `_on_write_update_replica`: likewise for a `tf.Variable` of a script."""
    state = current.state
    if (
        state is None
        or current.reduced
        or not state.knows(variable)
        or variable.aggregation != tf.VariableAggregation.NONE
    ):
        return original(variable, update, value, **more)
    try:
        value = update(_NewValue(_tf.copy_here(variable)), value)
    except AttributeError:  # `scatter_max` or the like
        state.leave(variable)
        return original(variable, update, value, **more)
    value = state.written(variable, variable, value)
    return original(variable, lambda v, x, **k: v.assign(x, **k), value, **more)


class _NewValue:
    """A stand-in for a variable, of which an update returns the new value."""

    def __init__(self, copy: Any) -> None:
        self._copy = copy

    def assign(self, value: Any) -> Any:
        return tf.convert_to_tensor(value, self._copy.dtype)

    def assign_add(self, value: Any) -> Any:
        return self._copy.read_value() + value

    def assign_sub(self, value: Any) -> Any:
        return self._copy.read_value() - value

    def scatter_add(self, slices: Any) -> Any:
        indices = slices.indices[:, tf.newaxis]
        return _with_rows_added(self._copy.read_value(), indices, slices.values)


class StepState:
    """The state that a replica's step may write.

    Args:
        trainer: The model.
        hooks: The hooks of its strategy.
        rows: The replica's number of rows.
        training: Whether layers may write theirs, too.
    """

    def __init__(
        self, trainer: Any, hooks: KerasHooks, rows: Any, *, training: bool
    ) -> None:
        self._hooks = hooks
        self._rows = rows
        # The layers, and the variables' names there.
        self._layers: dict[int, tuple[str, str]] = {}
        self._metrics: dict[int, str] = {}
        metrics = _metrics_of(trainer.metrics)
        for metric in metrics:
            for variable in metric.variables:
                self._metrics[id(variable)] = metric.name
        self._summed = [v._value for metric in metrics for v in metric.variables]
        for layer in trainer._flatten_layers() if training else ():
            if not is_of_keras(layer) and not getattr(layer, "stateful", False):
                for variable in getattr(layer, "_non_trainable_variables", ()):
                    self._layers[id(variable)] = layer.name, variable.name
                for name, variable in plain_variables(layer):
                    self._layers[id(variable)] = layer.name, name
        self._kinds: LossKinds | None = None

    def knows(self, variable: Any) -> bool:
        """Return whether a variable is one of a layer of the script's."""
        return id(variable) in self._layers

    def written(self, variable: Any, held: Any, value: Any) -> Any:
        """Return what this replica writes in place of a value.

        Args:
            variable: Keras's variable, or one of TensorFlow that a layer holds.
            held: TensorFlow's variable. Not `variable.value`, which mixed precision
                casts.
            value: The value.
        """
        metric = self._metrics.get(id(variable))
        if metric is None and not self.knows(variable):
            return value
        value = tf.cast(value, held.dtype)
        if metric is not None:
            return self._of_metric(metric, variable, value)
        if not tf.executing_eagerly():
            value = _as_sum(value)
            kind = self.kinds.of(value)
            if kind == CONSTANT or (kind == Kind(0) and value.dtype.is_floating):
                return value
            whole = self.kinds.of_all(value, self._reduce)
            if whole is not None:
                return whole
            added = _added_to(value, _tf.copy_here(held).handle)
            if added is not None and value.dtype.is_integer:
                # A count, of whatever: by an operation that isn't known.
                (total,) = self._reduce([added], [Kind(1)])
                return held.read_value() + total
        elif value.dtype.is_floating:
            return value  # averaged
        self.leave(variable)
        return value

    def leave(self, variable: Any) -> None:
        """Let each replica write its own; the chief's counts at the end of an epoch."""
        CHIEFS_STATE.set(variable, True)
        layer, name = self._layers[id(variable)]
        self._hooks.log_once(
            f"state {layer}/{name}",
            f"kerasdist: what the layer {layer!r} writes to its variable {name!r} "
            "isn't known to be made of sums, means and extremes of a batch's rows. "
            "Each replica writes what its own rows make of it, and the chief's value "
            "counts at the end of an epoch: it may differ from that of one process.",
        )

    def _of_metric(self, metric: str, variable: Any, value: Any) -> Any:
        if tf.executing_eagerly():
            return value
        if _added_to(value, _tf.copy_here(variable._value).handle) is not None:
            return value
        whole = self.kinds.of_all(value, self._reduce)
        if whole is None:
            self._hooks.log_once(
                f"metric {metric}",
                f"kerasdist: what the metric {metric!r} writes to its variable "
                f"{variable.name!r} isn't known to be made of sums, means and extremes "
                "of a batch's rows, so its result may differ from that of one process. "
                "Add numbers to variables with `assign_add`, and compute the result of "
                "them in `result`.",
            )
            return value
        first = self._hooks.workers.current_replica() == 0
        return whole if first else tf.zeros_like(whole)

    @property
    def kinds(self) -> LossKinds:
        """The kinds of the values that are written."""
        if self._kinds is None:
            copies = [_tf.copy_here(variable) for variable in self._summed]
            self._kinds = LossKinds(self._rows, copies, counting=True)
        return self._kinds

    def _reduce(self, values: list[Any], kinds: list[Any]) -> list[Any]:
        """Return the numbers of the global batch."""
        replicas, mine = self._hooks.workers.replicas, current.rows > 0
        me = self._hooks.workers.current_replica()
        parts = []
        for value, kind in zip(values, kinds, strict=True):
            if isinstance(kind, Extreme):
                # A sum with a place for each replica.
                none = value.dtype.min if kind.op == "max" else value.dtype.max
                own = tf.where(mine, value, tf.constant(none, value.dtype))
                zeros = tf.zeros_like(own)
                places = [own if i == me else zeros for i in range(replicas)]
                parts.append(tf.stack(places))
                continue
            if kind.degree != 1:
                value *= tf.cast(part_of(kind.degree), value.dtype)
            parts.append(tf.where(mine, value, tf.zeros_like(value)))
        sums = self._hooks.gradients.sum_over_replicas(parts)
        found = []
        for total, kind in zip(sums, kinds, strict=True):
            if isinstance(kind, Extreme):
                largest = kind.op == "max"
                total = (tf.reduce_max if largest else tf.reduce_min)(total, 0)
            found.append(total)
        return found


def _metrics_of(metrics: Iterable[Any]) -> list[Any]:
    """Return the metrics that a script has written, also those given to `compile`."""
    found: list[Any] = []
    for metric in metrics:
        if not is_of_keras(metric):
            found.append(metric)
        elif isinstance(getattr(metric, "metrics", None), list):
            found += _metrics_of(metric.metrics)
    return found


def is_of_keras(owner: Any) -> bool:
    """Return whether a layer or metric is Keras's own, not a subclass of a script."""
    return type(owner).__module__.startswith(keras.__name__ + ".")


def plain_variables(layer: Any) -> list[tuple[str, Any]]:
    """Return each `tf.Variable` of the scope that a layer holds, and its attribute."""
    found = []
    for name, held in vars(layer).items():
        several = held.values() if isinstance(held, dict) else held
        for each in several if isinstance(held, (dict, list, tuple)) else (held,):
            if isinstance(each, tf.Variable) and is_distributed(each):
                found.append((name, each))
    return found


def _as_sum(value: Any) -> Any:
    """Return a sum in place of `tf.tensor_scatter_nd_add`."""
    is_scattered = value.op.type == "TensorScatterAdd"
    return _with_rows_added(*value.op.inputs) if is_scattered else value


def _with_rows_added(tensor: Any, indices: Any, rows: Any) -> Any:
    return tensor + tf.scatter_nd(indices, rows, tf.shape(tensor, indices.dtype))


def _added_to(value: Any, handle: Any) -> Any | None:
    """Return what is added to a variable's value, if that isn't made of it."""
    while value.op.type in ("Identity", "Cast"):
        value = value.op.inputs[0]
    if value.op.type not in ("Add", "AddV2", "Sub"):
        return None
    one, other = value.op.inputs
    if _is_read(one, handle):
        added = other if value.op.type != "Sub" else -other
    elif _is_read(other, handle) and value.op.type != "Sub":
        added = one
    else:
        return None
    depends = any(each is handle for each in reached([added], sources_of))
    return None if depends else added


def _is_read(tensor: Any, handle: Any) -> bool:
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return (
        tensor.op.type == "ReadVariableOp" and outermost(tensor.op.inputs[0]) is handle
    )
