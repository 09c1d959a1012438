"""What layers cost, found without their weights."""

from __future__ import annotations

import random
import resource

import keras
import numpy as np
import pytest
from keras import layers

from kerasdist._keras.costs.describe import describe

ROWS = 8


def costs(model_fn, optimizer=None, **given):
    """The costs by the end of the layer's path."""
    model = describe(model_fn, ROWS, optimizer, **given)
    return {layer.path.rpartition("/")[2]: layer for layer in model.layers}


def chain(*parts):
    return lambda: keras.Sequential([*parts])


# No weights.


def test_twenty_gigabytes_of_weights_take_no_memory():
    def build():
        width = 35_000
        model = keras.Sequential([keras.Input((width,))])
        for i in range(4):
            model.add(layers.Dense(width, name=f"wide_{i}"))
        return model

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = costs(build, "adam")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sum(layer.parameter_bytes for layer in found.values()) > 19.5e9
    assert sum(layer.slot_bytes for layer in found.values()) > 39e9
    assert grown < 200_000  # KB


def test_nothing_is_different_afterwards():
    keras.utils.set_random_seed(3)
    expected = [random.random(), np.random.random()]
    expected_weights = keras.Sequential([keras.Input((3,)), layers.Dense(2)]).weights
    name = layers.Dense(1).name
    keras.utils.set_random_seed(3)
    describe(lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2)]), 4)
    assert [random.random(), np.random.random()] == expected
    assert int(layers.Dense(1).name.rpartition("_")[2]) == (
        int(name.rpartition("_")[2]) + 1
    )
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    assert model(np.ones((1, 3), np.float32)).shape == (1, 2)
    assert expected_weights[0].shape == model.weights[0].shape


# Kinds of models.


class Own(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.first = layers.Dense(4, name="first")
        self.second = layers.Dense(4, name="second")

    def call(self, x):
        x = self.first(x)
        return x + self.second(x)


class Built(Own):
    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build((None, 4))


def by_shape():
    model = Built()
    model.build((None, 3))
    return model


def by_call():
    model = Own()
    model(np.zeros((1, 3), np.float32))
    return model


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (chain(layers.Dense(4, name="first"), layers.Dense(4, name="second")), (3,)),
        (Own, (3,)),
        (by_shape, None),
        (by_call, (3,)),
    ],
    ids=["sequential", "subclassed", "built by shape", "built by a call"],
)
def test_models_without_inputs(build, inputs):
    found = costs(build, inputs=inputs)
    assert list(found) == ["first", "second"]
    assert found["first"].parameter_bytes == 4 * (3 * 4 + 4)
    assert found["second"].parameter_bytes == 4 * (4 * 4 + 4)


class Odd(keras.optimizers.SGD):
    def __init__(self, needed):
        super().__init__()


@pytest.mark.parametrize(
    ("build", "given", "message"),
    [
        (chain(layers.Dense(4)), {}, r"^A plan needs the shapes .*inputs=\(28"),
        (Own, {}, r"^A plan needs the shapes"),
        (
            chain(keras.Input((None, 4)), layers.LSTM(3)),
            {},
            r"^A plan needs inputs of known sizes\.",
        ),
        (lambda: None, {}, r"^A plan needs a function that returns a"),
        (Own, {"inputs": [(3,), (3,)]}, r"^A plan calls the model with placeholders"),
        (
            chain(keras.Input((4,)), layers.Dense(1)),
            {"optimizer": Odd(1)},
            r"^A plan needs an optimizer that can",
        ),
    ],
)
def test_what_is_refused(build, given, message):
    with pytest.raises(ValueError, match=message):
        costs(build, **given)


def test_several_inputs_in_a_dict():
    def build():
        given = {
            "words": keras.Input((5,), dtype="int32", name="words"),
            "numbers": keras.Input((3,), name="numbers"),
        }
        words = layers.Flatten()(
            layers.Embedding(50, 4, name="words_in")(given["words"])
        )
        numbers = layers.Dense(4, name="numbers_in")(given["numbers"])
        joined = layers.Concatenate(name="join")([words, numbers])
        return keras.Model(given, layers.Dense(1, name="out")(joined))

    found = costs(build, "sgd")
    assert {"words_in", "numbers_in", "join", "out"} <= set(found)
    assert found["words_in"].parameter_bytes == 50 * 4 * 4


def test_nested_models_are_taken_apart_and_shared_layers_count_once():
    def build():
        inner = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(4, name="in_a"),
                layers.Dense(4, name="in_b"),
            ],
            name="inner",
        )
        shared = layers.Dense(4, name="shared")
        x = inputs = keras.Input((4,))
        x = shared(inner(shared(x)))
        return keras.Model(inputs, x)

    found = costs(build, "adam")
    assert list(found) == ["shared", "in_a", "in_b"]
    assert all(layer.parameter_bytes == 80 for layer in found.values())
    # Twice the work.
    assert found["shared"].row_flops == 2 * found["in_a"].row_flops


def test_skips_are_edges():
    def build():
        x = inputs = keras.Input((4,))
        first = x = layers.Dense(8, name="first")(x)
        for name in "ab":
            x = layers.Dense(8, name=name)(x)
        return keras.Model(inputs, layers.Add(name="add")([first, x]))

    model = describe(build, ROWS)
    paths = [layer.path for layer in model.layers]
    edges = {
        (paths[t.source] if t.source >= 0 else "", tuple(paths[i] for i in t.consumers))
        for t in model.tensors
    }
    assert edges == {
        ("", ("first",)),
        ("first", ("a", "add")),
        ("a", ("b",)),
        ("b", ("add",)),
    }
    assert {t.row_bytes for t in model.tensors} == {4 * 4, 8 * 4}


def test_inputs_of_unknown_size_that_are_given():
    given = chain(keras.Input((None, 4)), layers.LSTM(3, name="lstm"))
    assert costs(given, inputs=(7, 4))["lstm"].row_flops > 0


# Optimizers.


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (None, 0),
        ("sgd", 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        ("adam", 2),
        (keras.optimizers.Adam(amsgrad=True), 3),
        (keras.optimizers.Adam(use_ema=True), 3),
        (keras.optimizers.Adam(gradient_accumulation_steps=4), 3),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
        ("adagrad", 1),
    ],
)
def test_slots_are_found_from_the_optimizer(optimizer, slots):
    found = costs(
        chain(
            keras.Input((16,)), layers.Dense(32, name="a"), layers.Dense(32, name="b")
        ),
        optimizer,
    )
    for layer in found.values():
        assert layer.slot_bytes == slots * layer.trainable_bytes
        assert layer.gradient_bytes == layer.trainable_bytes


@pytest.mark.parametrize(
    ("optimizer", "elements"),
    [
        # A kernel has a momentum, a bias the two moments of Adam.
        ("muon", 16 * 32 + 2 * 32),
        # Of the shape of the weights, and rows and columns of a kernel.
        ("adafactor", 16 * 32 + 32 + 16 + 32),
    ],
)
def test_optimizers_that_name_the_reference_of_a_slot(optimizer, elements):
    # They failed with a TypeError: they call `add_variable_from_reference` by keyword.
    found = costs(chain(keras.Input((16,)), layers.Dense(32, name="a")), optimizer)
    assert found["a"].slot_bytes == 4 * elements


def test_the_optimizer_of_a_compiled_model():
    def build():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="a")])
        model.compile("adam", "mse")
        return model

    assert costs(build)["a"].slot_bytes == 2 * 4 * (4 * 8 + 8)


def test_what_is_not_trained_has_no_slots():
    found = costs(
        chain(
            keras.Input((4,)),
            layers.Dense(8, name="frozen", trainable=False),
            layers.BatchNormalization(name="norm"),
        ),
        "adam",
    )
    assert found["frozen"].trainable_bytes == found["frozen"].slot_bytes == 0
    assert found["frozen"].parameter_bytes == 4 * 40
    assert (found["norm"].parameter_bytes, found["norm"].trainable_bytes) == (128, 64)


# Work and activations.


@pytest.mark.parametrize(
    ("shape", "layer", "flops"),
    [
        ((16,), lambda: layers.Dense(8), 2 * 16 * 8 + 8),
        ((16,), lambda: layers.Dense(8, use_bias=False), 2 * 16 * 8),
        ((5, 16), lambda: layers.EinsumDense("btd,de->bte", (5, 8)), 5 * 2 * 16 * 8),
        ((8, 8, 3), lambda: layers.Conv2D(4, 3, use_bias=False), 6 * 6 * 4 * 2 * 27),
        ((8, 3), lambda: layers.Conv1D(4, 3, use_bias=False), 6 * 4 * 2 * 9),
        ((4, 4, 4, 2), lambda: layers.Conv3D(3, 2, use_bias=False), 27 * 3 * 2 * 16),
        (
            (8, 8, 3),
            lambda: layers.DepthwiseConv2D(3, use_bias=False),
            6 * 6 * 3 * 2 * 9,
        ),
        (
            (8, 8, 3),
            lambda: layers.Conv2DTranspose(4, 2, strides=2, use_bias=False),
            8 * 8 * 3 * 2 * 4 * 4,
        ),
        ((16,), lambda: layers.Activation("relu"), 16),
    ],
)
def test_operations_of_a_layer(shape, layer, flops):
    model = describe(lambda: keras.Sequential([keras.Input(shape), layer()]), ROWS)
    assert model.layers[0].row_flops == flops


def test_operations_of_a_loop_count_once_per_step():
    given = {
        steps: costs(chain(keras.Input((steps, 6)), layers.LSTM(5, name="rnn")))["rnn"]
        for steps in (10, 20)
    }
    products = 2 * (6 + 5) * 4 * 5
    for steps, layer in given.items():
        assert layer.row_flops == pytest.approx(steps * products, rel=0.3)
    # Four gates, the cell, its tanh and the output of each step.
    assert given[20].saved_row_bytes == pytest.approx(20 * 7 * 5 * 4, rel=0.35)


def test_activations_are_what_the_backward_pass_reads():
    found = costs(
        chain(
            keras.Input((16,)),
            layers.Dense(32, activation="relu", name="a"),
            layers.Dense(8, name="linear"),
            layers.Dense(4, activation="tanh", name="c"),
        )
    )
    assert found["a"].saved_row_bytes == 32 * 4
    assert found["linear"].saved_row_bytes == 8 * 4  # the next one's input
    assert found["c"].saved_row_bytes == 4 * 4


def test_half_precision_takes_half():
    full, half = (
        costs(
            chain(
                keras.Input((16,)),
                layers.Dense(32, activation="relu", name="a", dtype=dtype),
                layers.Dense(32, activation="relu", name="b", dtype=dtype),
            ),
            "adam",
        )["b"]
        for dtype in ("float32", "mixed_bfloat16")
    )
    assert half.saved_row_bytes == full.saved_row_bytes / 2
    assert half.parameter_bytes == full.parameter_bytes
    # Weights in 16 bits beside those in 32.
    assert half.saved_bytes == 32 * 32 * 2
