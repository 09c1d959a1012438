"""Numbers of rows: batches that can't be divided evenly."""

from __future__ import annotations

from typing import Any

import keras

from cases.training import CROSSENTROPY, Numbers, Scope, case, data, train


@case
def uneven_last_batch(scope: Scope) -> Numbers:
    return train(scope)


@case
def fewer_rows_than_replicas(scope: Scope) -> Numbers:
    return train(scope, arrays=data(17), fit={"batch_size": 4})


@case
def one_row_at_a_time(scope: Scope) -> Numbers:
    return train(scope, arrays=data(5), fit={"batch_size": 1})


@case
def one_row_and_several_losses(scope: Scope) -> Numbers:
    """Most replicas have no row to build the losses from."""

    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
            return x

    def build() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(7, kernel_regularizer="l2")(inputs)
        hidden = Penalty()(hidden)
        return keras.Model(
            inputs,
            {
                "kind": keras.layers.Dense(3, name="kind")(hidden),
                "size": keras.layers.Dense(1, name="size")(hidden),
            },
        )

    x, y = data(3)
    return train(
        scope,
        build,
        arrays=(x, {"kind": y, "size": x.sum(1)}),
        compiled=lambda: {
            "loss": {"kind": CROSSENTROPY["loss"], "size": "mse"},
            "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        },
        fit={"batch_size": 1},
    )


@case
def first_batch_uneven(scope: Scope) -> Numbers:
    return train(scope, arrays=data(3), fit={"batch_size": 3})


@case
def even_batches(scope: Scope) -> Numbers:
    return train(scope, arrays=data(48), fit={"batch_size": 12})
