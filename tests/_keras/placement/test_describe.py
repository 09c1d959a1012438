import random
import resource

import keras
import numpy as np
import pytest
from keras import layers

from kerasdist._keras.placement.describe import describe

ROWS = 8


def costs(model_fn, optimizer=None, **given):
    model = describe(model_fn, ROWS, optimizer, **given)
    return {layer.path.rpartition("/")[2]: layer for layer in model.layers}


def chain(*parts):
    return lambda: keras.Sequential([*parts])


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
    name = layers.Dense(1).name
    keras.utils.set_random_seed(3)
    describe(lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2)]), 4)
    assert [random.random(), np.random.random()] == expected
    number = int(name.rpartition("_")[2])
    assert int(layers.Dense(1).name.rpartition("_")[2]) == number + 1
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    assert model(np.ones((1, 3), np.float32)).shape == (1, 2)


class Own(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.first = layers.Dense(4, name="first")
        self.second = layers.Dense(4, name="second")

    def call(self, x):
        x = self.first(x)
        return x + self.second(x)


def by_call():
    model = Own()
    model(np.zeros((1, 3), np.float32))
    return model


@pytest.mark.parametrize("build", [Own, by_call], ids=["not built", "built"])
def test_models_without_inputs(build):
    found = costs(build, inputs=(3,))
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
        (chain(keras.Input((None, 4)), layers.LSTM(3)), {}, r"^A plan needs inputs of"),
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


def test_skips_are_edges_and_shared_layers_count_once():
    def build():
        x = inputs = keras.Input((4,))
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="first")])
        first = x = inner(x)
        shared = layers.Dense(8, name="shared")
        for layer in (shared, shared, layers.Dense(8, name="last")):
            x = layer(x)
        return keras.Model(inputs, layers.Add(name="add")([first, x]))

    model = describe(build, ROWS)
    names = [layer.path.rpartition("/")[2] for layer in model.layers]
    assert names == ["first", "shared", "last", "add"]
    edges = {
        (names[t.source] if t.source >= 0 else "", tuple(names[i] for i in t.consumers))
        for t in model.tensors
    }
    assert {("", ("first",)), ("first", ("shared", "add")), ("last", ("add",))} <= edges
    assert {t.row_bytes for t in model.tensors} == {4 * 4, 8 * 4}
    _, shared, last, _ = model.layers
    assert shared.parameter_bytes == last.parameter_bytes
    # Twice the work.
    assert shared.row_flops == 2 * last.row_flops


@pytest.mark.parametrize(
    ("optimizer", "slots"),
    [
        (None, 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        ("adam", 2),
        (keras.optimizers.Adam(use_ema=True), 3),
        (keras.optimizers.Adam(gradient_accumulation_steps=4), 3),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
        # It failed with a TypeError: it names the reference of a slot by keyword. A
        # kernel has a momentum, a bias the two moments of Adam.
        ("muon", (16 * 32 + 2 * 32) / (16 * 32 + 32)),
    ],
)
def test_slots_are_found_from_the_optimizer(optimizer, slots):
    def build():
        model = keras.Sequential([keras.Input((16,)), layers.Dense(32, name="a")])
        model.add(layers.Dense(32, name="frozen", trainable=False))
        model.add(layers.BatchNormalization(name="norm"))
        if optimizer == "adam":
            model.compile("adam", "mse")
        return model

    found = costs(build, optimizer if optimizer != "adam" else None)
    assert found["a"].slot_bytes == slots * found["a"].trainable_bytes
    assert found["a"].gradient_bytes == found["a"].trainable_bytes == 4 * 17 * 32
    assert found["frozen"].trainable_bytes == found["frozen"].slot_bytes == 0
    assert found["frozen"].parameter_bytes == 4 * 33 * 32
    assert found["norm"].parameter_bytes == 2 * found["norm"].trainable_bytes


# Work and activations.


@pytest.mark.parametrize(
    ("shape", "layer", "flops"),
    [
        ((16,), lambda: layers.Dense(8), 2 * 16 * 8 + 8),
        ((5, 16), lambda: layers.EinsumDense("btd,de->bte", (5, 8)), 5 * 2 * 16 * 8),
        ((8, 8, 3), lambda: layers.Conv2D(4, 3, use_bias=False), 6 * 6 * 4 * 2 * 27),
        ((8, 8, 3), lambda: layers.DepthwiseConv2D(3, use_bias=False), 36 * 3 * 2 * 9),
        ((8, 8, 3), lambda: layers.Conv2DTranspose(4, 2, 2, use_bias=False), 192 * 32),
        ((16,), lambda: layers.Activation("relu"), 16),
    ],
)
def test_operations_of_a_layer(shape, layer, flops):
    model = describe(lambda: keras.Sequential([keras.Input(shape), layer()]), ROWS)
    assert model.layers[0].row_flops == flops


def test_operations_of_a_loop_count_once_per_step():
    # The number of steps isn't known, and given.
    build = chain(keras.Input((None, 6)), layers.LSTM(5, name="rnn"))
    found = costs(build, inputs=(20, 6))["rnn"]
    assert found.row_flops == pytest.approx(20 * 2 * (6 + 5) * 4 * 5, rel=0.3)
    # Four gates, the cell, its tanh and the output of each step.
    assert found.saved_row_bytes == pytest.approx(20 * 7 * 5 * 4, rel=0.35)


def test_activations_are_what_the_backward_pass_reads_in_half_precision_half():
    found_full, found_half = (
        costs(
            chain(
                keras.Input((16,)),
                layers.Dense(32, activation="relu", name="a", dtype=dtype),
                layers.Dense(32, activation="relu", name="b", dtype=dtype),
                layers.Dense(8, name="linear", dtype=dtype),
                layers.Dense(4, activation="tanh", name="c", dtype=dtype),
            ),
            "adam",
        )
        for dtype in ("float32", "mixed_bfloat16")
    )
    assert found_full["a"].saved_row_bytes == 32 * 4
    assert found_full["linear"].saved_row_bytes == 8 * 4  # the next one's input
    assert found_full["c"].saved_row_bytes == 4 * 4
    full, half = found_full["b"], found_half["b"]
    assert half.saved_row_bytes == full.saved_row_bytes / 2
    assert half.parameter_bytes == full.parameter_bytes
    # Weights in 16 bits beside those in 32.
    assert half.saved_bytes == 32 * 32 * 2
