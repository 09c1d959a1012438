"""Facts that are kept about objects of Keras and TensorFlow: all of them.

The objects themselves stay unchanged: Keras and TensorFlow track attributes, save them
and copy them. A fact isn't copied with its object, and ends with it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import tensorflow as tf

# The parts of a strategy of ours that `_tf` and `_keras` ask for, in one place.
#
# A strategy's extended object has them as its attribute `kerasdist`; other strategies
# have none of them.


@dataclasses.dataclass(slots=True, kw_only=True)
class StrategyExtensions:
    """The parts of one strategy.

    Attributes:
        hooks: The `_keras.protocols.KerasHooks`; None if no worker has a peer.
        timer: The `_keras.protocols.StepTimer`.
        placer: The `_keras.placement.layers.LayerPlacer`; None without a placement.
        stage_clock: The `strategies.measure.stages.StageClock` of a placement.
        step_counter: An object with the current `step`, for error messages; or None.
        failure: Returns the failure of the job behind an error of TensorFlow's, or
            None.
        in_lockstep: Returns whether all replicas are about to write the same values.
        places_gradients: Whether gradients are computed where their layers are.
        micro_batches: Into how many parts a replica's batch is divided.
        rematerialize: Whether activations are computed again instead of kept.
    """

    hooks: Any = None
    timer: Any = None
    placer: Any = None
    stage_clock: Any = None
    step_counter: Any = None
    failure: Callable[[Exception], Exception | None] = lambda error: None
    in_lockstep: Callable[[], bool] = lambda: False
    places_gradients: bool = False
    micro_batches: int = 1
    rematerialize: bool = False


_NONE = StrategyExtensions()


def facets_of(strategy: Any) -> StrategyExtensions:
    """Return a strategy's parts; none of a strategy that isn't ours, or of None."""
    found: StrategyExtensions = getattr(
        getattr(strategy, "extended", None), "kerasdist", _NONE
    )
    return found


def current_facets() -> StrategyExtensions:
    """Return the parts of the strategy in scope."""
    return facets_of(tf.distribute.get_strategy())


def is_ours(strategy: Any) -> bool:
    """Return whether a strategy is one of kerasdist."""
    return facets_of(strategy) is not _NONE


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
# An optimizer: the `_keras.learning_rate.Scaling` of its learning rate.
SCALING = Mark[Any]()
