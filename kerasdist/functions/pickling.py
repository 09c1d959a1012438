"""The pickling of functions and results: cloudpickle, with two exceptions.

cloudpickle takes functions and classes of `__main__`, of a notebook's cells, lambdas
and closures by value, those of other modules by name. Here code keeps the file's name,
and `History` is pickled without its model.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import IO, Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # It holds the model, with its strategy. Most who return it want the numbers.
        keras = sys.modules.get("keras")
        if keras is not None and type(obj) is keras.callbacks.History:
            return make_history, (obj.history, obj.epoch, obj.params)
        if isinstance(obj, types.CodeType):
            # cloudpickle leaves the name of the file out since version 3.1.3. Without
            # it tracebacks have no lines, and `tf.function` can't convert the code.
            make, args = self.dispatch_table[types.CodeType](obj)
            return make_code, (make, args, obj.co_filename)
        return super().reducer_override(obj)


def dump(value: Any, file: IO[bytes]) -> None:
    """Pickle a value into a file.

    Raises:
        Exception: It can't be pickled; classes raise what they like.
    """
    _Pickler(file).dump(value)


def make_code(
    make: Callable[..., types.CodeType], args: tuple[Any, ...], filename: str
) -> types.CodeType:
    """Return a code object with the name of its file."""
    return make(*args).replace(co_filename=filename)


def make_history(
    history: dict[str, list[Any]], epoch: list[int], params: dict[str, Any] | None
) -> Any:
    """Return a `keras.callbacks.History` without a model."""
    made = importlib.import_module("keras").callbacks.History()
    made.set_params(params)
    made.history = history
    made.epoch = epoch
    return made
