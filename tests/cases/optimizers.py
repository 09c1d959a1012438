"""Optimizers: what they do with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from cases.training import CASES, Numbers, Scope, case, data, mlp, train


def optimizer_case(name: str, make: Callable[[], Any], **fit: Any) -> None:
    def run(scope: Scope) -> Numbers:
        # Averages take the weights' places after the training.
        then = ["evaluate"] if make().use_ema else []
        return train(scope, compiled=lambda: {"optimizer": make()}, fit=fit, then=then)

    CASES[name] = run


optimizer_case("adam", lambda: keras.optimizers.Adam(0.01))
optimizer_case("clipnorm", lambda: keras.optimizers.SGD(0.1, clipnorm=0.05))
optimizer_case(
    "global_clipnorm", lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1)
)
optimizer_case("clipvalue", lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))
optimizer_case(
    "accumulation", lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
)
optimizer_case("weight_decay", lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))
optimizer_case(
    "average_of_weights",
    lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3
    ),
)
optimizer_case("average_at_the_end", lambda: keras.optimizers.SGD(0.1, use_ema=True))
optimizer_case(
    "all_of_it",
    lambda: keras.optimizers.AdamW(
        0.01, global_clipnorm=0.5, use_ema=True, gradient_accumulation_steps=2
    ),
)
optimizer_case(
    "rate_schedule",
    lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    ),
)
optimizer_case(
    "loss_scale", lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
)


@case
def overflow_on_one_replica(scope: Scope) -> Numbers:
    """One huge sample: the step is skipped on all replicas, the scale halved."""
    x, _ = data(32)
    x[20] = 3e38
    keras.utils.set_random_seed(1)
    with scope():
        model = mlp()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=1024.0
        )
        model.compile(optimizer, keras.losses.MeanSquaredError())
    target = np.zeros((32, 3), "float32")
    target[20] = 3e38
    model.fit(x, target, batch_size=16, epochs=1, shuffle=False, verbose=0)
    scale = keras.ops.convert_to_numpy(optimizer.dynamic_scale)
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        "scale": scale,
    }


@case
def mixed_precision(scope: Scope) -> Numbers:
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        numbers = train(scope)
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    # bfloat16 has 8 bits: sums in another order differ in the last of them.
    return {f"coarse {name}": value for name, value in numbers.items()}
