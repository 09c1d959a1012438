"""Handwritten digits: train, evaluate, save and reload on any number of workers.

    kerasdist run -n 2 examples/digits.py
    python examples/digits.py                  # the same script, one worker

The data are the 1,797 images of 8 x 8 pixels that scikit-learn contains. kerasdist
needs only the two marked lines.
"""

import argparse
import hashlib
import os
import tempfile
import time

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kerasdist  # 1
import kerasdist.callbacks


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers")
    parser.add_argument("--board", help="folder for TensorBoard's scaling page")
    options = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.25, random_state=0, stratify=y
    )

    keras.utils.set_random_seed(0)
    strategy = kerasdist.RingStrategy()
    with strategy.scope():  # 2
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    # The first epoch traces the graphs; the clock starts after it.
    verbose = 2 if strategy.is_chief else 0
    model.fit(
        x_train, y_train, batch_size=options.batch_size, epochs=1, verbose=verbose
    )
    callbacks = []
    if options.board:
        callbacks.append(kerasdist.callbacks.ScalingTensorBoard(options.board))
    start = time.perf_counter()
    model.fit(
        x_train,
        y_train,
        batch_size=options.batch_size,
        epochs=options.epochs,
        initial_epoch=1,
        verbose=verbose,
        callbacks=callbacks,
    )
    seconds = time.perf_counter() - start
    rate = (options.epochs - 1) * len(x_train) / max(seconds, 1e-9)
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)

    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights()))
    print(
        f"rank {strategy.rank} of {strategy.size}: weights {digest.hexdigest()[:16]}",
        flush=True,
    )
    same = (
        len(
            {
                w.tobytes()
                for w in strategy.communicator.all_gather(
                    np.frombuffer(digest.digest(), np.uint8)
                )
            }
        )
        == 1
    )

    if strategy.is_chief:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "digits.keras")
            model.save(path)
            # Outside of the scope: an ordinary model, without kerasdist.
            again = keras.models.load_model(path)
        predictions = np.argmax(again.predict(x_test, verbose=0), axis=1)
        reloaded = float(np.mean(predictions == y_test))
        print(f"weights bit-equal on all workers: {same}")
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")
        print(f"test accuracy of the saved and reloaded model {reloaded:.4f}")
        print(f"{rate:.0f} examples/s with {strategy.size} worker(s)")
    if not same:
        raise SystemExit("The workers' weights differ.")


if __name__ == "__main__":
    main()
