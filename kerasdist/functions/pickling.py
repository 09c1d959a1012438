"""The pickling of functions and results: cloudpickle, and `History` without its model.

cloudpickle takes functions and classes of `__main__`, of a notebook's cells, lambdas
and closures by value, those of other modules by name.
"""

from __future__ import annotations

import importlib
import sys
from typing import IO, Any

import cloudpickle

__all__ = ["dump", "make_history"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # It holds the model, with its strategy. Most who return it want the numbers.
        keras = sys.modules.get("keras")
        if keras is not None and type(obj) is keras.callbacks.History:
            return make_history, (obj.history, obj.epoch, obj.params)
        return super().reducer_override(obj)


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickle a value into a file.

    Raises:
        Exception: It can't be pickled; classes raise what they like.
    """
    _Pickler(file).dump(value)


def make_history(
    history: dict[str, list[Any]], epoch: list[int], params: dict[str, Any] | None
) -> Any:
    """Return a `keras.callbacks.History` without a model."""
    made = importlib.import_module("keras").callbacks.History()
    made.set_params(params)
    made.history = history
    made.epoch = epoch
    return made
