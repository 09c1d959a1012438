"""What a user sees of an error: his own lines, not ours."""

import traceback

import keras
import numpy as np
import pytest

import kerasdist
from kerasdist import _keras, errors

X = np.ones((8, 3), "float32")
Y = np.ones((8, 1), "float32")


def wrong_loss(y_true, y_pred):
    return y_true - undefined  # noqa: F821


class Wrong(keras.layers.Layer):
    def call(self, inputs):
        return inputs + undefined  # noqa: F821


class Losing(keras.layers.Layer):
    def call(self, inputs):
        raise errors.WorkerLost(1, "host1:1", 3, "it was killed")


class Stopping(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise OSError("no room")


def train(loss="mse", layers=(), callbacks=(), y=Y):
    model = keras.Sequential([keras.layers.Dense(1), *layers])
    model.compile("sgd", loss)
    model.fit(X, y, verbose=0, callbacks=list(callbacks))


CAUSES = {
    "loss": ({"loss": wrong_loss}, NameError, "wrong_loss"),
    # Of Keras's own: models in a strategy are built on shapes.
    "layer": ({"layers": [Wrong()]}, RuntimeError, "call"),
    "lost": ({"layers": [Losing()]}, errors.WorkerLost, "call"),
    "callback": ({"callbacks": [Stopping()]}, OSError, "on_epoch_end"),
    "data": ({"y": Y[:7]}, ValueError, "check_data_cardinality"),
}


def frames(error):
    """Names of functions in a traceback, and of those that are of kerasdist."""
    found = [
        (frame.f_code.co_name, frame.f_globals.get("__name__", ""))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    ours = [name for name, module in found if module.startswith("kerasdist.")]
    return [name for name, _ in found], ours


@pytest.mark.parametrize("cause", [*CAUSES, "placed"])
def test_an_error_under_fit_ends_in_the_users_line(cause):
    """Once there were two frames of ours for each function of Keras that is wrapped.

    They filled most of a screen, and that of a layer ended in Keras.
    """
    _keras.uninstall()  # strategies put in what they need, and no more
    placed = cause == "placed"
    given, kind, last = CAUSES["loss" if placed else cause]
    if placed:
        strategy = kerasdist.ModelParallelStrategy({}, devices=["CPU:0"])
    else:
        strategy = kerasdist.RingStrategy(["CPU:0"])
    with strategy.scope(), pytest.raises(kind) as caught:
        train(**given)
    names, ours = frames(caught.value)
    assert names[-1] == last
    assert ours == ["name_the_lost", "fit"][not placed :]
    assert len(names) <= 5 + placed
    strategy.close()


def test_all_frames_are_shown_to_who_asks():
    strategy = kerasdist.RingStrategy(["CPU:0"])
    keras.config.disable_traceback_filtering()
    try:
        with strategy.scope(), pytest.raises(NameError) as caught:
            train(loss=wrong_loss)
    finally:
        keras.config.enable_traceback_filtering()
    _, ours = frames(caught.value)
    assert {"fit", "symbolic_build", "compile_loss"} <= set(ours)
    # Hooks alone: what puts them around Keras's functions has no frames.
    assert "wrapper" not in ours
    strategy.close()


@pytest.mark.parametrize("given", [X, keras.Input((3,))], ids=["eager", "functional"])
def test_a_lost_worker_is_not_made_another_error_by_a_layer(given):
    strategy = kerasdist.RingStrategy(["CPU:0"])
    with strategy.scope(), pytest.raises(errors.WorkerLost) as caught:
        Losing()(given)
    assert caught.value.rank == 1
    strategy.close()
