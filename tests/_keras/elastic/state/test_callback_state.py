from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from kerasdist._keras.elastic.finished_calls import (
    adopt,
    arrays_of,
    changed,
    numbers_of_one,
)

STOPPING = keras.callbacks.EarlyStopping
PLATEAU = keras.callbacks.ReduceLROnPlateau


class Losses:
    def __init__(self, callback: Any) -> None:
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        self.model.compile(keras.optimizers.SGD(1.0), "mse")
        self.model.stop_training = False
        self.callback = callback
        callback.set_model(self.model)
        callback.on_train_begin()
        self.begun = [numbers_of_one(callback)]
        self.epoch = 0

    def go_on(self, losses: list[float]) -> Any:
        """Return the epoch after the last one, and the learning rate."""
        for loss in losses:
            if not self.model.stop_training:
                self.callback.on_epoch_end(self.epoch, {"loss": loss})
                self.epoch += 1
        return self.epoch, float(self.model.optimizer.learning_rate)

    def hand_over(self, other: Losses) -> None:
        other.epoch = self.epoch
        other.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate)
        states = json.loads(json.dumps(changed([self.callback], self.begun)))
        adopt([other.callback], states)


@pytest.mark.parametrize("mode", ["min", "max", "auto"])
@pytest.mark.parametrize("kind", ["stopping", "plateau"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_smallest_change_counts_in_the_same_direction(
    mode: str, kind: str, after: int
) -> None:
    """Keras changed the sign of an adopted `min_delta` once more in mode "min"."""
    make: Callable[[], Any] = {
        "stopping": lambda: STOPPING("loss", min_delta=0.5, patience=3, mode=mode),
        "plateau": lambda: PLATEAU("loss", 0.5, min_delta=0.5, patience=2, mode=mode),
    }[kind]
    # Steps of 0.3 aren't improvements by 0.5, and would be if it was added.
    sign = 1 if mode == "max" else -1
    losses = [9 + sign * each for each in (0, 0.6, 0.9, 1.0, 0.7, 0.8, 0.9, 1.0)]
    alone = Losses(make())
    members, newcomer = Losses(make()), Losses(make())
    members.go_on(losses[:after])
    members.hand_over(newcomer)
    assert newcomer.go_on(losses[after:]) == alone.go_on(losses)
    assert members.go_on(losses[after:]) == alone.go_on([])


def test_a_list_is_given_once_however_often_it_is_adopted() -> None:
    member, newcomer = keras.callbacks.Callback(), keras.callbacks.Callback()
    member.seen, newcomer.seen = [], []
    begun = [numbers_of_one(member)]
    member.seen.append(4)
    states = changed([member], begun)
    adopt([newcomer], states)
    newcomer.seen.append(4)
    adopt([newcomer], states, again=True)
    assert newcomer.seen == [4]


def test_weights_without_dimensions_are_given_with_the_others() -> None:
    """A newcomer's `EarlyStopping` restored other weights than the others'."""
    callback = STOPPING("loss", restore_best_weights=True)
    weights = [np.ones([2, 3], np.float32), np.float32(2)]
    callback.best_weights = weights
    assert arrays_of([callback]) == [(0, "best_weights", weights)]
