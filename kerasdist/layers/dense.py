"""A Dense layer over several devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasdist.layers.sharded import Sharded, refuse_extras

# An Embedding layer over several devices.


@keras.saving.register_keras_serializable(package="kerasdist")
class ShardedEmbedding(Sharded, keras.layers.Embedding):
    """`keras.layers.Embedding` whose table is divided over several devices.

    `split="rows"`: each device has a range of the words, gets the words of its range,
    and returns their rows. `split="columns"`: each device has some columns of all
    words' rows.

    It computes and learns the same as an Embedding layer, from the same initial table,
    and its gradients are as sparse. The exceptions are those of `ShardedDense`. Its
    files hold one table: that of a `keras.layers.Embedding` in its place.

    Args:
        input_dim: Number of words.
        output_dim: Number of columns.
        devices: A device per shard, as TensorFlow names them. By default all devices
            of the strategy that builds the layer; without one a single shard.
        shards: Number of shards, instead of `devices`: on the strategy's devices.
        split: `"rows"` or `"columns"`, see above.
        **kwargs: As of `keras.layers.Embedding`, but for LoRA and quantization.

    Input shape: integers of any shape, also ragged. Output shape: that shape with
    `output_dim` behind it.

    Raises:
        ValueError: An argument is wrong; when it's built also: more shards than rows
            (columns), unknown devices, or a constraint that needs the whole table.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *args: Any,
        devices: Sequence[str] | None = None,
        shards: int | None = None,
        split: str = "rows",
        weights: Any = None,
        **kwargs: Any,
    ) -> None:
        refuse_extras(kwargs)
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self._set_up(split, devices, shards, ("embeddings",))
        if weights is not None:
            self.build()
            if isinstance(weights, list) and len(weights) == 1:
                weights = weights[0]
            self._load_whole(weights, "embeddings")

    def build(self, input_shape: Any = None) -> None:
        """Create the shards."""
        if self.built:
            return
        table = (self.input_dim, self.output_dim), self._axis
        # Its inputs are words: there's nothing to cast.
        self._make_shards({"embeddings": table}, _look_up, autocast=False)
        self.built = True

    @property
    def embeddings(self) -> Any:
        """The whole table, shape `(input_dim, output_dim)`."""
        return self._whole("embeddings")

    def call(self, inputs: Any) -> Any:
        """Return rows of the table, one for each integer.

        Raises:
            ValueError: The inputs are sparse.
        """
        if isinstance(inputs, tf.SparseTensor):
            raise ValueError(
                "A sharded embedding doesn't look up sparse tensors. Received: "
                f"inputs={inputs}. Give it a dense or ragged one "
                "(`tf.sparse.to_dense(inputs)`)."
            )
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self._rows(inputs.flat_values))
        return self._rows(inputs)

    def _rows(self, words: Any) -> Any:
        shards = self._parts()
        if len(shards) == 1:
            rows = shards[0](words)
        elif self.split == "columns":
            rows = tf.concat([shard(words) for shard in shards], -1)
        else:
            flat = tf.reshape(words, [-1])
            # As Keras does: -1 is the last word.
            flat = tf.where(flat < 0, flat + self.input_dim, flat)
            starts = tf.constant([own.start for own in self._slices[1:]], flat.dtype)
            owner = tf.searchsorted(starts, flat, side="right")
            count = len(shards)
            requested = tf.dynamic_partition(flat, owner, count)
            places = tf.dynamic_partition(tf.range(tf.size(flat)), owner, count)
            found = [
                shard(part - own.start)
                for shard, part, own in zip(
                    shards, requested, self._slices, strict=True
                )
            ]
            rows = tf.dynamic_stitch(places, found)
            shape = tf.concat([tf.shape(words), [self.output_dim]], 0)
            rows = tf.reshape(rows, shape)
            rows.set_shape([*words.shape, self.output_dim])
        return keras.ops.cast(rows, self.compute_dtype)


# See `ShardedDense`.
ShardedEmbedding.__name__ = "Embedding"


def _look_up(shard: Any, words: Any) -> Any:
    return keras.ops.take(shard.embeddings, words, axis=0)


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
        stored = ("kernel", "bias") if self.use_bias else ("kernel",)
        self._set_up(split, devices, shards, stored)
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

        wholes: dict[str, Any] = {"kernel": ((rows, self.units), self._axis)}
        if biased:
            wholes["bias"] = (self.units,), 0
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
        return self._whole("kernel")

    @property
    def bias(self) -> Any:
        """The whole bias, shape `(units,)`; None without one."""
        if not self.use_bias:
            return None
        return self._whole("bias") if self.split == "columns" else self._bias

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Return the layer's outputs, of shape `(batch, ..., units)`."""
        if self.split == "columns":
            parts = [shard(inputs) for shard in self._parts()]
            outputs = parts[0] if len(parts) == 1 else tf.concat(parts, -1)
        else:
            parts = [
                shard(inputs[..., own])
                for shard, own in zip(self._parts(), self._slices, strict=True)
            ]
            outputs = functools.reduce(keras.ops.add, parts)
            if self._bias is not None:
                outputs = keras.ops.add(outputs, self._bias)
        if self.activation is not None and not self._by_shard():
            outputs = self.activation(outputs)
        return outputs


# Keras calls a layer's place in a file by the class: the files of sharded and plain
# layers can be exchanged.
ShardedDense.__name__ = "Dense"
