"""Facts that are kept about objects of Keras and TensorFlow: all of them.

The objects themselves stay unchanged: Keras and TensorFlow track attributes, save them
and copy them. A fact isn't copied with its object, and ends with it.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Mark(Generic[T]):
    """One fact about some objects, which are compared by identity.

    The value must not refer to its object, which would never end then.
    """

    def __init__(self) -> None:
        # Not a `WeakKeyDictionary`: Keras's variables have no hash.
        self._values: dict[int, tuple[weakref.ref[Any], T]] = {}

    def set(self, owner: Any, value: T) -> None:
        """Set the fact about an object."""
        key, values = id(owner), self._values
        values[key] = weakref.ref(owner, lambda _: values.pop(key, None)), value

    def get(self, owner: Any) -> T | None:
        """Return the fact about an object; None if none was set."""
        found = self._values.get(id(owner))
        return None if found is None else found[1]

    def pop(self, owner: Any) -> T | None:
        """Return the fact about an object, and forget it."""
        found = self._values.pop(id(owner), None)
        return None if found is None else found[1]


# A distributed dataset: each worker has its own. True if it is divided by file.
OWN_DATA = Mark[bool]()
# A callback: whether each rank writes its files, to a temporary folder of its own.
OWN_FILES = Mark[bool]()
# A distributed dataset whose batches are divided: the dataset of global batches.
WHOLE_DATA = Mark[Any]()
# A layer: the device of the stage that it was created in.
STAGE = Mark[str]()
# A variable without a value: the device that it gets its value on.
VARIABLE_DEVICE = Mark[str]()
# A model: each worker trains it for itself. True if the script has declared that.
TRAINED_LOCALLY = Mark[bool]()
# A variable of a layer: its value differs between replicas, and the chief's counts.
CHIEFS_STATE = Mark[bool]()
# A function that replicas run: XLA compiles what doesn't communicate.
COMPILED = Mark[bool]()
# A train or test function: the `_keras.training.logs.LastLogs` of its steps.
LAST_LOGS = Mark[Any]()
# A model: the number of the membership that its predict function was made for.
PREDICTING_EPOCH = Mark[int]()
# An optimizer: the variable with the number of steps that others had taken.
OTHERS_STEPS = Mark[Any]()
# An optimizer: the `_keras.optimizer.learning_rate.Scaling` of its learning rate.
SCALING = Mark[Any]()
