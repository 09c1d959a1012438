"""scikit-learn's handwritten digits, and the model that learns them."""

from __future__ import annotations

from typing import Any

__all__ = ["digits_data", "digits_model"]


def digits_data() -> tuple[Any, Any, Any, Any]:
    """1,347 rows to train on and 450 to test: x, y, test x, test y.

    x are float32 of 64 features, 0 to 1; y are integers, 0 to 9.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        x, y, test_size=0.25, random_state=0, stratify=y
    )
    return x_train, y_train, x_test, y_test


def digits_model(keras: Any, optimizer: Any, **options: Any) -> Any:
    """64 -> 128 -> 64 -> 10, compiled."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **options)
    return model
