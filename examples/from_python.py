"""A function in several workers, called from a notebook: each part is a cell.

python examples/from_python.py
"""

# %% The data, and the model.
import keras
import numpy as np
from sklearn.datasets import load_digits

import kerasdist

x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype("float32")


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


model = build_model()
print(f"{model.count_params()} weights, {len(np.unique(y))} kinds of digits")


# %% Each worker calls this function. The data and `build_model` are sent along.
def train(epochs: int) -> tuple:
    keras.utils.set_random_seed(0)
    strategy = kerasdist.RingStrategy()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(x[:1500], y[:1500], batch_size=64, epochs=epochs)
    weights = model.get_weights() if strategy.is_chief else None
    return history, weights


results = kerasdist.run(train, n=2, args=(8,))

# %% The results are here, by rank.
history, weights = results[0]
print("accuracy by epoch:", np.round(history.history["accuracy"], 3).tolist())
print("the same on all workers:", history.history == results[1][0].history)
model.set_weights(weights)
right = np.argmax(model.predict(x[1500:], verbose=0), axis=1) == y[1500:]
print(f"test accuracy {right.mean():.4f}")
