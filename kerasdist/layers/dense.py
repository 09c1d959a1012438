"""A Dense layer over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasdist.layers.full_tensor import FullTensor
from kerasdist.layers.sharded import Sharded, refuse_extras

# Functions of each entry alone: a shard may apply them to its part of the output.
# Others, such as softmax, need a whole row.
_ELEMENTWISE = tuple(
    getattr(keras.activations, name)
    for name in (
        "elu",
        "exponential",
        "gelu",
        "hard_sigmoid",
        "hard_silu",
        "leaky_relu",
        "linear",
        "mish",
        "relu",
        "relu6",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "softsign",
        "tanh",
    )
)


@keras.saving.register_keras_serializable(package="kerasdist")
class ShardedDense(Sharded, keras.layers.Dense):
    """`keras.layers.Dense` whose kernel is divided over several devices.

    `split="columns"`: each device has some columns of the kernel and computes these
    columns of the output, which are then joined. `split="rows"`: each device has some
    rows, gets these columns of the input, and the products are added up.

    It computes and learns the same as a Dense layer, from the same initial weights.
    Functions of a whole variable get a shard: an optimizer's `clipnorm` (not
    `global_clipnorm` and `clipvalue`), Adafactor, Lamb and Muon.

    Its files hold one kernel and one bias: those of a `keras.layers.Dense` in its
    place. The number of shards is saved with a model, their devices are not.

    Args:
        units: Number of columns of the output.
        devices: A device per shard, as TensorFlow names them. By default all devices
            of the strategy that builds the layer; without one a single shard.
        shards: Number of shards, instead of `devices`: on the strategy's devices.
        split: `"columns"` or `"rows"`, see above.
        **kwargs: As of `keras.layers.Dense`, but for LoRA and quantization.

    Input shape: `(batch, ..., input_dim)`. Output shape: `(batch, ..., units)`.

    Raises:
        ValueError: An argument is wrong; when it's built also: more shards than columns
            (rows), unknown devices, or a constraint that needs the whole kernel.
    """

    def __init__(
        self,
        units: int,
        *args: Any,
        devices: Sequence[str] | None = None,
        shards: int | None = None,
        split: str = "columns",
        **kwargs: Any,
    ) -> None:
        refuse_extras(kwargs)
        super().__init__(units, *args, **kwargs)
        self._set_up(split, devices, shards)
        self._bias: Any = None

    def build(self, input_shape: Any) -> None:
        """Create the shards, for inputs of shape `(batch, ..., input_dim)`."""
        rows = int(input_shape[-1])
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: rows})
        biased = self.use_bias and self.split == "columns"
        activation = self.activation if self._by_shard() else None

        def compute(shard: Any, inputs: Any) -> Any:
            outputs = keras.ops.matmul(inputs, shard.kernel)
            if biased:
                outputs = keras.ops.add(outputs, shard.bias)
            return outputs if activation is None else activation(outputs)

        wholes = {"kernel": FullTensor(shape=(rows, self.units), axis=self._axis)}
        if biased:
            wholes["bias"] = FullTensor(shape=(self.units,), axis=0)
        self._make_shards(wholes, compute)
        if self.use_bias and not biased:
            self._bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
        self.built = True

    def _by_shard(self) -> bool:
        return self.split == "columns" and self.activation in _ELEMENTWISE

    @property
    def kernel(self) -> Any:
        """The whole kernel, shape `(input_dim, units)`."""
        return self._whole("kernel", self._axis)

    @property
    def bias(self) -> Any:
        """The whole bias, shape `(units,)`; None without one."""
        if not self.use_bias:
            return None
        return self._whole("bias", 0) if self.split == "columns" else self._bias

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the layer's outputs, of shape `(batch, ..., units)`."""
        if self.split == "columns":
            parts = [shard(inputs) for shard in self._parts()]
            outputs = parts[0] if len(parts) == 1 else tf.concat(parts, -1)
        else:
            outputs = _add(
                [
                    shard(inputs[..., own])
                    for shard, own in zip(self._parts(), self._slices, strict=True)
                ]
            )
            if self._bias is not None:
                outputs = keras.ops.add(outputs, self._bias)
        if self.activation is not None and not self._by_shard():
            outputs = self.activation(outputs)
        return outputs

    def save_own_variables(self, store: Any) -> None:
        """Store one kernel and one bias, as a Dense layer does."""
        if not self.built:
            return
        self._store_whole(store, "0", "kernel", self._axis)
        if self.use_bias:
            store["1"] = keras.ops.convert_to_numpy(self.bias)

    def load_own_variables(self, store: Any) -> None:
        """Load the variables of a Dense layer, or of one with any number of shards.

        Raises:
            ValueError: It isn't one kernel and, with `use_bias`, one bias of its shape.
        """
        expected = ["0", "1"] if self.use_bias else ["0"]
        if not self.built or sorted(store.keys()) != expected:
            raise ValueError(
                f"Layer {self.name!r} expects {len(expected)} variables: the whole "
                f"kernel{' and bias' if self.use_bias else ''}. Received: "
                f"{len(list(store.keys()))} variables for a layer that is "
                f"{'' if self.built else 'not '}built. Load into a model of the same "
                "layers."
            )
        self._load_whole(store["0"], "kernel", self._axis)
        if self.use_bias and self.split == "columns":
            self._load_whole(store["1"], "bias", 0)
        elif self.use_bias:
            self._bias.assign(store["1"])


# Keras calls a layer's place in a file by the class: the files of sharded and plain
# layers can be exchanged.
ShardedDense.__name__ = "Dense"


def _add(parts: list[Any]) -> Any:
    total = parts[0]
    for part in parts[1:]:
        total = keras.ops.add(total, part)
    return total
