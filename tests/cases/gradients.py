import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cases import training as jobs
from cases.training import CROSSENTROPY, Numbers, Scope, case, chain, data, mlp

_Step = Callable[[Any, Any, Any], Any]


class Stepped(keras.Model):
    def __init__(self, step: _Step, tokens: bool = False) -> None:
        super().__init__()
        self.step = step
        self.first = layers.Dense(6, activation="tanh")
        self.table = layers.Embedding(9, 5) if tokens else None
        self.norm = layers.BatchNormalization(synchronized=True)
        self.second = layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        if self.table is not None:
            # Rows of the table are looked up more than once.
            x = tf.reduce_mean(self.table(tf.cast(tf.abs(x) * 4, tf.int32) % 9), 1)
        return self.second(self.norm(self.first(x), training=training))

    def train_step(self, data: Any) -> Any:
        return self.step(self, *data[:2])


def _taken(model: Any, x: Any, y: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    weights = model.trainable_variables
    return weights, tape.gradient(loss, weights), loss


def _changing(change: Callable[[Any], Any]) -> _Step:
    def step(model: Any, x: Any, y: Any) -> Any:
        weights, gradients, loss = _taken(model, x, y)
        norm = tf.linalg.global_norm(gradients)
        model.optimizer.apply_gradients(zip(change(gradients), weights, strict=True))
        return {"loss": loss, "norm": norm}

    return step


def _sharpness(model: Any, x: Any, y: Any) -> Any:
    """SAM: the gradients where the loss is larger."""
    weights, gradients, loss = _taken(model, x, y)
    norm = tf.linalg.global_norm(gradients)
    moves = [each * 0.5 / norm for each in gradients]
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_add(move)
    _, there, _ = _taken(model, x, y)
    for weight, move in zip(weights, moves, strict=True):
        weight.assign_sub(move)
    model.optimizer.apply_gradients(zip(there, weights, strict=True))
    return {"loss": loss}


def _by_hand(model: Any, x: Any, y: Any) -> Any:
    weights, gradients, loss = _taken(model, x, y)
    for weight, each in zip(weights, gradients, strict=True):
        weight.assign(tf.clip_by_value(weight - 0.3 * tf.sign(each), -0.5, 0.5))
    return {"loss": loss}


def _adversarial(model: Any, x: Any, y: Any) -> Any:
    """Gradients with respect to inputs, of a mean; large where rows are few."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = model.compute_loss(x, y, model(x, training=False))
    moved = x + 40.0 * tape.gradient(loss, x)
    weights, gradients, _ = _taken(model, moved, y)
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return {"loss": loss}


def _penalty(model: Any, x: Any, y: Any) -> Any:
    """A penalty on the norm of the weights' gradients: a tape in a tape."""
    weights = model.trainable_variables
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = model.compute_loss(x, y, model(x, training=False))
        slopes = inner.gradient(loss, weights[:2])
        whole = loss + 0.5 * tf.add_n([tf.reduce_sum(s**2) for s in slopes])
    gradients = outer.gradient(whole, weights)
    gradients = [
        tf.zeros_like(w) if g is None else g
        for g, w in zip(gradients, weights, strict=True)
    ]
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return {"loss": whole}


def _learning_to_learn(model: Any, x: Any, y: Any) -> Any:
    """MAML: the loss after a step that the outer tape has seen."""
    kernel, bias = model.second.trainable_variables
    with tf.GradientTape() as outer:
        inputs = model.first(x)
        with tf.GradientTape() as inner:
            inner.watch([kernel.value, bias.value])
            loss = model.compute_loss(x, y, inputs @ kernel + bias)
        slopes = inner.gradient(loss, [kernel, bias])
        logits = inputs @ (kernel - 0.5 * slopes[0]) + (bias - 0.5 * slopes[1])
        after = model.compute_loss(x, y, logits)
    weights = [*model.first.trainable_variables, kernel, bias]
    gradients = outer.gradient(after, weights)
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
    return {"loss": after}


def _in_halves(model: Any, x: Any, y: Any) -> Any:
    """Two tapes, one for each half of the model."""
    with tf.GradientTape() as lower:
        features = model.first(x)
    with tf.GradientTape() as upper:
        upper.watch(features)
        loss = model.compute_loss(x, y, model.second(features))
    weights = model.second.trainable_variables
    *gradients, passed = upper.gradient(loss, [*weights, features])
    below = model.first.trainable_variables
    gradients += lower.gradient(features, below, output_gradients=passed)
    gradients, norm = tf.clip_by_global_norm(gradients, 0.1)
    model.optimizer.apply_gradients(zip(gradients, [*weights, *below], strict=True))
    return {"loss": loss, "norm": norm}


def _curvature(model: Any, x: Any, y: Any) -> Any:
    """A product of the Hessian and a vector, by which the step is scaled."""
    weights = model.second.trainable_variables
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = model.compute_loss(x, y, model(x, training=False))
        slopes = inner.gradient(loss, weights)
    products = outer.gradient(slopes, weights, output_gradients=slopes)
    scale = tf.linalg.global_norm(slopes) / (tf.linalg.global_norm(products) + 0.1)
    for weight, slope in zip(weights, slopes, strict=True):
        weight.assign_sub(0.3 * scale * slope)
    return {"loss": loss, "scale": scale}


def _without_a_tape(model: Any, x: Any, y: Any) -> Any:
    """Gradients by a formula, from those of the outputs."""
    kernel, bias = model.second.trainable_variables
    features = model.first(x)
    with tf.GradientTape() as tape:
        logits = features @ kernel + bias
        tape.watch(logits)
        loss = model.compute_loss(x, y, logits)
    passed = tape.gradient(loss, logits)
    gradients = [
        tf.matmul(features, passed, transpose_a=True),
        tf.reduce_sum(passed, 0),
    ]
    model.optimizer.apply_gradients(zip(gradients, [kernel, bias], strict=True))
    return {"loss": loss}


STEPS: dict[str, _Step] = {
    "clipped": _changing(lambda given: tf.clip_by_global_norm(given, 0.3)[0]),
    "signs": _changing(lambda given: [0.1 * tf.sign(each) for each in given]),
    "normalized": _changing(lambda given: [tf.math.l2_normalize(g) for g in given]),
    "sharpness": _sharpness,
    "by hand": _by_hand,
    "adversarial": _adversarial,
    "penalty": _penalty,
    "learning to learn": _learning_to_learn,
    "in halves": _in_halves,
    "curvature": _curvature,
    "without a tape": _without_a_tape,
}


def _train(
    scope: Scope, build: Callable[[], Any], optimizer: Callable[[], Any], **more: Any
) -> Numbers:
    x, y = data(26)

    def called() -> Any:
        model = build()
        model(x[:1])
        return model

    model = jobs.compiled_in(scope, called, optimizer, **CROSSENTROPY, **more)
    # The rows of the last batch are divided unequally.
    fit = {"batch_size": 9, "epochs": 2, "shuffle": False, "verbose": 0}
    return jobs.numbers_of(model, model.fit(x, y, **fit))


def _all_of(scope: Scope, steps: Iterable[str], **more: Any) -> Numbers:
    found: Numbers = {}
    for name in steps:

        def build(name: str = name) -> Any:
            return Stepped(STEPS[name])

        numbers = _train(scope, build, lambda: keras.optimizers.SGD(0.2), **more)
        found |= {f"{name}: {key}": value for key, value in numbers.items()}
    return found


# All of them at once, one by one, and with weights that change meanwhile.
CHANGES = ("clipped", "signs", "sharpness", "by hand")
# Another function of each gradient by itself.
MORE_CHANGES = ("normalized",)

for case_name, chosen in {
    "changed_gradients": CHANGES,
    "more_changed_gradients": MORE_CHANGES,
    "gradients_of_other_things": STEPS.keys() - {*CHANGES, *MORE_CHANGES},
}.items():
    jobs.CASES[case_name] = functools.partial(_all_of, steps=sorted(chosen))


@case
def changed_gradients_of_eager_steps(scope: Scope) -> Numbers:
    chosen = ("clipped", "sharpness", "penalty", "in halves")
    return _all_of(scope, chosen, run_eagerly=True)


@case
def changed_slices(scope: Scope) -> Numbers:
    """The norm of an embedding's gradient is that of its slices."""
    return _train(
        scope, lambda: Stepped(STEPS["clipped"], tokens=True), keras.optimizers.SGD
    )


class Clipping(keras.optimizers.SGD):
    """Adaptive clipping, as a subclass of an optimizer does it."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        variables = trainable_variables or self._trainable_variables
        grads = [
            g * tf.minimum(1.0, 0.05 * (tf.norm(v) + 1e-3) / (tf.norm(g) + 1e-6))
            for g, v in zip(grads, variables, strict=True)
        ]
        super().apply(grads, trainable_variables)


class Centred(keras.optimizers.Adam):
    def apply_gradients(self, grads_and_vars: Any, **more: Any) -> Any:
        pairs = [(g - tf.reduce_mean(g), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs, **more)


@case
def optimizers_that_change_gradients(scope: Scope) -> Numbers:
    found: Numbers = {}
    for make in (Clipping, Centred):
        options = {"gradient_accumulation_steps": 2} if make is Centred else {}
        numbers = _train(scope, mlp, lambda: make(0.1, **options))  # noqa: B023
        found |= {f"{make.__name__}: {key}": each for key, each in numbers.items()}
    return found


@case
def upstream_gradients(scope: Scope) -> Numbers:
    """A layer that limits what flows backward, and mixed precision at its limit."""

    @tf.custom_gradient
    def limited(x: Any) -> Any:
        return x, lambda upstream: tf.clip_by_value(upstream, -0.02, 0.02)

    def build() -> Any:
        lambda_layer = layers.Lambda(limited)
        return chain((5,), layers.Dense(4), lambda_layer, layers.Dense(3))

    found = _train(scope, build, lambda: keras.optimizers.SGD(0.5))
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x = np.full((40, 2), 1e-3, "float32")
        model = jobs.compiled_in(
            scope,
            lambda: chain((2,), layers.Dense(1, use_bias=False)),
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.0), initial_scale=2.0**13, dynamic_growth_steps=1
            ),
            "mse",
        )
        model.fit(x, x[:, :1] * 9e3, batch_size=8, shuffle=False, verbose=0)
        optimizer = model.optimizer
        found["loss scale"] = optimizer.dynamic_scale.numpy()
        found["updates"] = optimizer.inner_optimizer.iterations.numpy()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return found
