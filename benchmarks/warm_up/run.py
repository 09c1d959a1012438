"""Large batches with the linear rule: without a warm-up, a constant one, a gradual one.

    make bench-warm-up

Goyal et al. ("Accurate, large minibatch SGD", 2017, table 2a and figure 2) found for
batches of 8,192 images the gradual warm-up best, as good as small batches, and a
constant one no better than none. Here a small network learns scikit-learn's digits,
shifted by a pixel in all directions, with batches of 64 to 2,048 rows and the same
number of epochs; five seeds.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import Report, arguments, digits_data, digits_model, table

BASE, RATE, MOMENTUM = 64, 0.03, 0.9
BATCHES = (64, 256, 1024, 2048)
KINDS = ("none", "constant", "gradual")
EPOCHS, WARM_UP = 20, 5
SEEDS = range(3)


def shifted() -> tuple[Any, Any, Any, Any]:
    """Return the digits; those to train on nine times, moved by up to one pixel."""
    import numpy as np

    x, y, x_test, y_test = digits_data()
    images = np.pad(x.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    moved = [images[:, a : a + 8, b : b + 8] for a in range(3) for b in range(3)]
    return np.concatenate(moved).reshape(-1, 64), np.tile(y, 9), x_test, y_test


def train(kind: str, batch: int, seed: int, epochs: int) -> tuple[float, float]:
    """Return the last epoch's loss, and the part of wrong answers of the test rows."""
    import keras

    import kerasdist

    keras.utils.set_random_seed(seed)
    x, y, x_test, y_test = shifted()
    with kerasdist.RingStrategy().scope():
        sgd = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        model = digits_model(keras, sgd, metrics=["accuracy"])
    if kind == "constant":
        callback = keras.callbacks.LearningRateScheduler(
            lambda epoch: RATE * (1 if epoch < WARM_UP else batch / BASE)
        )
    else:
        callback = kerasdist.callbacks.ScaleLearningRate(
            warmup_epochs=WARM_UP if kind == "gradual" else 0,
            base_batch_size=BASE,
            verbose=0,
        )
    history = model.fit(
        x, y, batch_size=batch, epochs=epochs, verbose=0, callbacks=[callback]
    )
    _, right = model.evaluate(x_test, y_test, verbose=0)
    return history.history["loss"][-1], 1 - right


def main() -> None:
    parser = arguments(__doc__, HERE)
    options = parser.parse_args()
    batches, seeds, epochs = BATCHES, list(SEEDS), EPOCHS
    if options.quick:
        batches, seeds, epochs = BATCHES[-1:], [0], 1
    report = Report(
        "The linear rule with batches of 64 to 2,048 rows",
        options.output,
        ("keras", "tensorflow", "scikit-learn"),
        repeats=f"{len(seeds)} seeds, {epochs} epochs",
    )
    rows = []
    for batch in batches:
        for kind in KINDS:
            found = [train(kind, batch, seed, epochs) for seed in seeds]
            report.data[f"{batch}, {kind}"] = [
                # A loss that isn't a number has no JSON.
                [loss if math.isfinite(loss) else None, error]
                for loss, error in found
            ]
            losses = sorted(loss for loss, _ in found if math.isfinite(loss))
            errors = sorted(error for _, error in found)
            middle = errors[len(errors) // 2]
            rows.append(
                [
                    str(batch),
                    kind,
                    f"{losses[len(losses) // 2]:.4f}" if losses else "not finite",
                    f"{middle:.1%}",
                    f"{errors[0]:.1%} - {errors[-1]:.1%}",
                ]
            )
    heads = ["batch", "warm-up", "training loss", "test error", "least - most"]
    report.add("Medians over the seeds:\n")
    report.add(table(heads, rows))
    report.write()


if __name__ == "__main__":
    main()
