"""Shards: one matrix as several variables, each on a device of its own.

A sharded layer has a sub-layer per shard. So a shard has, like every layer, a path, a
device, and a backward pass on that device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasdist._keras.placement.layers import placer_of
from kerasdist.collectives.row_exchange import equal_part

# Initializer, regularizer and constraint of a whole matrix, for its parts.
#
# The initial value is drawn once; a regularizer and a constraint must have the same
# effect on the parts as on the whole.

# Sums over entries: the penalty of a matrix is the sum of its parts' penalties.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_NORMS = (
    keras.constraints.MaxNorm,
    keras.constraints.MinMaxNorm,
    keras.constraints.UnitNorm,
)


class _OfWhole(keras.regularizers.Regularizer):
    """A regularizer of a whole matrix: its value doesn't depend on the argument.

    A class, because Keras 3.14 accepts no function.
    """

    def __init__(self, regularizer: Any, whole: Callable[[], Any]) -> None:
        self._regularizer = regularizer
        self._of = whole

    def __call__(self, x: Any) -> Any:
        return self._regularizer(self._of())


def regularizer_of(
    regularizer: Any, index: int, whole: Callable[[], Any]
) -> Callable[[Any], Any] | None:
    """Return the regularizer of one part's variable, or None.

    Args:
        regularizer: That of the whole matrix, or None.
        index: The part's number.
        whole: Returns the whole matrix.
    """
    if regularizer is None or type(regularizer) in _SUMS:
        return regularizer
    # Any other may need the whole matrix: the first part's gets all of it.
    return None if index else _OfWhole(regularizer, whole)


def check_constraint(constraint: Any, argument: str, axis: int, shards: int) -> None:
    """Check that a constraint on each shard is the constraint on the whole.

    Raises:
        ValueError: It isn't, or that is unknown.
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


class Shard(keras.layers.Layer):
    """One shard's variables, and the computation with them.

    Args:
        weights: For each variable the arguments of `add_weight`.
        compute: A function of the shard and its inputs.
        device: Its device, if no strategy places it; None for any.
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
        """Create the variables on the device of the caller's scope."""
        for spec in self._specs:
            setattr(self, spec["name"], self.add_weight(**spec))
        self._specs = []  # they may hold the whole initial value

    def call(self, inputs: Any) -> Any:
        """Compute this shard's part."""
        with _on(self.device):
            return self._compute(self, inputs)


class Sharded:
    """Base of sharded layers, mixed into a layer of Keras.

    Attributes:
        split: `"columns"` or `"rows"`: the axis along which the matrix is cut.
    """

    built: bool
    name: str
    dtype_policy: Any

    # `__shards__`, because Keras writes layers that it finds under other names into
    # files of their own; those of this layer hold the whole matrix.

    def _set_up(
        self, split: str, devices: Any, shards: int | None, stored: tuple[str, ...]
    ) -> None:
        """Take the arguments that plain layers don't have.

        Args:
            split: See the layers.
            devices: See the layers.
            shards: See the layers.
            stored: The names of the variables that a file has, in their order.

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
        self._stored = stored
        self._wanted = None if devices is None else tuple(map(str, devices))
        self._count = shards if devices is None else len(self._wanted or ())

    def _devices(self, length: int) -> list[str | None]:
        """Return the device of each shard of an axis of that length.

        Raises:
            ValueError: There are more shards than entries, or a device is missing.
        """
        placer = placer_of(tf.distribute.get_strategy())
        theirs = [] if placer is None else list(placer.devices)
        count = self._count or min(len(theirs) or 1, length)
        if count > length:
            raise ValueError(
                "A layer can't have more shards than its matrix has "
                f"{self.split}. Received: {count} shards of {length} {self.split}. "
                "Give it fewer devices, or use the plain layer."
            )
        if self._wanted is not None:
            if placer is None:
                _check(self._wanted)
            return list(self._wanted)
        # Saved with more shards than there are devices now: several shards per device.
        return [theirs[i % len(theirs)] if theirs else None for i in range(count)]

    @property
    def _axis(self) -> int:
        """The axis along which the matrix is cut."""
        return 1 if self.split == "columns" else 0

    def _make_shards(
        self,
        wholes: Mapping[str, tuple[tuple[int, ...], int]],
        compute: Callable[[Any, Any], Any],
        **options: Any,
    ) -> None:
        """Create and build the shards, each on its device.

        Args:
            wholes: The shapes of the tensors to cut, by name, the matrix first, and the
                axes that are cut, along which all are equally long. The layer has an
                initializer, a regularizer and a constraint of each.
            compute: The computation of a shard, see `Shard`.
            **options: As of any layer.
        """
        placer = placer_of(tf.distribute.get_strategy())
        shape, axis = next(iter(wholes.values()))
        length, devices = shape[axis], self._devices(shape[axis])
        shards = len(devices)
        for name, (_, axis) in wholes.items():
            argument = f"{name}_constraint"
            check_constraint(getattr(self, argument), argument, axis, shards)
        # By name, until all parts are made: the initial value is drawn whole and once.
        drawn: dict[str, Any] = {}
        made = []
        self._wholes = dict(wholes)
        self._slices = [equal_part(length, shards, i) for i in range(shards)]
        for index, device in enumerate(devices):
            # Made in its stage, too: that precedes patterns that match the layer.
            with placer.staging(device) if placer and device else _on(device):
                shard = Shard(
                    [self._weight(name, index, drawn) for name in wholes],
                    compute,
                    None if placer else device,
                    name=f"shard_{index}",
                    dtype=self.dtype_policy,
                    **options,
                )
                shard.build()
            made.append(shard)
        self._count = shards
        # XLA doesn't compile for several devices at once.
        self.supports_jit = shards == 1
        self.__shards__ = made

    def _weight(self, name: str, index: int, drawn: dict[str, Any]) -> dict[str, Any]:
        """Return `add_weight`'s arguments for a shard's part of a matrix or vector.

        The initial value is a part of the whole one, which is drawn in host memory: so
        the layer begins with the numbers of a plain one with the same seed.
        """
        (shape, axis), own = self._wholes[name], self._slices[index]

        def initial(_: Any, dtype: Any = None) -> Any:
            # A tensor of one graph isn't another's. Keras's initializers draw the same
            # numbers again.
            kept = drawn if tf.executing_eagerly() else {}
            with tf.device("CPU:0"):
                if name not in kept:
                    value = getattr(self, f"{name}_initializer")(shape, dtype=dtype)
                    kept[name] = tf.convert_to_tensor(value)
                return tf.identity(kept[name][(*[slice(None)] * axis, own)])

        return {
            "name": name,
            "shape": (*shape[:axis], own.stop - own.start, *shape[axis + 1 :]),
            "initializer": initial,
            "regularizer": regularizer_of(
                getattr(self, f"{name}_regularizer"),
                index,
                lambda: self._whole(name),
            ),
            "constraint": getattr(self, f"{name}_constraint"),
        }

    @property
    def shards(self) -> int | None:
        """Number of shards; None if the strategy that builds the layer decides."""
        return self._count

    def _parts(self) -> list[Any]:
        return list(self.__shards__)

    def _whole(self, name: str) -> Any:
        """Return a matrix or vector of all shards, as one tensor."""
        parts = [getattr(shard, name) for shard in self._parts()]
        # Keras reads all attributes of a layer that it saves: host memory has room.
        with _on("CPU:0" if tf.executing_eagerly() else None):
            tensors = [tf.convert_to_tensor(part) for part in parts]
            return tf.concat(tensors, self._wholes[name][1])

    def save_own_variables(self, store: Any) -> None:
        """Store whole variables, as the plain layer does."""
        if self.built:
            for number, name in enumerate(self._stored):
                store[str(number)] = keras.ops.convert_to_numpy(getattr(self, name))

    def load_own_variables(self, store: Any) -> None:
        """Load the variables of a plain layer, or of one with any number of shards.

        Raises:
            ValueError: They aren't whole ones of its shapes.
        """
        names, count = self._stored, len(self._stored)
        if not self.built or sorted(store.keys()) != [str(i) for i in range(count)]:
            raise ValueError(
                f"Layer {self.name!r} expects {count} variable{'s' * (count > 1)}: "
                f"the whole {' and '.join(names)}. Received: "
                f"{len(list(store.keys()))} variables for a layer that is "
                f"{'' if self.built else 'not '}built. Load into a model of the same "
                "layers."
            )
        for number, name in enumerate(names):
            if name in self._wholes:
                self._load_whole(store[str(number)], name)
            else:
                getattr(self, f"_{name}").assign(store[str(number)])

    def _load_whole(self, value: Any, name: str) -> None:
        """Give each shard its part of a whole matrix or vector.

        Raises:
            ValueError: It has another shape.
        """
        value = np.asarray(value)
        parts = [getattr(shard, name) for shard in self._parts()]
        shape, axis = self._wholes[name]
        if value.shape != shape:
            raise ValueError(
                f"`{name}` of layer {self.name!r} has another shape in the "
                f"file. Received: shape {value.shape}; expected {shape}. Load into a "
                "layer with the same arguments; only the number of shards may differ."
            )
        for part, own in zip(parts, self._slices, strict=True):
            part.assign(np.take(value, range(own.start, own.stop), axis))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments without devices, so that a file contains none."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        config.pop("quantization_config", None)
        return {**config, "shards": self.shards, "split": self.split}

    def quantize(self, mode: Any = None, *args: Any, **kwargs: Any) -> None:
        """Refuse quantization.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"A sharded layer can't be quantized. Received: mode={mode!r} for layer "
            f"{self.name!r}. Load its weights into the plain layer, and quantize that."
        )

    def enable_lora(self, rank: Any = None, *args: Any, **kwargs: Any) -> None:
        """Refuse LoRA.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            f"A sharded layer has no LoRA. Received: rank={rank!r} for layer "
            f"{self.name!r}. Load its weights into the plain layer, and enable it "
            "there."
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
    """Check that devices exist, where no strategy checks it.

    Raises:
        ValueError: One doesn't, or another strategy places the variables.
    """
    if tf.distribute.has_strategy():
        raise ValueError(
            "A layer's `devices` need a strategy that places layers, or no strategy. "
            f"Received: devices={list(devices)!r} under "
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
