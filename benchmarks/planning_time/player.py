"""Plans models again and again: `player.py LAYERS REPEATS`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
from keras import layers

import kerasdist


def chain(count: int) -> Any:
    """As many layers of Dense."""
    return keras.Sequential(
        [
            keras.Input((256,)),
            *(layers.Dense(256, activation="relu") for _ in range(count)),
        ]
    )


def residual(count: int) -> Any:
    """Blocks of four layers: convolution, normalization, activation, addition."""
    x = inputs = keras.Input((16, 16, 32))
    for _ in range(count // 4):
        y = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        x = layers.Add()([x, y])
    return keras.Model(inputs, x)


def seconds(function: Callable[[int], Any], count: int) -> float:
    """The time of one plan."""
    began = time.perf_counter()
    plan = kerasdist.plan(
        lambda: function(count),
        [f"GPU:{i}" for i in range(4)],
        batch_size=64,
        optimizer="adam",
        memory_limits="16GB",
    )
    took = time.perf_counter() - began
    assert len(plan.layers) == count
    return took


if __name__ == "__main__":
    count, repeats = int(sys.argv[1]), int(sys.argv[2])
    found = {
        function.__name__: [seconds(function, count) for _ in range(repeats)]
        for function in (chain, residual)
    }
    print("RESULT", json.dumps(found), flush=True)
