"""Distributed variables of kerasdist's strategies: their behavior and their creation.

`aggregate`, `to_float` and `to_int` are hooks, see `patches`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils

from kerasdist._tf.graph_clocks import COLLECTIVE
from kerasdist._tf.patching import Original

# Facts that are kept about objects of Keras and TensorFlow: all of them.
#
# The objects themselves stay unchanged: Keras and TensorFlow track attributes, save
# them and copy them. A fact isn't copied with its object, and ends with it.

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
    """

    hooks: Any = None
    timer: Any = None
    placer: Any = None
    stage_clock: Any = None
    step_counter: Any = None
    failure: Callable[[Exception], Exception | None] = lambda error: None
    in_lockstep: Callable[[], bool] = lambda: False
    places_gradients: bool = False


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


# Strategies' scopes: a way out of them for a while, and what keeps them alive.
#
# `keep_graph` is a hook, see `patches`.


@contextlib.contextmanager
def outside_of_scopes() -> Iterator[None]:
    """Run the block as if it were in no strategy's scope.

    Variables that it creates are this process's alone. Outside of any scope nothing
    changes.
    """
    if not tf.distribute.has_strategy():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = [
        (priority, creator)
        for priority, creator in creators
        if "StrategyExtendedV2._scope." not in getattr(creator, "__qualname__", "")
    ]
    try:
        distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
        try:
            yield
        finally:
            distribute_lib._pop_per_thread_mode()
    finally:
        # The same list object: the scope that has set it compares it when it exits.
        graph._variable_creator_stack = creators


def keep_graph(original: Original, graphs: Any) -> None:
    """Replace `reset_default_graph`: `clear_session` doesn't end the scope around it.

    The default graph holds the stack of scopes that a thread is in. With a new graph
    models would silently be created outside of them, and leaving the scope would raise
    an IndexError. While no graph is built the old one holds nothing else that matters.
    """
    # All of kerasdist's strategies have a timer, and no others.
    ours = is_ours(tf.distribute.get_strategy())
    if not (ours and tf.executing_eagerly()):
        original(graphs)


# Errors of functions, and calls of functions of a loaded SavedModel in a scope. Hooks,
# see `patches`.


def keep_error(
    original: Original, self: Any, kind: Any, error: Any, frames: Any
) -> Any:
    """Replace the end of a function's call: an error in a collective stays as it is.

    TensorFlow looks for the line of Python that has made the operation, which is one of
    kerasdist. TensorFlow 2.21 has crashed in that: a worker that could go on without a
    lost one was lost, too.
    """
    if COLLECTIVE in str(getattr(error, "message", "")):
        return False
    return original(self, kind, error, frames)


def call(original: Original, function: Any, args: Any, captured: Sequence[Any]) -> Any:
    """Replace the call of a loaded function: it can be called in the scope.

    Outside of a replica, such as at the top level of a script, TensorFlow doesn't know
    which replica's variables are meant, passes placeholders, and the call fails. All
    copies hold the same value, so this reads and writes the first one and copies it to
    the others. Within a replica TensorFlow traces the function once more.
    """
    ours = is_ours(tf.distribute.get_strategy())
    if not ours or not tf.distribute.in_cross_replica_context():
        return original(function, args, captured)
    variables = [c for c in captured if is_distributed(c)]
    handles = [c.values[0].handle if is_distributed(c) else c for c in captured]
    result = original(function, args, handles)
    for variable in variables:
        for copy in variable.values[1:]:
            copy.assign(variable.values[0])
    return result


def aggregate(
    original: Original, value: Any, aggregation: Any, destinations: Any
) -> Any:
    """Replace `apply_aggregation_replica_context`: write equal values without a merge.

    For a variable of `ONLY_FIRST_REPLICA` TensorFlow merges the replicas to take the
    first one's value, which it can't do inside `tf.cond`. While
    `StrategyExtensions.in_lockstep` holds, all replicas have the same value by
    construction, and each writes its own copy.
    """
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    if aggregation == first and current_facets().in_lockstep():
        return value
    return original(value, aggregation, destinations)


def to_float(variable: Any) -> float:
    """Return a distributed variable's value as a float.

    Callbacks write `float(model.optimizer.learning_rate)`. TensorFlow's plain variables
    can be converted, but not its distributed ones.
    """
    return float(variable.numpy())


def to_int(variable: Any) -> int:
    """Return a distributed variable's value as an int, see `to_float`."""
    return int(variable.numpy())


def of_tensorflow(variable: Any) -> Any:
    """Return TensorFlow's variable: of Keras's, whose `value` it is, or itself."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def share_reads(variable: Any) -> None:
    """Let reads share a variable's memory again, after an update of some of its rows.

    That makes TensorFlow copy the whole variable at each read from then on. The next
    update of rows copies it only if a tensor still shares its memory.
    """
    tf.raw_ops.DisableCopyOnRead(resource=variable.handle)


def is_distributed(variable: Any) -> bool:
    """Return whether a variable has a copy on each of a strategy's devices."""
    return isinstance(variable, tf.distribute.DistributedValues)


def distribute_copies(strategy: Any, copies: Sequence[Any], like: Any) -> Any:
    """Return one distributed variable whose copies are the given variables.

    Functions that were traced with one of them read and write the same memory.

    Args:
        strategy: A strategy that derives from `MirroredStrategy`.
        copies: One variable per local replica, each on its device.
        like: The Keras variable that it is for, which determines how replicas' writes
            are combined.
    """
    return distribute_utils.create_mirrored_variable(
        strategy,
        lambda **_: list(copies),
        distribute_utils.VARIABLE_CLASS_MAPPING,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        synchronization=like._map_synchronization(like.synchronization),
        aggregation=like._map_aggregation(like.aggregation),
        trainable=like.trainable,
    )
