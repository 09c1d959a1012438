"""A large table of words on parameter servers: only the rows that are used are sent.

    kerasdist run -n 2 --ps 2 examples/embedding_ps.py
    python examples/embedding_ps.py            # the same script, one worker

The texts are generated. A text consists of words of a large vocabulary, most of which
are rare, as in a language. Each word votes for or against, and the label is the vote of
the majority. A worker trains on batches of its own, and after each step exchanges the
rows of the table that were used with the servers.
"""

import argparse
from typing import Any

import keras
import numpy as np

import kerasdist


class Bytes(keras.callbacks.Callback):
    """Counts the bytes that this worker sends and receives in its steps."""

    def __init__(self, strategy: kerasdist.ParameterServerStrategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.steps = self.sent = self.received = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before = self.strategy.bytes_sent, self.strategy.bytes_received

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.sent += self.strategy.bytes_sent - self.before[0]
        self.received += self.strategy.bytes_received - self.before[1]


def texts(count: int, words: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return texts as word indices of shape `(count, length)`, and their labels."""
    rng = np.random.default_rng(0)
    votes = rng.choice([-1, 1], size=words)
    # Half of the words of all texts are among the few hundred most frequent ones.
    x = (words ** rng.random((count, length))).astype("int32") % words
    return x, (votes[x].sum(axis=1) > 0).astype("int32")


def build_model(words: int, length: int, width: int) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            keras.layers.Embedding(words, width),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--words", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=32, help="floats per word")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    # In a server this call doesn't return. Workers may be 8 steps apart.
    strategy = kerasdist.ParameterServerStrategy(mode="async", max_staleness=8)
    length = 15
    x, y = texts(24_000, options.words, length)
    with strategy.scope():
        model = build_model(options.words, length, options.width)
        model.compile(
            # Changes only the rows that were used. Adam would change others, too.
            optimizer=keras.optimizers.Adagrad(1.0),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
        )
    counted = Bytes(strategy)
    model.fit(
        x[:20_000],
        y[:20_000],
        batch_size=options.batch_size,
        epochs=options.epochs,
        verbose=2 if strategy.is_chief else 0,
        callbacks=[counted],
    )
    loss, accuracy = model.evaluate(x[20_000:], y[20_000:], verbose=0)

    steps = max(1, counted.steps)
    print(
        f"rank {strategy.rank} of {strategy.size}: {counted.steps} steps, "
        f"{counted.sent / steps:.0f} bytes sent and "
        f"{counted.received / steps:.0f} bytes received per step",
        flush=True,
    )
    if strategy.is_chief:
        print(f"the table has {4 * options.words * options.width} bytes")
        print(f"test loss {loss:.4f}, test accuracy {accuracy:.4f}")
    strategy.close()


if __name__ == "__main__":
    main()
