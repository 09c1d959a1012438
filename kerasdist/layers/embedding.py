"""An Embedding layer over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasdist.layers.full_tensor import FullTensor
from kerasdist.layers.sharded import Sharded, refuse_extras


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
        self._set_up(split, devices, shards)
        if weights is not None:
            self.build()
            if isinstance(weights, list) and len(weights) == 1:
                weights = weights[0]
            self._load_whole(weights, "embeddings", self._axis)

    def build(self, input_shape: Any = None) -> None:
        """Create the shards."""
        if self.built:
            return
        table = FullTensor(shape=(self.input_dim, self.output_dim), axis=self._axis)
        # Its inputs are words: there's nothing to cast.
        self._make_shards({"embeddings": table}, _look_up, autocast=False)
        self.built = True

    @property
    def embeddings(self) -> Any:
        """The whole table, shape `(input_dim, output_dim)`."""
        return self._whole("embeddings", self._axis)

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

    def save_own_variables(self, store: Any) -> None:
        """Store one table, as an Embedding layer does."""
        if self.built:
            self._store_whole(store, "0", "embeddings", self._axis)

    def load_own_variables(self, store: Any) -> None:
        """Load the table of an Embedding layer, or of one with any number of shards.

        Raises:
            ValueError: It isn't one table of its shape.
        """
        if not self.built or list(store.keys()) != ["0"]:
            raise ValueError(
                f"Layer {self.name!r} expects 1 variable: the whole table. Received: "
                f"{len(list(store.keys()))} variables for a layer that is "
                f"{'' if self.built else 'not '}built. Load into a model of the same "
                "layers."
            )
        self._load_whole(store["0"], "embeddings", self._axis)


# See `ShardedDense`.
ShardedEmbedding.__name__ = "Embedding"


def _look_up(shard: Any, words: Any) -> Any:
    return keras.ops.take(shard.embeddings, words, axis=0)
