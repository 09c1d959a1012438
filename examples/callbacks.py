"""Callbacks that take the other workers into account, on handwritten digits.

    kerasdist run -n 2 examples/callbacks.py

`python examples/callbacks.py` runs it as one worker: the script needs no `if`.
"""

import sys

import keras
from sklearn.datasets import load_digits

import kerasdist

trace = sys.argv[1] if len(sys.argv) > 1 else "trace.json"
digits = load_digits()
x = digits.data.astype("float32") / 16
y = digits.target

strategy = kerasdist.RingStrategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

history = model.fit(
    x,
    y,
    batch_size=32 * strategy.num_replicas_in_sync,
    epochs=10,
    verbose=2,
    callbacks=[
        # All workers begin with the state of rank 0.
        kerasdist.callbacks.BroadcastInitialState(),
        # Twice the batch size needs twice the learning rate, after a warm-up.
        kerasdist.callbacks.ScaleLearningRate(warmup_epochs=3),
        keras.callbacks.ReduceLROnPlateau("loss", patience=2),
        # Open it at https://ui.perfetto.dev.
        kerasdist.callbacks.Timeline(trace, steps=(10, 20)),
    ],
)
if strategy.is_chief:
    print(f"accuracy {history.history['accuracy'][-1]:.3f}")
