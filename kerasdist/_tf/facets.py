"""The parts of a strategy of ours that `_tf` and `_keras` ask for, in one place.

A strategy's extended object has them as its attribute `kerasdist`; other strategies
have none of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(slots=True, kw_only=True)
class Facets:
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


_NONE = Facets()


def facets_of(strategy: Any) -> Facets:
    """Return a strategy's parts; none of a strategy that isn't ours, or of None."""
    found: Facets = getattr(getattr(strategy, "extended", None), "kerasdist", _NONE)
    return found


def current_facets() -> Facets:
    """Return the parts of the strategy in scope."""
    return facets_of(tf.distribute.get_strategy())


def is_ours(strategy: Any) -> bool:
    """Return whether a strategy is one of kerasdist."""
    return facets_of(strategy) is not _NONE
