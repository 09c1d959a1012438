"""Kinds of models that a placement must not change, and what is checked of them.

A layer's name begins with the number of the stage that it belongs to: "on1_dense". So
the names of operations tell where each should be, and only the runtime's metadata tell
where it was: `misplaced` compares the two. `numbers` trains, evaluates and predicts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

ROWS = 10
BATCH = 4  # the last batch has 2 rows


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of model.

    `build` makes the model; with `staged` it's given a function that enters a stage by
    its number, and stages place it instead of patterns. `data`: arguments of `fit`.
    `compile`: those of `compile`, made in the scope. `by_rows`: a batch's gradient is
    the mean of its rows' gradients; not if rows are normalized together, or numbers are
    drawn per batch. `exact`: its numbers are the same bits wherever it is; where
    operations of one layer and the next are on one device, the runtime may fuse them.
    """

    build: Callable[..., Any]
    data: dict[str, Any]
    compile: Callable[[], dict[str, Any]]
    by_rows: bool = True
    staged: bool = False
    exact: bool = True


def placement(kind: Kind, devices: list[str]) -> dict[str, str]:
    if kind.staged:
        return {}
    return {f"on{i}_[^/]*": devices[min(i, len(devices) - 1)] for i in range(3)}


def numbers(
    kind: Kind, scope: Callable[[], Any], stage: Callable[[int], Any]
) -> dict[str, Any]:
    keras.backend.clear_session()
    # Much of what was traced lives on: each collection would go through it again, which
    # took half of the time.
    gc.freeze()
    keras.utils.set_random_seed(7)
    with scope():
        model = kind.build(stage) if kind.staged else kind.build()
        model.compile(**kind.compile())
    data = kind.data
    fitted = model.fit(**data, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    found = {f"history {k}": np.asarray(v) for k, v in fitted.history.items()}
    evaluated = model.evaluate(**data, batch_size=BATCH, verbose=0, return_dict=True)
    found |= {f"evaluate {k}": np.asarray(v) for k, v in evaluated.items()}
    predicted = model.predict(data["x"], batch_size=BATCH, verbose=0)
    for i, part in enumerate(tf.nest.flatten(predicted)):
        found[f"predict {i}"] = np.asarray(part)
    variables = [*model.variables, *model.optimizer.variables]
    for i, variable in enumerate(variables):
        found[f"{i} {variable.path}"] = np.asarray(variable.value)
    return {"model": model, **found}


def plain_numbers(name: str, folder: str) -> dict[str, Any]:
    path = Path(folder, f"{name}.npz")
    if not path.exists():
        found = numbers(ZOO[name], contextlib.nullcontext, contextlib.nullcontext)
        del found["model"]
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, **found)
        part.rename(path)  # whole, or not there
    with np.load(path) as kept:
        return dict(kept)


# Where operations were.

# They compute nothing, or are moved and merged by the runtime as it likes.
_LIGHT = {
    *("_Arg", "_DeviceArg", "_DeviceRetval", "_HostRecv", "_HostSend", "_Recv"),
    *("_Retval", "_Send", "Const", "ConcatOffset", "Enter", "Exit", "Identity"),
    *("LoopCond", "Merge", "NextIteration", "NoOp", "Switch"),
}


@contextlib.contextmanager
def run_metadata() -> Iterator[list[Any]]:
    """Collect the graphs of all functions that run inside, as they ran.

    The strategy's own reports get nothing meanwhile: TensorFlow collects them once.
    """
    from tensorflow.python.eager import context

    from kerasdist.strategies.placed import placer

    found: list[Any] = []
    own = placer.ran_graphs
    placer.ran_graphs = lambda: contextlib.nullcontext([])
    context.enable_graph_collection()
    context.export_run_metadata()  # what ran before
    try:
        yield found
        graphs = context.export_run_metadata().function_graphs
        found.extend(graph for f in graphs for graph in f.partition_graphs)
    finally:
        placer.ran_graphs = own
        context.disable_graph_collection()


def misplaced(graphs: list[Any], devices: list[str]) -> tuple[int, list[str]]:
    """Operations that weren't where their layer belongs.

    And the number of those of the backward pass that were looked at.
    """
    count, wrong = 0, []
    for node in (node for graph in graphs for node in graph.node):
        expected = None if node.op in _LIGHT else _expected(node.name, devices)
        if expected is None:
            continue
        count += "gradient_tape/" in node.name
        if not node.device.endswith(f"device:{expected}"):
            wrong.append(f"{node.op} {node.name} on {node.device[-5:]}")
    return count, wrong


def misplaced_variables(model: Any, devices: list[str]) -> list[str]:
    return [
        f"{variable.path} on {variable.value.device[-5:]}"
        for variable in [*model.variables, *model.optimizer.variables]
        if (expected := _expected(variable.path, devices)) is not None
        and not variable.value.device.endswith(f"device:{expected}")
    ]


def _expected(name: str, devices: list[str]) -> str | None:
    stages = re.findall(r"(?:^|[/_])on(\d)_", name)
    return devices[min(int(stages[-1]), len(devices) - 1)] if stages else None


def moved_into_updates(graphs: list[Any]) -> list[str]:
    """Optimizer updates whose new value was computed on another device."""
    wrong = []
    for graph in graphs:
        nodes = {node.name: node for node in graph.node}
        for node in graph.node:
            assigns = node.op.startswith(("Assign", "ResourceApply", "ResourceScatter"))
            if not assigns or not re.search(r"(^|/)(adam|adamw|sgd)\w*/", node.name):
                continue
            for name in node.input[1:]:
                source = nodes.get(name.partition(":")[0])
                if source is not None and source.op == "_Recv":
                    wrong.append(f"{node.op} {node.name} <- {source.name}")
    return wrong


# The models.


def _rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).normal(size=(ROWS, *shape)).astype("float32")


_PLAIN = {"x": _rows(6), "y": _rows(3, seed=1)}
_SEQUENCES = {"x": _rows(5, 4), "y": _rows(3, seed=1)}
_IMAGES = {"x": _rows(6, 6, 2), "y": np.arange(ROWS) % 3}
_MANY = {
    "x": {"a": _rows(6), "b": _rows(4, seed=5)},
    "y": {"first": _rows(3, seed=1), "second": _rows(1, seed=2)},
    "sample_weight": {
        "first": np.linspace(0, 1, ROWS).astype("float32"),
        "second": np.linspace(1, 2, ROWS).astype("float32"),
    },
}


def _simple() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"}


def _adam() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse", "metrics": ["mae"]}


def _classes() -> dict[str, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    return {"optimizer": optimizer, "loss": loss, "metrics": ["accuracy"]}


def _everything() -> dict[str, Any]:
    options = {"weight_decay": 0.02, "global_clipnorm": 0.5, "use_ema": True}
    options |= {"ema_overwrite_frequency": 2, "gradient_accumulation_steps": 2}
    return {"optimizer": keras.optimizers.AdamW(0.01, **options), "loss": "mse"}


def _dense(name: str, width: int = 6, activation: Any = None, **more: Any) -> Any:
    return layers.Dense(width, activation=activation, name=name, **more)


def _skip() -> Any:
    x = keras.Input((6,))
    a = _dense("on0_a", 8, "tanh")(x)
    c = _dense("on2_c", 8)(layers.Add(name="on1_add")([a, _dense("on1_b", 8)(a)]))
    return keras.Model(x, _dense("on2_d", 3)(ops.tanh(a * 0.5 + c)))


class Scaled(layers.Layer):
    """Weights of its own around those of layers inside."""

    def __init__(self, name: str, inner: list[Any]) -> None:
        super().__init__(name=name)
        self.inner = inner

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.built = True

    def call(self, x: Any) -> Any:
        x = x * self.scale
        for layer in self.inner:
            x = layer(x)
        return x


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled("on0_block", [_dense("inner", 8), _dense("on1_guest", 8)])
        self.second = Scaled("on1_block", [_dense("inner", 8)])
        self.out = _dense("on2_out", 3)

    def call(self, x: Any) -> Any:
        x = self.first(x)
        return self.out(x + self.second(tf.nn.relu(x)))


def _shared() -> Any:
    twice = _dense("on1_twice", 6, "tanh")
    return keras.Sequential([twice, _dense("on0_middle"), twice, _dense("on2_out", 3)])


def _recurrent() -> Any:
    lstm = layers.LSTM(4, return_sequences=True, name="on0_lstm")
    return keras.Sequential([lstm, layers.GRU(4, name="on1_gru"), _dense("on2_out", 3)])


class Controlled(layers.Layer):
    """A condition and a loop, both with weights inside."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.dense = layers.Dense(6, name="dense")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: self.dense(x), lambda: x * 0.5)
        return tf.while_loop(
            lambda i, _: i < 3,
            lambda i, h: (i + 1, tf.tanh(tf.matmul(h, self.dense.kernel))),
            (tf.constant(0), x),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 6])),
        )[1]


def _control_flow() -> Any:
    controlled = Controlled("on1_controlled")
    return keras.Sequential([_dense("on0_in"), controlled, _dense("on2_out", 3)])


@tf.function
def _affine(x: Any, kernel: Any) -> Any:
    return tf.nn.softplus(tf.matmul(x, kernel))


class Functioned(layers.Layer):
    """Calls a `tf.function` that other layers call, too, and has one of its own."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 6))
        self.built = True

    @tf.function
    def call(self, x: Any) -> Any:
        return tf.sin(_affine(x, self.kernel.value))


def _functions() -> Any:
    first, second = Functioned(name="on0_f"), Functioned(name="on1_f")
    return keras.Sequential([first, second, _dense("on2_out", 3)])


def _convolution() -> Any:
    return keras.Sequential(
        [
            layers.Conv2D(4, 3, padding="same", name="on0_conv"),
            layers.BatchNormalization(name="on0_norm"),
            layers.ReLU(name="on0_relu"),
            layers.SeparableConv2D(4, 3, name="on1_separable"),
            layers.MaxPooling2D(name="on1_pool"),
            layers.Flatten(name="on2_flat"),
            _dense("on2_out", 3),
        ]
    )


def _functional(name: str, inner: str, width: int) -> Any:
    x = keras.Input((6,))
    h = _dense(f"{inner}_a", 6, "tanh")(x)
    return keras.Model(x, _dense(f"{inner}_b", width)(h), name=name)


def _nested() -> Any:
    """Sub-models that were built by themselves, with the same names inside."""
    x = keras.Input((6,))
    h = _functional("on0_encoder", "dense", 6)(x)
    dropped = layers.Dropout(0.2, name="on1_dropout")(h)
    inside = [keras.Input((6,)), layers.Dropout(0.2, name="drop"), _dense("dense_a")]
    decoder = keras.Sequential(inside, name="on1_decoder")
    return keras.Model(x, _functional("on2_head", "dense", 3)(decoder(dropped)))


def _staged(stage: Any) -> Any:
    with stage(0):
        encoder = _functional("on0_encoder", "on0_dense", 6)
    with stage(1):
        middle = _dense("on1_dense")
        drop = layers.Dropout(0.2, name="on1_dropout")
    with stage(2):
        parts = [_dense("on2_a", 6, "relu"), _dense("on2_b", 3)]
        head = keras.Sequential(parts, name="on2_head")
    return keras.Sequential([encoder, middle, drop, head])


def _deep() -> Any:
    first, second = _dense("on0_a", 8, "tanh"), _dense("on1_b", 8, "tanh")
    return keras.Sequential([first, second, _dense("on2_c", 3)])


def _half() -> Any:
    first = _dense("on0_a", 8, dtype="mixed_float16")
    second = _dense("on1_b", 8, "relu", dtype="mixed_float16")
    return keras.Sequential([first, second, _dense("on2_c", 3, dtype="float32")])


def _scaled_loss() -> dict[str, Any]:
    inner = keras.optimizers.Adam(0.01)
    return {"optimizer": keras.optimizers.LossScaleOptimizer(inner), "loss": "mse"}


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        weights = self.trainable_weights
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.3)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.compute_metrics(x, y, predicted)


class Measured(layers.Layer):
    """A metric of its own, whose variables are on the first device."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.metrics.Mean(name="of_rows")

    def call(self, x: Any) -> Any:
        self.mean.update_state(ops.mean(x, -1))
        return x


class Reversed(layers.Layer):
    """A gradient and losses of its own."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def through(value: Any) -> Any:
            return value * 1.5, lambda gradient: tf.tanh(gradient) * -0.5

        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        self.add_loss(1e-3 * ops.sum(ops.square(x), -1))
        return through(x)


def _many() -> Any:
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    h = layers.Dense(5, name="on0_a", kernel_regularizer="l2")(a)
    k = Reversed(name="on1_reversed")(layers.Dense(5, name="on1_b")(Measured()(b)))
    both = layers.Concatenate(name="on1_both")([h, k])
    outputs = {
        "first": layers.Dense(3, name="on2_first", activity_regularizer="l2")(both),
        "second": layers.Dense(1, name="on0_second")(both),
    }
    return keras.Model({"a": a, "b": b}, outputs)


ZOO: dict[str, Kind] = {
    "skip": Kind(_skip, _PLAIN, _adam, exact=False),
    "subclassed": Kind(Subclassed, _PLAIN, _adam),
    "shared": Kind(_shared, _PLAIN, _adam),
    "recurrent": Kind(_recurrent, _SEQUENCES, _simple),
    "control_flow": Kind(_control_flow, _PLAIN, _simple, by_rows=False),
    "functions": Kind(_functions, _PLAIN, _simple),
    "convolution": Kind(_convolution, _IMAGES, _classes, by_rows=False, exact=False),
    "nested": Kind(_nested, _PLAIN, _adam, by_rows=False),
    "staged": Kind(_staged, _PLAIN, _adam, by_rows=False, staged=True),
    "everything": Kind(_deep, _PLAIN, _everything),
    "half": Kind(_half, _PLAIN, _scaled_loss),
    "own_step": Kind(lambda: OwnStep(_deep().layers), _PLAIN, _simple, exact=False),
    "many": Kind(_many, _MANY, _simple),
}

# On how many devices a kind is placed; where batches are cut, too, the other number.
# Soak tests have all of them.
COUNTS = {name: 2 + i % 2 for i, name in enumerate(ZOO)}
