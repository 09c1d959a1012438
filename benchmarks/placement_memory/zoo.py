"""The models whose memory is estimated and measured, each with its batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["ZOO", "loss_of"]


def mlp(scale: int = 1) -> Any:
    """Mostly weights."""
    import keras

    width = 1536 // scale
    return keras.Sequential(
        [
            keras.Input((784,)),
            *(keras.layers.Dense(width, activation="relu") for _ in range(5)),
            keras.layers.Dense(10),
        ]
    )


def cnn(scale: int = 1) -> Any:
    """Mostly activations, with batch normalization and dropout."""
    import keras
    from keras import layers

    model = keras.Sequential([keras.Input((64, 64, 3))])
    for filters in (32, 64, 128):
        model.add(layers.Conv2D(filters // scale, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dropout(0.5))
    model.add(layers.Dense(10))
    return model


def lstm(scale: int = 1) -> Any:
    """Two layers of LSTM over 100 steps: what a loop keeps."""
    import keras
    from keras import layers

    units = 128 // scale
    return keras.Sequential(
        [
            keras.Input((100, 32)),
            layers.LSTM(units, return_sequences=True),
            layers.LSTM(units),
            layers.Dense(10),
        ]
    )


def transformer(scale: int = 1) -> Any:
    """Four blocks of self-attention, made of layers."""
    import keras
    from keras import layers

    width = 256 // scale
    inputs = keras.Input((128,), dtype="int32")
    x = layers.Embedding(1000, width)(inputs)
    for _ in range(4):
        attended = layers.MultiHeadAttention(8, width // 8)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        fed = layers.Dense(4 * width, activation="relu")(x)
        fed = layers.Dense(width)(fed)
        x = layers.LayerNormalization()(layers.Add()([x, fed]))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def embedding(scale: int = 1) -> Any:
    """A large table of which few rows are used."""
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((20,), dtype="int32"),
            layers.Embedding(300_000 // scale, 64),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def unet(scale: int = 1) -> Any:
    """Convolutions down and up again, with skips between."""
    import keras
    from keras import layers

    def twice(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    inputs = x = keras.Input((64, 64, 3))
    skips = []
    for filters in (16, 32):
        x = twice(x, filters // scale)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = twice(x, 64 // scale)
    for filters, skip in zip((32, 16), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters // scale, 2, strides=2)(x)
        x = twice(layers.Concatenate()([x, skip]), filters // scale)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def subclassed(scale: int = 1) -> Any:
    """A model of one's own, with a residual connection in its `call`."""
    import keras
    from keras import layers

    class Mixer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(512 // scale, activation="gelu")
            self.blocks = [
                layers.Dense(512 // scale, activation="gelu") for _ in range(6)
            ]
            self.norm = layers.LayerNormalization()
            self.last = layers.Dense(10)

        def build(self, shape: Any) -> None:
            inner = (None, 512 // scale)
            self.first.build(shape)
            for layer in (*self.blocks, self.norm, self.last):
                layer.build(inner)

        def call(self, x: Any) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.last(self.norm(x))

    model = Mixer()
    model.build((None, 784))
    return model


# From a name to the function, the batch size, and the optimizer.
ZOO: dict[str, tuple[Callable[..., Any], int, str]] = {
    "mlp": (mlp, 256, "adam"),
    "cnn": (cnn, 128, "adam"),
    "lstm": (lstm, 512, "adam"),
    "transformer": (transformer, 32, "adam"),
    "embedding": (embedding, 256, "adam"),
    "unet": (unet, 64, "sgd"),
    "subclassed": (subclassed, 4096, "rmsprop"),
}


def loss_of() -> Any:
    """All of them tell ten classes apart."""
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
