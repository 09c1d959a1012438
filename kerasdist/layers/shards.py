"""One matrix as several variables, each on a device of its own.

A sharded layer has a sub-layer per shard. So a shard has what every layer has: a path,
a device, and a backward pass on it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

__all__ = [
    "Place",
    "Shard",
    "Sharded",
    "WholeValue",
    "bounds",
    "check_constraint",
    "refuse_extras",
]

# Sums over entries: the penalty of a matrix is the sum of its parts' penalties.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_NORMS = (
    keras.constraints.MaxNorm,
    keras.constraints.MinMaxNorm,
    keras.constraints.UnitNorm,
)


def bounds(length: int, shards: int) -> list[tuple[int, int]]:
    """Where each shard begins and ends: in order, sizes differ by at most 1."""
    size, more = divmod(length, shards)
    ends = [size * i + min(i, more) for i in range(shards + 1)]
    return list(itertools.pairwise(ends))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a shard belongs.

    Attributes:
        index: Its number.
        count: Number of shards.
        start: Where it begins, along the axis that is cut.
        stop: Where it ends.
        device: The device that it has to name itself; None for no wish.
    """

    index: int
    count: int
    start: int
    stop: int
    device: str | None

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


class WholeValue:
    """The initial value of a matrix, drawn whole and once, given out in parts.

    So a sharded layer begins with the numbers of a plain one with the same seed. It is
    drawn in host memory, and dropped when all parts were given out.

    Args:
        initializer: Keras's initializer, or a function of shape and dtype.
        shape: Of the whole matrix.
        axis: Along which it's cut.
        parts: Into how many parts.
    """

    def __init__(
        self,
        initializer: Callable[..., Any],
        shape: Sequence[int],
        axis: int,
        parts: int,
    ) -> None:
        self._initializer = initializer
        self._shape = tuple(shape)
        self._axis = axis
        self._parts = parts
        self._missing = parts
        self._whole: Any = None

    def part(self, place: Place) -> Callable[..., Any]:
        """The initializer of a shard."""

        def initial(shape: Sequence[int], dtype: Any = None) -> Any:
            with tf.device("CPU:0"):
                whole = self._draw(dtype)
                where = [slice(None)] * len(self._shape)
                where[self._axis] = slice(place.start, place.stop)
                return tf.identity(whole[tuple(where)])

        return initial

    def _draw(self, dtype: Any) -> Any:
        if not tf.executing_eagerly():
            # A tensor of one graph isn't another's. Keras's initializers draw the
            # same numbers again.
            return tf.convert_to_tensor(self._initializer(self._shape, dtype=dtype))
        if self._whole is None:
            drawn = self._initializer(self._shape, dtype=dtype)
            self._whole = tf.convert_to_tensor(drawn)
            self._missing = self._parts
        whole = self._whole
        self._missing -= 1
        if self._missing == 0:
            self._whole = None
        return whole


class _OfWhole(keras.regularizers.Regularizer):
    """What a regularizer says of a whole matrix, whatever variable it is asked about.

    A class, because Keras 3.14 takes no function.
    """

    def __init__(self, regularizer: Any, whole: Callable[[], Any]) -> None:
        self._regularizer = regularizer
        self._of = whole

    def __call__(self, x: Any) -> Any:
        return self._regularizer(self._of())


class Shard(keras.layers.Layer):
    """One shard's variables, and what is computed with them.

    Args:
        weights: For each variable the arguments of `add_weight`.
        compute: A function of the shard and its inputs.
        device: Where it is, if no strategy says so; None for no wish.
        **kwargs: As of any layer.
    """

    def __init__(
        self,
        weights: Sequence[dict[str, Any]],
        compute: Callable[[Any, Any], Any],
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._specs = [dict(spec) for spec in weights]
        self._compute = compute
        self.device = device
        self.supports_masking = True

    def build(self, input_shape: Any = None) -> None:
        """Create the variables where this is called."""
        for spec in self._specs:
            setattr(self, spec["name"], self.add_weight(**spec))
        self._specs = []  # they may hold the whole initial value

    def call(self, inputs: Any) -> Any:
        """Compute this shard's part."""
        with _on(self.device):
            return self._compute(self, inputs)


class Sharded:
    """What sharded layers have in common; mixed into a layer of Keras.

    Attributes:
        split: `"columns"` or `"rows"`: along which axis the matrix is cut.
    """

    built: bool
    name: str

    # `__shards__`, because Keras writes layers that it finds under other names into
    # files of their own; those of this layer hold the whole matrix.

    def _set_up(self, split: str, devices: Any, shards: int | None) -> None:
        """Take the arguments that plain layers don't have.

        Raises:
            ValueError: They are wrong, or don't agree.
        """
        faults = []
        if split not in ("columns", "rows"):
            faults.append(f"`split` is 'columns' or 'rows'. Received: split={split!r}")
        if devices is not None and (isinstance(devices, str) or not list(devices)):
            faults.append(
                "`devices` is a list of device names, one for each shard. Received: "
                f"devices={devices!r}"
            )
            devices = None
        if shards is not None and (not isinstance(shards, int) or shards < 1):
            faults.append(
                f"`shards` is a positive integer. Received: shards={shards!r}"
            )
        elif devices is not None and shards not in (None, len(devices)):
            faults.append(
                "`devices` names one device for each of the `shards`. Received: "
                f"shards={shards}, devices={list(devices)!r}. Leave out `shards`"
            )
        if faults:
            raise ValueError("; ".join(faults) + ".")
        self.split = split
        self._wanted = None if devices is None else tuple(map(str, devices))
        self._count = shards if devices is None else len(self._wanted or ())

    def _devices(self, length: int) -> list[str | None]:
        """The device of each shard of an axis of that length.

        Raises:
            ValueError: There are more shards than entries, or a device is missing.
        """
        strategy = tf.distribute.get_strategy()
        staged = hasattr(strategy, "stage")
        theirs = list(strategy.devices) if staged else []
        count = self._count or min(len(theirs) or 1, length)
        if count > length:
            raise ValueError(
                "A layer can't have more shards than its matrix has "
                f"{self.split}. Received: {count} shards of {length} {self.split}. "
                "Give it fewer devices, or use the plain layer."
            )
        if self._wanted is not None:
            if not staged:
                _check(self._wanted)
            return list(self._wanted)
        # Saved with more shards than there are devices now: they go round.
        return [theirs[i % len(theirs)] if theirs else None for i in range(count)]

    def _make_shards(self, length: int, make: Callable[[Place], Shard]) -> None:
        """Create and build the shards of an axis of that length, where they belong."""
        strategy = tf.distribute.get_strategy()
        devices = self._devices(length)
        made = []
        self._bounds = bounds(length, len(devices))
        for index, device in enumerate(devices):
            staged = device is not None and hasattr(strategy, "stage")
            start, stop = self._bounds[index]
            place = Place(
                index=index,
                count=len(devices),
                start=start,
                stop=stop,
                device=None if staged else device,
            )
            # Made in its stage, too: it comes before patterns that match the layer.
            with strategy.stage(device) if staged else _on(device):
                shard = make(place)
                shard.build()
            made.append(shard)
        self._count = len(devices)
        # XLA doesn't compile for several devices at once.
        self.supports_jit = len(devices) == 1
        self.__shards__ = made

    @property
    def shards(self) -> int | None:
        """Number of shards; None if the strategy that builds the layer decides."""
        return self._count

    def _parts(self) -> list[Any]:
        return list(self.__shards__)

    def _whole(self, name: str, axis: int) -> Any:
        """A matrix or vector of all shards, as one tensor."""
        parts = [getattr(shard, name) for shard in self._parts()]
        # Keras asks for all attributes of what it writes: in host memory there's room.
        with _on("CPU:0" if tf.executing_eagerly() else None):
            return tf.concat([tf.convert_to_tensor(part) for part in parts], axis)

    def _penalty(
        self, regularizer: Any, name: str, axis: int, place: Place
    ) -> Callable[[Any], Any] | None:
        """The regularizer of one shard's variable."""
        if regularizer is None or type(regularizer) in _SUMS:
            return regularizer
        # Anything else may need the whole matrix: the first shard's adds it up.
        if place.index:
            return None
        return _OfWhole(regularizer, lambda: self._whole(name, axis))

    def _store_whole(self, store: Any, key: str, name: str, axis: int) -> None:
        parts = [getattr(shard, name) for shard in self._parts()]
        arrays = [keras.ops.convert_to_numpy(part) for part in parts]
        store[key] = np.concatenate(arrays, axis)

    def _load_whole(self, value: Any, name: str, axis: int) -> None:
        """Give each shard its part of a whole matrix or vector.

        Raises:
            ValueError: It has another shape.
        """
        value = np.asarray(value)
        parts = [getattr(shard, name) for shard in self._parts()]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        if list(value.shape) != shape:
            raise ValueError(
                f"`{name}` of layer {self.name!r} has another shape in what "
                f"is loaded. Received: shape {tuple(value.shape)}; expected "
                f"{tuple(shape)}. Load into a layer with the same arguments; only the "
                "number of shards may differ."
            )
        for part, (start, stop) in zip(parts, self._bounds, strict=True):
            part.assign(np.take(value, range(start, stop), axis))

    def quantize(self, mode: Any = None, *args: Any, **kwargs: Any) -> None:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"A sharded layer can't be quantized. Received: mode={mode!r} for layer "
            f"{self.name!r}. Load its weights into the plain layer, and quantize that."
        )

    def enable_lora(self, rank: Any = None, *args: Any, **kwargs: Any) -> None:
        """Refused.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"A sharded layer has no LoRA. Received: rank={rank!r} for layer "
            f"{self.name!r}. Load its weights into the plain layer, and enable it "
            "there."
        )


def check_constraint(constraint: Any, argument: str, axis: int, shards: int) -> None:
    """Check that a constraint on each shard is the constraint on the whole.

    Raises:
        ValueError: It isn't, or nobody knows.
    """
    if constraint is None or shards == 1:
        return
    kind = type(constraint)
    if kind is keras.constraints.NonNeg:
        return
    if kind in _NORMS:
        axes = constraint.axis
        axes = axes if isinstance(axes, (list, tuple)) else [axes]
        if axis not in axes and axis - 2 not in axes:
            return
    raise ValueError(
        f"`{argument}` must treat each shard as it treats the whole. Received: "
        f"{argument}={constraint!r} with {shards} shards along axis {axis}. Expected "
        "NonNeg, or a norm along the other axis: take it, split the layer the other "
        "way, or use one shard."
    )


def refuse_extras(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of the plain layers that a sharded one doesn't have.

    Raises:
        ValueError: There is one.
    """
    for name in ("lora_rank", "lora_alpha", "quantization_config"):
        if kwargs.pop(name, None) is not None:
            raise ValueError(
                f"A sharded layer has no `{name}`. Received: {name}=... Leave it out, "
                "or use the plain layer."
            )


def _check(devices: Sequence[str]) -> None:
    """Check that devices exist, where no strategy does.

    Raises:
        ValueError: One doesn't, or another strategy places the variables.
    """
    if tf.distribute.has_strategy():
        raise ValueError(
            "A layer's `devices` mean something without a strategy, or with one that "
            f"places layers. Received: devices={list(devices)!r} under "
            f"{type(tf.distribute.get_strategy()).__name__}. Leave them out, or use "
            "kerasdist.ModelParallelStrategy."
        )
    known = {d.name.split("device:")[-1] for d in tf.config.list_logical_devices()}
    missing = [
        d for d in devices if d.split("device:")[-1].lstrip("/").upper() not in known
    ]
    if missing:
        raise ValueError(
            f"There are no such devices. Received: devices={missing!r}; there are "
            f"{sorted(known)}. Several devices can be made of one CPU with "
            "`tf.config.set_logical_device_configuration` before anything else runs."
        )


def _on(device: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device is None else tf.device(device)
