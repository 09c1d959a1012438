"""Keras callbacks that take all workers into account.

The folder is beside the package in the repository and is installed as
`kerasdist.callbacks`. They work under every strategy of kerasdist, with one worker and
without a strategy: a script needs no `if`. Keras's own callbacks work unchanged.
"""

from __future__ import annotations

from kerasdist.callbacks.broadcast_initial_state import BroadcastInitialState
from kerasdist.callbacks.scale_learning_rate import ScaleLearningRate
from kerasdist.callbacks.scaling_board import ScalingTensorBoard
from kerasdist.callbacks.timeline import Timeline

__all__ = [
    "BroadcastInitialState",
    "ScaleLearningRate",
    "ScalingTensorBoard",
    "Timeline",
]
